"""Carrying out a plan: weights are overwritten, layers are marked as merged or replaced by their base."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.utils.other import AuxiliaryTrainingWrapper

from .fp8_merge import merge_fp8
from .lora_layers import MatrixPart
from .merge_plan import LayerMerge
from .offloaded import Offloaded
from .trainable_tokens import Tokens
from .update import PartlyMerged, merge_matrix

Places = dict[int, list[tuple[torch.nn.Module, str]]]


class HalfMerged(Exception):
    """A layer of which a part is merged and a part is not: which weight, and how many of its rows."""


def merge_by_blocks(job: LayerMerge, store: Offloaded, *, scratch_bytes: int, unload: bool) -> None:
    """Overwrite the weights of a job, in the offload store too, and mark its layers as merged.

    Raises:
        MemoryError, RuntimeError: The memory ran out before anything of the layer was written.
        HalfMerged: It ran out later, and sufficed not even for the smallest blocks.
    """
    written = 0
    for target in job.targets:
        if isinstance(target, Tokens):
            target.write()
            continue
        for piece in target.pieces:
            try:
                norms = _merged(piece, scratch_bytes, begun=written > 0)
            except (MemoryError, RuntimeError, PartlyMerged) as error:
                if written or isinstance(error, PartlyMerged):
                    raise HalfMerged(f"{job.name_of(target)}: {error}") from error
                raise
            written += 1
            if not unload and target.attribute != "bias":
                for index, norm in norms.items():
                    _keep_norm(job.layer, piece.update.terms[index].name, norm)
    store.settle((target.owner, name) for target in job.targets for name in target.written)
    for layer, names in job.marks:
        layer.merged_adapters.extend(names)
    job.targets.clear()  # views of the adapter's tensors, which unloading frees


def _merged(piece: MatrixPart, scratch_bytes: int, *, begun: bool) -> dict[int, torch.Tensor]:
    if piece.fp8 is not None:
        merge_fp8(piece.update, piece.fp8, scratch_bytes=scratch_bytes)
        return {}
    try:
        return merge_matrix(piece.update, piece.matrix, scratch_bytes=scratch_bytes)
    except (MemoryError, RuntimeError):  # before the first row of this piece was written
        if not begun:
            raise
        return merge_matrix(piece.update, piece.matrix, scratch_bytes=1)


def unload(job: LayerMerge, tuner: Any, places: Places) -> None:
    """Put the base layer in the place of the tuner layer, wherever that stands."""
    layer: Any = job.layer
    if hasattr(layer, "unload_and_optionally_merge_module"):
        base = layer.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
    else:
        base = layer.get_base_layer()
    for parent, name in places.get(id(layer), []):
        if not isinstance(parent, AuxiliaryTrainingWrapper):  # unloaded with its wrapper
            tuner._replace_module(parent, name, base, layer)


@contextmanager
def interrupts_wait() -> Iterator[list[int]]:
    """Inside, Ctrl-C does not interrupt; what yields is the list of the signals that came meanwhile."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came  # only the main thread gets the signal
        return
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # set by C code, and cannot be put back from here
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _keep_norm(layer: Any, name: str, norm: torch.Tensor) -> None:
    """Leave the norm where peft's unmerge looks for it, in the shape that it expects."""
    magnitude = layer.lora_magnitude_vector[name].weight
    layer._cache_store(f"{name}-weight_norm", norm.to(magnitude.dtype).view_as(magnitude))
