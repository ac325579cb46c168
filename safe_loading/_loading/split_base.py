"""Adapters on a base that ranks hold together: split by DeepSpeed's ZeRO-3, or sharded by FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from safe_loading._checkpoint.faults import note
from safe_loading._core.names import first_names
from safe_loading._core.report import Finding, counted
from safe_loading._model.peft_layers import base_of
from safe_loading._model.tensors import is_dtensor, trained_alone
from safe_loading._model.zero3 import split_weights
from safe_loading.errors import AdapterError

from .adapter_values import Adapter


@contextmanager
def said_of_split_base(model: torch.nn.Module, adapter: Adapter) -> Iterator[None]:
    """Say of an adapter that cannot be attached in the block whether that is because its base is split."""
    try:
        yield
    except (AdapterError, RuntimeError) as error:  # torch's own, of operations between a DTensor and another tensor
        by_zero, sharded = split_weights(model) is not None, any(is_dtensor(p) for p in model.parameters())
        if not (by_zero or sharded):
            raise
        named = f"{adapter.facts.source!r} (as {adapter.name!r})"
        kind = type(base_of(model)).__name__
        said = (
            f"{named} takes more of {kind} than plain LoRA does, and DeepSpeed's ZeRO-3 has split its weights. Load it "
            f"with PeftModel.from_pretrained, which gathers them"
            if by_zero
            else f"{named} cannot be attached to {kind} as ranks hold it: its weights are DTensors, of FSDP2 or tensor "
            f"parallelism. Load it onto the whole base, and let wrap_fsdp_meta_safe(model) shard both"
        )
        raise AdapterError(
            f"{said}; nothing was changed:",
            getattr(error, "problems", None) or [str(error)],
        ) from error


def alone_findings(model: torch.nn.Module) -> list[Finding]:
    """Return a finding for an adapter that is trained on a base which FSDP has sharded before."""
    alone = trained_alone(model)
    if not alone:
        return []
    found = counted(len(alone), "trained parameter is", "trained parameters are")
    message = (
        f"FSDP had sharded the base, and {found} outside of its units ({first_names(alone)}): nothing reduces their "
        f"gradients, so each rank would train an adapter of its own, and rank 0's would be saved"
    )
    fix = (
        "call wrap_fsdp_meta_safe(model), which shards what was attached since; or load first, and let FSDP shard then"
    )
    size = sum(parameter.nbytes for parameter in alone.values())
    return [note("warning", "adapter-not-sharded", type(base_of(model)).__name__, message, fix, size)]
