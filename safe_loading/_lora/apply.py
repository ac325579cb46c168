"""Carrying out a plan: weights are overwritten, layers are marked as merged or replaced by their base."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from safe_loading._lora.plan import Job
from safe_loading._lora.tokens import Tokens
from safe_loading._lora.update import merge_matrix

Places = dict[int, list[tuple[torch.nn.Module, str]]]


class Backup:
    """The base weights of the layers that peft merges, copied, since peft may fail in the middle.

    Attributes:
        bytes: The size of the copies.
    """

    def __init__(self) -> None:
        self._tensors: list[tuple[dict[str, Any], str, Any, torch.Tensor, torch.Tensor]] = []
        self._attributes: list[tuple[Any, dict[str, Any], list[str]]] = []
        self.bytes = 0

    def keep(self, layer: BaseTunerLayer) -> None:
        """Copy what merging ``layer`` changes."""
        for module in _modules(layer):
            self._attributes.append(
                (module, dict(vars(module)), list(getattr(module, "merged_adapters", []) if _is_tuner(module) else []))
            )
            if _is_adapter_part(layer, module):
                continue
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in places:
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta:
                        copy = tensor.detach().clone()
                        self._tensors.append((tensors, name, tensor, tensor.data, copy))
                        self.bytes += copy.nbytes

    def restore(self) -> None:
        """Put every weight back, in its own storage."""
        for tensors, name, tensor, data, copy in self._tensors:
            data.copy_(copy)
            tensor.data = data
            tensors[name] = tensor
        for module, attributes, merged in self._attributes:
            vars(module).update(attributes)
            if _is_tuner(module):
                module.merged_adapters[:] = merged

    def settle(self) -> None:
        """Move the merged values into the storage that the weights had; peft gives them another one."""
        for tensors, name, tensor, data, _ in self._tensors:
            now = tensors.get(name)
            if now is None or now.data_ptr() == data.data_ptr():
                continue
            if type(now) is type(tensor) and (now.shape, now.dtype, now.device) == (
                tensor.shape,
                tensor.dtype,
                tensor.device,
            ):
                data.copy_(now.detach())
                tensor.data = data
                tensors[name] = tensor
        self._tensors.clear()
        self._attributes.clear()


def merge_by_peft(job: Job, *, check_finite: bool) -> None:
    """Let peft merge a layer that is not known here."""
    job.layer.merge(safe_merge=check_finite, adapter_names=list(job.names))


def merge_by_blocks(job: Job, *, scratch_bytes: int, unload: bool) -> None:
    """Overwrite the weights of a job and mark its layers as merged."""
    for target in job.targets:
        if isinstance(target, Tokens):
            target.write()
            continue
        for piece in target.pieces:
            norms = merge_matrix(piece.update, piece.matrix, scratch_bytes=scratch_bytes)
            if not unload and target.attribute != "bias":
                for index, norm in norms.items():
                    _keep_norm(job.layer, piece.update.terms[index].name, norm)
    for layer, names in job.marks:
        layer.merged_adapters.extend(names)
    job.targets.clear()  # views of the adapter's tensors, which unloading frees


def unload(job: Job, tuner: Any, places: Places) -> None:
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


def _modules(layer: BaseTunerLayer) -> list[Any]:
    return list(layer.modules()) if isinstance(layer, torch.nn.Module) else []


def _is_tuner(module: Any) -> bool:
    return isinstance(module, BaseTunerLayer)


def _is_adapter_part(layer: Any, module: torch.nn.Module) -> bool:
    """Whether a module belongs to the adapter, which merging only reads."""
    own = [getattr(layer, name, None) for name in layer.adapter_layer_names]
    return any(isinstance(part, torch.nn.Module) and any(m is module for m in part.modules()) for part in own)
