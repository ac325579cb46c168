"""A model on meta with its quantized layers, for whoever counts or traces it before a weight is read."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._checkpoint.unread_codes import UNREAD_ENTRIES, refuse_unread_codes, refuse_unread_config
from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError, SafeLoadingError

from .attention_names import attention_of, comes_from_a_package, scratch_is_known, without_packages
from .formats.card_findings import bytes_of_parameters, experts_not_quantized
from .formats.format import AMPERE, HOPPER, Format, QuantizationRequest, TargetCard
from .formats.registry import FORMATS, QUANTIZED_NAME
from .meta_model import class_assumed, meta_model
from .model_config import ignored_sizes, settle_config
from .quantized.on_disk import refuse_bad_codes, without_passed_over
from .quantized.patterns import compiled_once, refuse_costly_patterns
from .quantized.request import read_request
from .weights_dtype import built_with, find_weights_dtype

QuantizationConfig = Mapping[str, object] | QuantizationConfigMixin | None
# The entries of its quantization that a folder's headers correct, and the finding about it.
ByHeaders = Callable[[torch.nn.Module, ModelFolder, object], "tuple[dict[str, object], Finding] | None"]


class QuantizedModel(NamedTuple):
    """A model on meta, and the findings about its quantization on the card that it is for."""

    model: torch.nn.Module
    method: str = ""  # transformers' ``quant_method``; empty for a model that is not quantized
    findings: Sequence[Finding] = ()

    @property
    def packs_on_device(self) -> bool:
        """Whether its weights arrive in 16 bits and are packed on the device."""
        return bool(self.method) and FORMATS[self.method].packs_on_device

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability that is assumed where nobody named one: an A100's, or an H100's where fp8 stays."""
        # a loaded weight may be a tensor of its format's own, with the codes inside
        codes = (getattr(parameter.data, "qdata", parameter) for parameter in self.model.parameters())
        stays_in_fp8 = any(each.dtype == torch.float8_e4m3fn for each in codes)
        return HOPPER if stays_in_fp8 else AMPERE


def quantized_meta_model(
    config: PreTrainedConfig,
    quantization_config: QuantizationConfig = None,
    *,
    card: TargetCard | None = None,
    folder: ModelFolder | None = None,
    dtype: torch.dtype | str | None = None,
    by_headers: ByHeaders | None = None,
    **options: Any,
) -> QuantizedModel:
    """Return the model of a config on meta, with layers that store and allocate as the quantized ones do on a card.

    No package of a method is needed: shapes and dtypes are facts of the formats. Without a ``quantization_config`` it
    is what the config says, which is what its checkpoint holds. The ``folder`` is the config's, whose weights may say
    their dtype, and by ``by_headers`` correct its quantization. The options are those of ``meta_model``; the config is
    not changed. What cannot be planned, or is refused by transformers on this card, raises `ArgumentError`.
    """
    _refuse_unread(config, folder)
    weights = find_weights_dtype(dtype, config, folder)
    plain, on_disk = _without_quantization(config, folder)
    request = read_request(on_disk, quantization_config)
    with without_packages():
        model, weights = built_with(weights, lambda made: meta_model(plain, dtype=made, **options))
    _refuse_flash(model, card or TargetCard())
    if folder is not None or config.name_or_path:
        _train_as_loaded(model)
    ignored = None if folder is None else ignored_sizes(folder.path, folder.config, config)
    known = [*filter(None, (weights.assumed, ignored))]
    if options.get("auto_class") is None:
        trusted = bool(options.get("trust_remote_code"))
        known += filter(None, [class_assumed(plain, model, trust_remote_code=trusted)])
    known += [_of_attention(name) for name in attention_of(model) if not scratch_is_known(name)]
    if request is None:
        known += filter(None, [_quantization_assumed(config, folder)])
        return QuantizedModel(model, findings=known)
    chosen = _known_format(request)
    refuse_costly_patterns(request, (path for path, _ in model.named_modules()))
    found = by_headers(model, folder, on_disk) if by_headers is not None and folder is not None else None
    if found is not None:
        entries, finding = found
        request = dataclasses.replace(request, options={**request.options, **entries})
        known.append(finding)
    before = bytes_of_parameters(model)
    try:
        with compiled_once():
            findings = known + chosen.build(model, request, card or TargetCard())
    except SafeLoadingError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"quantization_config ({request.method}) does not suit {type(model).__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error
    dequantized = any(finding.code == "dequantized" for finding in findings) or request.options.get("dequantize")
    if chosen.shrinks and not dequantized and bytes_of_parameters(model) == before:
        findings.append(_nothing_quantized(model, request.method, before))
    elif chosen.linear_only:
        findings += experts_not_quantized(model, request.method)
    if not request.pre_quantized and chosen.loading_not_counted:
        findings.append(_of_loading(request.method))
    return QuantizedModel(model, request.method, findings)


def _refuse_flash(model: torch.nn.Module, card: TargetCard) -> None:
    """Refuse flash attention of any version on a card that is older than its kernels, as they do."""
    named = next((name for name in attention_of(model) if comes_from_a_package(name) and "flash" in name), None)
    if named is not None and card.capability is not None and card.capability < AMPERE:
        major, minor = card.capability
        raise ArgumentError(
            f'attn_implementation="{named}" runs on GPUs of compute capability 8.0 and above, and this one has '
            f'{major}.{minor}. Pass attn_implementation="sdpa", or "eager".'
        )


def _train_as_loaded(model: torch.nn.Module) -> None:
    """Train the parameters that the class froze: ``from_pretrained`` makes each anew, as one to be trained."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)


def _quantization_assumed(config: PreTrainedConfig, folder: ModelFolder | None) -> Finding | None:
    """Return the finding of plain weights whose name is that of a quantized checkpoint, where no header decides."""
    path = folder.path if folder is not None else Path(config.name_or_path or "")
    if path.parent.name == "snapshots":  # in the hub's cache, whose snapshots are named by hashes
        path = path.parent.parent
    word = QUANTIZED_NAME.search(path.name)
    checkpoint = None if word is None or folder is None else folder.inspect_checkpoint(kind="model")[0]
    if word is None or (checkpoint is not None and checkpoint.tensors):
        return None
    message = (
        f"the name {path.name} says {word[0]}, but neither the config nor a file beside it names a quantization: plain "
        f"weights are counted."
    )
    fix = "pass the folder with its weights, whose headers say what they are."
    return Finding("quantization-assumed", "warning", str(path), message, fix)


def _known_format(request: QuantizationRequest) -> Format:
    chosen = FORMATS.get(request.method)
    if chosen is None:
        raise ArgumentError(
            f"quantization_config is {request.method!r}, which cannot be planned; these can: {', '.join(FORMATS)}. "
            f"Without quantization: take the checkpoint in 16 bits, whose plan is an upper bound."
        )
    return chosen


def _refuse_unread(config: PreTrainedConfig, folder: ModelFolder | None) -> None:
    """Refuse codes that transformers does not read, and those that are damaged."""
    if folder is None:
        refuse_unread_config(config.to_dict(), config.name_or_path or type(config).__name__)
        return
    refuse_bad_codes(folder)
    refuse_unread_codes(folder)


def _without_quantization(config: PreTrainedConfig, folder: ModelFolder | None) -> tuple[PreTrainedConfig, object]:
    """Return a copy of a config that says nothing of a quantization, and the ``quantization_config`` that it had."""
    plain = copy.deepcopy(config)
    without_passed_over(plain, folder)
    settle_config(plain)
    on_disk: object = vars(plain).pop("quantization_config", None)
    for entry in UNREAD_ENTRIES:
        vars(plain).pop(entry, None)
    return plain, on_disk


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


def _of_attention(name: str) -> Finding:
    message = f"{name} is counted as flash attention 2; what else its kernels allocate is not known."
    fix = 'leave room for it with overhead=, or plan with attn_implementation="flash_attention_2" or "sdpa".'
    return Finding("scratch-unknown", "info", "", message, fix)


def _of_loading(method: str) -> Finding:
    message = f"what quantizing to {method} takes for a moment while the weights are loaded is not counted."
    fix = "leave room for one weight in float32, twice; or load a checkpoint that is quantized already."
    return Finding("load-not-counted", "info", "", message, fix)
