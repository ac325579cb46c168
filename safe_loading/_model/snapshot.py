"""A snapshot of a module tree, which undoes what an engine changed in place when the call fails."""

from __future__ import annotations

import torch


class Snapshot:
    """The attributes of every module of ``model`` and the ``requires_grad`` of every parameter, to be restored.

    Tensors are kept by reference: only the data of those passed to :meth:`keep` is copied. Containers among the
    attributes (``_modules``, ``_parameters``, hooks, LoRA's ``scaling``, ...) are restored in place, because other
    objects may refer to them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        # The configs as well, to which peft writes (pretraining_tp); several modules may share one.
        configs = {id(config): config for module in modules if (config := vars(module).get("config"))}
        objects: list[object] = [*modules, *configs.values()]
        self._states = [(item, _copy_one_level(vars(item))) for item in objects if hasattr(item, "__dict__")]
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy a tensor's data to the host, because it is about to be overwritten."""
        self._data.append((tensor, tensor.detach().to("cpu", copy=True)))

    def restore(self) -> None:
        """Put every module back into the state in which it was."""
        for item, state in self._states:
            # Through __dict__, because setattr() and delattr() of nn.Module look into its registries first.
            attributes = vars(item)
            for name in [name for name in attributes if name not in state]:
                del attributes[name]
            for name, (value, content) in state.items():
                attributes[name] = value
                _refill(value, content)
        for parameter, requires_grad in self._requires_grad:
            parameter.requires_grad_(requires_grad)
        with torch.no_grad():
            # Of a tensor that was kept twice, the first copy holds the oldest values, so it is written last.
            for tensor, data in reversed(self._data):
                tensor.copy_(data)


def _copy_one_level(state: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Return each attribute, and a copy of it where it is a container."""
    return {
        name: (value, value.copy() if isinstance(value, (dict, list, set)) else None) for name, value in state.items()
    }


def _refill(container: object, content: object) -> None:
    if isinstance(container, list) and isinstance(content, list):
        container[:] = content
    elif isinstance(container, (dict, set)) and isinstance(content, (dict, set)):
        container.clear()
        container.update(content)
