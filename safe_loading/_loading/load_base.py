"""The load of a base model onto its devices by transformers, and the findings on its report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils

from safe_loading._checkpoint.base_config import IMPLEMENTATIONS, quantization_of
from safe_loading._checkpoint.faults import fault, listed, note
from safe_loading._checkpoint.header import BITS
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._core.names import ancestors, without_peft_prefix
from safe_loading._core.protocols import EngineKwargs, ModelClass
from safe_loading._core.report import Finding, counted
from safe_loading._core.thread_patches import answer_no, patched
from safe_loading._model.embeddings_and_head import tied_ends_of
from safe_loading._model.formats.format import Format, QuantizationRequest
from safe_loading._model.formats.registry import decoded_rightly, format_named
from safe_loading._model.layout.ties import untied_finding
from safe_loading._model.model_config import failed_code
from safe_loading._model.quantized.request import packs_on_device, read_request
from safe_loading._model.zero3 import splits_new_models
from safe_loading._ranks.rank_devices import RankDevices
from safe_loading.errors import AdapterError, ArgumentError, CheckpointError, EngineError, SafeLoadingError

from .adapter_values import Adapter
from .base_model import changed_config, lies_in, replaced_modules
from .into_place import IntoPlace, Method, read_into_place
from .report import FROM_PRETRAINED

# what torch's allocator of the host says, and the system, of a mapping
_HOST_IS_FULL = re.compile("can('t|not) allocate memory", re.IGNORECASE)

# Scales by which quantized layers round their inputs, outputs and cache; plain layers, as a load decodes them, do not.
# And the groups of columns that follow one another: others were refused before the load.
_OF_ROUNDED_INPUTS = re.compile(
    r"\.(?:(?:input|output|activation|[qkv])_(?:global_)?(?:scale|zero_point)|weight_g_idx)$"
)
_OF_CODES = re.compile(r"\.weight_(?:global_)?scale(?:_inv)?$")  # without which codes are no values

LoadingInfo = Mapping[str, Iterable[object]]
"""What ``from_pretrained(output_loading_info=True)`` tells: ``missing_keys``, ``mismatched_keys``, ..."""


def load_base(
    auto_class: ModelClass,
    opened: ModelFolder,
    devices: RankDevices,
    dtype: torch.dtype | str,
    base_kwargs: EngineKwargs,
    config: PreTrainedConfig,
    *,
    corrected: Mapping[str, object] | None = None,
    planned: IntoPlace | Method,
) -> tuple[PreTrainedModel, LoadingInfo, Method]:
    """Load the base onto its devices and nowhere else; it is in eval mode. ``config`` is its config as read before.

    ``corrected`` are the entries of its ``quantization_config`` that its headers know better; ``planned`` are the
    weights that transformers need not read. Returns how the weights were read, too.
    """
    folder = opened.path
    # use_safetensors: otherwise transformers falls back to a pickle where there is no safetensors file.
    arguments: dict[str, object] = {"dtype": dtype, "output_loading_info": True}
    rest = dict(base_kwargs)
    if (folder / CONFIG).exists() and (corrected or not IMPLEMENTATIONS.isdisjoint(base_kwargs)):
        changed, rest = changed_config(opened, base_kwargs)
        if corrected:
            changed.quantization_config.update(corrected)
        arguments["config"] = changed
    arguments |= {"use_safetensors": True, "trust_remote_code": base_kwargs.get("trust_remote_code", False), **rest}
    if splits_new_models():  # onto the device of DeepSpeed, beside which transformers takes no device_map
        if devices.are_several:
            raise ArgumentError(
                "device_map= spreads the base over devices, and DeepSpeed's ZeRO-3, which is on in this process, "
                "splits it over ranks: leave device_map= out."
            )
    elif devices.are_several:
        arguments["device_map"] = dict(devices.by_module)
    elif devices.main.type != "cpu":
        # Always with an index: transformers' loader threads do not inherit the current device and take "cuda" for 0.
        arguments["device_map"] = {"": devices.main}
    elif _packs_on_device(config, base_kwargs):
        arguments["device_map"] = {"": "cpu"}  # its quantizer loads onto the current accelerator otherwise
    try:
        # A rank that accelerate launched for FSDP would leave what no file holds on meta, for FSDP to send it later.
        rightly = decoded_rightly(quantization_of(opened.config or {}))
        with patched(modeling_utils, "is_fsdp_enabled", answer_no), rightly, read_into_place(planned) as methods:
            model, info = auto_class.from_pretrained(folder, **arguments)
    except (SafeLoadingError, MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:  # a package that its attention, quantizer or own code needs
        if of_code := failed_code(error, opened.config or {}):
            raise EngineError(f"transformers cannot load the base {folder}: {of_code}") from error
        raise EngineError(
            f"transformers cannot load the base {folder} with the packages that are installed: "
            f"{str(error).rstrip('. ')}. Ask for what needs none of them, such as "
            f'attn_implementation="sdpa", or install it.'
        ) from error
    except Exception as error:
        raise _failed(opened, base_kwargs, error) from error
    if devices.main.type == "cpu" and not devices.are_several:
        # peft's later calls take {"": "cpu"} for offloading, and dispatch the model to an accelerator
        vars(model).pop("hf_device_map", None)
    return model, info, methods[-1] if methods else Method(FROM_PRETRAINED, "its class has a loader of its own")


def refuse_missing_weights(
    folder: ModelFolder, names: Iterable[str], adapters: Sequence[Adapter], base_kwargs: EngineKwargs
) -> None:
    """Refuse adapters of layers that will have no weight when the base has been loaded, before it is read.

    peft looks at the weight of each layer that it changes, and fails without a word about the format. ``names`` are
    those of the base's tensors, in the file or in the model, or both.
    """
    on_disk = quantization_of(folder.config or {})
    known = format_named(on_disk.get("quant_method")) if isinstance(on_disk, dict) else None
    hidden = set[str]() if known is None else known.without_weight(names)
    request = read_request(on_disk, base_kwargs.get("quantization_config")) if hidden else None
    if known is None or request is None or request.options.get("dequantize"):
        return
    for adapter in adapters:
        header = adapter.facts.header
        names = {without_peft_prefix(name) for name in (() if header is None else header.tensors)}
        if changed := sorted({module for name in names for module in ancestors(name) if module in hidden}):
            raise AdapterError(
                f"{adapter.facts.config_file}: the adapter changes {counted(len(changed), 'layer')} whose weights "
                f"{folder.path} keeps packed until the first forward pass ({request.method}), and peft changes no "
                f"layer without a weight: {listed(changed)}. Load the base decoded: "
                f"{_asked_decoded(known.dequantized_by)}."
            )


def decoding_findings(checkpoint: Checkpoint, settings: object, asked: object) -> list[Finding]:
    """Return a finding where transformers alone would decode weights wrongly, which a load here decodes rightly."""
    request = read_request(settings, asked)
    known = None if request is None else format_named(request.method)
    if request is None or known is None or not (wrong := known.decoded_wrongly(checkpoint.tensors, request.options)):
        return []
    message = (
        f"where transformers decodes them, {counted(len(wrong), 'tensor')} of {request.method} would give wrong "
        f"weights, or an error: {listed(wrong)}. They are decoded rightly here"
    )
    fix = "take the base in 16 bits that it was made from, for a load without this package"
    return [note("warning", "decoded-wrongly", checkpoint.folder / CONFIG, message, fix)]


def _failed(opened: ModelFolder, base_kwargs: EngineKwargs, error: Exception) -> MemoryError | CheckpointError:
    """Return the error of a load that failed in the class of the model, its quantizer, or remote code."""
    folder = opened.path
    if _HOST_IS_FULL.search(str(error)):
        return MemoryError(
            f"{folder}: the host has no memory left for the base, and nothing of it stays: {error}. Free some, or "
            f"raise the process's limit (ulimit -d, ulimit -v), and load again."
        )
    known, asked = _format_of(opened), base_kwargs.get("quantization_config")
    request = None if known is None else read_request(quantization_of(opened.config or {}), asked)
    decoded = "" if known is None else known.dequantized_by
    advice = f". Load it decoded: {_asked_decoded(decoded)}" if decoded and not _is_decoded(request) else ""
    problem = failed_code(error, opened.config or {}) or f"{type(error).__name__}: {error}{advice}"
    return CheckpointError(f"{folder}: transformers cannot load the base: {problem}")


def _format_of(opened: ModelFolder) -> Format | None:
    """Return the format of a folder's codes by its config."""
    settings = quantization_of(opened.config or {})
    return format_named(settings.get("quant_method")) if isinstance(settings, dict) else None


def _asked_decoded(config: str) -> str:
    """Return the argument of a load that decodes, by transformers' class of the format's config."""
    return f"base_kwargs={{'quantization_config': {config}(dequantize=True)}}"


def _is_decoded(request: QuantizationRequest | None) -> bool:
    return request is None or bool(request.options.get("dequantize"))


def _packs_on_device(config: PreTrainedConfig, base_kwargs: EngineKwargs) -> bool:
    """Return whether the base's config or the arguments of its load name a method that packs weights on a device."""
    asked = (base_kwargs.get("quantization_config"), getattr(config, "quantization_config", None))
    return any(packs_on_device(each) for each in asked)


def name_base(model: torch.nn.Module, source: str | os.PathLike[str]) -> None:
    """Give the model the name that the user passed, in place of the path in the cache that it was read from."""
    config = getattr(model, "config", None)
    if config is not None:
        config._name_or_path = os.fspath(source)
    model.__dict__["name_or_path"] = os.fspath(source)


def loading_findings(info: LoadingInfo, adapters: Sequence[Adapter], source: str, opened: ModelFolder) -> list[Finding]:
    """Return a finding for each weight of the base that its checkpoint did not fill and that no adapter replaces."""
    replaced = replaced_modules(adapters)
    findings = []
    unfilled = {str(name): "is not in the checkpoint" for name in info.get("missing_keys") or ()}
    for name, *shapes in cast("Iterable[tuple[str, Sequence[int], Sequence[int]]]", info.get("mismatched_keys") or ()):
        there, here = map(list, shapes)
        unfilled[name] = f"is {here}, and {there} in the checkpoint,"
    for name, what in sorted(unfilled.items()):
        if lies_in(name, replaced):
            continue
        message = f"this weight of the base {what} and was initialized at random"
        fix = "pass the base that the adapter was trained on, or auto_class= for the class that it was saved as"
        findings.append(fault("base-key-missing", f"{source}: {name}", message, fix))
    unknown = map(str, info.get("unexpected_keys") or ())
    unexpected = sorted(name for name in unknown if not _OF_ROUNDED_INPUTS.search(name))
    if unexpected:
        message = (
            f"the class that was loaded does not know {counted(len(unexpected), 'tensor')} of the checkpoint and left "
            f"out: {listed(unexpected)}"
        )
        fix = "none if they are a head for another task; otherwise auto_class= for the class that it was saved as"
        findings.append(note("warning", "base-key-unexpected", f"{source}: {unexpected[0]}", message, fix))
    return [*findings, *_codes_as_values(unexpected, source, opened)]


def _codes_as_values(unexpected: Sequence[str], source: str, opened: ModelFolder) -> list[Finding]:
    """Return the finding of codes whose scale the class has no place for, so that their weights are the codes alone."""
    scales = [name for name in unexpected if _OF_CODES.search(name)]
    checkpoint = opened.whole_checkpoint if scales else None
    tensors = {} if checkpoint is None else checkpoint.tensors
    weights = [f"{name.rpartition('.')[0]}.weight" for name in scales]
    taken = [name for name in weights if name not in unexpected and name in tensors and BITS[tensors[name].dtype] == 8]
    known = _format_of(opened)
    if not taken or known is None:
        return []
    message = (
        f"transformers took the codes of {counted(len(taken), 'layer')} for values and left their scales out, because "
        f"the names in quantization_config leave these layers plain: {listed(taken)}"
    )
    fix = f"load the base decoded: {_asked_decoded(known.dequantized_by)}; or correct the names there"
    return [fault("codes-as-values", f"{source}: {taken[0]}", message, fix)]


def untied_findings(model: torch.nn.Module, source: str) -> list[Finding]:
    """Return a finding when the config ties two weights whose stored values differ, which transformers only logs."""
    ends = tied_ends_of(model)
    if ends is None:
        return []
    embedding, head = ends.weights
    if embedding is None or head is None or embedding is head:
        return []
    names = {id(weight): name for name, weight in model.named_parameters()}
    return [untied_finding(source, [names.get(id(weight), "a weight") for weight in (head, embedding)])]
