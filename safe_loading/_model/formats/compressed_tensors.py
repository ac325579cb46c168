"""compressed-tensors, which transformers decompresses at the first forward, unless fp8 kernels are asked for."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.report import Finding
from safe_loading._core.thread_patches import patched

from .card_findings import bytes_of_parameters, refuse_training, with_bytes
from .format import ADA, Format, QuantizationRequest, TargetCard
from .packed_linear import PackedLinear, frozen, with_input_codes

_PACKED = ".weight_packed"
_WHOLE_CODES = ("F8_E4M3", "I8")  # one in the place of a value
_STATUS = {"quantization_status": "compressed"}
_GLOBAL_SCALE = "weight_global_scale"  # over the scales of groups
_OF_ONE_EXPERT = re.compile(rf"(?:^|\.)experts\.\d+\.(?:.+\.)?{_GLOBAL_SCALE}$")
_DECODES = "CompressedTensorsDequantize"  # transformers' operation
_LAYER = re.compile(r".*\.layers\.\d+\.")
_FAILS_AT = re.compile(r"(?:^|\.)experts\.\d+\.(?:.+\.)?(weight|weight_zero_point)$")


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


def decoded_wrongly(tensors: Mapping[str, TensorInfo], options: Mapping[str, Any]) -> list[str]:
    """Return the tensors that transformers decodes by another group of the config, or of single experts wrongly."""
    found = scales_left_out(tensors)
    for name, info in tensors.items():
        if (told := _FAILS_AT.search(name)) and (told[1] != "weight" or info.dtype == "I8"):
            found.append(name)
    groups: Mapping[str, Mapping[str, Any]] = options.get("config_groups") or {}
    kinds = [(group["weights"], group.get("format")) for group in groups.values() if group.get("weights")]
    if options.get("dequantize") and any(kind != kinds[0] for kind in kinds):
        found += [name for name in tensors if name.endswith(".weight_scale")]
    return sorted(set(found))


_Tensors = Mapping[str, "torch.Tensor | list[torch.Tensor]"]


def each_by_its_group() -> list[AbstractContextManager[object]]:
    """Return the context in which transformers decodes each layer by its own group of the config, with all scales.

    It (up to 5.24) decodes all dense layers of a load with ``dequantize=True`` by one group, and all experts by one,
    whichever group names them: with 8 bits beside 4 their values are wrong, and with other formats the load fails. Of
    single experts it takes codes and scales alone: it leaves out the scale over those of groups (transformers#48371)
    and plain experts beside packed ones, and fails with zero points (transformers#47430), scales of blocks and int8.
    """
    try:
        from transformers.integrations import compressed_tensors as integration
    except ImportError:  # older releases decode nothing while they load
        return []
    engine: Any = getattr(integration, _DECODES, None)
    if engine is None:
        return []
    convert: Callable[..., dict[str, Any]] = engine.convert  # in this thread

    def convert_each(self: Any, input_dict: _Tensors, *args: Any, **kwargs: Any) -> dict[str, Any]:
        config, name = self.hf_quantizer.compressor.quantization_config, kwargs["full_layer_name"]
        if "weight" not in input_dict and "weight_scale" not in input_dict:
            return _experts(input_dict, name, config, kwargs["model"].get_parameter(name).dtype)
        operation = copy.copy(self)
        if "weight_scale" in input_dict:
            path = name.rpartition(".")[0]
            operation.scheme = _scheme_of(config, [path], kwargs["model"].get_submodule(path), input_dict)
        return convert(operation, input_dict, *args, **kwargs)

    return [patched(engine, "convert", convert_each)]


def _experts(tensors: _Tensors, name: str, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return the weights of all experts of a layer, decoded and stacked, by the patterns of their names on disk."""
    by_layer: dict[str, dict[str, Any]] = {}
    for pattern, values in tensors.items():
        layer, _, role = pattern.rpartition(".")
        by_layer.setdefault(layer, {})[role] = values
    weights, linear = {}, torch.nn.Linear(1, 1, device="meta")  # as each was when it was quantized
    for layer, roles in by_layer.items():
        if "weight_scale" not in roles:  # of a layer that is not quantized
            weights[f"{layer}.weight"] = roles["weight"]
            continue
        scheme = _scheme_of(config, _names_of(layer, name), linear, roles)
        weights[f"{layer}.weight"] = _stacked(roles, scheme, config, dtype)
    return weights


def _stacked(roles: Mapping[str, Any], scheme: Any, config: Any, dtype: torch.dtype) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    kind = scheme.format or (config.format if len(config.config_groups) == 1 else None)
    kind = kind or infer_module_format(torch.nn.Linear, scheme)
    compressor: Any = BaseCompressor.get_value_from_registry(getattr(kind, "value", kind))
    lists = {role: values if isinstance(values, list) else [values] for role, values in roles.items()}
    weights = (
        compressor.decompress(_with_shape(dict(zip(lists, of_one, strict=True)), scheme), scheme)["weight"]
        for of_one in zip(*lists.values(), strict=True)
    )
    first = next(weights)
    # at once: a list of all experts would take as much memory again
    stacked = torch.empty((len(lists["weight_scale"]), *first.shape), dtype=dtype, device=first.device)
    for index, values in enumerate(itertools.chain((first,), weights)):
        stacked[index].copy_(values)
    return stacked


def _with_shape(tensors: dict[str, torch.Tensor], scheme: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an expert with the shape of its weight, which some files lack."""
    packed, shape = tensors.get("weight_packed"), tensors.get("weight_shape")
    if packed is None or packed.dtype != torch.int32 or (shape is not None and shape.numel()):
        return tensors
    return {**tensors, "weight_shape": torch.tensor([len(packed), packed.shape[1] * 32 // scheme.weights.num_bits])}


def _names_of(layer: str, name: str) -> list[str]:
    """Return the names of a layer of the first expert, in the model and on disk, by its pattern and its parameter."""
    pattern = layer.replace("\\", "").lstrip("^.").replace("*", "0")
    inside = _LAYER.match(name)
    return [f"{name.rpartition('.')[0]}.0.{pattern.rpartition('.')[2]}", f"{inside[0] if inside else ''}{pattern}"]


def _scheme_of(config: Any, names: Sequence[str], layer: nn.Module, roles: _Tensors) -> Any:
    """Return the scheme of the config group that names a layer, by the first of its names that one does.

    Of groups that all name it (published so, for single layers), it is one whose codes the layer has.
    """
    from compressed_tensors.utils.match import match_targets

    schemes = [scheme for scheme in config.config_groups.values() if scheme.weights is not None]
    schemes = [scheme for scheme in schemes if _has_codes_of(scheme.weights, roles)] or schemes
    if all((scheme.weights, scheme.format) == (schemes[0].weights, schemes[0].format) for scheme in schemes):
        return schemes[0]
    by_target = {target: scheme for scheme in schemes for target in scheme.targets}
    for kind in (nn.Module(), layer):  # by name or pattern first, which say more than a class
        for name in names:
            for target in match_targets(name, kind, by_target):
                return by_target[target]
    raise ValueError(f"no config group of quantization_config names {names[0]}")


def _has_codes_of(weights: Any, roles: _Tensors) -> bool:
    """Return whether the tensors of a layer can be codes of these arguments, by their dtype and their bits."""
    first = {role: each[0] if isinstance(each, list) else each for role, each in roles.items()}
    kind, packed = getattr(weights.type, "value", weights.type), first.get("weight_packed")
    if packed is None:
        codes = first.get("weight")
        return weights.num_bits == 8 and (codes is None or codes.is_floating_point() == (kind == "float"))
    if packed.dtype != torch.int32:
        return bool(kind == "float" and weights.num_bits < 8)
    shape = first.get("weight_shape")
    columns = int(shape[-1]) if shape is not None and shape.numel() else None
    return bool(kind == "int" and (columns is None or packed.shape[-1] == -(-columns * weights.num_bits // 32)))


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
    decoded_wrongly=decoded_wrongly,
    holds=has_scheme,
    decoded_at_forward=is_compressed,
    decode=decode_compressed,
    mended=each_by_its_group,
)
