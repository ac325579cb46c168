"""Matching the tensors of an adapter file with the slots of a model; a finding for everything that does not fit."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from peft import PeftConfig, PeftModel

from safe_loading._checkpoint.adapter_config import OF_FUSED_EXPERTS, TO_PARAMETERS
from safe_loading._checkpoint.faults import fault, note
from safe_loading._core.names import CLASSIFIER_HEADS, PEFT_PREFIX, ancestors, nearest, without_peft_prefix
from safe_loading._core.report import Finding, one_for_all_layers
from safe_loading._model.embeddings_and_head import tied_head_of
from safe_loading._model.peft_layers import base_of, without_peft_levels

from .fitting import what_would_fit
from .key_names import layer_indices
from .slots import AdapterSlot, RoutedTensors, named_tensors


@dataclasses.dataclass(frozen=True)
class Match:
    """Which tensor of a file goes where."""

    values: dict[str, torch.Tensor]  # the tensor for each slot, by the slot's key
    base_writes: dict[str, torch.Tensor]  # tensors that the file has for the base's own weights, by state-dict key
    findings: list[Finding]  # everything that does not fit, and what is worth knowing

    @property
    def leaves_slots_empty(self) -> bool:
        """Whether a slot gets no tensor because of something that does not fit."""
        return any(finding.code in _LEAVES_A_SLOT for finding in self.findings)


# Slots that are no adapter-key-missing. The wrappers of the first two ask for their tensors themselves
# (RoutedTensors.missing); the third is AdaLoRA's rank, which peft sets from the config and never saves.
_REPORTED_ELSEWHERE = (".modules_to_save.", "trainable_tokens", ".ranknum.")
# The heads that peft takes for saved modules of every adapter for a task.
_HEADS_OF_TASKS = {
    **dict.fromkeys(("SEQ_CLS", "TOKEN_CLS"), CLASSIFIER_HEADS),
    "QUESTION_ANS": frozenset({"qa_outputs"}),
}
_LEAVES_A_SLOT = frozenset({"adapter-key-missing", "modules-to-save-missing", "shape-mismatch", "vocabulary-resized"})
_OF_KOHYA = re.compile(r"\.lora_(?:down|up)\.weight$")
_BASE_OF_ITS_OWN = "load it onto a base of its own (load_peft_on_rank)"
_INNER_WEIGHT = ".base_layer.weight"
_RIGHT_BASE = "pass the base that the adapter was trained on"


def match_tensors(
    model: PeftModel,
    name: str,
    file: str,
    slots: Mapping[str, AdapterSlot],
    routed: RoutedTensors,
    embeddings: Sequence[torch.Tensor],
) -> Match:
    """Match a file's tensors with the slots of the model, which has the modules of the adapter ``name`` already.

    ``file`` is its path, for the findings; ``embeddings`` are the base's input and output embedding weights, as they
    were before the injection.
    """
    match = Match({}, {}, [])
    config = model.peft_config[name]
    rows = {tensor.shape[0] for tensor in embeddings}
    for key, value in routed.tensors.items():
        slot = slots.get(key)
        if slot is None:
            continue
        if slot.tensor.shape == value.shape:
            match.values[key] = value
            match.findings.extend(saved_module_dtype(file, slot, value))
        else:
            labels = getattr(getattr(base_of(model), "config", None), "num_labels", None)
            match.findings.append(_shape_mismatch(file, config, key, slot.tensor, value, rows, labels))
    without_slot = {key: value for key, value in routed.tensors.items() if key not in slots}
    nested = _loras_in_saved(config, without_slot)
    match.findings.extend(_lora_in_saved(file, config, path, saved) for path, saved in nested.items())
    without_slot = {key: value for key, value in without_slot.items() if not _lies_in(key, nested)}
    if without_slot:
        _match_base_weights(model, name, file, without_slot, embeddings, match)
    match.findings.extend(_tied_tokens(file, slots, match.values))
    required = [key for key in routed.missing if not _lies_in(key, nested)]
    match.findings.extend(_missing(file, config, slots, routed, required, later=len(model.peft_config) > 1))
    match.findings[:] = one_for_all_layers(match.findings)
    match.findings.extend(_layer_counts(file, model, routed, match.findings))
    return match


def _shape_mismatch(
    file: str,
    config: PeftConfig,
    key: str,
    tensor: torch.Tensor,
    value: torch.Tensor,
    rows: set[int],
    labels: int | None = None,
) -> Finding:
    on_file, in_model = list(value.shape), list(tensor.shape)
    at = 1 if ".lora_embedding_A" in key else 0  # the dimension of the words, where there is one
    alike = len(on_file) == len(in_model) > at and on_file[1 - at : 2 - at] == in_model[1 - at : 2 - at]
    if alike and in_model[at] in rows:
        message = f"the file has {on_file[at]} rows ({on_file}), the base's vocabulary has {in_model[at]} ({in_model})"
        fix = (
            f"load the base yourself, call base.resize_token_embeddings({on_file[at]}) and pass it as base_model; new "
            f"rows that the file does not hold are drawn anew, and not those of its training"
        )
        return fault("vocabulary-resized", f"{file}: {key}", message, fix, value.nbytes)
    message = f"the file has {on_file}, the model has {in_model}."
    if ".modules_to_save." in key and on_file[1:] == in_model[1:] and in_model[0] == labels:
        fix = f"load the base with a head of that many labels: base_kwargs={{'num_labels': {on_file[0]}}}"
        return fault("shape-mismatch", f"{file}: {key}", message, fix, value.nbytes)
    rank = f" The config says r={getattr(config, 'r', None)}." if ".lora_" in key else ""
    fix = (
        f"{_RIGHT_BASE} (for a head: base_kwargs={{'num_labels': ...}}), or correct r and rank_pattern in "
        f"adapter_config.json{', and alpha_pattern with them: peft scales by lora_alpha / rank' if rank else ''}"
    )
    ranks, beyond = divmod(in_model[0], on_file[0]) if on_file[:1] > [0] else (0, 1)
    if rank and on_file[1:] == in_model[1:] and not beyond:  # a shard of FSDP2
        fix = f"{fix}. Save it again, gathered, if these are the rows of one rank of {ranks}"
    return fault("shape-mismatch", f"{file}: {key}", f"{message}{rank}", fix, value.nbytes)


def _match_base_weights(
    model: PeftModel,
    name: str,
    file: str,
    without_slot: Mapping[str, torch.Tensor],
    embeddings: Sequence[torch.Tensor],
    match: Match,
) -> None:
    """Accept the weights of the base that peft saves with an adapter, and refuse all others."""
    named, config = named_tensors(model), model.peft_config[name]
    place_of = _places_in_base(without_slot, named, under_others=not _ties_later(model, name))
    tensors = {key: named[place] for key, place in place_of.items()}
    embedding_ids = {id(tensor) for tensor in embeddings}
    # save_embedding_layers writes the input and the output embedding, never one alone: that was a module to save.
    both_embeddings = embedding_ids <= {id(tensor) for tensor in tensors.values()}
    # It writes whole modules, so a bias comes along where the output layer has one (BERT's decoder).
    embedding_modules = {key.rpartition(".")[0] for key, tensor in tensors.items() if id(tensor) in embedding_ids}
    modules = {path for path, _ in model.named_modules()}
    nowhere = {key: v for key, v in without_slot.items() if key not in tensors and _module_of(key) not in modules}
    fitting = what_would_fit(nowhere, base_of(model), config, [*match.values, *tensors]) if nowhere else None
    whole = any(key.endswith(_INNER_WEIGHT) and key.rpartition(".")[0] not in embedding_modules for key in without_slot)
    for key, value in without_slot.items():
        tensor = tensors.get(key)
        if tensor is None:
            match.findings.append(_unexpected(file, key, modules, model, name, fitting))
            continue
        if name in key.split(".")[-2:]:
            if not _same_values(tensor, value):
                match.findings.append(_shared(file, key, name, value))
            continue
        trained_bias = getattr(config, "bias", "none") != "none" and key.endswith(".bias")
        embedding = key.rpartition(".")[0] in embedding_modules and (".base_layer." in key or both_embeddings)
        if not (trained_bias or embedding):
            match.findings.append(_undeclared(file, key, value, whole))
        elif tensor.shape != value.shape:
            rows = {weight.shape[0] for weight in embeddings}
            match.findings.append(_shape_mismatch(file, config, key, tensor, value, rows))
        elif not _fits_dtype(value, tensor.dtype):
            match.findings.append(_base_dtype(file, key, tensor, value))
        else:
            others = [other for other in model.peft_config if other != name]
            if others and not _same_values(tensor, value):
                match.findings.append(_changes_base_of(others, file, key, name, value))
            match.base_writes[place_of[key]] = value


def _places_in_base(keys: Iterable[str], named: Mapping[str, torch.Tensor], *, under_others: bool) -> dict[str, str]:
    """Return the keys in the model of the tensors that a file has, by their keys in the file.

    Around a module of the base the layers of other adapters may lie, where the file is written and where it is read.
    Not ``under_others``: what a later adapter ties is its own, has no slot in peft, and must not replace the base's.
    """
    found = {key: key for key in keys if key in named}
    lacking = [key for key in keys if key not in named]
    if lacking and under_others:
        places = {without_peft_levels(place): place for place in named if place not in found}
        found |= {key: places[plain] for key in lacking if (plain := without_peft_levels(key)) in places}
    return found


def _fits_dtype(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the dtype holds these values: a base that is trained in float32 may have come from 16 bits."""
    return torch.promote_types(dtype, value.dtype) == dtype or torch.equal(value.to(dtype).to(value.dtype), value)


def _same_values(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return tensor.is_meta or (tensor.shape == value.shape and torch.equal(tensor, value.to(tensor)))


def _shared(file: str, key: str, name: str, value: torch.Tensor) -> Finding:
    """Return the finding on a tensor of which peft keeps one for all adapters, such as VeRA's projections."""
    message = (
        f"the adapters of the model share this tensor, and the file has other values than the adapters that are "
        f"loaded; peft would overwrite theirs with those of {name!r}"
    )
    return fault("shared-tensor-differs", f"{file}: {key}", message, _BASE_OF_ITS_OWN, value.nbytes)


def _tied_tokens(file: str, slots: Mapping[str, AdapterSlot], values: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Yield findings on tokens of a head that differ from the embeddings', where the model has one tensor for both.

    So it is where an adapter before trains the same tokens in both: peft keeps one list of tokens, the later one.
    """
    first_key: dict[int, str] = {}
    for key, value in values.items():
        if "trainable_tokens_delta" not in key:
            continue
        other = first_key.setdefault(slots[key].storage, key)
        if not _same_values(values[other], value):
            message = f"the adapters before tie this tensor to {other}, and the file has other values for each"
            yield fault("shared-tensor-differs", f"{file}: {key}", message, _BASE_OF_ITS_OWN, value.nbytes)


def _changes_base_of(others: Sequence[str], file: str, key: str, name: str, value: torch.Tensor) -> Finding:
    """Return the finding on a weight of the base in a file, which other adapters would run on from then on."""
    message = (
        f"the file of {name!r} has other values for this weight of the base, on which {list(others)} run, so these "
        f"adapters would compute something else from then on"
    )
    return fault("base-changed-again", f"{file}: {key}", message, _BASE_OF_ITS_OWN, value.nbytes)


def _base_dtype(file: str, key: str, tensor: torch.Tensor, value: torch.Tensor) -> Finding:
    message = (
        f"the file replaces this weight of the base in {value.dtype}, the base is {tensor.dtype}; writing it would "
        f"round it"
    )
    fix = f"load the base with dtype={value.dtype}"
    return fault("base-weight-dtype", f"{file}: {key}", message, fix, value.nbytes)


def saved_module_dtype(file: str, slot: AdapterSlot, value: torch.Tensor) -> Iterator[Finding]:
    """Yield the finding for a saved module that the file has in another dtype than it gets."""
    if slot.dtype is None or slot.dtype == value.dtype:
        return
    message = (
        f"the saved module is {value.dtype} in the file; it gets the dtype of the module that it replaces, "
        f"{slot.dtype}, in which the layers around it compute"
        if ".modules_to_save." in slot.key
        else f"it is {value.dtype} in the file; it gets {slot.dtype}, in which the layers around it compute"
    )
    where = f"{file}: {slot.key}"
    if torch.promote_types(slot.dtype, value.dtype) == slot.dtype:
        yield note("info", "saved-module-dtype", where, message, "none", value.nbytes)
    else:
        fix = f"load the base with dtype={value.dtype} to keep every bit of it"
        yield note("warning", "saved-module-dtype", where, f"{message}; this rounds it", fix, value.nbytes)


def _undeclared(file: str, key: str, value: torch.Tensor, whole: bool) -> Finding:
    module = without_peft_prefix(key.rpartition(".")[0])
    message = (
        f"the file has a weight of the base ({list(value.shape)}), but modules_to_save in its config does not name "
        f"{module!r}; peft would overwrite the base's own"
    )
    fix = f"add {module.rpartition('.')[2]!r} to modules_to_save in adapter_config.json, or remove the tensor"
    if whole:  # the state_dict() of a PeftModel
        fix = "remove all tensors of the base from the file (with base_layer in their names, or of no adapted layer)"
    return fault("modules-to-save-undeclared", f"{file}: {key}", message, fix, value.nbytes)


def _loras_in_saved(config: PeftConfig, keys: Iterable[str]) -> dict[str, str]:
    """Return the layers with a LoRA inside a saved module, by their paths with the name that modules_to_save has.

    Earlier versions of peft trained and loaded these, and this one still trains them in some heads of tokens.
    """
    saved = () if getattr(config, "use_dora", False) else getattr(config, "modules_to_save", None) or ()
    paths = {key.removesuffix(_INNER_WEIGHT) for key in keys if key.endswith(_INNER_WEIGHT)}
    named = {path: next((name for name in saved if f".{name}." in f"{path}."), None) for path in paths}
    return {path: name for path, name in sorted(named.items()) if name is not None}


def _lies_in(key: str, layers: Iterable[str]) -> bool:
    """Return whether a tensor is of one of these layers, in the saved module or in the base's own (bias="all")."""
    return any(key.replace(".original_module.", ".", 1).startswith(f"{path}.") for path in layers)


def _lora_in_saved(file: str, config: PeftConfig, path: str, saved: str) -> Finding:
    name, scaling = without_peft_prefix(path), "sqrt(r)" if getattr(config, "use_rslora", False) else "r"
    message = (
        f"the adapter has a LoRA in {name!r}, inside the module {saved!r} of its modules_to_save, and this peft builds "
        f"none there"
    )
    fix = (
        f"write {f'{path}.weight'!r} into the file in place of it: the sum of base_layer.weight and of lora_B @ lora_A "
        f"times lora_alpha / {scaling}; and base_layer.bias as {f'{path}.bias'!r}"
    )
    return fault("adapter-key-unexpected", f"{file}: {path}", message, fix)


def _ties_later(model: PeftModel, adapter: str) -> bool:
    """Return whether an adapter that is not the first one of its model is to tie its weights."""
    return len(model.peft_config) > 1 and getattr(model.peft_config[adapter], "ensure_weight_tying", False) is True


def _module_of(key: str) -> str:
    return key.split(".lora_")[0] if ".lora_" in key else key.rpartition(".")[0]


def _unexpected(file: str, key: str, modules: set[str], model: PeftModel, adapter: str, fitting: str | None) -> Finding:
    path = _module_of(key)
    name = without_peft_prefix(path)
    named = getattr(model.peft_config[adapter], "target_parameters", None)
    if OF_FUSED_EXPERTS.search(key) and path.removesuffix(".base_layer") in modules and not named:
        message = "it is of the factors of all experts of a layer, and target_parameters in the config names none"
        return fault("target-not-covered", f"{file}: {key}", message, TO_PARAMETERS)
    if path in modules and path != PEFT_PREFIX.rstrip("."):
        # peft looks for the ties of the base by names that the wrappers of the adapters before it have changed.
        if _ties_later(model, adapter):
            message = (
                f"ensure_weight_tying ties {name!r} for the first adapter of a model alone, and this is a later one"
            )
            return fault("target-not-covered", f"{file}: {key}", message, _BASE_OF_ITS_OWN)
        if (flag := _flag_of(key)) is not None and f"{path}.lora_A.{adapter}" in modules:
            message = f"the tensor is of an adapter with {flag}, and the config of this one does not have it"
            fix = f"set {flag} to true in adapter_config.json"
            return fault("adapter-key-unexpected", f"{file}: {key}", message, fix)
        if _OF_KOHYA.search(key) is not None:
            message = "lora_down and lora_up are names of kohya's scripts for what peft calls lora_A and lora_B"
            fix = (
                r"pass key_mapping={'\.lora_down\.': '.lora_A.', '\.lora_up\.': '.lora_B.'}, if lora_alpha in "
                "adapter_config.json is that of the training"
            )
            return fault("adapter-key-unexpected", f"{file}: {key}", message, fix)
        embedded = adapter in getattr(model.get_submodule(path), "lora_embedding_A", ())
        if embedded and (head := tied_head_of(base_of(model))) is not None:
            message = (
                f"its factors are those of a linear layer, such as {head!r}, and the tied {name!r} is an embedding"
            )
            mapping = {f"^{re.escape(name)}": head}
            fix = f'write "{head}" in its place into target_modules, and pass key_mapping={mapping}'
            return fault("adapter-key-unexpected", f"{file}: {key}", message, fix)
        message = (
            f"the base has {name!r}, but target_modules in the adapter's config does not select it, so the tensor has "
            f"nowhere to go"
        )
        fix = "add the module to target_modules in adapter_config.json"
        return fault("target-not-covered", f"{file}: {key}", message, fix)
    base = type(base_of(model)).__name__
    message = f"{base} has no module {name!r} (nearest: {_nearest(path, modules, model)})"
    return fault("adapter-key-unexpected", f"{file}: {key}", message, _fix_of_unexpected(name, model, fitting))


def _flag_of(key: str) -> str | None:
    """Return the field of a LoRA's config without which it has no such tensor; None for one that each has."""
    if ".lora_magnitude_vector" in key:
        return "use_dora"
    return "lora_bias" if ".lora_B." in key and key.endswith(".bias") else None


def _fix_of_unexpected(path: str, model: PeftModel, fitting: str | None) -> str:
    for config in model.peft_config.values():
        for name in getattr(config, "modules_to_save", None) or ():
            if f"{path}.".startswith(f"{name}."):
                return (
                    f"the adapter was saved with this head: load the base, call attach_head(base, {name!r}, ...) with "
                    f"a module like it, and pass that base; where it is the head of a task, pass the class that has "
                    f"it, such as auto_class=AutoModelForSequenceClassification"
                )
    if fitting is None:
        return _RIGHT_BASE
    return f"{_RIGHT_BASE}; if it is this one, pass {fitting}, with which all of these tensors fit"


def _nearest(path: str, modules: set[str], model: PeftModel) -> str:
    """Return the children of the last module on the path that exists, those with the most similar names first."""
    parent = nearest(path, modules) or ""
    name = path.removeprefix(parent).lstrip(".").partition(".")[0]
    children = [child for child, _ in model.get_submodule(parent).named_children() if not child.startswith("lora_")]
    similar = difflib.get_close_matches(name, children, n=3, cutoff=0.0)
    return ", ".join(without_peft_prefix(f"{parent}.{child}").lstrip(".") for child in similar) or "none"


def _without_task(config: PeftConfig, key: str) -> str:
    """Return the rest of the advice for a head that peft adds to a config by its task, listed there or not."""
    task = str(getattr(config.task_type, "value", config.task_type))
    brings = not _HEADS_OF_TASKS.get(task, frozenset()).isdisjoint(key.split("."))
    return f", and set task_type to null in it, since {task} brings this head" if brings else ""


def _missing(
    file: str,
    config: PeftConfig,
    slots: Mapping[str, AdapterSlot],
    routed: RoutedTensors,
    required: Iterable[str],
    *,
    later: bool,
) -> list[Finding]:
    message = "modules_to_save (or trainable tokens) in the config requires this tensor, and the file does not have it"
    fix = "save the adapter again with save_pretrained, or take the module out of the config"
    if later:  # of a tied part that adapters before have apart, the file has one
        fix = f"{_BASE_OF_ITS_OWN}; or {fix}"
    findings = [
        fault("modules-to-save-missing", f"{file}: {key}", message, f"{fix}{_without_task(config, key)}")
        for key in required
    ]
    # Tied slots share one storage: one tensor of the file fills all of them.
    filled = {slots[key].storage for key in routed.tensors if key in slots}
    named = {part for key in routed.tensors for part in ancestors(without_peft_prefix(_module_of(key)))}
    for key, slot in slots.items():
        missing = slot.is_parameter and key not in routed.tensors and slot.storage not in filled
        if missing and not any(part in key for part in _REPORTED_ELSEWHERE):
            message = (
                f"the model has a {list(slot.tensor.shape)} for it, the file has no tensor; peft would leave it at its "
                f"random or zero initial value"
            )
            flag = _flag_of(key)
            right = (
                _RIGHT_BASE if flag is None else f"set {flag} to false in adapter_config.json if it was not trained so"
            )
            if flag == "lora_bias" and any(_flag_of(other) == flag for other in routed.tensors):  # mergekit's are such
                right = "pass strict=False to load it with 0 for the biases that the file does not have"
            fix = f"{right}, or save the adapter again (gathered, from rank 0){_or_exclude(config, key, named)}"
            findings.append(fault("adapter-key-missing", f"{file}: {key}", message, fix, slot.tensor.nbytes))
    return findings


def _or_exclude(config: PeftConfig, key: str, named: Container[str]) -> str:
    """Return the way to leave out a whole part of the base that the file does not name, as a tower for images.

    An adapter that was trained on the text model alone has targets, such as q_proj, that are in that part too.
    """
    around = [*ancestors(without_peft_prefix(_module_of(key)))]
    part = next((path for path in reversed(around) if path not in named), "")
    is_part_of_layer = any(level.isdigit() for level in part.split("."))  # whose tensors may be lost
    if not part or is_part_of_layer or getattr(config, "exclude_modules", "") is not None:
        return ""
    pattern = json.dumps(rf"{re.escape(part)}(\..*)?")
    return f', or, if it was trained without {part!r}, write "exclude_modules": {pattern} into adapter_config.json'


def _layer_counts(file: str, model: PeftModel, routed: RoutedTensors, findings: list[Finding]) -> list[Finding]:
    """Return a finding when the base has another number of layers than the adapter: it explains all others."""
    if not any(finding.code in ("adapter-key-missing", "adapter-key-unexpected") for finding in findings):
        return []
    layers = getattr(getattr(base_of(model), "config", None), "num_hidden_layers", None)
    indices = layer_indices(key for key in routed.tensors if ".lora_" in key)
    if not isinstance(layers, int) or not indices or max(indices) + 1 == layers:
        return []
    message = f"the adapter has tensors for layers up to {max(indices)}, the base has {layers} layers"
    return [fault("layer-count", file, message, _RIGHT_BASE)]
