"""Quantized layers become plain ones, with the adapters in them: one rounding, to the dtype in which they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.quantized.decode import decoded_weight
from safe_loading._model.quantized.recognize import has_offloaded_codes, is_quantized
from safe_loading._model.tensor_values import is_finite

from .lora_layers import linear_terms, whole
from .merge_plan import LayerMerge
from .rounding import round_into
from .update import ROWS, RowMerger, Update
from .variants import MERGE_BEFORE_QUANTIZING, SCALES_OFFLOADED, CannotMerge, is_known, refuse_impossible
from .writable_tensors import parents_of, tuner_layers


@dataclasses.dataclass(frozen=True, eq=False)
class Replacement:
    """A plain layer, and what it takes the place of.

    Attributes:
        path: The place in the model.
        old: The quantized layer, or the tuner layer around it.
        new: The plain layer.
    """

    path: str
    old: Any
    new: torch.nn.Linear


def dequantized(
    model: Any, jobs: Sequence[LayerMerge], *, scratch_bytes: int, check_finite: bool
) -> tuple[list[Replacement], list[str]]:
    """Make the plain layers; the model is not changed.

    Args:
        model: The base, with its adapters.
        jobs: The quantized layers that have adapters.
        scratch_bytes: The largest temporary beside one layer's values.
        check_finite: Whether what is merged must be finite.

    Returns:
        A replacement for each of ``jobs``, and for each quantized layer without adapters; and what forbids it.
    """
    made: list[Replacement] = []
    problems: list[str] = []
    for path, layer, names in _quantized(model, jobs):
        try:
            made.append(Replacement(path, layer, _plain(model, layer, names, scratch_bytes, check_finite)))
        except CannotMerge as reason:
            problems.append(f"{path}: {reason}.")
        except NotImplementedError as reason:
            problems.append(f"{path}: {reason}. {MERGE_BEFORE_QUANTIZING}.")
    return made, problems


def put_in_place(model: Any, made: Sequence[Replacement]) -> list[Finding]:
    """Put the plain layers where the quantized ones stand, and take the quantization out of the config."""
    places = parents_of(model)
    for replacement in made:
        for parent, name in places.get(id(replacement.old), []):
            setattr(parent, name, replacement.new)
    if not made:
        return []
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        if getattr(model, flag, False):
            setattr(model, flag, False)
    size = sum(replacement.new.weight.nbytes for replacement in made)
    dtypes = sorted({str(replacement.new.weight.dtype).removeprefix("torch.") for replacement in made})
    return [
        Finding(
            "dequantised",
            "info",
            f"{len(made)} layers, as {made[0].path}",
            f"quantized layers are plain ones in {', '.join(dtypes)} now, {format_bytes(size)}; each element was "
            f"rounded once, after everything was added.",
            "none; dequantize=False keeps the model quantized, and rounds what the adapters add to its codes.",
            size,
        )
    ]


def _quantized(model: torch.nn.Module, jobs: Sequence[LayerMerge]) -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Yield place, layer and adapters of every quantized layer."""
    inside = {id(part) for _, layer in tuner_layers(model) for part in _modules(layer)}
    for job in jobs:
        yield job.path, job.layer, job.names
    for path, module in model.named_modules():
        if id(module) not in inside and is_quantized(module):
            yield path, module, ()


def _modules(layer: Any) -> Iterator[Any]:
    yield from layer.modules()


def _plain(model: Any, layer: Any, names: Sequence[str], scratch_bytes: int, check_finite: bool) -> torch.nn.Linear:
    base: Any = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    if not isinstance(base, torch.nn.Linear):
        raise CannotMerge(
            f"its quantized {type(base).__name__} is no Linear, which alone is dequantized here. "
            f"{MERGE_BEFORE_QUANTIZING}"
        )
    if base.weight.is_meta or has_offloaded_codes(base):
        raise CannotMerge(SCALES_OFFLOADED)
    if names:
        _check_variants(layer, names)
    dtype = _dtype(model, base)
    values = decoded_weight(base)
    terms = linear_terms(_not_transposed(layer), names) if names else []
    with torch.device("meta"):
        new = torch.nn.Linear(values.shape[1], values.shape[0], bias=base.bias is not None)
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    merger = RowMerger(
        Update((values.shape[0], values.shape[1]), tuple(terms)),
        torch.float64,
        values.device,
        scratch_bytes=scratch_bytes,
    )
    step = max(ROWS, scratch_bytes // (8 * values.shape[1]) // ROWS * ROWS)
    for start in range(0, len(values), step):
        block = values[start : start + step].double()
        merger.merge(block, start)
        round_into(block, weight[start : start + step])
    if check_finite and not is_finite(weight):
        raise CannotMerge(f"a merged element is NaN, infinite or beyond the largest number of {dtype}")
    new.weight = torch.nn.Parameter(weight, requires_grad=False)
    bias: torch.Tensor | None = base.bias  # torch says that it is never None
    if bias is not None or any(layer.lora_bias.get(name) for name in names):
        new.bias = torch.nn.Parameter(_bias(layer, base, names, dtype), requires_grad=False)
    return new.train(base.training)


def _check_variants(layer: Any, names: Sequence[str]) -> None:
    refuse_impossible(layer, names)
    for name in names:
        if not is_known(layer.lora_variant.get(name)):
            kind = type(layer.lora_variant[name]).__name__
            raise CannotMerge(f"adapter {name!r} is a {kind}, which is not known here. Keep it as an adapter")


def _bias(layer: Any, base: Any, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
    having = [name for name in names if layer.lora_bias.get(name)]
    if base.bias is None:
        raise CannotMerge(f"adapter {having[0]!r} has lora_bias=True, and the layer has no bias to add it to")
    bias = base.bias.detach().double()
    for name in having:
        bias = bias + layer.scaling[name] * whole(layer.lora_B[name].bias.data).double().to(bias.device)
    out = torch.empty(bias.shape, dtype=dtype, device=bias.device)
    round_into(bias, out)
    return out


def _not_transposed(layer: Any) -> Any:
    if getattr(layer, "fan_in_fan_out", False):
        raise CannotMerge("its quantized weight is stored transposed, which is not known here")
    return layer


def _dtype(model: Any, base: Any) -> torch.dtype:
    """Return the dtype in which a quantized layer computes: its own, or the model's."""
    dtype = getattr(base, "compute_dtype", None)
    if dtype is None:
        dtype = getattr(getattr(model, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
