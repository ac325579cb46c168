"""What adapters do to each parameter of their base, read from a model on meta that has them attached."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

from safe_loading._core.names import without_peft_prefix
from safe_loading._loading.adapter_values import rename_keys, same_tensor
from safe_loading._loading.attach import Adapter
from safe_loading._loading.slots import route
from safe_loading._merging.weights.lora_layers import adapters_of
from safe_loading._merging.weights.update import Update
from safe_loading._merging.weights.variants import CannotMergeError, refuse_own_forward
from safe_loading._merging.weights.writable_tensors import equal_updates

from .base_changing_init import BaseChangingInit, start_of
from .layer_updates import inner_layers, layer_updates


@dataclasses.dataclass(eq=False)
class Edit:
    """Everything that happens to one parameter.

    Attributes:
        names: Its names in the base; several when it is tied.
        shape: Its shape.
        updates: What is added, to the matrix at each leading index: ``{(): ...}`` for a matrix, ``{(e,): ...}`` for
            the experts of a fused parameter.
        starts: What adapters first take out of it.
        value: What replaces it whole, before anything is added; None when nothing does.
        rows: Single rows that are replaced after all else, by their number.
        said: The modules that the adapters spoke of.
        apart: The names under which it does not change, though it is tied to those that do.
        own: What replaces it under each of its names, where that differs, though they are tied in the base.
        each: The edit of each of its names, where some are replaced and others added to, though they are tied.
        summed: The modules under which it is added to, or rows of it are replaced.
        saved: The names under which a module of ``modules_to_save`` replaces it, which no tie carries to the others.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    updates: dict[tuple[int, ...], Update] = dataclasses.field(default_factory=dict)
    starts: list[BaseChangingInit] = dataclasses.field(default_factory=list)
    value: torch.Tensor | None = None
    rows: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    said: set[str] = dataclasses.field(default_factory=set)
    apart: tuple[str, ...] = ()
    own: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    each: dict[str, Edit] = dataclasses.field(default_factory=dict)
    summed: set[str] = dataclasses.field(default_factory=set)
    saved: set[str] = dataclasses.field(default_factory=set)

    def split(self) -> None:
        """Tell what happens under each name, where a saved module stands under one and others are added to."""
        for name in self.names:
            summed = name.rpartition(".")[0] in self.summed
            self.each[name] = dataclasses.replace(
                self,
                names=(name,),
                value=self.own.get(name),
                updates=self.updates if summed else {},
                rows=self.rows if summed else {},
                own={},
                each={},
            )
        self.own.clear()
        self.apart = tuple(
            name for name, edit in self.each.items() if edit.value is None and not edit.updates and not edit.rows
        )


class Edits:
    """The edits of all parameters, collected from an attached model.

    Args:
        base: The base, before anything is attached to it.

    Attributes:
        by_id: The edits, by the ``id`` that the parameter had then.
        problems: What cannot be merged, a line each.
    """

    def __init__(self, base: torch.nn.Module) -> None:
        names = names_of(base)
        # By its place too: peft's MultiheadAttention makes new Parameters of the base's whenever it is walked over.
        self._places = {
            (id(module), name): (id(tensor), names[id(tensor)], tensor.shape)
            for module in base.modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and id(tensor) in names
        }
        self._names = {
            (id(module), name): f"{path}.{name}".lstrip(".")
            for path, module in base.named_modules()
            for name in (*module._parameters, *module._buffers)
        }
        self.by_id: dict[int, Edit] = {}
        self.problems: list[str] = []

    def collect(self, model: PeftModel, adapters: Sequence[Adapter]) -> None:
        """Read everything that the adapters change."""
        order = [adapter.name for adapter in adapters]
        self._base_writes(model, adapters)
        inner: set[int] = set()
        for path, module in model.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                self._modules_to_save(path, module, order)
            elif isinstance(module, TrainableTokensWrapper):
                self._trainable_tokens(path, module, order)
            elif isinstance(module, LoraLayer) and id(module) not in inner:
                inner.update(map(id, inner_layers(module)))
                self._layer(path, module, order)
                self._starts(path, module, adapters)
        self._find_ties()

    def _layer(self, path: str, layer: LoraLayer, order: Sequence[str]) -> None:
        found, problems = layer_updates(path, layer, order)
        self.problems += problems
        for owner, attribute, index, update in found:
            edit = self._of(owner, attribute, path, adds=True)
            held = None if edit is None else edit.updates.setdefault(index, update)
            if edit is None or held is None or equal_updates(held, update):
                continue  # the same twice: ensure_weight_tying=True puts one adapter on both of two tied weights
            self.problems.append(
                f"{edit.names[0]}: two layers share this parameter, and the adapter changes it as "
                f"{', '.join(sorted(edit.said))} in different ways. Untie the base first "
                f"(config.tie_word_embeddings = False, then save it), or train with ensure_weight_tying=True"
            )

    def _starts(self, path: str, layer: Any, adapters: Sequence[Adapter]) -> None:
        """Note what the adapters took out of the weight before they were trained, one after the other."""
        for adapter in adapters:
            start = start_of(layer, adapter.name, adapter.config) if adapter.name in adapters_of(layer) else None
            edit = None if start is None else self._of(layer.get_base_layer(), "weight", path)
            if start is None or edit is None:
                continue
            if len(edit.names) > 1 or edit.value is not None:
                self.problems.append(f"{', '.join(edit.names)}: {start.kind} on a weight that is tied or replaced")
            edit.starts.append(start)

    def _of(self, owner: torch.nn.Module, attribute: str, path: str, *, adds: bool = False) -> Edit | None:
        place = self._places.get((id(owner), attribute))
        if place is None:
            self.problems.append(f"{path}: the adapter changes a tensor that is no parameter of the base")
            return None
        key, names, shape = place
        edit = self.by_id.setdefault(key, Edit(names, tuple(shape)))
        edit.said.add(_plain(path))
        if adds:
            edit.summed.add(_plain(path))
        return edit

    def _base_writes(self, model: PeftModel, adapters: Sequence[Adapter]) -> None:
        """Take the weights of the base that the files bring along (trained biases, saved embeddings)."""
        modules = dict(model.named_modules(remove_duplicate=False))
        base = model.get_base_model()
        own_module = any(name == "module" for name, _ in base.named_children())
        for adapter in adapters:
            renamed = rename_keys(adapter.facts, adapter.tensors, prompt_learning=False, own_module=own_module).tensors
            for key, value in route(model, adapter.name, renamed).tensors.items():
                path, _, name = key.rpartition(".")
                if path.endswith(".original_module"):
                    continue  # the base's own, beside the module of the adapter that stands in its place
                if path in modules and (id(modules[path]), name) in self._places:
                    self._replace(modules[path], name, path, value)

    def _modules_to_save(self, path: str, module: Any, order: Sequence[str]) -> None:
        originals = dict(module.original_module.named_modules())
        for name in order:
            if name not in module.modules_to_save:
                continue
            for key, value in _tensors(module.modules_to_save[name]):
                if value.is_meta:  # what the file need not hold, as a buffer that is computed
                    continue
                where, _, attribute = key.rpartition(".")
                self._replace(originals[where], attribute, path, value, saved=True)

    def _trainable_tokens(self, path: str, module: Any, order: Sequence[str]) -> None:
        layer = module.token_adapter
        try:
            refuse_own_forward(_base_below(module), replaces_rows=True)
        except CannotMergeError as reason:
            self.problems.append(f"{_plain(path)}: {reason}")
        for name in order:
            if name not in layer.trainable_tokens_delta:
                continue
            edit = self._of(_base_below(module), "weight", path, adds=True)
            if edit is None:
                continue
            for row, value in zip(layer.token_indices[name], layer.trainable_tokens_delta[name], strict=True):
                held = edit.rows.setdefault(int(row), value.detach())
                if not torch.equal(held, value):
                    self.problems.append(
                        f"{edit.names[0]}: row {row} is replaced twice, by different values "
                        f"({', '.join(sorted(edit.said))}; adapters {list(order)})"
                    )

    def _replace(
        self, owner: torch.nn.Module, attribute: str, path: str, value: torch.Tensor, *, saved: bool = False
    ) -> None:
        name = self._names.get((id(owner), attribute), f"{path}.{attribute}")
        edit = self._of(owner, attribute, name.rpartition(".")[0])  # path may be that of a module around it
        if edit is None:
            return
        if not same_tensor(edit.own.setdefault(name, value.detach()), value):
            self.problems.append(f"{name}: it is replaced twice, by different values")
        edit.value = value.detach()
        if saved:
            edit.saved.add(name)

    def _find_ties(self) -> None:
        """See which names of a tied parameter the adapters left out: those must not change with the others."""
        for edit in self.by_id.values():
            differ = any(not same_tensor(value, edit.value) for value in edit.own.values() if edit.value is not None)
            some = differ and edit.own.keys() != set(edit.names)
            if edit.saved and (edit.updates or edit.rows or some) and len(edit.names) > 1:
                edit.split()
                continue
            if not differ:
                edit.own.clear()
            elif edit.own.keys() != set(edit.names) or edit.updates or edit.rows:
                self.problems.append(f"{', '.join(edit.names)}: they are tied, and replaced by different values")
            if edit.rows and not edit.updates and edit.value is None:
                continue  # trainable tokens: peft ties the rows of the output to those of the input itself
            if not edit.saved and not edit.summed:
                continue  # weights of the base that a file brings are written over it, under all of their names
            modules = {name.rpartition(".")[0] for name in edit.names}
            if len(modules) > 1 and modules - edit.said:
                edit.apart = tuple(name for name in edit.names if name.rpartition(".")[0] not in edit.said)


def names_of(model: torch.nn.Module) -> dict[int, tuple[str, ...]]:
    """Return the names of each parameter and buffer, by ``id``."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return {key: tuple(found) for key, found in names.items()}


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _base_below(module: Any) -> torch.nn.Module:
    inner: torch.nn.Module = module.original_module
    while hasattr(inner, "base_layer"):
        inner = inner.base_layer  # type: ignore[assignment]  # a module
    return inner


def _plain(path: str) -> str:
    """Return the module's name in the base: peft's levels in between are left out."""
    parts = without_peft_prefix(path).split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module", "modules_to_save"))
