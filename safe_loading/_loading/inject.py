"""The modules that peft builds in a model for an adapter, and the tensors of its file paired with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import torch
from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftConfig, PeftModel, PeftType

from safe_loading._checkpoint.adapter_config import OF_FUSED_EXPERTS, TO_PARAMETERS
from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._checkpoint.adapter_patterns import pattern_order
from safe_loading._checkpoint.trained_beside import trained_beside
from safe_loading._core.engines import is_integrated, trainable_as_before, without_autocast
from safe_loading._core.log import quiet
from safe_loading._core.names import without_peft_prefix
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, errors_of
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.formats.registry import is_decoded_at_forward
from safe_loading._model.peft_layers import (
    base_of,
    has_adapters,
    whose_layers,
    without_peft_levels,
    wrap_tokens_once,
)
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.stand_ins import MetaStandIns, NoInit
from safe_loading._model.zero3 import made_whole
from safe_loading._ranks.own_generators import own_generators
from safe_loading.errors import AdapterError, ArgumentError, SafeLoadingError, printable

from .adapter_file import read_tensors, value_findings
from .adapter_values import Adapter
from .allocation_limit import allocation_limit
from .base_arguments import advice_on_class, advice_on_part
from .choose_class import class_of_auto_mapping
from .experts import fit_experts
from .fused_parameters import fused_parameters, parameter_of_leaves, without_conversion_by_peft
from .key_names import check_key_mapping
from .match import Match, match_tensors
from .old_names import with_new_names
from .peft_config import as_trained, build_config, mamba_outputs_adapted, refuse_costly_patterns
from .prompts import foreign_prompt
from .slots import AdapterSlot, RoutedTensors, new_slots, route
from .starts import (
    BaseWatch,
    adapted_weights,
    builds_on_meta,
    holds_finished_prompt,
    may_change_base,
    random_start,
    refuse_start_without_card,
    resized_by_file,
    skip_deferred_start,
    start_findings,
    start_is_there,
    starts_on_base,
    without_repeated_layers,
    without_start_on_base,
)

_NOTHING_SELECTED = ("not found in the base model", "modules were excluded", "modules were targeted")  # words of peft
_MOST_OF_PEFT = 400  # characters of an error of peft, which may show a module with all that is in it


@dataclasses.dataclass
class Injection:
    """The modules that peft built for an adapter, still without the file's tensors."""

    model: PeftModel
    match: Match
    slots: dict[str, AdapterSlot]  # the adapter's tensors in the model, by key
    renamed: dict[str, str]  # {key on disk: key used}
    file: dict[str, torch.Tensor]  # the file's tensors, by the keys that peft writes
    routed: dict[str, torch.Tensor]  # the same by their key in the model, those of the base that came along too
    on_meta: bool  # whether nothing but the file gives it values
    changed: list[torch.Tensor] = dataclasses.field(default_factory=list)  # the base's weights that the start changed
    start: list[Finding] = dataclasses.field(default_factory=list)  # what is noteworthy about how it starts


def prepare(
    name: str,
    facts: AdapterFolder,
    *,
    is_trainable: bool,
    key_mapping: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Adapter:
    """Read an adapter's config and tensors and check the values, which are used in ``dtype``, or as they are."""
    check_key_mapping(key_mapping)
    config, findings = build_config(facts, is_trainable=is_trainable)
    if is_trainable and holds_finished_prompt(config):
        raise AdapterError(
            f"{facts.weights}: {facts.config['peft_type']} trains an encoder that makes the prompt, and the file holds "
            f"the finished prompt without it, so that its training cannot go on. Leave is_trainable=True out to run "
            f"it, or train a new one with peft.get_peft_model."
        )
    tensors = read_tensors(facts)
    facts.require_unchanged()  # peft has read the config again
    findings = [*findings, *trained_beside(facts.path), *value_findings(facts, tensors, dtype)]
    findings += pattern_order(facts.config_file, facts.config, {key: each.shape for key, each in tensors.items()})
    return Adapter(name, facts, config, tensors, tuple(findings), key_mapping)


def check_adapter_name(name: str) -> None:
    """Refuse a name that peft cannot use: empty, with a dot (it becomes an attribute), or part of parameters' names."""
    if not isinstance(name, str) or not name or "." in name:
        raise ArgumentError(f"{name!r} cannot be the name of an adapter: it must be a string without dots.")
    # peft drops the keys that have another adapter's name as one of their parts (_filter_state_dict_for_adapter_name),
    # so a name must not be a part that every key has. It also becomes a key of ModuleDicts.
    taken = name in ("lora_", "lora", "lora_A", "lora_B", "base_layer", "weight")
    if taken or hasattr(torch.nn.ModuleDict(), name):
        raise ArgumentError(f"{name!r} is a name that peft or torch gives to a part of a module; choose another.")


def to_add_one(model: torch.nn.Module) -> str:
    """Return the way to give a model one more adapter, or its first one, by who put those into it that it has."""
    if has_adapters(model):
        return "Use load_adapter_on_rank to add one, or pass the plain base."
    if is_integrated(model):
        return (
            "transformers put them in: add one by its own `model.load_adapter()`, or load the base anew with all "
            "adapters by load_peft_on_rank."
        )
    # what a caller passed for a model may be none
    owner = whose_layers(model) if isinstance(model, torch.nn.Module) else None
    if owner is not None:
        return (
            f"They belong to {owner}: pass that one to load_adapter_on_rank, or for the plain base what its unload() "
            f"returns."
        )
    return "Use load_peft_on_rank for the first adapter."


def inject_checked(
    model: torch.nn.Module, adapter: Adapter, *, undo: Sequence[Snapshot], keep_base: bool = False, strict: bool = True
) -> Injection:
    """Let peft build the modules of an adapter whose file fits them; the arguments are those of :func:`attach`."""
    # What is known of the files alone comes first, so that it can be refused before the base is touched.
    on_base = with_own_config(adapter)  # before, as an injection rewrites the config that it is given
    injection = _inject_on_meta(model, adapter, undo[0])
    if injection is None:
        injection = _start_on_base(model, on_base, list(model.parameters()), undo[-1:] if keep_base else ())
        _refuse(adapter, injection, injection.match.findings, strict=strict)
    else:
        _refuse(adapter, injection, injection.match.findings, strict=strict)
        needs_start = starts_on_base(adapter.config) and not start_is_there(injection.model, adapter.name)
        if needs_start or _needs_base_values(injection):
            # Only now is it known that something on meta has no value in the file. Build again, with values this time.
            weights = adapted_weights(injection.model, adapter.name)
            undo[0].restore()
            injection = _start_on_base(model, on_base, weights, undo[-1:] if keep_base else ())
        else:
            skip_deferred_start(injection.model, adapter.name)
    injection.start = findings_of_start(adapter, injection)
    _refuse(adapter, injection, injection.start, strict=strict)
    return injection


def _inject_on_meta(model: torch.nn.Module, adapter: Adapter, before: Snapshot) -> Injection | None:
    """Let peft build the modules without memory; None, and the model as it was, when that takes the base's values."""
    if not builds_on_meta(adapter.config):
        return None
    try:
        return inject_and_match(model, adapter, on_meta=True)
    except NeedsValues:
        before.restore()
        return None


def _start_on_base(
    model: torch.nn.Module, adapter: Adapter, weights: Iterable[torch.Tensor], keep: Iterable[Snapshot]
) -> Injection:
    """Let peft build and initialize the modules, and see which of the base's ``weights`` that changes."""
    if not may_change_base(adapter.config):
        return inject_and_match(model, adapter, on_meta=False)
    weights = list(weights)
    for snapshot in keep:
        for weight in weights:
            snapshot.keep(weight)
    watch = BaseWatch(weights)
    injection = inject_and_match(model, adapter, on_meta=False)
    injection.changed = watch.changed(injection.model)
    return injection


def findings_of_start(adapter: Adapter, injection: Injection) -> list[Finding]:
    """Return the findings on the start of an adapter, as its modules are now."""
    model, name = injection.model, adapter.name
    is_there = starts_on_base(adapter.config) and start_is_there(model, name)
    changed = injection.changed
    if starts_on_base(adapter.config) and any(slot.tensor.is_meta for slot in injection.slots.values()):
        changed = adapted_weights(model, name)  # as it will
    return start_findings(model, name, adapter.file, changed=changed, is_there=is_there)


def _refuse(adapter: Adapter, injection: Injection, findings: Iterable[Finding], *, strict: bool) -> None:
    """Refuse an adapter with errors; without ``strict`` only one of which no tensor fits, or one of unknown layout."""
    findings = [*adapter.findings, *findings]
    errors = errors_in(findings)
    unread = any(finding.code == "fused-layout-unknown" for finding in findings)
    if errors and (strict or unread or not (injection.match.values or adapter.config.is_prompt_learning)):
        base = base_of(injection.model)
        built, config = type(base).__name__, getattr(base, "config", None)
        advice = advice_on_part(class_of_auto_mapping(adapter), config) or advice_on_class(built, config)
        raise refusal([adapter], built, [*advice, *errors])


class NeedsValues(Exception):
    """peft asked a tensor on meta for its values."""


def inject_and_match(model: torch.nn.Module, adapter: Adapter, *, on_meta: bool) -> Injection:
    """Let peft build the adapter's modules, and pair the file's tensors with them."""
    base = base_of(model)
    # Taken before the injection, which may replace these modules by an adapter's copies of them.
    embeddings = [weight for weight in embeddings_and_head_of(base).own_weights if weight is not None]
    config = adapter.config
    refuse_costly_patterns(config, base, adapter.facts.config_file)
    foreign = foreign_prompt(config, base, adapter.facts.config_file)
    if foreign:
        raise AdapterError(foreign[0])
    file = adapter.renamed(base)
    config = with_new_names(config, file.old_names, base)
    config, tensors, fitted, is_fused = fit_experts(config, file.tensors, base, adapter.facts)
    before = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    unconverted = without_conversion_by_peft(base) if is_fused else nullcontext()
    with quiet(), as_trained(config), mamba_outputs_adapted(config), unconverted:
        if on_meta:
            # No memory is used and no number is drawn: every value comes from the file.
            with without_start_on_base(config), MetaStandIns(model), torch.device("meta"), NoInit(), made_whole():
                injected = _inject(model, config, adapter, on_meta=True)
        else:
            # Only here: what is built on meta allocates nothing, whatever its size.
            limit = allocation_limit(base, adapter.tensors, adapter.facts.config_file)
            with without_repeated_layers(model, config), limit, own_generators():
                injected = _inject(model, config, adapter, on_meta=False)
    with _in_the_model(injected, adapter.name):
        routed = _route(injected, adapter, tensors)
        slots = new_slots(routed.places, before)  # after peft has routed, which replaces parameters of AdaLoRA
        matched = slots
        if config.is_prompt_learning:
            # peft loads the prompt straight into its encoder; what goes through the state dict are saved modules
            routed = routed._replace(tensors={key: value for key, value in routed.tensors.items() if "." in key})
            matched = {key: slot for key, slot in slots.items() if ".modules_to_save." in key}
        match = match_tensors(injected, adapter.name, adapter.file, matched, routed, embeddings)
    match.findings[:0] = (*file.findings, *fitted)
    return Injection(injected, match, slots, file.renamed, file.tensors, routed.tensors, on_meta)


@contextmanager
def _in_the_model(model: PeftModel, name: str) -> Iterator[None]:
    """Put an adapter's modules into the model: peft keeps those of inactive adaption prompts outside of it."""
    activate = getattr(model.base_model, "_temporarily_active", None)
    if activate is None:
        yield
        return
    with activate(name):
        yield


def _inject(model: torch.nn.Module, config: PeftConfig, adapter: Adapter, *, on_meta: bool) -> PeftModel:
    name = adapter.name
    refuse_start_without_card(config, adapter.facts.config_file)
    # autocast_adapter_dtype would cast 16-bit factors to float32; here each keeps the dtype that it has on disk.
    try:
        if has_adapters(model):
            with trainable_as_before(model):
                model.add_adapter(name, config, **without_autocast(model.add_adapter))
                if config.peft_type == PeftType.TRAINABLE_TOKENS:
                    wrap_tokens_once(model)
            return model
        peft_class = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(str(config.task_type), PeftModel)
        return peft_class(model, config, adapter_name=name, autocast_adapter_dtype=False)
    except (SafeLoadingError, MemoryError, torch.OutOfMemoryError):
        raise
    # What the checks of peft's methods raise, and what they run into where a check is missing: a target that does not
    # exist, a module that the method does not support, a number that no tensor can have as its size.
    except Exception as error:
        # "Tensor.item() cannot be called on meta tensors", "Cannot copy out of meta tensor", and others like them
        # and accelerate's "weight is on the meta device", for the copy of a module that it dispatched
        if on_meta and isinstance(error, (RuntimeError, ValueError)) and "meta" in str(error):
            raise NeedsValues from error
        if isinstance(error, IndexError):
            _refuse_rows_beyond(adapter, base_of(model))
        way = _way_beside_others(model, config, error) or _way_for_packed_layers(model)
        way = way or _way_of_its_layers(adapter, base_of(model), error) or _way_of_a_router(adapter.facts.config)
        way = way or _way_of_fused_experts(config, base_of(model), error) or _way_of_their_module(adapter, error)
        start = [finding.problem for finding in random_start(config, str(adapter.facts.config_file))]
        raise AdapterError(
            f"{adapter.facts.config_file}: peft cannot add {name!r} to {type(base_of(model)).__name__}: "
            f"{_in_a_line(error)}.{way or _way_without_package(error, config)}",
            start,
        ) from error


def _way_without_package(error: Exception, config: PeftConfig) -> str:
    """Return the way where a package is missing that an adapter's method imports; empty for any other error."""
    if not isinstance(error, ImportError):
        return ""
    layers_of_megatron = ", or set megatron_config to null, which only layers of Megatron need"
    return f" Install it{layers_of_megatron if getattr(config, 'megatron_config', None) else ''}."


def _way_of_a_router(config: JsonObject) -> str:
    """Return the way for a saved router of Arrow, of whose adapters peft does not read the names; empty for others."""
    arrow = config.get("arrow_config")
    if not isinstance(arrow, Mapping):
        return ""
    return (
        f" It is a router of Arrow, which peft saves and does not load. Make it again over the adapters that it "
        f"chooses among, {arrow.get('task_adapter_names')!r:.200}: peft.create_arrow_model(base, "
        f"task_specific_adapter_paths=[...], arrow_config=peft.ArrowConfig(...))."
    )


def _way_of_fused_experts(config: PeftConfig, base: torch.nn.Module, error: Exception) -> str:
    """Return the way for DoRA of experts that are one parameter for all of them, of which peft has none; else empty."""
    refused = getattr(config, "use_dora", False) and "ParamWrapper" in str(error)
    fused = [one.path for one in fused_parameters(base, parameter_of_leaves(base))] if refused else []
    if not fused:
        return ""
    return (
        f" This transformers holds all experts of a layer in one parameter ({fused[0]}), and peft has DoRA for modules "
        f"alone. Load or merge it with transformers 4, which has a module for each expert."
    )


def _way_of_their_module(adapter: Adapter, error: Exception) -> str:
    """Return the way where the config names the module of experts of which the file has the parameters; else empty."""
    named = adapter.facts.config.get("target_parameters")
    if named or "is not supported" not in str(error) or not any(map(OF_FUSED_EXPERTS.search, adapter.tensors)):
        return ""
    return f" The file has the factors of all experts of a layer as one: {TO_PARAMETERS}."


def _in_a_line(error: Exception) -> str:
    """Return the words of an error of peft without line breaks, which a module has that it shows whole."""
    return printable(" ".join(str(error).rstrip(". ").split()), _MOST_OF_PEFT)


def _way_beside_others(model: torch.nn.Module, config: PeftConfig, error: Exception) -> str:
    """Return the way for an adapter that cannot stand beside those of a model; empty where that is not the reason.

    It is of another method, or targets a module that they have wrapped otherwise: tokens of an embedding, and a LoRA,
    or other parameters of one module.
    """
    if not has_adapters(model):
        return ""
    own_wrapper = any(sign in str(error) for sign in ("TrainableTokensWrapper", "peft.tuners.", "`target_parameters`"))
    if not own_wrapper and config.peft_type in {each.peft_type for each in model.peft_config.values()}:
        return ""
    return " Load it with a base of its own: load_peft_on_rank(base_model, adapter)."


def _way_for_packed_layers(model: torch.nn.Module) -> str:
    """Return the way for a base of layers that have no weight yet; empty for any other."""
    layers = (module for module in model.modules() if is_decoded_at_forward(module))
    if not any(getattr(layer, "weight", None) is None for layer in layers):
        return ""
    return " Its layers have no weight before the model's first forward pass: run one, and load the adapter then."


def _way_of_its_layers(adapter: Adapter, base: torch.nn.Module, error: Exception) -> str:
    """Return the way where an adapter selects no module of the base, by the layers that its file names."""
    keys = [key for key in adapter.renamed(base).tensors if ".lora_" in key]
    if not keys or not any(words in str(error) for words in _NOTHING_SELECTED):
        return ""
    modules = {without_peft_levels(name) for name, _ in base.named_modules()}
    layers = dict.fromkeys(without_peft_prefix(key).split(".lora_")[0] for key in sorted(keys))
    missing = [layer for layer in layers if layer not in modules]
    if missing:
        return f" The file is of {missing[0]!r}, which the base does not have: pass the one that it was trained on."
    fields = "target_modules, exclude_modules and layers_to_transform"
    return f" The file is of {next(iter(layers))!r}, which the base has: correct {fields} in adapter_config.json."


def _refuse_rows_beyond(adapter: Adapter, base: torch.nn.Module) -> None:
    """Refuse an adapter that trains rows of the embeddings which the base does not have."""
    config, embeddings = adapter.config, embeddings_and_head_of(base).weights[0]
    asked = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None) or ()
    lists = asked.values() if isinstance(asked, Mapping) else [asked]
    last = max((row for rows in lists for row in rows), default=-1)
    if embeddings is not None and last >= embeddings.shape[0]:
        raise AdapterError(
            f"{adapter.facts.config_file}: it trains row {last} of the embeddings, and {type(base).__name__} has "
            f"{embeddings.shape[0]} rows. Load the base, call resize_token_embeddings({last + 1}) or with the size of "
            f"its training, and pass it as base_model."
        )


def _route(model: PeftModel, adapter: Adapter, tensors: dict[str, torch.Tensor]) -> RoutedTensors:
    try:
        return route(model, adapter.name, tensors)
    # the last three where the ranks that AdaLoRA's config lists are no lists, or of other layers or another length
    except (KeyError, RuntimeError, ValueError, AttributeError, IndexError, TypeError) as error:
        wrong = "; its rank_pattern is not that of the file" if resized_by_file(adapter.config) else ""
        raise AdapterError(f"peft cannot map the tensors of {adapter.file} to the model: {error}{wrong}") from error


def _needs_base_values(injection: Injection) -> bool:
    """Return whether a tensor on meta gets its value from the base and not from the file."""
    # Trainable tokens keep the original rows of the embedding in a buffer, which peft saves nowhere.
    return injection.match.leaves_slots_empty or any(
        slot.tensor.is_meta and key not in injection.match.values and not slot.is_parameter
        for key, slot in injection.slots.items()
    )


def with_own_config(adapter: Adapter) -> Adapter:
    """Return an adapter with a copy of its config, to which peft may write."""
    # peft rewrites a config while it injects (expert names of transformers 4 to 5, target_modules condensed)
    return dataclasses.replace(adapter, config=deepcopy(adapter.config))


def errors_in(findings: Iterable[Finding]) -> list[str]:
    """Return the problems of the findings that are errors."""
    return [finding.problem for finding in errors_of(findings)]


def refusal(adapters: Sequence[Adapter], target: str, problems: Iterable[str]) -> AdapterError:
    """Return the error that says why adapters cannot be attached to ``target``."""
    names = ", ".join(f"{adapter.facts.source!r} (as {adapter.name!r})" for adapter in adapters)
    return AdapterError(f"{names} cannot be attached to {target}; nothing was changed:", problems)
