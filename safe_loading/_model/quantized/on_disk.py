"""Whether the files of a folder hold the codes that its config names, whole: one judgement for every verb. No torch."""

from __future__ import annotations

from pathlib import Path

from safe_loading._checkpoint.faults import raise_faults
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.left_over import left_over_quantization
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading._model.formats.packed_on_disk import packed_findings


def codes_findings(path: Path, config: JsonObject, checkpoint: Checkpoint) -> list[Finding]:
    """Return the findings of codes that are not there, or that nothing decodes; ``path`` is that of the config."""
    left_over = left_over_quantization(path, config, checkpoint.tensors)
    return packed_findings(path, config, checkpoint) if left_over is None else [left_over]


def refuse_bad_codes(folder: ModelFolder) -> None:
    """Refuse a folder whose config names codes that its weights do not have, or not whole; one without weights may."""
    checkpoint = folder.whole_checkpoint
    if checkpoint is not None and (found := codes_findings(folder.path / CONFIG, folder.config or {}, checkpoint)):
        raise_faults(folder.path, found)
