"""Weights that a training saved beside an adapter's, in files that peft does not read. Imports no torch.

LLaVA and its kin save a projector and a vision tower so, LongLoRA embeddings and norms, ms-swift a tower and
LLaMA-Factory a value head; vLLM reads new words so. Without them the adapter computes something else than in its
training, and nobody says it.
"""

from __future__ import annotations

from pathlib import Path

from safe_loading._core.report import Finding, counted

from .faults import listed, note
from .files import size_of

_NAMES = frozenset(
    {"non_lora_trainables.bin", "non_lora_state_dict.bin", "mm_projector.bin", "trainable_params.bin"}
    | {"vit.safetensors", "value_head.safetensors", "value_head.bin"}
    | {"new_embeddings.safetensors", "new_embeddings.bin"}
)


def trained_beside(folder: Path) -> list[Finding]:
    """Return the finding of weights beside those of an adapter, if there are some."""
    found = sorted(name for name in _NAMES if (folder / name).is_file())
    if not found:
        return []
    message = (
        f"holds {counted(len(found), 'file')} of weights that a training saved beside the adapter, and that peft does "
        f"not read, so that the model runs without them: {listed(found)}"
    )
    fix = "put their values into the base, and pass that model as base_model; or remove them if it has them"
    return [note("warning", "trained-beside", folder, message, fix, sum(size_of(folder / name) for name in found))]
