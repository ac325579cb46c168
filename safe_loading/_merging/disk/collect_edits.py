"""What adapters do to each parameter of their base, read from the base on meta with the adapters attached."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch.overrides import TorchFunctionMode

from safe_loading._core.names import without_peft_prefix
from safe_loading._loading.adapter_values import rename_keys, same_tensor
from safe_loading._loading.attach import Adapter, attach
from safe_loading._loading.peft_config import changes_base
from safe_loading._loading.slots import route
from safe_loading._merging.weights.lora_layers import adapters_of, is_blocked, merge_targets
from safe_loading._merging.weights.update import Update
from safe_loading._merging.weights.variants import CannotMergeError, refuse_own_forward
from safe_loading._merging.weights.writable_tensors import equal_updates
from safe_loading._model.peft_layers import is_lora_layer
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.tensors import ModelTensor, inventory

from .base_changing_init import BaseChangingInit, init_of
from .changes import Edit, WeightChange

_CPU = torch.device("cpu")
# The levels that peft puts between a module and its name in the base.
_PEFT_LEVELS = frozenset({"base_layer", "original_module", "modules_to_save"})


def collect_edits(base: torch.nn.Module, adapters: Sequence[Adapter]) -> tuple[list[Edit], list[str]]:
    """Attach the adapters to their base on meta; return an edit for each parameter they change, and all problems.

    Raises AdapterError when an adapter does not fit the base.
    """
    collector = _Collector(base)  # before peft puts its wrappers into the base, which rename the parameters
    model = _attach_all(base, adapters)
    collector.collect_base_weights(model, adapters)
    collector.collect_modules(model, adapters)
    edits = [collector.finish(record) for record in collector.records.values()]
    return edits, collector.problems


@dataclasses.dataclass(eq=False)
class _ParameterRecord:
    """What is known of one parameter while the adapters are read."""

    names: tuple[str, ...]  # in the base; several when it is tied
    shape: tuple[int, ...]
    # As in WeightChange:
    inits: list[BaseChangingInit] = dataclasses.field(default_factory=list)
    updates: dict[tuple[int, ...], Update] = dataclasses.field(default_factory=dict)
    rows: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # by the name that is replaced
    modules: set[str] = dataclasses.field(default_factory=set)  # under which an adapter changes it in any way
    updated_modules: set[str] = dataclasses.field(default_factory=set)  # under which it has updates or rows
    # The names that modules_to_save replaces. peft copies such a module, so a tie does not carry its values on.
    saved_names: set[str] = dataclasses.field(default_factory=set)

    def change(self, value: torch.Tensor | None, *, updated: bool) -> WeightChange:
        """Return the change with a value; ``updated`` says whether updates and rows belong to it."""
        inits = tuple(self.inits)
        return WeightChange(value, inits, self.updates, self.rows) if updated else WeightChange(value, inits)

    def named_modules(self) -> str:
        """Return the modules for a message."""
        return ", ".join(sorted(self.modules))


class _Collector:
    """Collects what adapters do to the parameters of a base, before and after they are attached to it."""

    def __init__(self, base: torch.nn.Module) -> None:
        # By module and attribute: peft's MultiheadAttention replaces the base's Parameters whenever it is walked.
        self._parameters: dict[tuple[int, str], tuple[str, ModelTensor]] = {}
        for tensor in inventory(base):
            for name, (module, attribute) in zip(tensor.names, tensor.places, strict=True):
                self._parameters.setdefault((id(module), attribute), (name, tensor))
        self.records: dict[int, _ParameterRecord] = {}  # by the id of the parameter before peft came
        self.problems: list[str] = []

    def collect_base_weights(self, model: PeftModel, adapters: Sequence[Adapter]) -> None:
        """Collect the weights of the base that adapter files bring along (trained biases, saved embeddings)."""
        modules = dict(model.named_modules(remove_duplicate=False))
        base = model.get_base_model()
        own_module = any(name == "module" for name, _ in base.named_children())
        for adapter in adapters:
            renamed = rename_keys(adapter.facts, adapter.tensors, prompt_learning=False, own_module=own_module).tensors
            for key, value in route(model, adapter.name, renamed).tensors.items():
                path, _, name = key.rpartition(".")
                if path.endswith(".original_module"):
                    continue  # the base's own module, in whose place modules_to_save puts the adapter's
                if path in modules and (id(modules[path]), name) in self._parameters:
                    self._replace(modules[path], name, path, value)

    def collect_modules(self, model: PeftModel, adapters: Sequence[Adapter]) -> None:
        """Collect what the modules that peft put into the base do to its parameters."""
        order = [adapter.name for adapter in adapters]
        nested: set[int] = set()
        for path, module in model.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                self._collect_saved_module(path, module, order)
            elif isinstance(module, TrainableTokensWrapper):
                self._collect_tokens(path, module, order)
            elif isinstance(module, LoraLayer) and id(module) not in nested:
                if type(module) is MultiheadAttention:  # it merges the LoRA layer of its output projection itself
                    nested.add(id(module.get_base_layer().out_proj))
                self._collect_updates(path, module, order)
                self._collect_inits(path, module, adapters)

    def _collect_updates(self, path: str, layer: LoraLayer, order: Sequence[str]) -> None:
        updates, problems = _layer_updates(path, layer, order)
        self.problems += problems
        for target, attribute, index, update in updates:
            record = self._record(target, attribute, path, updated=True)
            first = None if record is None else record.updates.setdefault(index, update)
            if record is None or first is None or equal_updates(first, update):
                continue  # the same twice: ensure_weight_tying=True puts one adapter on both of two tied weights
            self.problems.append(
                f"{record.names[0]}: two layers share this parameter, and the adapter changes it as "
                f"{record.named_modules()} in different ways. Untie the base first (config.tie_word_embeddings = "
                f"False, then save it), or train with ensure_weight_tying=True"
            )

    def _collect_inits(self, path: str, layer: LoraLayer, adapters: Sequence[Adapter]) -> None:
        """Note what the adapters subtracted from the weight before they were trained, one after the other."""
        for adapter in adapters:
            init = init_of(layer, adapter.name, adapter.config) if adapter.name in adapters_of(layer) else None
            record = None if init is None else self._record(layer.get_base_layer(), "weight", path)
            if init is None or record is None:
                continue
            if len(record.names) > 1 or record.values:
                self.problems.append(
                    f"{', '.join(record.names)}: its {init.kind} init cannot be repeated on a weight that is tied or "
                    f"replaced. Load the model, merge it with merge_lora_inplace and save it with save_pretrained"
                )
            record.inits.append(init)

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
        layer, base = wrapper.token_adapter, _innermost(wrapper.original_module)
        try:
            refuse_own_forward(base, replaces_rows=True)
        except CannotMergeError as reason:
            self.problems.append(f"{_base_name(path)}: {reason}")
        for name in order:
            if name not in layer.trainable_tokens_delta:
                continue
            record = self._record(base, "weight", path, updated=True)
            if record is None:
                continue
            for row, value in zip(layer.token_indices[name], layer.trainable_tokens_delta[name], strict=True):
                if not torch.equal(record.rows.setdefault(int(row), value.detach()), value):
                    self.problems.append(
                        f"{record.names[0]}: row {row} is replaced twice, by different values "
                        f"({record.named_modules()}; adapters {list(order)})"
                    )

    def _replace(
        self, owner: torch.nn.Module, attribute: str, path: str, value: torch.Tensor, *, saved: bool = False
    ) -> None:
        name, _ = self._parameters.get((id(owner), attribute), (f"{path}.{attribute}", None))
        record = self._record(owner, attribute, _module_of(name))  # path may be that of a module around it
        if record is None:
            return
        if not same_tensor(record.values.setdefault(name, value.detach()), value):
            self.problems.append(f"{name}: it is replaced twice, by different values")
        if saved:
            record.saved_names.add(name)

    def _record(
        self, owner: torch.nn.Module, attribute: str, path: str, *, updated: bool = False
    ) -> _ParameterRecord | None:
        known = self._parameters.get((id(owner), attribute))
        if known is None:
            self.problems.append(f"{path}: the adapter changes a tensor that is no parameter of the base")
            return None
        _, tensor = known
        record = self.records.setdefault(id(tensor.tensor), _ParameterRecord(tensor.names, tuple(tensor.tensor.shape)))
        record.modules.add(_base_name(path))
        if updated:
            record.updated_modules.add(_base_name(path))
        return record

    def finish(self, record: _ParameterRecord) -> Edit:
        """Return the edit of a parameter: which of its names change alike, and which must be untied."""
        value = next(reversed(record.values.values()), None)
        differ = value is not None and any(not same_tensor(other, value) for other in record.values.values())
        all_replaced = record.values.keys() == set(record.names)
        updated = bool(record.updates or record.rows)
        # The cases follow in the order of what is known: a saved module is the adapter's own copy, whatever the tie.
        tied = dict.fromkeys(record.names, record.change(value, updated=True))
        if record.saved_names and (updated or (differ and not all_replaced)) and len(record.names) > 1:
            why = f"the adapter changes {record.named_modules()} each in its own way"
            return Edit(record.names, record.shape, _each_name_alone(record), why)
        if differ and (updated or not all_replaced):
            self.problems.append(f"{', '.join(record.names)}: they are tied, and replaced by different values")
            return Edit(record.names, record.shape, tied)
        if differ:
            changes = {name: record.change(own, updated=False) for name, own in record.values.items()}
            return Edit(record.names, record.shape, changes, "the adapter brings different content for each")
        if _is_tie_kept(record):
            return Edit(record.names, record.shape, tied)
        changes = {name: change for name, change in tied.items() if _module_of(name) in record.modules}
        return Edit(record.names, record.shape, changes, f"the adapter changes {record.named_modules()} alone")


def _is_tie_kept(record: _ParameterRecord) -> bool:
    """Return whether all names of a parameter still share one tensor when each has the same change."""
    if record.rows and not record.updates and not record.values:
        return True  # trainable tokens: peft ties the rows of the output to those of the input itself
    if not record.saved_names and not record.updated_modules:
        return True  # weights of the base that a file brings are written over it, under all of their names
    modules = {_module_of(name) for name in record.names}
    return len(modules) == 1 or modules <= record.modules


def _each_name_alone(record: _ParameterRecord) -> dict[str, WeightChange]:
    """Return what happens under each name, where a saved module stands under one and others are added to."""
    changes = {}
    for name in record.names:
        updated = _module_of(name) in record.updated_modules
        change = record.change(record.values.get(name), updated=updated)
        if change.value is not None or change.updates or change.rows:
            changes[name] = change
    return changes


class _LayerUpdate(NamedTuple):
    """What a layer adds to a matrix: the parameter's module and attribute, the matrix's index in it, the update."""

    module: torch.nn.Module
    attribute: str
    matrix: tuple[int, ...]
    update: Update


def _layer_updates(path: str, layer: LoraLayer, order: Sequence[str]) -> tuple[list[_LayerUpdate], list[str]]:
    """Return what the adapters add to the parameters of one layer, and why something cannot be merged."""
    names = [name for name in order if name in adapters_of(layer)]
    wraps_parameter = type(layer) is ParamWrapper
    if not names or not is_lora_layer(layer):
        return [], []
    if not is_blocked(layer, names):
        kinds = [type(layer).__name__, *(type(variant).__name__ for variant in layer.lora_variant.values())]
        return [], [
            f"{path}: {' with '.join(kinds)} has a merge of its own, which needs the model. Load it, merge it with "
            f"merge_lora_inplace and save it with save_pretrained"
        ]
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


def _attach_all(base: torch.nn.Module, adapters: Iterable[Adapter]) -> PeftModel:
    model = base
    for adapter in adapters:
        with _NoComparisonOnMeta():
            # the factors are only read here, so one copy of an adapter in memory is enough
            model = attach(model, _as_plain_lora(adapter), _CPU, undo=[Snapshot(model)], copy=False).model
    if not isinstance(model, PeftModel):
        raise ValueError("a merge has at least one adapter")
    return model


def _as_plain_lora(adapter: Adapter) -> Adapter:
    """Return the adapter as one that leaves its base alone: PiSSA and OLoRA are repeated where the weights are read."""
    if not changes_base(adapter.config):
        return adapter
    config = copy.deepcopy(adapter.config)
    vars(config)["init_lora_weights"] = True
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


def _base_name(path: str) -> str:
    """Return a module's name in the base: without peft's prefix, and the levels that peft puts in between."""
    return ".".join(level for level in without_peft_prefix(path).split(".") if level not in _PEFT_LEVELS)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
