"""compressed-tensors, which transformers decompresses at the first forward, unless fp8 kernels are asked for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding

from .card_findings import bytes_of_parameters, refuse_training, with_bytes
from .format import ADA, Format, QuantizationRequest, TargetCard
from .packed_linear import PackedLinear, frozen, with_input_codes

_PACKED = ".weight_packed"
_WHOLE_CODES = ("F8_E4M3", "I8")  # one in the place of a value
_STATUS = {"quantization_status": "compressed"}
_GLOBAL_SCALE = "weight_global_scale"  # over the scales of groups
_OF_ONE_EXPERT = re.compile(rf"(?:^|\.)experts\.\d+\.(?:.+\.)?{_GLOBAL_SCALE}$")


def build_compressed(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Leave the model as compressed-tensors decompresses it at the first forward, unless fp8 kernels are asked for."""
    wants_kernels = bool(request.options.get("use_optimized_inference")) and not request.options.get("dequantize")
    if wants_kernels and card.has(ADA):
        refuse_training(card, "compressed-tensors' fp8 kernels", "dequantize=True in place of use_optimized_inference")
    before = bytes_of_parameters(model)
    kept_in_fp8 = 0
    for path, layer, group in _matched_linears(model, request):
        weights: Mapping[str, Any] = group.get("weights") or {}
        is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
        if wants_kernels and card.has(ADA) and is_fp8:
            stored = {
                "weight": ((layer.out_features, layer.in_features), torch.float8_e4m3fn),
                "weight_scale": ((1, layer.out_features), torch.float32),
            }
            model.set_submodule(path, PackedLinear(layer, stored, with_input_codes(torch.float8_e4m3fn)))
            kept_in_fp8 += 1
        elif not request.options.get("dequantize"):
            _keep_scales(layer, group, request.options.get("format"))
    if kept_in_fp8 or request.options.get("dequantize"):
        return []
    message = (
        "transformers leaves this format compressed while it loads, and decompresses all of it at the first forward "
        "pass; counted as it is then."
    )
    groups: Mapping[str, Mapping[str, Any]] = request.options.get("config_groups") or {}
    if any(group.get("input_activations") for group in groups.values()):
        message += " What it takes to round the layers' inputs to codes and back is not counted."
    fix = "for fp8, quantization_config with use_optimized_inference=True keeps it, on a card of capability 8.9."
    return [with_bytes(Finding("dequantized", "warning", "", message, fix), before)]


def packed_modules(names: Iterable[str]) -> set[str]:
    """Return the modules that keep their weight packed until the first forward pass, by the names on disk."""
    return {name.removesuffix(_PACKED) for name in names if name.endswith(_PACKED)}


def corrected_status(options: Mapping[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Return the status of a checkpoint whose config names another, although it holds codes.

    transformers goes by the status alone, and takes codes for values where it is not this one (transformers#47145).
    """
    status = options.get("quantization_status")
    if getattr(status, "value", status) == _STATUS["quantization_status"]:
        return {}
    holds_codes = any(
        name.endswith(_PACKED) or (name.endswith(".weight") and dtype in _WHOLE_CODES) for name, dtype in dtypes.items()
    )
    return dict(_STATUS) if holds_codes else {}


def scales_left_out(names: Iterable[str]) -> list[str]:
    """Return the scales of single experts that transformers leaves out where it decodes these into one tensor.

    It takes the scales of groups, and not the one over them (up to 5.24, transformers#48371).
    """
    found = [name for name in names if _OF_ONE_EXPERT.search(name)]
    if not found:
        return []
    try:
        from transformers.integrations import compressed_tensors as engine
    except ImportError:  # older releases decode no experts
        return []
    return [] if _GLOBAL_SCALE in inspect.getsource(engine) else found


def has_scheme(module: nn.Module) -> bool:
    """Return whether compressed-tensors quantizes a module's weight, which may hold decoded values by now."""
    return getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None


def is_compressed(module: nn.Module) -> bool:
    """Return whether a module holds codes still, which the model's first forward pass decodes."""
    return has_scheme(module) and getattr(module, "quantization_status", None) == "compressed"


def decode_compressed(module: nn.Module) -> torch.Tensor | None:
    """Return the values that compressed-tensors itself decodes a weight to; None for any other module."""
    if not has_scheme(module):
        return None
    if not is_compressed(module):
        return module.get_parameter("weight").data
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    scheme: Any = module.quantization_scheme
    kind = scheme.format or infer_module_format(type(module), scheme)
    engine: Any = BaseCompressor.get_value_from_registry(getattr(kind, "value", kind))
    state = {name: tensor.data for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers())}
    values: torch.Tensor = engine.decompress(state, scheme)["weight"]
    return values


def _matched_linears(
    model: nn.Module, request: QuantizationRequest
) -> Iterator[tuple[str, nn.Linear, Mapping[str, Any]]]:
    """Yield the linear layers of each config group, which names classes, or modules by ``re:`` and a pattern."""
    groups: Mapping[str, Mapping[str, Any]] = request.options.get("config_groups") or {}
    ignored = tuple(request.options.get("ignore") or ())
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or any(_matches(path, module, target) for target in ignored):
            continue
        for group in groups.values():
            if any(_matches(path, module, target) for target in group.get("targets") or ()):
                yield path, module, group
                break


def _matches(path: str, module: nn.Module, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], path) is not None
    return target == path or any(kind.__name__ == target for kind in type(module).__mro__)


def _keep_scales(layer: nn.Linear, group: Mapping[str, Any], model_format: object) -> None:
    """Add the scales that stay beside a decompressed weight, and those by which inputs and outputs are rounded."""
    rows, columns = layer.out_features, layer.in_features
    _add_scales(layer, "weight", group.get("weights"), (rows, columns))
    _add_scales(layer, "input", group.get("input_activations"), (1, columns))
    _add_scales(layer, "output", group.get("output_activations"), (1, rows))
    named = group.get("format") or model_format
    if getattr(named, "value", named) == "pack-quantized":
        layer.register_parameter("weight_shape", frozen((2,), torch.int64))


def _add_scales(layer: nn.Linear, name: str, args: Mapping[str, Any] | None, shape: tuple[int, int]) -> None:
    """Add the scales of a matrix of this shape, and its zero points where the codes are not symmetric.

    Those of inputs that are scaled as they come (``dynamic``) are not kept, but for the one scale over local ones.
    """
    if not args or args.get("dynamic") is True:
        return
    rows, columns = shape
    strategy = _strategy(args)
    if strategy == "tensor_group":
        layer.register_parameter(f"{name}_global_scale", frozen((1,), torch.float32))
    if args.get("dynamic"):  # "local"
        return
    group, block = args.get("group_size") or columns, _block_of(args) or shape
    of_group = (rows, -(-columns // group))
    sizes = {"tensor": (1,), "channel": (rows, 1), "group": of_group, "tensor_group": of_group}
    sizes["block"] = (-(-rows // block[0]), -(-columns // block[1]))
    if strategy in sizes:
        layer.register_parameter(f"{name}_scale", frozen(sizes[strategy], layer.weight.dtype))
        if args.get("symmetric") is False:
            layer.register_parameter(f"{name}_zero_point", frozen(sizes[strategy], torch.int8))


def _strategy(args: Mapping[str, Any]) -> str:
    """Return the strategy for scales; where it is not named, the group size tells it (``QuantizationArgs``)."""
    named = args.get("strategy")
    if named is not None:
        return str(getattr(named, "value", named)).lower()
    group = args.get("group_size")
    return "tensor" if group is None else "channel" if group == -1 else "group"


def _block_of(args: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the rows and columns of a block, which is published as text (``"128x128"``) and as a list."""
    block: str | Sequence[int] | None = args.get("block_structure")
    return [int(size) for size in block.split("x")] if isinstance(block, str) else block


COMPRESSED_TENSORS = Format(
    "compressed-tensors",
    build_compressed,
    dequantized_by="CompressedTensorsConfig",
    computes_in=torch.bfloat16,
    read_on_disk=True,
    merged_on_disk=True,
    instead="plain",
    without_weight=packed_modules,
    corrected=corrected_status,
    scales_left_out=scales_left_out,
    holds=has_scheme,
    decoded_at_forward=is_compressed,
    decode=decode_compressed,
)
