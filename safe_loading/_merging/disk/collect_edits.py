"""The edits that adapters make to each parameter of their base, read from the base on meta with adapters attached."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora.layer import MultiheadAttention, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch.overrides import TorchFunctionMode

from safe_loading._core.names import without_peft_prefix
from safe_loading._core.report import Finding
from safe_loading._loading.adapter_values import Adapter, same_tensor
from safe_loading._loading.fill_slots import fill_slots
from safe_loading._loading.inject import Injection, inject_checked
from safe_loading._loading.peft_config import changes_base
from safe_loading._merging.weights.lora_layers import is_blocked, merge_targets
from safe_loading._merging.weights.other_tuners import TunerMerge, fill_constants, tuner_merges, why_not_merged_right
from safe_loading._merging.weights.update import Update
from safe_loading._merging.weights.variants import CannotMergeError, refuse_own_forward, why_computed
from safe_loading._model.peft_layers import (
    LoraModule,
    TunerModule,
    adapters_of,
    is_lora_layer,
    outermost_tuner_layers,
    without_peft_levels,
)
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.tensors import ModelTensor, inventory
from safe_loading._ranks.rank_devices import RankDevices

from .base_changing_init import BaseChangingInit, init_of
from .changes import IN_MEMORY, Edit, WeightChange

_CPU = torch.device("cpu")


def collect_edits(
    base: torch.nn.Module, adapters: Sequence[Adapter], weights: Mapping[str, float]
) -> tuple[list[Edit], list[str], list[Finding]]:
    """Attach the adapters to their base on meta; return an edit for each parameter they change, and all problems.

    The findings are of adapters whose files do not say in which order they hold their elements.

    Raises AdapterError when an adapter does not fit the base.
    """
    collector = _Collector(base)  # before peft puts its wrappers into the base, which rename the parameters
    model = _attach_all(base, adapters, collector)
    _scale(model, weights)
    collector.collect_modules(model, adapters)
    edits = [collector.finish(record) for record in collector.records.values()]
    return edits, collector.problems, collector.findings


@dataclasses.dataclass(eq=False)
class _ParameterRecord:
    """The changes to one parameter found so far while the adapters are read."""

    tensor: ModelTensor  # as the base has it
    # As in WeightChange, by the name of the base under which an adapter changes it:
    inits: list[BaseChangingInit] = dataclasses.field(default_factory=list)
    updates: dict[str, dict[tuple[int, ...], Update]] = dataclasses.field(default_factory=dict)
    rows: dict[str, dict[int, torch.Tensor]] = dataclasses.field(default_factory=dict)
    by_peft: dict[str, TunerMerge] = dataclasses.field(default_factory=dict)
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    # The names that modules_to_save replaces. peft copies such a module, so a tie does not carry its values on.
    saved_names: set[str] = dataclasses.field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        """All its names in the base; several when it is tied."""
        return self.tensor.names

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the base."""
        return tuple(self.tensor.tensor.shape)

    def change(self, name: str, value: torch.Tensor | None) -> WeightChange:
        """Return the change under one of its names; ``value`` replaces the parameter before any other change."""
        # A module that stands in several places of the base is known under the first of its names.
        place = self.tensor.places[self.names.index(name)]
        name = self.names[self.tensor.places.index(place)]
        own = self.updates.get(name, {}), self.rows.get(name, {}), self.by_peft.get(name)
        return WeightChange(value, tuple(self.inits), *own)

    def changed_modules(self) -> str:
        """Return the modules under which an adapter adds to it or replaces it, for a message."""
        names = {*self.updates, *self.rows, *self.by_peft, *self.saved_names} or {*self.values}
        return ", ".join(sorted(map(_module_of, names)))


class _Collector:
    """Collects the changes that adapters make to a base's parameters, before and after they are attached to it."""

    def __init__(self, base: torch.nn.Module) -> None:
        # By module and attribute: peft's MultiheadAttention replaces the base's Parameters whenever it is walked.
        self._parameters: dict[tuple[int, str], tuple[str, ModelTensor]] = {}
        for tensor in inventory(base):
            for name, (module, attribute) in zip(tensor.names, tensor.places, strict=True):
                self._parameters.setdefault((id(module), attribute), (name, tensor))
        self.records: dict[int, _ParameterRecord] = {}  # by the id of the parameter before peft came
        self.problems: list[str] = []
        self.findings: list[Finding] = []

    def collect_base_weights(self, injection: Injection) -> None:
        """Collect the weights of the base that an adapter's file brings along (trained biases, saved embeddings)."""
        modules = dict(injection.model.named_modules(remove_duplicate=False))
        for key, value in injection.routed.items():
            path, _, name = key.rpartition(".")
            if ".original_module." in f"{path}.":
                continue  # the base's own module, in whose place modules_to_save puts the adapter's
            if path in modules and (id(modules[path]), name) in self._parameters:
                self._replace(modules[path], name, path, value)

    def collect_modules(self, model: PeftModel, adapters: Sequence[Adapter]) -> None:
        """Collect the changes made to the base's parameters by the modules that peft put into it."""
        order = [adapter.name for adapter in adapters]
        nested: set[int] = set()
        for path, module in model.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                self._collect_saved_module(path, module, order)
            elif isinstance(module, TrainableTokensWrapper):
                self._collect_tokens(path, module, order)
            elif is_lora_layer(module) and id(module) not in nested:
                if isinstance(module, MultiheadAttention):  # it merges the LoRA layer of its output projection itself
                    nested.add(id(module.get_base_layer().out_proj))
                self._collect_updates(path, module, order)
                self._collect_inits(path, module, adapters)
        for path, layer in outermost_tuner_layers(model):
            if isinstance(layer, TrainableTokensLayer):  # of the method of that name, without a wrapper
                self._collect_token_rows(layer, layer.get_base_layer(), path, order)
            elif not is_lora_layer(layer):
                self._collect_by_peft(path, layer, order)

    def _collect_by_peft(self, path: str, layer: TunerModule, order: Sequence[str]) -> None:
        """Record the merges of one layer's tensors by a method other than LoRA."""
        base = layer.get_base_layer()
        left = fill_constants(layer)
        if left:
            self.problems.append(f"{path}: {', '.join(left)} of its {type(layer).__name__} is in no file. {IN_MEMORY}")
            return
        computed = [reason for attribute in ("weight", "bias") if (reason := why_computed(base, attribute))]
        wrong = why_not_merged_right(layer, [name for name in order if name in adapters_of(layer)])
        self.problems += [f"{path}: {reason}" for reason in (*computed, wrong) if reason]
        for attribute, merge in tuner_merges(layer, tuple(order)).items():
            name, record = self._record(base, attribute, path)
            if record is not None:
                record.by_peft[name] = merge

    def _collect_updates(self, path: str, layer: LoraModule, order: Sequence[str]) -> None:
        updates, problems = _layer_updates(path, layer, order)
        self.problems += problems
        for target, attribute, index, update in updates:
            name, record = self._record(target, attribute, path)
            if record is None:
                continue
            first = record.updates.setdefault(name, {}).setdefault(index, update)
            if not first.equals(update):
                self.problems.append(f"{name}: {path} and another layer change the same module. {IN_MEMORY}")

    def _collect_inits(self, path: str, layer: LoraModule, adapters: Sequence[Adapter]) -> None:
        """Record how the adapters changed the weight before training: once for all, as they are loaded."""
        for adapter in adapters:
            init = init_of(layer, adapter.name, adapter.config) if adapter.name in adapters_of(layer) else None
            _, record = ("", None) if init is None else self._record(layer.get_base_layer(), "weight", path)
            if init is None or record is None:
                continue
            if len(record.names) > 1 or record.values:
                self.problems.append(
                    f"{', '.join(record.names)}: its {init.kind} init cannot be repeated on a weight that is tied or "
                    f"replaced. {IN_MEMORY}"
                )
            if not record.inits:
                record.inits.append(init)
            elif not record.inits[0].is_like(init):
                self.problems.append(
                    f"{', '.join(record.names)}: the {record.inits[0].kind} init of one adapter and the {init.kind} "
                    f"init of another take different parts out of it, and each was trained without the other's. "
                    f"Merge one of them, or convert both to plain LoRAs where they were trained "
                    f"(save_pretrained(..., path_initial_model_for_weight_conversion=...))"
                )

    def _collect_saved_module(self, path: str, wrapper: ModulesToSaveWrapper, order: Sequence[str]) -> None:
        originals = dict(wrapper.original_module.named_modules())
        for name in order:
            if name not in wrapper.modules_to_save:
                continue
            copied: torch.nn.Module = wrapper.modules_to_save[name]
            parameters = copied.named_parameters(remove_duplicate=False)
            for key, value in (*parameters, *copied.named_buffers(remove_duplicate=False)):
                if value.is_meta:  # what the file need not hold, such as a buffer that is computed
                    continue
                inner, _, attribute = key.rpartition(".")
                self._replace(originals[inner], attribute, path, value, saved=True)

    def _collect_tokens(self, path: str, wrapper: TrainableTokensWrapper, order: Sequence[str]) -> None:
        self._collect_token_rows(wrapper.token_adapter, _innermost(wrapper.original_module), path, order)

    def _collect_token_rows(
        self, layer: TrainableTokensLayer, base: torch.nn.Module, path: str, order: Sequence[str]
    ) -> None:
        try:
            refuse_own_forward(base, replaces_rows=True)
        except CannotMergeError as reason:
            self.problems.append(f"{without_peft_levels(without_peft_prefix(path))}: {reason}")
        for name in order:
            if name not in layer.trainable_tokens_delta:
                continue
            known, record = self._record(base, "weight", path)
            if record is None:
                continue
            rows = record.rows.setdefault(known, {})
            count, last = base.weight.shape[0], max(layer.token_indices[name])  # type: ignore[index]
            if last >= count:
                self.problems.append(
                    f"{known}: the adapter trains row {last}, the base has {count} rows, and the adapter does not hold "
                    f"the weight with more. Load the base, call resize_token_embeddings({last + 1}) or with the size "
                    f"that it was trained with, save it, and merge into that"
                )
                continue
            for row, value in zip(layer.token_indices[name], layer.trainable_tokens_delta[name], strict=True):
                if not torch.equal(rows.setdefault(int(row), value.detach()), value):
                    self.problems.append(
                        f"{known}: row {row} is replaced twice, by different values (adapters {list(order)}). Merge "
                        f"one of them"
                    )

    def _replace(
        self, owner: torch.nn.Module, attribute: str, path: str, value: torch.Tensor, *, saved: bool = False
    ) -> None:
        name, record = self._record(owner, attribute, path)
        if record is None:
            return
        if not same_tensor(record.values.setdefault(name, value.detach()), value):
            self.problems.append(f"{name}: it is replaced twice, by different values")
        if saved:
            record.saved_names.add(name)

    def _record(self, owner: torch.nn.Module, attribute: str, path: str) -> tuple[str, _ParameterRecord | None]:
        """Return the name of a parameter of the base and its record; None for a tensor that is no parameter."""
        known = self._parameters.get((id(owner), attribute))
        if known is None:
            no_parameter = f"the adapter changes a tensor that is no parameter of the base. {IN_MEMORY}"
            self.problems.append(f"{path}: {why_computed(owner, attribute) or no_parameter}")
            return "", None
        name, tensor = known
        return name, self.records.setdefault(id(tensor.tensor), _ParameterRecord(tensor))

    def finish(self, record: _ParameterRecord) -> Edit:
        """Return the edit of a parameter: which of its names change alike, and which must be untied."""
        names = record.names
        value = next(reversed(record.values.values()), None)
        differ = value is not None and any(not same_tensor(other, value) for other in record.values.values())
        all_replaced = record.values.keys() == set(names)
        updated = bool(record.updates or record.rows or record.by_peft)
        alike = {name: record.change(name, value) for name in names}
        # The cases follow in the order of what is known: a saved module is the adapter's own copy, whatever the tie.
        if record.saved_names and (updated or (differ and not all_replaced)) and len(names) > 1:
            why = f"the adapter changes {record.changed_modules()} each in its own way"
            return Edit(names, record.shape, _own_changes(record), why)
        if differ and (updated or not all_replaced):
            self.problems.append(f"{', '.join(names)}: they are tied, and replaced by different values. {IN_MEMORY}")
            return Edit(names, record.shape, alike)
        if differ:
            return Edit(names, record.shape, _own_changes(record), "the adapter brings different content for each")
        if _is_tie_kept(record, alike):
            rows = next(iter(record.rows.values()), {})
            return Edit(names, record.shape, {name: dataclasses.replace(alike[name], rows=rows) for name in names})
        # What a file brings of the base itself is written over the parameter, under all of its names.
        changes = alike if value is not None and not record.saved_names else _own_changes(record)
        changed = {name: change for name, change in changes.items() if not change.is_empty}
        updated_names = record.updates.keys() | record.rows.keys() | record.by_peft.keys()
        how = "alone" if len(updated_names) == 1 else "each in its own way"
        return Edit(names, record.shape, changed, f"the adapter changes {record.changed_modules()} {how}")


def _is_tie_kept(record: _ParameterRecord, changes: Mapping[str, WeightChange]) -> bool:
    """Return whether all names of a parameter still share one tensor: the same is done under each of them."""
    if record.saved_names and not record.saved_names.issuperset(record.names):
        return len({_module_of(name) for name in record.names}) == 1
    first, *others = changes.values()
    return all(
        first.by_peft is other.by_peft
        and first.updates.keys() == other.updates.keys()
        and all(update.equals(other.updates[index]) for index, update in first.updates.items())
        and first.rows.keys() == other.rows.keys()
        and all(torch.equal(row, other.rows[index]) for index, row in first.rows.items())
        for other in others
    )


def _own_changes(record: _ParameterRecord) -> dict[str, WeightChange]:
    """Return the change under each name of a parameter whose names change separately."""
    changes = {name: record.change(name, record.values.get(name)) for name in record.names}
    return {name: change for name, change in changes.items() if not change.is_empty}


class _LayerUpdate(NamedTuple):
    """A layer's update of one matrix: the parameter's module and attribute, the matrix's index in it, the update."""

    module: torch.nn.Module
    attribute: str
    matrix: tuple[int, ...]
    update: Update


def _layer_updates(path: str, layer: LoraModule, order: Sequence[str]) -> tuple[list[_LayerUpdate], list[str]]:
    """Return the adapters' updates of one layer's parameters, and the reasons why an update cannot be merged."""
    names = [name for name in order if name in adapters_of(layer)]
    wraps_parameter = isinstance(layer, ParamWrapper)
    if not names:
        return [], []
    if not is_blocked(layer, names):
        kinds = [type(layer).__name__, *(type(variant).__name__ for variant in layer.lora_variant.values())]
        return [], [f"{path}: {' with '.join(kinds)} has a merge of its own, which needs the model. {IN_MEMORY}"]
    try:
        layer_targets = merge_targets(layer, names)
    except CannotMergeError as reason:
        return [], [f"{path}: {reason}"]
    updates = []
    for target in layer_targets:
        fused = wraps_parameter and target.tensor.dim() == 3  # the experts of one layer in one parameter
        for number, matrix in enumerate(target.matrices):
            update = _without_meta(matrix.update)
            updates.append(_LayerUpdate(target.owner, target.attribute, (number,) if fused else (), update))
    return updates, []


def _without_meta(update: Update) -> Update:
    """Return the update with real ones: those that multiply a bias are made on the base's device, which is meta."""
    terms = (
        dataclasses.replace(term, right=torch.ones(term.right.shape)) if term.right.is_meta else term
        for term in update.terms
    )
    return dataclasses.replace(update, terms=tuple(terms))


def _attach_all(base: torch.nn.Module, adapters: Iterable[Adapter], collector: _Collector) -> PeftModel:
    model = base
    for adapter in adapters:
        with _NoComparisonOnMeta():
            injection = inject_checked(model, _as_plain_lora(adapter), undo=[Snapshot(model)])
            # the factors are only read here, so one copy of an adapter in memory is enough
            fill_slots(injection.slots, injection.match.values, RankDevices(_CPU), None, copy=False)
        collector.collect_base_weights(injection)
        collector.findings += [found for found in injection.match.findings if found.code == "expert-packing-unknown"]
        model = injection.model
    if not isinstance(model, PeftModel):
        raise ValueError("a merge has at least one adapter")
    return model


def _scale(model: PeftModel, weights: Mapping[str, float]) -> None:
    """Multiply each adapter's scaling by its weight, as ``set_scale`` of peft's layers does."""
    for module in model.modules():
        if is_lora_layer(module):
            for name in weights.keys() & module.scaling.keys():
                module.scaling[name] *= weights[name]


def _as_plain_lora(adapter: Adapter) -> Adapter:
    """Return the adapter as one that needs no values of its base, which is on meta, and leaves it alone."""
    config = copy.deepcopy(adapter.config)
    settings = vars(config)
    if changes_base(config):  # PiSSA and OLoRA are repeated where the weights are read
        settings["init_lora_weights"] = True
    if settings.get("velora_config") is not None:  # its random start computes with values; they are in the file
        settings["velora_config"].init_type = "batch_average_once"
    return dataclasses.replace(adapter, config=config)


class _NoComparisonOnMeta(TorchFunctionMode):
    """Lets ``torch.equal`` with a tensor on meta be true, which torch refuses for want of values.

    Attaching compares a base weight that an adapter file brings along with the base's own. Here it is written to the
    output instead, whether it differs or not.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.equal and any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):
            return True
        return func(*args, **(kwargs or {}))


def _innermost(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module of the base that peft's layers are wrapped around."""
    inner = module
    while isinstance(base_layer := getattr(inner, "base_layer", None), torch.nn.Module):
        inner = base_layer
    return inner


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
