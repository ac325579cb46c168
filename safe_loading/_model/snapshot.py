"""Undo for a module tree: what an engine changed in place is put back when the call is refused."""

from __future__ import annotations

from typing import Any

import torch


class Snapshot:
    """The attributes of every module of ``model`` and the ``requires_grad`` of every parameter, to be restored.

    Tensors are kept by reference: their data is not copied, but for those that :meth:`keep` is told of. Containers
    among the attributes (``_modules``, ``_parameters``, hooks, LoRA's ``scaling``, ...) are restored in place, since
    others may hold them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        objects: list[Any] = list(model.modules())
        # peft writes to the model's config too (pretraining_tp); it is no module
        objects += [
            config for config in {id(c): c for c in (vars(m).get("config") for m in objects)}.values() if config
        ]
        self._states = [(item, _copy_one_level(vars(item))) for item in objects if hasattr(item, "__dict__")]
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy a tensor's data to the host, since it is about to be overwritten."""
        self._data.append((tensor, tensor.detach().to("cpu", copy=True)))

    def restore(self) -> None:
        """Put every module back to what it was."""
        for item, state in self._states:
            now = vars(item)
            for name in [name for name in now if name not in state]:
                del now[name]
            for name, (value, content) in state.items():
                now[name] = value
                if content is not None:
                    _refill(value, content)
        for parameter, requires_grad in self._requires_grad:
            parameter.requires_grad_(requires_grad)
        with torch.no_grad():
            for tensor, data in reversed(self._data):
                tensor.copy_(data)


def _copy_one_level(state: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (value, value.copy() if isinstance(value, (dict, list, set)) else None) for name, value in state.items()
    }


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)
