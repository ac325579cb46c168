"""A snapshot of a module tree, which undoes an engine's changes in place when the call fails."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from safe_loading._core.interrupts import finish
from safe_loading._core.walk import unordered_modules, walk_parameters

_ABSENT = object()


def take_idle_caches_off(model: torch.nn.Module) -> None:
    """Put plain dictionaries in place of caches that offload tensors by name, where these move nothing.

    A first forward pass that decodes weights leaves them in every module, on one device as well. They copy a tensor
    that is assigned to a name into the one that was there, so that nothing can be put aside and back.
    """
    for module in unordered_modules(model):
        cache: Any = module._parameters
        if type(cache) is dict or getattr(cache, "onload_device", None) != getattr(cache, "offload_device", ""):
            continue
        buffers: Any = module._buffers
        module._parameters, module._buffers = cache.offloaded_values, buffers.offloaded_values
        forward = vars(module).pop("_original_forward_func", None)
        if forward is type(module).forward:
            del module.forward
        elif forward is not None:
            module.__dict__["forward"] = forward.__get__(module)


class Snapshot:
    """The class and attributes of every module of ``model``, and ``requires_grad`` of every parameter, to be restored.

    Tensors are kept by reference: only the data of those passed to :meth:`keep` is copied. Containers among the
    attributes (``_modules``, ``_parameters``, hooks, LoRA's ``scaling``, ...) are restored in place, because other
    objects may refer to them.
    """

    def __init__(
        self, model: torch.nn.Module, modules: Iterable[torch.nn.Module] | None = None, *, others: Iterable[object] = ()
    ) -> None:
        """Keep the attributes of ``modules`` alone, if any are given, and the ``requires_grad`` of no parameter.

        ``others`` are objects, or dicts, that change with the model and are restored as its modules are.
        """
        modules, parameters = (unordered_modules(model), walk_parameters(model)) if modules is None else (modules, ())
        modules = list(modules)
        # The configs as well, to which peft writes (pretraining_tp); several modules may share one.
        configs = {id(config): config for module in modules if (config := vars(module).get("config"))}
        objects: list[object] = [*modules, *configs.values(), *others]
        objects = [item for item in objects if type(item) is dict or hasattr(item, "__dict__")]
        self._states = [(item, _ObjectState(_attributes_of(item))) for item in objects]
        self._classes = [(module, type(module)) for module in modules]  # to which transparent wrappers and FSDP2 add
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in parameters]
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._whole: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # a tensor, where it lay, and a copy

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy a tensor's data to the host, because it is about to be overwritten."""
        self._data.append((tensor, tensor.detach().to("cpu", copy=True)))

    def keep_whole(self, module: torch.nn.Module) -> None:
        """Keep the data of a small module, a head, in the memory where it lies: it may be moved, cast or filled."""
        tensors = [*module.parameters(), *module.buffers()]
        self._whole += [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors]

    def changes(self) -> Iterator[tuple[object, str]]:
        """Yield each module or config with an attribute that is another object since then, or has another content."""
        for item, state in self._states:
            for name in state.changes(_attributes_of(item)):
                yield item, name

    def restore(self) -> None:
        """Put every module back into the state in which it was; nothing interrupts that."""
        finish(self._restore)

    def _restore(self) -> None:
        for item, state in self._states:
            # Through __dict__, because setattr() and delattr() of nn.Module look into its registries first.
            state.restore(_attributes_of(item))
        for module, cls in self._classes:
            if type(module) is not cls:
                module.__class__ = cls
        for parameter, requires_grad in self._requires_grad:
            parameter.requires_grad_(requires_grad)
        with torch.no_grad():
            # Of a tensor that was kept twice, the first copy holds the oldest values, so it is written last.
            for tensor, data in reversed(self._data):
                tensor.copy_(data)
            for tensor, data, copy in self._whole:
                tensor.data = data
                tensor.copy_(copy)


def _attributes_of(item: object) -> dict[str, Any]:
    """Return the items of a plain dict, and the attributes of everything else."""
    return item if type(item) is dict else vars(item)


class _ObjectState:
    """The attributes of one object, and the content of those that are containers."""

    __slots__ = ("attributes", "contents", "empty")

    def __init__(self, attributes: dict[str, object]) -> None:
        self.attributes = attributes.copy()
        containers = [value for value in self.attributes.values() if isinstance(value, (dict, list, set))]
        # Most are the hooks and buffers that a module does not have, and a copy of each would be half the cost.
        self.empty = [value for value in containers if not value]
        self.contents = [(value, value.copy()) for value in containers if value]

    def changes(self, attributes: dict[str, object]) -> Iterator[str]:
        for name in self.attributes.keys() | attributes.keys():
            if name not in self.attributes or attributes.get(name, _ABSENT) is not self.attributes[name]:
                yield name
        changed = [container for container in self.empty if container]
        changed += [container for container, content in self.contents if not _equal_items(container, content)]
        for container in changed:
            yield from (name for name, value in self.attributes.items() if value is container)

    def restore(self, attributes: dict[str, object]) -> None:
        attributes.clear()
        attributes.update(self.attributes)
        for container in self.empty:
            container.clear()
        for container, content in self.contents:
            # What was not changed stays: some containers refuse to be written to (the configs of diffusers).
            if not _same_items(container, content):
                _refill(container, content)


def _equal_items(container: object, content: object) -> bool:
    return container == content if isinstance(container, set) else _same_items(container, content)


def _same_items(container: object, content: object) -> bool:
    """Return whether a container holds the same objects, in the same order, as its copy."""
    if isinstance(container, dict) and isinstance(content, dict):
        return list(container) == list(content) and all(container[key] is content[key] for key in content)
    if isinstance(container, list) and isinstance(content, list):
        return len(container) == len(content) and all(map(operator.is_, container, content))
    return False  # a set is refilled


def _refill(container: object, content: object) -> None:
    if isinstance(container, list) and isinstance(content, list):
        container[:] = content
    elif isinstance(container, (dict, set)) and isinstance(content, (dict, set)):
        container.clear()
        container.update(content)
