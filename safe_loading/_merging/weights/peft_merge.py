"""The layers that are merged by peft's own code: other tuners, LoRA variants to come, quantized weights."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch

from safe_loading._core.interrupts import HeldSignals, finish
from safe_loading._core.names import method_name
from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.formats.four_bit import decoded_rightly_on_the_cpu, undo_cpu_packing
from safe_loading._model.peft_layers import TunerModule, is_lora_layer
from safe_loading._model.quantized.decode import decoded_weight
from safe_loading._model.quantized.recognize import is_quantized
from safe_loading._model.snapshot import Snapshot
from safe_loading.errors import MergeError

from .dequantize import merged_rows, terms_of
from .layer_merge import LayerMerge
from .offloaded import OffloadedWeights
from .other_tuners import (
    DEPENDS_ON_THE_INPUT,
    KNOWN,
    in_order_of_merge,
    is_plain,
    merge_in_float64,
    of_the_input,
)
from .variants import CannotMergeError

_SCRATCH_BYTES = 1 << 20  # of the exact sum, in float64
_Tensors = dict[str, Any]  # module._parameters or module._buffers, whose values have different types


def merge_all_by_peft(
    jobs: list[LayerMerge],
    offloaded: OffloadedWeights,
    methods: Collection[object],
    held: HeldSignals,
    *,
    check_finite: bool,
) -> list[Finding]:
    """Let peft merge the layers that are not known here, all of them or none; ``methods`` are the adapters'.

    Signals that are ``held`` come between two layers.
    """
    if not jobs:
        return []
    backup, path, errors = _Backup(), "", dict[str, float]()
    in_float64 = [job for job in jobs if KNOWN.issuperset(methods) and is_plain(job.layer) and not job.levels]
    try:
        for job in jobs:
            held.deliver()
            path = job.path
            backup.keep(job.layer)
            undo_cpu_packing(job.layer.get_base_layer())
            before = _as_it_is(job)
            if job in in_float64:
                merge_in_float64(job.layer, job.names, check_finite=check_finite)
                continue
            with decoded_rightly_on_the_cpu():
                for layer, names in job.levels or [(job.layer, job.names)]:
                    layer.merge(safe_merge=check_finite, adapter_names=in_order_of_merge(layer, names))
            lost = None if before is None else _relative_error(job, before)
            if lost is not None:
                errors[path] = lost
            backup.spare_replaced()
    except BaseException as error:  # Ctrl-C as well: a layer may be half merged
        finish(backup.restore)
        if not isinstance(error, Exception):
            raise
        raise MergeError(
            "peft cannot merge a layer; everything is as it was:", [f"{path}: {_why_not(error, methods)}."]
        ) from error
    finish(backup.move_into_old_storage)
    offloaded.write_back(_base_tensors(jobs))
    kinds = sorted({type(job.layer).__name__ for job in jobs})
    where = f"{len(jobs)} layers, for example {jobs[0].path}"
    whole = len(in_float64) == len(jobs)
    how = "in float64, and rounded once" if whole else "which rounds more than once"
    why = (
        f"{kinds} were merged by peft's own code, {how}; the weights of before, kept for undoing it, took "
        f"{format_bytes(backup.bytes)} meanwhile."
    )
    fix = "none needed" + ("." if whole else "; for quantized weights, merging before the base is quantized is best.")
    found = Finding("merged-by-peft", "info" if whole else "warning", where, why, fix, backup.bytes)
    return [found, *_requantized(errors)]


def _why_not(error: Exception, methods: Collection[object]) -> str:
    """Return the reason why peft did not merge a layer; of some methods its own error is empty."""
    of_input = sorted(DEPENDS_ON_THE_INPUT.intersection(map(method_name, methods)))
    return of_the_input(*of_input) if of_input else str(error).rstrip(". ") or type(error).__name__


def _as_it_is(job: LayerMerge) -> torch.nn.Module | None:
    """Return a quantized layer with its weight of now, which peft's merge replaces; None where no LoRA is merged."""
    base = job.layer.get_base_layer()
    if not is_lora_layer(job.layer) or not is_quantized(base):
        return None
    before = copy.copy(base)
    for shared in ("_parameters", "_buffers", "state"):  # engines keep scales in ``state`` after a forward
        if shared in vars(base):
            vars(before)[shared] = copy.copy(vars(base)[shared])
    return before


def _relative_error(job: LayerMerge, before: torch.nn.Module) -> float | None:
    """Return the rounding error of a requantized layer, relative to its adapters' delta; None where unknown."""
    if not is_lora_layer(job.layer):
        return None
    try:
        terms = terms_of(job.layer, job.names)
        values, now = decoded_weight(before), decoded_weight(job.layer.get_base_layer())
    except (NotImplementedError, CannotMergeError):
        return None
    error, added = 0.0, 0.0
    for start, exact in merged_rows(values, terms, _SCRATCH_BYTES):
        rows = slice(start, start + len(exact))
        added += float((exact - values[rows]).square_().sum())
        error += float(exact.sub_(now[rows]).square_().sum())
    return math.sqrt(error / max(added, 1e-60))  # adapters may add nothing


def _requantized(errors: dict[str, float]) -> list[Finding]:
    if not errors:
        return []
    worst = max(errors, key=lambda path: errors[path])
    why = (
        f"their weights were dequantized, added to, and rounded to codes again. The rounding error is "
        f"{min(errors.values()):.0%} to {errors[worst]:.0%} of what the adapters add (root mean square)."
    )
    fix = "merge_lora_inplace(..., dequantize=True) keeps all of it; or merge into the base before it is quantized."
    return [Finding("requantized", "warning", f"{len(errors)} layers, for example {worst}", why, fix)]


@dataclasses.dataclass(frozen=True, eq=False)
class _SavedTensor:
    """One parameter or buffer before the merge: ``tensors[name]`` is ``tensor``."""

    tensors: _Tensors
    name: str
    tensor: torch.Tensor
    data: torch.Tensor  # whose storage it gets back
    copy: torch.Tensor
    # Of the object. An engine keeps there whether a weight is codes already, and peft's merge changes it.
    attributes: dict[str, object]


class _Backup:
    """The base weights of the layers that peft merges, copied, since peft may fail in the middle."""

    def __init__(self) -> None:
        self._layers: list[Snapshot] = []
        self._tensors: list[_SavedTensor] = []
        self._spared = 0  # of the tensors, from the first: those whose copies were looked at
        self.bytes = 0  # of the weights of before, kept as copies or as they are

    def keep(self, layer: TunerModule) -> None:
        """Copy the weights and attributes that merging ``layer`` changes."""
        self._layers.append(Snapshot(layer))
        for module in layer.modules():
            if _is_of_adapter(layer, module):
                continue
            dicts: tuple[_Tensors, ...] = (module._parameters, module._buffers)
            for tensors in dicts:
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta:
                        values, attributes = tensor.detach().clone(), dict(vars(tensor))
                        self._tensors.append(_SavedTensor(tensors, name, tensor, tensor.data, values, attributes))
                        self.bytes += values.nbytes

    def spare_replaced(self) -> None:
        """Free the copies of tensors that were replaced as a whole, and whose values are in them still."""
        for index in range(self._spared, len(self._tensors)):
            saved = self._tensors[index]
            if saved.tensors.get(saved.name) is saved.tensor or type(saved.data) is not torch.Tensor:
                continue  # codes in an engine's own class of tensors may not be compared
            if torch.equal(saved.data, saved.copy):
                self._tensors[index] = dataclasses.replace(saved, copy=saved.data)
        self._spared = len(self._tensors)

    def restore(self) -> None:
        """Put every weight back, in its own storage, and every module back into its earlier state."""
        for saved in self._tensors:
            saved.data.copy_(saved.copy)
            saved.tensor.data = saved.data
            vars(saved.tensor).update(saved.attributes)
        for layer in self._layers:
            layer.restore()

    def move_into_old_storage(self) -> None:
        """Copy merged values into the storage that the weights had before; peft puts them into a new one."""
        for saved in self._tensors:
            now, before = saved.tensors.get(saved.name), saved.tensor
            if now is None or now.data_ptr() == saved.data.data_ptr():
                continue
            # codes belong to the scales that came with them, which a new parameter holds: it stays where it is
            plain = type(now) in (torch.nn.Parameter, torch.Tensor) and type(now) is type(before)
            if plain and (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device):
                saved.data.copy_(now.detach())
                before.data = saved.data
                saved.tensors[saved.name] = before
        self._tensors.clear()  # frees the copies


def _is_of_adapter(layer: TunerModule, module: torch.nn.Module) -> bool:
    """Return whether a module belongs to the adapter, which merging only reads."""
    own = [getattr(layer, name, None) for name in layer.adapter_layer_names]
    return any(isinstance(child, torch.nn.Module) and any(m is module for m in child.modules()) for child in own)


def _base_tensors(jobs: list[LayerMerge]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield module and name of every tensor of the base in some layers."""
    for job in jobs:
        for module in job.layer.modules():
            if not _is_of_adapter(job.layer, module):
                yield from ((module, name) for name in (*module._parameters, *module._buffers))
