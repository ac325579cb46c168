"""What adapters do to each parameter of their base, read from a model on meta that has them attached."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

from safe_loading._adapter.attach import Adapter
from safe_loading._adapter.slots import route
from safe_loading._adapter.values import rename
from safe_loading._lora.update import Update
from safe_loading._merge_checkpoint.layers import inner_layers, layer_updates


@dataclasses.dataclass(eq=False)
class Edit:
    """Everything that happens to one parameter.

    Attributes:
        names: Its names in the base; several when it is tied.
        shape: Its shape.
        updates: What is added, to the matrix at each leading index: ``{(): ...}`` for a matrix, ``{(e,): ...}`` for
            the experts of a fused parameter.
        value: What replaces it whole, before anything is added; None when nothing does.
        rows: Single rows that are replaced after all else, by their number.
        said: Which names the adapters spoke of.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    updates: dict[tuple[int, ...], Update] = dataclasses.field(default_factory=dict)
    value: torch.Tensor | None = None
    rows: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    said: set[str] = dataclasses.field(default_factory=set)


class Edits:
    """The edits of all parameters, collected from an attached model.

    Args:
        names: The names of each parameter or buffer of the base, by ``id``, as they were before anything was attached.

    Attributes:
        by_id: The edits, by the ``id`` of the parameter.
        problems: What cannot be merged, a line each.
    """

    def __init__(self, names: Mapping[int, tuple[str, ...]]) -> None:
        self._names = names
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
        self._check_ties()

    def _layer(self, path: str, layer: LoraLayer, order: Sequence[str]) -> None:
        found, problems = layer_updates(path, layer, order)
        self.problems += problems
        for parameter, index, update in found:
            edit = self._of(parameter, path)
            if edit is not None and index in edit.updates:
                self.problems.append(f"{edit.names[0]}: two layers share this parameter, and both change it")
            elif edit is not None:
                edit.updates[index] = update

    def _of(self, parameter: torch.Tensor, path: str) -> Edit | None:
        names = self._names.get(id(parameter))
        if names is None:
            self.problems.append(f"{path}: the adapter changes a tensor that is no parameter of the base")
            return None
        edit = self.by_id.setdefault(id(parameter), Edit(names, tuple(parameter.shape)))
        edit.said.add(_plain(path))
        return edit

    def _base_writes(self, model: PeftModel, adapters: Sequence[Adapter]) -> None:
        """Take the weights of the base that the files bring along (trained biases, saved embeddings)."""
        own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        base = model.get_base_model()
        own_module = any(name == "module" for name, _ in base.named_children())
        for adapter in adapters:
            renamed, _, _ = rename(adapter.facts, adapter.tensors, prompt_learning=False, own_module=own_module)
            for key, value in route(model, adapter.name, renamed).tensors.items():
                tensor = own.get(key)
                if tensor is not None and id(tensor) in self._names:
                    self._replace(tensor, key.rpartition(".")[0], value)

    def _modules_to_save(self, path: str, module: Any, order: Sequence[str]) -> None:
        for name in order:
            if name not in module.modules_to_save:
                continue
            saved = module.modules_to_save[name]
            originals = dict(_tensors(module.original_module))
            for key, value in _tensors(saved):
                if value.is_meta:  # what the file need not hold, as a buffer that is computed
                    continue
                self._replace(originals[key], path, value)

    def _trainable_tokens(self, path: str, module: Any, order: Sequence[str]) -> None:
        layer = module.token_adapter
        for name in order:
            if name not in layer.trainable_tokens_delta:
                continue
            edit = self._of(_weight_below(module), path)
            if edit is None:
                continue
            for row, value in zip(layer.token_indices[name], layer.trainable_tokens_delta[name], strict=True):
                held = edit.rows.setdefault(int(row), value.detach())
                if not torch.equal(held, value):
                    self.problems.append(f"{edit.names[0]}: two adapters hold a different row {row}")

    def _replace(self, parameter: torch.Tensor, path: str, value: torch.Tensor) -> None:
        edit = self._of(parameter, path)
        if edit is None:
            return
        if edit.value is not None and not _equal(edit.value, value):
            self.problems.append(f"{edit.names[0]}: it is replaced twice, by different values")
        edit.value = value.detach()

    def _check_ties(self) -> None:
        """An edit of one of several tied modules would silently change the others."""
        for edit in self.by_id.values():
            modules = {name.rpartition(".")[0] for name in edit.names}
            if len(modules) == 1 or (edit.rows and not edit.updates and edit.value is None):
                continue  # trainable tokens: peft ties the rows of the output to those of the input itself
            if modules - edit.said:
                self.problems.append(
                    f"{edit.names[0]} is tied to {', '.join(sorted(edit.names[1:]))}, and the adapter changes it as "
                    f"{', '.join(sorted(edit.said))} alone: merging it would change the other too. Untie the base "
                    f"first (config.tie_word_embeddings = False, then save it), or train with ensure_weight_tying=True"
                )


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


def _weight_below(module: Any) -> torch.Tensor:
    inner = module.original_module
    while hasattr(inner, "base_layer"):
        inner = inner.base_layer
    weight: torch.Tensor = inner.weight
    return weight


def _plain(path: str) -> str:
    """Return the module's name in the base: peft's levels in between are left out."""
    parts = path.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module", "modules_to_save"))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
