"""Attaching an adapter to a model: peft builds the modules, the file's tensors are put into them bit for bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftConfig, PeftModel, PeftType

from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._checkpoint.tokenizer_ids import warning_of_added_words
from safe_loading._checkpoint.trained_beside import trained_beside
from safe_loading._core.engines import trainable_as_before, without_autocast
from safe_loading._core.log import quiet
from safe_loading._core.report import Finding, errors_of
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.peft_layers import base_of, has_adapters, wrap_tokens_once
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.stand_ins import MetaStandIns, NoInit
from safe_loading._model.zero3 import made_whole
from safe_loading._ranks.own_generators import own_generators
from safe_loading._ranks.rank_devices import RankDevices
from safe_loading.errors import AdapterError, ArgumentError, SafeLoadingError

from .adapter_values import Adapter, read_tensors, value_findings
from .alike import find_alike, plan_for, remember
from .allocation_limit import allocation_limit
from .dispatched import bring_inputs
from .experts import fit_experts
from .fill_slots import fill_slots, overwrite_base
from .fused_parameters import without_conversion_by_peft
from .key_names import check_key_mapping
from .match import Match, match_tensors
from .move_modules import move_modules
from .old_names import with_new_names
from .peft_config import as_trained, build_config, mamba_outputs_adapted, refuse_costly_patterns, without_targets
from .prompts import foreign_prompt
from .slots import AdapterSlot, RoutedTensors, new_slots, own_tensor, route
from .starts import (
    BaseWatch,
    adapted_weights,
    builds_on_meta,
    holds_finished_prompt,
    may_change_base,
    refuse_start_without_card,
    resized_by_file,
    skip_deferred_start,
    start_findings,
    start_is_there,
    starts_on_base,
    without_repeated_layers,
    without_start_on_base,
)


@dataclasses.dataclass(frozen=True)
class Attached:
    """A model with an adapter attached, and the adapter's findings, sizes and renamed keys for the report."""

    model: PeftModel
    findings: list[Finding]
    dtypes: dict[str, int]
    tensors: int
    bytes: int
    renamed: dict[str, str]

    @classmethod
    def of(
        cls, model: PeftModel, findings: list[Finding], tensors: Iterable[torch.Tensor], renamed: dict[str, str]
    ) -> Attached:
        """Count the adapter's tensors, one that has several names once."""
        unique = {id(tensor): tensor for tensor in tensors}.values()
        dtypes = dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in unique))
        return cls(model, findings, dtypes, len(unique), sum(tensor.nbytes for tensor in unique), renamed)


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
    name: str, facts: AdapterFolder, *, is_trainable: bool, key_mapping: Mapping[str, str] | None = None
) -> Adapter:
    """Read an adapter's config and tensors and check the values."""
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
    findings = [*findings, *trained_beside(facts.path), *value_findings(facts, tensors)]
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


@dataclasses.dataclass(frozen=True)
class Checked:
    """The modules that peft built for an adapter on a model on meta, where all of it fitted."""

    adapter: Adapter
    injection: Injection
    before: Snapshot  # of the model on meta, without them


def check_on_meta(
    meta_model: torch.nn.Module, adapters: Sequence[Adapter], advise: Callable[[], Sequence[str]] = list
) -> Checked | None:
    """Attach the adapters to a model on meta, so that a misfit is refused before the base is loaded.

    Returns what peft built for the first adapter, if the model holds the modules of no other one. A refusal begins with
    what ``advise`` returns.
    """
    problems: list[str] = []
    built: list[Checked] = []
    model = meta_model
    for adapter in adapters:
        if find_alike(model, adapter):
            problems += errors_in(adapter.findings)
            continue
        if not builds_on_meta(adapter.config):  # needs the base's values; its tensors are matched as it is attached
            base, where = base_of(meta_model), adapter.facts.config_file
            foreign = foreign_prompt(adapter.config, base, where)
            problems += [*errors_in(adapter.findings), *without_targets(adapter.config, base), *foreign]
            continue
        before = Snapshot(model)
        try:
            injection = _inject_and_match(model, _with_own_config(adapter), on_meta=True)
        except _NeedsValues:
            before.restore()
            problems += errors_in(adapter.findings)
            continue
        except AdapterError as error:
            problems += error.problems or [str(error)]
            continue
        model = injection.model
        problems += errors_in((*adapter.findings, *injection.match.findings, *_findings_of_start(adapter, injection)))
        _remember(adapter, injection)
        built.append(Checked(adapter, injection, before))
    if problems:
        raise refusal(adapters, type(meta_model).__name__, (*advise(), *problems))
    return built[0] if len(built) == 1 and built[0].adapter is adapters[0] else None


def attach_checked(
    base: torch.nn.Module, checked: Checked, devices: RankDevices, *, dtype: torch.dtype | None = None
) -> Attached | None:
    """Attach an adapter to a loaded base with the modules that peft built for it on meta.

    None, and the base as it was, where they cannot be used (`move_modules`), or a value is not in the file.
    """
    adapter, injection = checked.adapter, checked.injection
    plan = plan_for(injection.model, adapter.facts)
    layers = plan.layers(injection.model) if plan is not None else None
    if layers is None or not move_modules(injection.model, base, layers, checked.before):
        return None
    fill_slots(injection.slots, injection.match.values, devices, dtype)
    return _attached(adapter, injection, ())


def attach(
    model: torch.nn.Module,
    adapter: Adapter,
    devices: RankDevices,
    *,
    undo: Sequence[Snapshot],
    keep_base: bool = False,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> Attached:
    """Attach an adapter to ``model``, a base model or a PeftModel that has other adapters.

    ``undo`` is a snapshot of the model as it is now, then earlier ones: when this raises, restoring them makes the
    model what it was. Base weights are kept in all of them before they are overwritten from the file; with
    ``keep_base`` the last one keeps those, too, that the adapter's start is about to change. ``dtype`` None leaves each
    tensor as it is on disk. With ``strict``, a finding of severity "error" refuses the adapter.
    """
    injection = inject_checked(model, adapter, undo=undo, keep_base=keep_base, strict=strict)
    fill_slots(injection.slots, injection.match.values, devices, dtype)
    overwritten = overwrite_base(injection.model, injection.match.base_writes, adapter.file, undo)
    bring_inputs(injection.model, devices)
    _remember(adapter, injection)
    return _attached(adapter, injection, (*injection.start, *overwritten))


def inject_checked(
    model: torch.nn.Module, adapter: Adapter, *, undo: Sequence[Snapshot], keep_base: bool = False, strict: bool = True
) -> Injection:
    """Let peft build the modules of an adapter whose file fits them; the arguments are those of :func:`attach`."""
    # What is known of the files alone comes first, so that it can be refused before the base is touched.
    on_base = _with_own_config(adapter)  # before, as an injection rewrites the config that it is given
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
    injection.start = _findings_of_start(adapter, injection)
    _refuse(adapter, injection, injection.start, strict=strict)
    return injection


def _attached(adapter: Adapter, injection: Injection, findings: Iterable[Finding]) -> Attached:
    now = (own_tensor(slot.owner, slot.name) for slot in injection.slots.values())
    tensors = [tensor for tensor in now if tensor is not None]
    findings = [*adapter.findings, *injection.match.findings, *findings, *rows_of_words(adapter, injection.model)]
    return Attached.of(injection.model, findings, tensors, injection.renamed)


def rows_of_words(adapter: Adapter, model: torch.nn.Module) -> list[Finding]:
    """Return the finding of a tokenizer beside an adapter with words for which the base has no rows."""
    base = base_of(model)
    weight = embeddings_and_head_of(base).weights[0]
    named = getattr(base, "name_or_path", None)
    known = Path(named) if isinstance(named, str) and named and Path(named).is_dir() else None
    return [] if weight is None else warning_of_added_words(adapter.facts.path, weight.shape[0], known)


class _NeedsValues(Exception):
    """peft asked a tensor on meta for its values."""


def _inject_on_meta(model: torch.nn.Module, adapter: Adapter, before: Snapshot) -> Injection | None:
    """Let peft build the modules without memory; None, and the model as it was, when that takes the base's values."""
    if not builds_on_meta(adapter.config):
        return None
    try:
        return _inject_and_match(model, adapter, on_meta=True)
    except _NeedsValues:
        before.restore()
        return None


def _start_on_base(
    model: torch.nn.Module, adapter: Adapter, weights: Iterable[torch.Tensor], keep: Iterable[Snapshot]
) -> Injection:
    """Let peft build and initialize the modules, and see which of the base's ``weights`` that changes."""
    if not may_change_base(adapter.config):
        return _inject_and_match(model, adapter, on_meta=False)
    weights = list(weights)
    for snapshot in keep:
        for weight in weights:
            snapshot.keep(weight)
    watch = BaseWatch(weights)
    injection = _inject_and_match(model, adapter, on_meta=False)
    injection.changed = watch.changed(injection.model)
    return injection


def _findings_of_start(adapter: Adapter, injection: Injection) -> list[Finding]:
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
        raise refusal([adapter], type(base_of(injection.model)).__name__, errors)


def _remember(adapter: Adapter, injection: Injection) -> None:
    """Keep where the tensors of an adapter went, for others that are alike."""
    match = injection.match
    if injection.on_meta and not (errors_in(match.findings) or match.base_writes or starts_on_base(adapter.config)):
        remember(injection.model, adapter.name, adapter.facts, injection.file, match.values, injection.slots)


def errors_in(findings: Iterable[Finding]) -> list[str]:
    return [finding.problem for finding in errors_of(findings)]


def _inject_and_match(model: torch.nn.Module, adapter: Adapter, *, on_meta: bool) -> Injection:
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
            raise _NeedsValues from error
        if isinstance(error, IndexError):
            _refuse_rows_beyond(adapter, base_of(model))
        raise AdapterError(
            f"{adapter.facts.config_file}: peft cannot add {name!r} to {type(base_of(model)).__name__}: {error}"
        ) from error


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


def _with_own_config(adapter: Adapter) -> Adapter:
    # peft rewrites a config while it injects (expert names of transformers 4 to 5, target_modules condensed)
    return dataclasses.replace(adapter, config=deepcopy(adapter.config))


def refusal(adapters: Sequence[Adapter], target: str, problems: Iterable[str]) -> AdapterError:
    """Return the error that says why adapters cannot be attached to ``target``."""
    names = ", ".join(f"{adapter.facts.source!r} (as {adapter.name!r})" for adapter in adapters)
    return AdapterError(f"{names} cannot be attached to {target}; nothing was changed:", problems)
