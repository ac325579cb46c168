"""Whether the files of a folder hold the codes that its config names, whole: one judgement for every verb. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safe_loading._checkpoint.base_config import passed_over, quantization_findings
from safe_loading._checkpoint.faults import raise_faults
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.left_over import is_passed_over, left_over_quantization
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, errors_of
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


def refuse_quantization(checkpoint: Checkpoint, config: JsonObject) -> None:
    """Refuse a base whose quantizer would match patterns that may never end, or wait for codes that are not there."""
    path = checkpoint.folder / CONFIG
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors}
    found = [*quantization_findings(path, config, modules), *codes_findings(path, config, checkpoint)]
    if errors := errors_of(found):
        raise_faults(path, errors)


def quantization_on_disk(folder: ModelFolder, checkpoint: Checkpoint) -> list[Finding]:
    """Return the findings of a quantization that the config names and the weights do not have, or not whole."""
    config = folder.files.try_read(folder.path / CONFIG)
    return [] if isinstance(config, Finding) else codes_findings(folder.path / CONFIG, config, checkpoint)


def plain_all_the_same(folder: ModelFolder) -> bool:
    """Return whether transformers passes over the quantization that a folder's config names, and its weights are plain.

    False where none is named, and for weights that are not here.
    """
    config = folder.config or {}
    checkpoint = folder.whole_checkpoint if passed_over(config) else None  # no header is read for a plain config
    return checkpoint is not None and is_passed_over(config, checkpoint.tensors)


def without_passed_over(config: Any, folder: ModelFolder | None) -> None:
    """Take a quantization out of a config of transformers, which passes over it and finds plain weights in the folder.

    That of a language model inside is one, too, where the config has none of its own.
    """
    if folder is None or not plain_all_the_same(folder):
        return
    for part in (config, vars(config).get("text_config")):
        if part is not None and not isinstance(part, dict):
            vars(part).pop("quantization_config", None)
