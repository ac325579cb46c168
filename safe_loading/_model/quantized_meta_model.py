"""A model on meta with its quantized layers, for whoever counts or traces it before a weight is read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError, SafeLoadingError

from .attention_names import attention_of, scratch_is_known, without_packages
from .meta_model import meta_model
from .quantized.engine_formats import build_compressed, build_fbgemm, build_fp8, build_mxfp4
from .quantized.packed_formats import pack_awq, pack_gptq, pack_hqq, pack_torchao
from .quantized.patterns import refuse_costly_patterns
from .quantized.request import AMPERE, HOPPER, QuantizationRequest, TargetCard, read_request
from .quantized.stand_ins import bitsandbytes_config, quantize_with_stand_ins

_QUANTIZED_WHILE_LOADING = ("fp8", "mxfp4", "torchao", "hqq")  # bitsandbytes' loading is forecast
_OF_LINEAR_LAYERS = ("bitsandbytes", "gptq", "auto-round", "awq", "torchao", "hqq")
_SMALLER = (*_OF_LINEAR_LAYERS, "fp8", "mxfp8")  # than 16 bits


class QuantizedModel(NamedTuple):
    """A model on meta, and what is worth knowing about its quantization on the card that it is for."""

    model: torch.nn.Module
    method: str = ""  # transformers' ``quant_method``; empty for a model that is not quantized
    findings: Sequence[Finding] = ()

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability that is assumed where nobody named one: an A100's, or an H100's where fp8 stays."""
        stays_in_fp8 = any(parameter.dtype == torch.float8_e4m3fn for parameter in self.model.parameters())
        return HOPPER if stays_in_fp8 else AMPERE


def quantized_meta_model(
    config: PreTrainedConfig, quantization_config: object = None, *, card: TargetCard | None = None, **options: Any
) -> QuantizedModel:
    """Return the model of a config on meta, with layers that store and allocate what the quantized ones do on a card.

    No package of a method is needed: shapes and dtypes are facts of the formats. Without a ``quantization_config`` it
    is what the config says, which is what its checkpoint holds. The options are those of ``meta_model``; the config is
    not changed. What cannot be planned, or is refused by transformers on this card, raises `ArgumentError`.
    """
    plain = copy.deepcopy(config)
    on_disk = vars(plain).pop("quantization_config", None)
    if on_disk is None:
        on_disk = _of_text_model(plain)
    request = read_request(on_disk, quantization_config)
    with without_packages():
        model = meta_model(plain, **options)
    attention = [_of_attention(name) for name in attention_of(model) if not scratch_is_known(name)]
    if request is None:
        return QuantizedModel(model, findings=attention)
    build = _BUILDERS.get(request.method)
    if build is None:
        raise ArgumentError(
            f"quantization_config is {request.method!r}, which cannot be planned; these can: {', '.join(_BUILDERS)}. "
            f"Without quantization: take the checkpoint in 16 bits, whose plan is an upper bound."
        )
    refuse_costly_patterns(request, (path for path, _ in model.named_modules()))
    before = _held(model)
    try:
        findings = attention + build(model, request, card or TargetCard())
    except SafeLoadingError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"quantization_config ({request.method}) does not suit {type(model).__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error
    dequantized = any(finding.code == "dequantized" for finding in findings) or request.options.get("dequantize")
    if request.method in _SMALLER and not dequantized and _held(model) == before:
        findings.append(_nothing_quantized(model, request.method, before))
    elif request.method in _OF_LINEAR_LAYERS:
        findings += _of_experts(model, request.method)
    if not request.pre_quantized and request.method in _QUANTIZED_WHILE_LOADING:
        findings.append(_of_loading(request.method))
    return QuantizedModel(model, request.method, findings)


def cast_for_training(model: torch.nn.Module) -> dict[str, int]:
    """Freeze and cast as ``prepare_model_for_kbit_training`` does; return what was cast, and its bytes before."""
    before = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad = False
        if parameter.dtype in (torch.float16, torch.bfloat16):
            before[name] = parameter.nbytes
            parameter.data = parameter.data.to(torch.float32)
    return before


def _of_text_model(config: PreTrainedConfig) -> object:
    """Take the quantization out of the config of the language model inside, where transformers looks for it, too."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # several of them
        return None
    found: object = vars(text).pop("quantization_config", None)
    return found


def _held(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _nothing_quantized(model: torch.nn.Module, method: str, size: int) -> Finding:
    """Say that a model stays as large as it was, as transformers leaves it, and because of which layers."""
    name = type(model).__name__
    derived = {type(m).__name__ for m in model.modules() if isinstance(m, torch.nn.Linear)} - {"Linear"}
    why = f", and those of this model are {', '.join(sorted(derived))}" if derived else ""
    message = (
        f"{method} quantizes no layer of {name}, which is counted as it stays: transformers replaces layers whose "
        f"class is Linear itself{why}."
    )
    fix = "plan without quantization_config; or take a checkpoint of a method that knows this model."
    return Finding("nothing-quantized", "warning", name, message, fix, size)


def _of_experts(model: torch.nn.Module, method: str) -> list[Finding]:
    """Say what stays in 16 bits because transformers holds all experts of a layer in one tensor."""
    held = [p.nbytes for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name.split(".")]
    if not held:
        return []
    message = (
        f"transformers holds the experts of a layer in one tensor, and {method} quantizes linear layers only: they "
        f"stay in 16 bits."
    )
    fix = "take a checkpoint in fp8, or MXFP4 for gpt-oss, whose experts are quantized."
    return [Finding("experts-not-quantized", "warning", "", message, fix, sum(held))]


def _of_attention(name: str) -> Finding:
    message = f"{name} is counted as flash attention 2; what else its kernels allocate is not known."
    fix = 'leave room for it with overhead=, or plan with attn_implementation="flash_attention_2" or "sdpa".'
    return Finding("scratch-unknown", "info", "", message, fix)


def _of_loading(method: str) -> Finding:
    message = f"what quantizing to {method} takes for a moment while the weights are loaded is not counted."
    fix = "leave room for one weight in float32, twice; or load a checkpoint that is quantized already."
    return Finding("load-not-counted", "info", "", message, fix)


def _build_bitsandbytes(model: torch.nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    config = bitsandbytes_config(dict(request.options))
    if config is not None:
        quantize_with_stand_ins(model, config)
    return []


def _build_auto_round(model: torch.nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """AutoRound stores its codes in the layout of GPTQ or of AWQ."""
    layout = str(request.options.get("packing_format", "auto_round:auto_gptq"))
    return (pack_awq if "awq" in layout else pack_gptq)(model, request, card)


_BUILDERS: dict[str, Callable[[torch.nn.Module, QuantizationRequest, TargetCard], list[Finding]]] = {
    "bitsandbytes": _build_bitsandbytes,
    "fp8": build_fp8,
    "mxfp8": build_fp8,
    "fbgemm_fp8": build_fbgemm,
    "mxfp4": build_mxfp4,
    "compressed-tensors": build_compressed,
    "gptq": pack_gptq,
    "auto-round": _build_auto_round,
    "awq": pack_awq,
    "torchao": pack_torchao,
    "hqq": pack_hqq,
}
