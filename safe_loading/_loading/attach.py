"""An adapter into a model: peft builds the structure, the file's tensors are placed exactly, a refusal undoes it."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftConfig, PeftModel

from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.report import Finding
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.stand_ins import MetaStandIns, NoInit
from safe_loading.errors import AdapterError, ArgumentError

from . import adapter_values as values
from . import fill_slots as place
from . import peft_config as configs
from .adapter_facts import AdapterFacts
from .match import Match, match
from .slots import AdapterSlot, RoutedTensors, held, new_slots, route


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter that has been read and looked at, ready to be attached to a model.

    Attributes:
        name: The name that it gets in the model.
        facts: What its folder says.
        config: peft's config of it.
        tensors: Its tensors on the host, by their key on disk.
        findings: What is wrong or noteworthy about it, whatever the model.
    """

    name: str
    facts: AdapterFacts
    config: PeftConfig
    tensors: dict[str, torch.Tensor]
    findings: tuple[Finding, ...]

    @property
    def where(self) -> str:
        """The file, for findings."""
        return str(self.facts.weights)


@dataclasses.dataclass(frozen=True)
class Attached:
    """What attaching did: the model, and what there is to report about the adapter."""

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
        """Count the adapter's tensors, one that stands in several places once."""
        made = {id(tensor): tensor for tensor in tensors}.values()
        dtypes = dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in made))
        return cls(model, findings, dtypes, len(made), sum(tensor.nbytes for tensor in made), renamed)


def prepare(name: str, facts: AdapterFacts, *, is_trainable: bool) -> Adapter:
    """Read an adapter's config and tensors and look at their values."""
    config, findings = configs.build_config(facts, is_trainable=is_trainable)
    tensors = values.read_tensors(facts)
    return Adapter(name, facts, config, tensors, (*findings, *values.value_findings(facts, tensors)))


def check_adapter_name(name: str) -> None:
    """Refuse a name that peft cannot keep.

    Raises:
        ArgumentError: The name is empty, has a dot (it becomes an attribute), or is part of a parameter's name.
    """
    if not isinstance(name, str) or not name or "." in name:
        raise ArgumentError(f"{name!r} is no adapter name: it must be a string without dots.")
    taken = name in ("lora_", "lora", "lora_A", "lora_B", "base_layer", "weight")
    if taken or hasattr(torch.nn.ModuleDict(), name):
        raise ArgumentError(f"{name!r} is a name that peft or torch gives to a part of a module; choose another.")


def check(skeleton: torch.nn.Module, adapters: list[Adapter]) -> None:
    """Attach the adapters to a model on meta, to find what does not fit before the base is loaded.

    Raises:
        AdapterError: What does not fit, of every adapter.
    """
    problems: list[str] = []
    model = skeleton
    for adapter in adapters:
        if not configs.can_start_empty(adapter.config):
            continue  # needs the base's values; checked when it is attached
        fresh = dataclasses.replace(adapter, config=_copy(adapter.config))
        try:
            model, found, _, _ = _structure(model, fresh, hollow=True)
        except AdapterError as error:
            problems += error.problems or [str(error)]
            continue
        problems += [str(finding) for finding in (*adapter.findings, *found.findings) if finding.severity == "error"]
    if problems:
        raise AdapterError(title(adapters, type(skeleton).__name__), problems)


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

    Args:
        model: Where it goes. When this raises, restoring the snapshots makes it what it was.
        adapter: What goes there.
        device: Where its tensors land.
        undo: A snapshot of ``model`` as it is now, then earlier ones; told of base weights that are overwritten.
        dtype: Their dtype; None leaves each as it is on disk.
        strict: Whether a finding of severity "error" refuses the adapter.
        copy: Whether the model gets tensors of its own; without it, those of the adapter, where none must be moved.

    Raises:
        AdapterError: It does not fit; every reason is in ``problems``.
    """
    # Other methods compute what they freeze (VeRA's projections, a prompt's start) from values that meta has not.
    hollow = configs.can_start_empty(adapter.config)
    config = _copy(adapter.config)
    wrapped, found, slots, renamed = _structure(model, adapter, hollow=hollow)
    errors = [finding for finding in (*adapter.findings, *found.findings) if finding.severity == "error"]
    if errors and (strict or not (found.values or adapter.config.is_prompt_learning)):
        raise AdapterError(title([adapter], type(_base(model)).__name__), map(str, errors))
    if hollow and _needs_real_start(adapter, found, slots):
        undo[0].restore()
        again = dataclasses.replace(adapter, config=config)
        wrapped, found, slots, renamed = _structure(model, again, hollow=False)
    place.fill(slots, found.values, device, dtype, copy=copy)
    written = place.write_base(wrapped, found.base_writes, adapter.where, undo)
    now = (held(slot.owner, slot.name) for slot in slots.values())
    made = [tensor for tensor in now if tensor is not None]
    return Attached.of(wrapped, [*adapter.findings, *found.findings, *written], made, renamed)


def _structure(
    model: torch.nn.Module, adapter: Adapter, *, hollow: bool
) -> tuple[PeftModel, Match, dict[str, AdapterSlot], dict[str, str]]:
    """Let peft build the adapter's modules, and pair the file's tensors with them."""
    base = _base(model)
    embeddings = _embeddings(base)
    config = adapter.config
    tensors, renamed, said = values.rename(
        adapter.facts,
        adapter.tensors,
        prompt_learning=config.is_prompt_learning,
        own_module=any(name == "module" for name, _ in base.named_children()),
    )
    before = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with quiet(), _initialization(config, skip=hollow):
        if hollow:
            with MetaStandIns(model), torch.device("meta"), NoInit():
                wrapped = _inject(model, config, adapter)
        else:
            wrapped = _inject(model, config, adapter)
    slots = new_slots(wrapped, before)
    if config.is_prompt_learning:
        # the encoder loads its own state there; nothing of it goes through a state-dict key
        _route(wrapped, adapter, tensors)
        return wrapped, Match({}, {}, said), slots, renamed
    found = match(wrapped, config, adapter.where, slots, _route(wrapped, adapter, tensors), embeddings)
    found.findings[:0] = said
    return wrapped, found, slots, renamed


def _inject(model: torch.nn.Module, config: PeftConfig, adapter: Adapter) -> PeftModel:
    name = adapter.name
    try:
        if isinstance(model, PeftModel):
            model.add_adapter(name, config, autocast_adapter_dtype=False)
            return model
        peft_class = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(str(config.task_type), PeftModel)
        return peft_class(model, config, adapter_name=name, autocast_adapter_dtype=False)
    except (ValueError, TypeError, NotImplementedError, AttributeError, KeyError, re.error) as error:
        raise AdapterError(
            f"{adapter.facts.folder / ADAPTER_CONFIG}: peft cannot put {name!r} on {type(_base(model)).__name__}: "
            f"{error}"
        ) from error


def _route(model: PeftModel, adapter: Adapter, tensors: dict[str, torch.Tensor]) -> RoutedTensors:
    try:
        return route(model, adapter.name, tensors)
    except (KeyError, RuntimeError, ValueError) as error:
        raise AdapterError(f"peft cannot map the tensors of {adapter.where} to the model: {error}") from error


def _needs_real_start(adapter: Adapter, found: Match, slots: dict[str, AdapterSlot]) -> bool:
    if configs.changes_base(adapter.config) or found.uncovered:
        return True
    # what peft computes from the base's values and no file holds: trainable tokens keep the original rows
    return any(slot.tensor.is_meta and key not in found.values and not slot.is_parameter for key, slot in slots.items())


@contextmanager
def _initialization(config: PeftConfig, *, skip: bool) -> Iterator[None]:
    """On meta, leave out the starts that factorise the base's weight: every tensor of theirs is in the file."""
    if not (skip and configs.changes_base(config)):
        yield
        return
    settings = vars(config)  # the field is LoRA's; the base class does not declare it
    asked = settings["init_lora_weights"]
    settings["init_lora_weights"] = False
    try:
        yield
    finally:
        settings["init_lora_weights"] = asked


@contextmanager
def quiet() -> Iterator[None]:
    """Hush the engines: what they would warn of is a finding here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _base(model: torch.nn.Module) -> torch.nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _embeddings(base: torch.nn.Module) -> list[torch.Tensor]:
    return [weight for weight in embeddings_and_head_of(base).weights if weight is not None]


def _copy(config: PeftConfig) -> PeftConfig:
    # peft rewrites a config while it injects (v4 expert names to v5, target_modules condensed)
    return copy.deepcopy(config)


def title(adapters: list[Adapter], model: str) -> str:
    named = ", ".join(f"{adapter.facts.source!r} (as {adapter.name!r})" for adapter in adapters)
    return f"{named} cannot be attached to {model}; nothing was changed:"
