"""``load_at_prepare``: ``from_pretrained`` without weights, which accelerate's ``prepare`` shards and loads."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch.distributed as dist
from transformers import PreTrainedModel

from safe_loading._core.log import logger
from safe_loading._core.thread_patches import patched, seen_here
from safe_loading.errors import ArgumentError

from .prepare import shard_at_prepare, shard_references
from .weightless import load_later

_MARK = "_reads_weights_later"


@contextlib.contextmanager
def load_at_prepare(
    *, verify: Literal["off", "structure", "bytes"] = "structure", timeout: float = 1800.0
) -> Iterator[None]:
    """Let ``from_pretrained`` read no weights, and accelerate's FSDP read each rank's own shard when it prepares.

    In the block, ``from_pretrained`` of transformers models gives the same model with the same class, config, dtype and
    ties, but no memory for its weights. Adapters may be attached to it and it may be handed to ``Trainer``,
    ``SFTTrainer`` and others; they, or a loop, call ``Accelerator.prepare``, and there
    :func:`wrap_fsdp_meta_safe` shards it as accelerate was told and every rank reads its own bytes. Weights that the
    checkpoint does not have (a new head) are initialized by ``from_pretrained`` as ever, and rank 0's are taken.

    In a job of a single process the block changes nothing, so a script runs there as it did.

    The trained model starts from exactly what the script would have had without the block: a layer that was moved,
    renamed or copied has its own values, and a parameter that the script reads or writes first is read from the folder,
    whole and on each rank that does so; rank 0's values of it are then taken.

    With ``tp_size`` of accelerate's ``ParallelismConfig`` each layer is split as well, as :func:`wrap_fsdp_meta_safe`
    does with a mesh.

    ``Accelerator.prepare`` stays replaced after the block, by a function that loads such models first and then calls
    accelerate's own. Until its weights are read, a model refuses to compute.

    Args:
        verify: As for :func:`wrap_fsdp_meta_safe`.
        timeout: Longest wait for the other ranks, in seconds.

    Raises:
        ArgumentError: From ``from_pretrained``: an option that the later load does not know, or a quantized model. From
            what needs the values of a weight that is yet to be packed in 4 bits. From ``prepare``: accelerate does not
            run FSDP, or only another rank than the first replaced a parameter.
        SafeLoadingError: From ``prepare``: whatever :func:`wrap_fsdp_meta_safe` raises.
    """
    if verify not in ("off", "structure", "bytes"):
        raise ArgumentError(f"verify={verify!r}: pass 'off', 'structure' or 'bytes'.")
    load = seen_here(PreTrainedModel, "from_pretrained").__func__
    if not _has_several_ranks() or _MARK in vars(load):  # in such a block already
        yield
        return
    shard_at_prepare(verify=verify, timeout=timeout)

    made: list[type[PreTrainedModel]] = []

    @functools.wraps(load)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **options: Any) -> Any:
        made.append(cls)
        shard_references(verify=verify, timeout=timeout)
        # transformers may call it again for models inside
        with patched(PreTrainedModel, "from_pretrained", classmethod(load)):
            return load_later(load, cls, *args, **options)

    vars(from_pretrained)[_MARK] = True
    with patched(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield
    if not made:
        logger.warning(
            "load_at_prepare: no from_pretrained of transformers ran in its block, so no model is read at prepare. Put "
            "the call that makes the model into the block; a trainer and its train() may stand after it."
        )


def _has_several_ranks() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
