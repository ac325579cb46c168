"""Quantized layers become plain ones, with the adapters in them: one rounding, to the dtype of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from transformers.pytorch_utils import Conv1D

from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.peft_layers import (
    LoraModule,
    TunerModule,
    is_lora_layer,
    is_tuner_layer,
    modules_inside_layers,
)
from safe_loading._model.quantized.decode import decoded_weight
from safe_loading._model.quantized.recognize import has_offloaded_codes, is_decoded_gguf, is_quantized
from safe_loading._model.tensor_values import is_finite

from .layer_merge import LayerMerge, MergeOptions
from .lora_layers import data_of, gathered, linear_terms, without_bias
from .rounding import round_into
from .unload import hand_hooks_on
from .update import ROWS, RowMerger, Term, Update
from .variants import MERGE_BEFORE_QUANTIZING, SCALES_OFFLOADED, CannotMergeError, is_known, refuse_impossible
from .writable_tensors import parents_of


@dataclasses.dataclass(frozen=True, eq=False)
class Replacement:
    """A plain layer, and the quantized one (or the tuner layer around it) that it replaces."""

    path: str
    old: torch.nn.Module
    new: torch.nn.Module  # a Linear, or the Conv1D that a quantizer took for one
    weight: torch.Tensor  # the new layer's


def dequantized_layers(
    model: torch.nn.Module, jobs: Sequence[LayerMerge], options: MergeOptions
) -> tuple[list[Replacement], list[str]]:
    """Make a plain layer for each quantized one, with adapters or without, and list the reasons where that fails.

    ``options.scratch_bytes`` bounds the temporaries besides the values of one layer.
    """
    replacements: list[Replacement] = []
    problems: list[str] = []
    dtype = _plain_dtype(model)
    for path, layer, names in _quantized_layers(model, jobs):
        try:
            new = _dequantized(layer, names, dtype, options)
            replacements.append(Replacement(path, layer, new, new.get_parameter("weight")))
        except CannotMergeError as reason:
            problems.append(f"{path}: {reason}.")
        except NotImplementedError as reason:
            problems.append(f"{path}: {reason}. {MERGE_BEFORE_QUANTIZING}.")
    return replacements, problems


def replace_quantized(model: torch.nn.Module, replacements: Sequence[Replacement]) -> list[Finding]:
    """Put the plain layers in place of the quantized ones, and take the quantization out of the config."""
    parents = parents_of(model)
    for replacement in replacements:
        if is_tuner_layer(replacement.old):
            hand_hooks_on(replacement.old.get_base_layer(), replacement.new)
        hand_hooks_on(replacement.old, replacement.new)
        for parent, name in parents.get(id(replacement.old), []):
            setattr(parent, name, replacement.new)
    if replacements or is_decoded_gguf(model):
        _forget_quantization(model)
    if not replacements:
        return []
    size = sum(replacement.weight.nbytes for replacement in replacements)
    dtypes = sorted({str(replacement.weight.dtype).removeprefix("torch.") for replacement in replacements})
    where = f"{len(replacements)} layers, for example {replacements[0].path}"
    why = (
        f"quantized layers are plain ones in {', '.join(dtypes)} now, {format_bytes(size)}; each element was rounded "
        f"once, after everything was added."
    )
    fix = "none; dequantize=False keeps the model quantized, and rounds what the adapters add to its codes."
    return [Finding("layers-dequantized", "info", where, why, fix, size)]


def _forget_quantization(model: torch.nn.Module) -> None:
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        if getattr(model, flag, False):
            setattr(model, flag, False)


def _quantized_layers(
    model: torch.nn.Module, jobs: Sequence[LayerMerge]
) -> Iterator[tuple[str, torch.nn.Module, Sequence[str]]]:
    """Yield path, layer and adapters of every quantized layer."""
    # Base layers inside tuner layers come with their jobs: they are replaced together with the tuner layer.
    inside = modules_inside_layers(model)
    for job in jobs:
        if job.method == "dequantized":
            yield job.path, job.layer, job.names
    for path, module in model.named_modules():
        if id(module) not in inside and is_quantized(module):
            yield path, module, ()


def _dequantized(
    layer: torch.nn.Module, names: Sequence[str], dtype: torch.dtype | None, options: MergeOptions
) -> torch.nn.Module:
    """Return a plain layer with the decoded weight of a quantized one, its adapters merged.

    Without a ``dtype`` it is the one in which the layer computes.
    """
    lora = layer if is_lora_layer(layer) else None
    base = layer if lora is None else lora.get_base_layer()
    if not isinstance(base, torch.nn.Linear):
        raise CannotMergeError(
            f"its quantized {type(base).__name__} is not a Linear, and only those are dequantized here. "
            f"{MERGE_BEFORE_QUANTIZING}"
        )
    if any(tensor.is_meta for tensor in base.parameters(recurse=False)) or has_offloaded_codes(base):
        raise CannotMergeError(SCALES_OFFLOADED)
    terms = [] if lora is None or not names else terms_of(lora, names)
    dtype, values = dtype or _compute_dtype(base), decoded_weight(base)
    weight = merged_weight(values, terms, dtype, options.scratch_bytes)
    if options.check_finite and not is_finite(weight):
        raise CannotMergeError(f"a merged element is NaN, infinite or beyond the largest number of {dtype}")
    bias = _merged_bias(base, lora, names, dtype)
    new: torch.nn.Module
    with torch.device("meta"):  # without the memory and the random numbers of a weight that is replaced at once
        if getattr(base, "source_cls", None) is Conv1D:  # whose weight its checkpoints have transposed
            new = Conv1D(values.shape[0], values.shape[1])  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            weight = weight.t().contiguous()
        else:
            new = torch.nn.Linear(values.shape[1], values.shape[0], bias=bias is not None)
    new.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    new.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
    return new.train(base.training)


def terms_of(layer: LoraModule, names: Sequence[str]) -> list[Term]:
    """Return the terms that adapters add to the weight of a quantized layer; refuse those that no weight can hold."""
    refuse_impossible(layer, names)
    for name in names:
        if not is_known(layer.lora_variant.get(name)):
            kind = type(layer.lora_variant[name]).__name__
            raise CannotMergeError(f"adapter {name!r} is a {kind}, which is not known here. Keep it as an adapter")
    if getattr(layer, "fan_in_fan_out", False):
        raise CannotMergeError("its quantized weight is stored transposed, which is not known here")
    return linear_terms(layer, names, transposed=False)


def merged_weight(values: torch.Tensor, terms: Sequence[Term], dtype: torch.dtype, scratch_bytes: int) -> torch.Tensor:
    """Add terms to decoded values and round the sums, block by block."""
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    for start, block in merged_rows(values, terms, scratch_bytes):
        round_into(block, weight[start : start + len(block)])
    return weight


def merged_rows(values: torch.Tensor, terms: Sequence[Term], scratch_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the sums of decoded values and terms in float64, each block with its first row."""
    rows, columns = values.shape
    # In float64, rounded afterwards: a merger of the result's dtype would read rows that were rounded to it already.
    merger = RowMerger(Update((rows, columns), tuple(terms)), torch.float64, values.device, scratch_bytes=scratch_bytes)
    step = max(ROWS, scratch_bytes // (8 * columns) // ROWS * ROWS)
    for start in range(0, rows, step):
        block = values[start : start + step].double()
        merger.merge(block, start)
        yield start, block


def _merged_bias(
    base: torch.nn.Linear, layer: LoraModule | None, names: Sequence[str], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the bias with those of lora_B added, rounded once; None when there is none."""
    bias: torch.Tensor | None = base.bias  # torch's stubs say that it is never None
    with_bias = [] if layer is None else [name for name in names if layer.lora_bias.get(name)]
    if bias is None:
        if with_bias:
            raise without_bias(with_bias[0], base)
        return None
    total = bias.detach().double()
    if layer is not None:
        for name in with_bias:
            added = gathered(data_of(layer.lora_B[name], "bias"))
            total = total + layer.scaling[name] * added.double().to(total.device)
    rounded = torch.empty(total.shape, dtype=dtype, device=total.device)
    round_into(total, rounded)
    return rounded


def _plain_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of the layers around the quantized ones, which outputs must have; None where there is none.

    It is not the one in which they compute: the engine casts to and fro, and a plain Linear does not. Where a script
    has cast all the others (``prepare_model_for_kbit_training``), it is no longer that of the config.
    """
    config: object = getattr(getattr(model, "config", None), "dtype", None)
    own = {id(p) for layer in model.modules() if is_tuner_layer(layer) for p in _of_adapters(layer)}
    found: set[torch.dtype] = {
        parameter.dtype
        for path, module in model.named_modules()
        if "modules_to_save" not in path.split(".") and not is_quantized(module)
        for parameter in module.parameters(recurse=False)
        if id(parameter) not in own and parameter.is_floating_point()
    }
    if len(found) == 1 and config not in found:
        return found.pop()
    return config if isinstance(config, torch.dtype) and config.is_floating_point else None


def _of_adapters(layer: TunerModule) -> Iterator[torch.nn.Parameter]:
    for name in layer.adapter_layer_names:
        held = getattr(layer, name, None)
        if isinstance(held, (torch.nn.Module, torch.nn.ParameterDict)):
            yield from held.parameters()


def _compute_dtype(base: torch.nn.Linear) -> torch.dtype:
    dtype = getattr(base, "compute_dtype", None)  # of 4-bit layers
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
