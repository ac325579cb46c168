"""How an adapter starts: from its file alone, or from the values of the base, which some starts change as well."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType

from safe_loading._checkpoint.copy_bytes import range_of
from safe_loading._checkpoint.faults import fault, note
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.engines import hash_tensor
from safe_loading._core.names import method_name, without_peft_prefix
from safe_loading._core.report import Finding, counted
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.peft_layers import LoraModule, has_adapters, is_lora_layer
from safe_loading.errors import AdapterError

from .adapter_values import Adapter
from .key_names import canonical_key
from .peft_config import can_build_on_meta, changes_base, is_lora, of_pattern

# Fields of LoraConfig after which every value of the adapter is in its file, whatever they say. What a later release
# adds is not among them, so a field that is set and not known here gets peft's own start, on the real base.
_PLAIN_FIELDS = (
    "alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias corda_config "
    "ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights kasa_config "
    "layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout "
    "lora_ga_config megatron_config megatron_core modules_to_save peft_type peft_version qalora_group_size r "
    "rank_pattern revision runtime_config target_modules target_parameters task_type trainable_token_indices "
    "use_bdlora use_dora use_qalora use_rslora"
)
_VALUES_ARE_IN_THE_FILE = frozenset(_PLAIN_FIELDS.split())
# Starts that leave the base as it is: the tests compare the base bit by bit around peft's own start of each method.
_METHODS = (
    "ADALORA ADAMSS ADAPTION_PROMPT BEFT BOFT C3A CARTRIDGE CPT DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 "
    "LILY LN_TUNING LOHA LOKR MISS MULTITASK_PROMPT_TUNING OFT OSF P_TUNING PEANUT POLY PREFIX_TUNING PROMPT_TUNING "
    "PSOFT PVERA RANDLORA ROAD SHADOW SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA VERA WAVEFT"
)
_LEAVES_THE_BASE = frozenset(_METHODS.split())
_LORA_FIELDS_THAT_LEAVE_THE_BASE = frozenset({"velora_config", "monteclora_config"})
_CONVERT = (
    "convert it to a plain LoRA where it was trained "
    "(save_pretrained(..., path_initial_model_for_weight_conversion=...))"
)
_NOT_STARTED = ("corda", "lora-ga")  # by peft alone, without the data, or by this name of ms-swift
_FROM_DATA = (*_NOT_STARTED, "lora_ga")
WHOLE_VALUES = frozenset({"F32", "BF16", "F16"})  # of a weight on disk; codes say nothing without their scales
_MOST_COMPARED = 3  # weights: the first layer's, one of the middle and one of the last layers
_BLOCK_NUMBERS = 1 << 20  # of a weight that are read at once
_NEARLY_ORTHOGONAL, _NEARLY_ONE = 0.2, 0.15
_LEAST_SHARE = 0.1  # of a weight; what training finds has hardly any direction in common with it
_Weight = TypeVar("_Weight")
_CONVERT_OR_SIMILAR = f"{_CONVERT}, or pass strict=False to load it onto a start that is only similar"


def builds_on_meta(config: PeftConfig) -> bool:
    """Return whether peft can build the adapter's modules, and they can be checked, on a model without values."""
    return can_build_on_meta(config) and not _unknown_fields(config)


def resized_by_file(config: PeftConfig) -> bool:
    """Return whether peft resizes layers to the ranks found in training while it reads the file, as for AdaLoRA."""
    return config.peft_type == PeftType.ADALORA and bool(getattr(config, "rank_pattern", None))


def starts_on_base(config: PeftConfig) -> bool:
    """Return whether the adapter's start is known to change the base's weights, and so is made on the real base."""
    return changes_base(config) or getattr(config, "kasa_config", None) is not None


def may_change_base(config: PeftConfig) -> bool:
    """Return whether it has to be seen from the base whether the adapter's start changes it."""
    if is_lora(config):
        return starts_on_base(config) or not _LORA_FIELDS_THAT_LEAVE_THE_BASE.issuperset(_unknown_fields(config))
    return method_name(config.peft_type) not in _LEAVES_THE_BASE


def _unknown_fields(config: PeftConfig) -> list[str]:
    """Return the fields that are set, and that may bring values which are not in the file."""
    return [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in _VALUES_ARE_IN_THE_FILE and getattr(config, field.name) != field.default
    ]


def refuse_start_without_card(config: PeftConfig, where: object) -> None:
    """Refuse LoftQ's start where peft has no card to compute it on; ``where`` names the adapter's file."""
    if str(getattr(config, "init_lora_weights", "")).lower() != "loftq":
        return
    if not torch.cuda.is_available() and not torch.xpu.is_available():
        raise AdapterError(
            f"{where}: init_lora_weights='loftq' changes the base before training, and peft computes that again at "
            f"each load, on CUDA or XPU alone; this machine has neither. Load it where there is one, and there "
            f"{_CONVERT}."
        )


def holds_finished_prompt(config: PeftConfig) -> bool:
    """Return whether the method trains an encoder of the prompt, while its file holds the encoder's output alone."""
    return config.peft_type == PeftType.P_TUNING or bool(getattr(config, "prefix_projection", False))


def describe(config: PeftConfig) -> str:
    """Return an adapter's start in the words of its config."""
    if getattr(config, "kasa_config", None) is not None:
        return "kasa_config"
    return f"init_lora_weights={getattr(config, 'init_lora_weights', None)!r}" if is_lora(config) else "its method"


@contextmanager
def without_start_on_base(config: PeftConfig) -> Iterator[None]:
    """Leave out an initialization that factorizes the base's weight (PiSSA, OLoRA), which has no values on meta."""
    if not changes_base(config):
        yield
        return
    settings = vars(config)  # the field is LoRA's; the base class does not declare it
    init = settings["init_lora_weights"]
    settings["init_lora_weights"] = False
    try:
        yield
    finally:
        settings["init_lora_weights"] = init


@contextmanager
def without_repeated_layers(model: torch.nn.Module, config: PeftConfig) -> Iterator[None]:
    """Leave out the replication of layers when the model's other adapters have replicated them in the same way.

    peft would replicate the layers that it has made. Another replication than theirs is refused: their layers would
    change.
    """
    layers = getattr(config, "layer_replication", None)
    if not layers or not has_adapters(model):
        yield
        return
    settings = vars(config)
    different = [
        f"{name!r} has layer_replication={there}, this one {layers}"
        for name, other in model.peft_config.items()
        if (there := getattr(other, "layer_replication", None)) != layers and config is not other
    ]
    if different:
        raise AdapterError(
            "layer_replication would change the layers of adapters that are loaded. Load it onto a base of its own "
            "(load_peft_on_rank):",
            different,
        )
    settings["layer_replication"] = None
    try:
        yield
    finally:
        settings["layer_replication"] = layers


def start_is_there(model: PeftModel, name: str) -> bool:
    """Return whether another adapter has changed the base already in the way in which ``name`` starts.

    It has when it starts alike on the same layers, with the same ranks and scalings. ``name`` has its modules in the
    model, but has not changed the base.
    """
    own = _ranks_and_scalings(model, name)
    config = model.peft_config[name]
    return any(
        starts_on_base(other) and describe(other) == describe(config) and _ranks_and_scalings(model, other_name) == own
        for other_name, other in model.peft_config.items()
        if other_name != name
    )


def skip_deferred_start(model: PeftModel, name: str) -> None:
    """Forget the change of the base that peft would make at the first forward of a KaSA that was built on meta."""
    for layer in adapted_layers(model, name):
        deferred = getattr(layer, "_lora_kasa_truncation_deferred", None)
        if deferred is not None:
            deferred.discard(name)


def _ranks_and_scalings(model: PeftModel, name: str) -> dict[int, tuple[int, float]]:
    return {id(layer): (layer.r[name], layer.scaling[name]) for layer in adapted_layers(model, name)}


def adapted_weights(model: torch.nn.Module, name: str) -> list[torch.Tensor]:
    """Return the base's own tensors in the LoRA layers that have an adapter of this name."""
    return [weight for layer in adapted_layers(model, name) for weight in layer.get_base_layer().parameters()]


def adapted_layers(model: torch.nn.Module, name: str) -> list[LoraModule]:
    """Return the LoRA layers that have an adapter of this name."""
    return [module for module in model.modules() if is_lora_layer(module) and name in module.scaling]


class BaseWatch:
    """The values of tensors as they are now, as hashes, to see later which of them changed.

    Neither the address nor torch's version counter tells: OLoRA subtracts through ``.data``, in place. Codes it
    replaces: the layer has another tensor then.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        plain = {id(tensor): tensor for tensor in tensors if not tensor.is_meta}.values()
        self._hashes = [(tensor, _hash(tensor)) for tensor in plain]

    def changed(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Return the tensors with other values than at first, or that the model no longer has."""
        held = {id(parameter) for parameter in model.parameters()}
        return [tensor for tensor, before in self._hashes if id(tensor) not in held or _hash(tensor) != before]


def _hash(tensor: torch.Tensor) -> int:
    values = tensor.detach()
    if values.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        values = values.contiguous().view(torch.uint8)
    return hash_tensor(values)


def start_findings(
    model: PeftModel, name: str, file: str, *, changed: Sequence[torch.Tensor], is_there: bool
) -> list[Finding]:
    """Return findings on an adapter's start.

    ``changed`` are the weights of the base that the start has changed, or that it would change. With ``is_there``
    another adapter's equal start has changed the base already, and it was not repeated.
    """
    config = model.peft_config[name]
    others = {other: settings for other, settings in model.peft_config.items() if other != name}
    findings = []
    if not starts_on_base(config) and not changed:
        changed_by = sorted(other for other, settings in others.items() if starts_on_base(settings))
        return [_already_changed(file, name, changed_by)] if changed_by else []
    start = describe(config)
    if is_there:
        message = f"{start} has changed the base once, and {name!r} starts from the same remainder of it"
        findings.append(note("info", "base-changed", file, message, "none: the change was not repeated"))
    elif others and changed:
        findings.append(_changed_again(file, name, start, sorted(others)))
    elif changed:
        size, fix = sum(tensor.nbytes for tensor in changed), "load the base again where its own are needed"
        message = (
            f"{start} changed {counted(len(changed), 'weight')} of the base, as it did before training, so "
            f"disable_adapter() does not give the base's own outputs"
        )
        findings.append(note("info", "base-changed", file, message, fix, size))
    reason = _why_another_start(config, changed)
    if reason and is_there:
        fix = f"none if it was trained in the same run as the adapter that is loaded; otherwise {_CONVERT}"
        findings.append(note("warning", "start-not-repeatable", file, reason, fix))
    elif reason:
        findings.append(fault("start-not-repeatable", file, reason, _CONVERT_OR_SIMILAR))
    return findings


def random_start(config: PeftConfig, file: str) -> list[Finding]:
    """Return the finding of a start that no base repeats: it took random numbers, or data, that are in no file."""
    init = config.init_lora_weights if isinstance(config, LoraConfig) else None
    if init not in _FROM_DATA and not _is_random(config):
        return []
    fix = _CONVERT if init in _NOT_STARTED else _CONVERT_OR_SIMILAR
    return [fault("start-not-repeatable", file, _why_another_start(config, ()), fix)]


def _is_random(config: PeftConfig) -> bool:
    init = str(getattr(config, "init_lora_weights", "")).lower()
    return isinstance(config, LoraConfig) and changes_base(config) and "_niter_" in init


def _why_another_start(config: PeftConfig, changed: Sequence[torch.Tensor]) -> str:
    """Return why the adapter was trained on another base than this one; empty if it was not."""
    init = str(getattr(config, "init_lora_weights", "")).lower()
    if not isinstance(config, LoraConfig) or not changes_base(config):
        return ""
    if _is_random(config):
        return (
            f"init_lora_weights={init!r} subtracts a randomized SVD from the base, and the random numbers are in no "
            f"file: the adapter would run on another base than it was trained on"
        )
    if not changed:
        return (
            f"init_lora_weights={init!r} changed the base before training, from data that is in no file, and peft "
            f"leaves the base as it is here: the adapter would run on another base than it was trained on"
        )
    return ""


def _changed_again(file: str, name: str, start: str, others: Sequence[str]) -> Finding:
    message = (
        f"{start} of {name!r} changes the weights of the base that {list(others)} run on, so these adapters would "
        f"compute something else from then on, and {name!r} too if one of them had changed the base before"
    )
    fix = f"load it onto a base of its own (load_peft_on_rank), or {_CONVERT}"
    return fault("base-changed-again", file, message, fix)


def _already_changed(file: str, name: str, changed_by: Sequence[str]) -> Finding:
    message = (
        f"the base was changed by the start of {list(changed_by)}; if {name!r} was trained on the base as it is on "
        f"disk, it computes something else here"
    )
    fix = "load it onto a base of its own (load_peft_on_rank) unless it was trained next to them"
    return note("warning", "base-already-changed", file, message, fix)


def start_in_base(adapter: Adapter, base: Checkpoint) -> str | None:
    """Return a weight on disk of which the product of a plain LoRA is a part already; None if there is none.

    Scripts that prepare PiSSA, OLoRA or CorDA save the rest of the base as a model of its own, and the part that was
    taken out of it as a plain LoRA, whose config may name the base as it was before. Training changes that part little,
    and no training ends in a part of the weight itself.
    """
    pairs = list[_AddedPart]()
    for key, a in adapter.tensors.items() if _is_plain(adapter.config) else ():
        b = adapter.tensors.get(key.replace(".lora_A.", ".lora_B."))
        path = without_peft_prefix(canonical_key(key)).partition(".lora_A.")[0]
        info = base.tensors.get(f"{path}.weight")
        if ".lora_A." not in key or b is None or info is None or info.dtype not in WHOLE_VALUES:
            continue
        if a.dim() == b.dim() == 2 and (b.shape[0], a.shape[1]) == info.shape and len(a) == b.shape[1]:
            pairs.append(_AddedPart(info, a, b, _scaling(adapter.config, path, a.shape[0])))
    smallest = min((pair.weight.nbytes for pair in pairs), default=0)
    pairs = [pair for pair in pairs if pair.weight.nbytes == smallest]
    some = a_few(pairs)
    found = some and all(_is_orthogonal(pair.b) for pair in some) and all(pair.is_part_of(base) for pair in some)
    return some[0].weight.name if found else None


def a_few(weights: Sequence[_Weight]) -> Sequence[_Weight]:
    """Return the weights of a model that are compared, over all its layers."""
    return weights[:: max(1, math.ceil(len(weights) / _MOST_COMPARED))]


def _is_plain(config: PeftConfig) -> bool:
    if not isinstance(config, LoraConfig) or starts_on_base(config):
        return False
    return not (config.use_dora or config.fan_in_fan_out or config.target_parameters)


def _scaling(config: Any, path: str, rank: int) -> float:
    alpha = of_pattern(config.alpha_pattern, path, config.lora_alpha)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _is_orthogonal(factor: torch.Tensor) -> bool:
    """Return whether the columns of a factor are, as nearly as after a decomposition and a training from there."""
    columns = torch.nn.functional.normalize(factor.float(), dim=0)
    return bool(factor.any()) and bool(((columns.T @ columns).fill_diagonal_(0).abs() < _NEARLY_ORTHOGONAL).all())


class _AddedPart(NamedTuple):
    """The factors of a LoRA, and the weight on disk that they are added to."""

    weight: TensorInfo
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def is_part_of(self, base: Checkpoint) -> bool:
        """Return whether they multiply to the weight's projection onto them, with their scaling or without (OLoRA)."""
        file, (rows, columns) = base.file_of[self.weight.name], self.weight.shape
        row_bytes, own, inner, whole = self.weight.nbytes // rows, 0.0, 0.0, 0.0
        for first in range(0, rows, step := max(1, _BLOCK_NUMBERS // columns)):
            product = self.b[first : first + step].float() @ self.a.float()
            data = range_of(file, self.weight.start + row_bytes * first, row_bytes * len(product))
            block = torch.frombuffer(data, dtype=DTYPES[self.weight.dtype]).view(product.shape).float()
            own += float(product.square().sum())
            inner += float((block * product).sum())
            whole += float(block.square().sum())
        if self.scaling <= 0 or inner < _LEAST_SHARE * math.sqrt(own * whole):
            return False
        return any(abs(inner - times * own) < _NEARLY_ONE * times * own for times in (self.scaling, 1))
