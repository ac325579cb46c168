"""Attaching an adapter to a model: peft builds the modules, the file's tensors are put into them bit for bit."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import NamedTuple

import torch
from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftConfig, PeftModel

from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.log import quiet
from safe_loading._core.report import Finding
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.stand_ins import MetaStandIns, NoInit
from safe_loading.errors import AdapterError, ArgumentError

from .adapter_facts import AdapterFacts
from .adapter_values import read_tensors, rename_keys, value_findings
from .fill_slots import fill_slots, overwrite_base
from .match import Match, match_tensors
from .peft_config import build_config, can_build_on_meta, changes_base, refuse_costly_patterns
from .slots import AdapterSlot, RoutedTensors, new_slots, own_tensor, route


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter that has been read and checked, ready to be attached to a model."""

    name: str  # in the model
    facts: AdapterFacts
    config: PeftConfig
    tensors: dict[str, torch.Tensor]  # on the host, by their key on disk
    findings: tuple[Finding, ...]  # what is wrong or noteworthy about it, whatever the model

    @property
    def file(self) -> str:
        """The path of its weights, for findings."""
        return str(self.facts.weights)


@dataclasses.dataclass(frozen=True)
class Attached:
    """A model with an adapter attached, and what there is to report about the adapter."""

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


class Injection(NamedTuple):
    """The modules that peft built for an adapter, still without the file's tensors."""

    model: PeftModel
    match: Match
    slots: dict[str, AdapterSlot]  # the adapter's tensors in the model, by key
    renamed: dict[str, str]  # {key on disk: key used}


def prepare(name: str, facts: AdapterFacts, *, is_trainable: bool) -> Adapter:
    """Read an adapter's config and tensors and check the values."""
    config, findings = build_config(facts, is_trainable=is_trainable)
    tensors = read_tensors(facts)
    return Adapter(name, facts, config, tensors, (*findings, *value_findings(facts, tensors)))


def check_adapter_name(name: str) -> None:
    """Refuse a name that peft cannot use: empty, with a dot (it becomes an attribute), or part of parameters' names."""
    if not isinstance(name, str) or not name or "." in name:
        raise ArgumentError(f"{name!r} cannot be the name of an adapter: it must be a string without dots.")
    # peft drops the keys that have another adapter's name as one of their parts (_filter_state_dict_for_adapter_name),
    # so a name must not be a part that every key has. It also becomes a key of ModuleDicts.
    taken = name in ("lora_", "lora", "lora_A", "lora_B", "base_layer", "weight")
    if taken or hasattr(torch.nn.ModuleDict(), name):
        raise ArgumentError(f"{name!r} is a name that peft or torch gives to a part of a module; choose another.")


def check_on_meta(meta_model: torch.nn.Module, adapters: Sequence[Adapter]) -> None:
    """Attach the adapters to a model on meta, so that what does not fit is refused before the base is loaded."""
    problems: list[str] = []
    model = meta_model
    for adapter in adapters:
        if not can_build_on_meta(adapter.config):
            continue  # needs the base's values; checked when it is attached
        try:
            injection = _inject_and_match(model, _with_own_config(adapter), on_meta=True)
        except AdapterError as error:
            problems += error.problems or [str(error)]
            continue
        model = injection.model
        problems += _errors(adapter, injection.match)
    if problems:
        raise refusal(adapters, type(meta_model).__name__, problems)


def attach(
    model: torch.nn.Module,
    adapter: Adapter,
    device: torch.device,
    *,
    undo: Sequence[Snapshot],
    dtype: torch.dtype | None = None,
    strict: bool = True,
    copy: bool = True,
) -> Attached:
    """Attach an adapter to ``model``, a base model or a PeftModel that has other adapters.

    ``undo`` is a snapshot of the model as it is now, then earlier ones: when this raises, restoring them makes the
    model what it was. Base weights are kept in all of them before they are overwritten. ``dtype`` None leaves each
    tensor as it is on disk. With ``strict``, a finding of severity "error" refuses the adapter. Without ``copy``, the
    model gets the tensors of ``adapter`` itself where they are on ``device`` already.
    """
    on_meta = can_build_on_meta(adapter.config)
    unused = _with_own_config(adapter)
    injection = _inject_and_match(model, adapter, on_meta=on_meta)
    errors = _errors(adapter, injection.match)
    if errors and (strict or not (injection.match.values or adapter.config.is_prompt_learning)):
        raise refusal([adapter], type(_base_of(model)).__name__, errors)
    if on_meta and _needs_base_values(adapter, injection):
        # Only now is it known that something on meta has no value in the file. Build again, with values this time.
        undo[0].restore()
        injection = _inject_and_match(model, unused, on_meta=False)
    fill_slots(injection.slots, injection.match.values, device, dtype, copy=copy)
    overwritten = overwrite_base(injection.model, injection.match.base_writes, adapter.file, undo)
    now = (own_tensor(slot.owner, slot.name) for slot in injection.slots.values())
    tensors = [tensor for tensor in now if tensor is not None]
    findings = [*adapter.findings, *injection.match.findings, *overwritten]
    return Attached.of(injection.model, findings, tensors, injection.renamed)


def _errors(adapter: Adapter, match: Match) -> list[str]:
    return [str(finding) for finding in (*adapter.findings, *match.findings) if finding.severity == "error"]


def _inject_and_match(model: torch.nn.Module, adapter: Adapter, *, on_meta: bool) -> Injection:
    """Let peft build the adapter's modules, and pair the file's tensors with them."""
    base = _base_of(model)
    # Taken before the injection, which may replace these modules by an adapter's copies of them.
    embeddings = [weight for weight in embeddings_and_head_of(base).weights if weight is not None]
    config = adapter.config
    refuse_costly_patterns(config, base, adapter.facts.folder / ADAPTER_CONFIG)
    file = rename_keys(
        adapter.facts,
        adapter.tensors,
        prompt_learning=config.is_prompt_learning,
        own_module=any(name == "module" for name, _ in base.named_children()),
    )
    before = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with quiet():
        if on_meta:
            # No memory is used and no number is drawn: every value comes from the file.
            with _without_base_changing_init(config), MetaStandIns(model), torch.device("meta"), NoInit():
                injected = _inject(model, config, adapter)
        else:
            injected = _inject(model, config, adapter)
    slots = new_slots(injected, before)
    routed = _route(injected, adapter, file.tensors)
    if config.is_prompt_learning:
        # peft loads these straight into the prompt encoder, so no tensor goes through a state-dict key
        return Injection(injected, Match({}, {}, file.findings), slots, file.renamed)
    match = match_tensors(injected, config, adapter.file, slots, routed, embeddings)
    match.findings[:0] = file.findings
    return Injection(injected, match, slots, file.renamed)


def _inject(model: torch.nn.Module, config: PeftConfig, adapter: Adapter) -> PeftModel:
    name = adapter.name
    # autocast_adapter_dtype would cast 16-bit factors to float32; here each keeps the dtype that it has on disk.
    try:
        if isinstance(model, PeftModel):
            model.add_adapter(name, config, autocast_adapter_dtype=False)
            return model
        peft_class = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(str(config.task_type), PeftModel)
        return peft_class(model, config, adapter_name=name, autocast_adapter_dtype=False)
    # What the checks of peft's methods raise, and what they run into where a check is missing: a target that does not
    # exist, a module that the method does not support, a regular expression in target_modules that does not compile.
    except (ValueError, TypeError, NotImplementedError, AttributeError, KeyError, re.error) as error:
        raise AdapterError(
            f"{adapter.facts.folder / ADAPTER_CONFIG}: peft cannot add {name!r} to {type(_base_of(model)).__name__}: "
            f"{error}"
        ) from error


def _route(model: PeftModel, adapter: Adapter, tensors: dict[str, torch.Tensor]) -> RoutedTensors:
    try:
        return route(model, adapter.name, tensors)
    except (KeyError, RuntimeError, ValueError) as error:
        raise AdapterError(f"peft cannot map the tensors of {adapter.file} to the model: {error}") from error


def _needs_base_values(adapter: Adapter, injection: Injection) -> bool:
    """Return whether a tensor on meta gets its value from the base and not from the file."""
    if changes_base(adapter.config) or injection.match.leaves_slots_empty:
        return True
    # Trainable tokens keep the original rows of the embedding in a buffer, which peft saves nowhere.
    return any(
        slot.tensor.is_meta and key not in injection.match.values and not slot.is_parameter
        for key, slot in injection.slots.items()
    )


@contextmanager
def _without_base_changing_init(config: PeftConfig) -> Iterator[None]:
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


def _base_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _with_own_config(adapter: Adapter) -> Adapter:
    # peft rewrites a config while it injects (expert names of transformers 4 to 5, target_modules condensed)
    return dataclasses.replace(adapter, config=deepcopy(adapter.config))


def refusal(adapters: Sequence[Adapter], target: str, problems: Iterable[str]) -> AdapterError:
    """Return the error that says why adapters cannot be attached to ``target``."""
    names = ", ".join(f"{adapter.facts.source!r} (as {adapter.name!r})" for adapter in adapters)
    return AdapterError(f"{names} cannot be attached to {target}; nothing was changed:", problems)
