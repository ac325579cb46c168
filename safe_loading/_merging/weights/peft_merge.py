"""The layers that are merged by peft's own code: other tuners, LoRA variants to come, quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.quantized.decode import decoded_weight, undo_cpu_packing
from safe_loading._model.quantized.recognize import is_quantized
from safe_loading.errors import MergeError

from .merge_plan import LayerMerge
from .offloaded import Offloaded


def merge_all_by_peft(jobs: list[LayerMerge], store: Offloaded, *, check_finite: bool) -> list[Finding]:
    """Let peft merge the layers that are not known here, all of them or none."""
    if not jobs:
        return []
    backup, at, lost = _Backup(), "", dict[str, float]()
    try:
        for job in jobs:
            at = job.path
            undo_cpu_packing(job.layer.get_base_layer())
            backup.keep(job.layer)
            exact = _exact(job)
            job.layer.merge(safe_merge=check_finite, adapter_names=list(job.names))
            if exact is not None:
                lost[at] = _lost(job, *exact)
    except BaseException as error:
        backup.restore()
        if not isinstance(error, Exception):
            raise
        raise MergeError(
            "peft cannot merge a layer; everything is as it was:", [f"{at}: {error or type(error).__name__}."]
        ) from error
    size = backup.bytes
    backup.settle()
    store.settle(_weights_of(jobs))
    kinds = sorted({type(job.layer).__name__ for job in jobs})
    finding = Finding(
        "merged-by-peft",
        "warning",
        f"{len(jobs)} layers, as {jobs[0].path}",
        f"{kinds} are merged by peft's own code: it rounds more than once, and took {format_bytes(size)} for a while.",
        "none needed; quantized weights are best merged into the base before it is quantized.",
        size,
    )
    return [finding, *_rounded_away(lost)]


def _exact(job: LayerMerge) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what a quantized layer stands for with its adapters, and what they add; None where that is not known."""
    layer = job.layer
    if not is_quantized(layer.get_base_layer()) or any(layer.use_dora.get(name) for name in job.names):
        return None
    try:
        values = decoded_weight(layer.get_base_layer())
    except NotImplementedError:
        return None
    delta = torch.zeros_like(values, dtype=torch.float32)
    for name in job.names:
        delta += layer.get_delta_weight(name).to(delta)
    return values.float() + delta, delta


def _lost(job: LayerMerge, exact: torch.Tensor, delta: torch.Tensor) -> float:
    """Return the rounding error of a requantized layer, as a part of what its adapters added."""
    error = torch.linalg.vector_norm(decoded_weight(job.layer.get_base_layer()).float() - exact)
    return float(error / torch.linalg.vector_norm(delta).clamp_min(1e-30))


def _rounded_away(lost: dict[str, float]) -> list[Finding]:
    if not lost:
        return []
    worst = max(lost, key=lambda path: lost[path])
    return [
        Finding(
            "requantised",
            "warning",
            f"{len(lost)} layers, as {worst}",
            f"their weights were dequantized, added to, and rounded to codes again. The rounding error is "
            f"{min(lost.values()):.0%} to {lost[worst]:.0%} of what the adapters add (root mean square).",
            "merge_lora_inplace(..., dequantize=True) keeps all of it; or merge into the base before it is quantized.",
        )
    ]


class _Backup:
    """The base weights of the layers that peft merges, copied, since peft may fail in the middle.

    Attributes:
        bytes: The size of the copies.
    """

    def __init__(self) -> None:
        self._tensors: list[tuple[dict[str, Any], str, Any, torch.Tensor, torch.Tensor]] = []
        self._orders: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._facts: list[tuple[Any, dict[str, Any]]] = []
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
                self._orders.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta:
                        copy = tensor.detach().clone()
                        self._tensors.append((tensors, name, tensor, tensor.data, copy))
                        # bitsandbytes keeps there whether a weight is codes already, and peft's merge changes it
                        self._facts.append((tensor, dict(vars(tensor))))
                        self.bytes += copy.nbytes

    def restore(self) -> None:
        """Put every weight back, in its own storage."""
        for _, _, tensor, data, copy in self._tensors:
            data.copy_(copy)
            tensor.data = data
        for tensors, order in self._orders:
            tensors.clear()
            tensors.update(order)
        for tensor, facts in self._facts:
            vars(tensor).update(facts)
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
            # codes belong to the scales that came with them, which a new parameter holds: it stays where it is
            plain = type(now) in (torch.nn.Parameter, torch.Tensor) and type(now) is type(tensor)
            if plain and (now.shape, now.dtype, now.device) == (
                tensor.shape,
                tensor.dtype,
                tensor.device,
            ):
                data.copy_(now.detach())
                tensor.data = data
                tensors[name] = tensor
        self._tensors.clear()
        self._orders.clear()
        self._facts.clear()
        self._attributes.clear()


def _modules(layer: BaseTunerLayer) -> list[Any]:
    return list(layer.modules()) if isinstance(layer, torch.nn.Module) else []


def _is_tuner(module: Any) -> bool:
    return isinstance(module, BaseTunerLayer)


def _is_adapter_part(layer: Any, module: torch.nn.Module) -> bool:
    """Whether a module belongs to the adapter, which merging only reads."""
    own = [getattr(layer, name, None) for name in layer.adapter_layer_names]
    return any(isinstance(part, torch.nn.Module) and any(m is module for m in part.modules()) for part in own)


def _weights_of(jobs: list[LayerMerge]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield module and name of every tensor of the base in some layers."""
    for job in jobs:
        for module in _modules(job.layer):
            if not _is_adapter_part(job.layer, module):
                yield from ((module, name) for name in (*module._parameters, *module._buffers))
