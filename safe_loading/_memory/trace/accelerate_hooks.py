"""What accelerate's hooks do at the boundaries of modules, on fake devices.

The rules are those of ``accelerate.dispatch_model`` (accelerate 1.15, ``hooks.py``): every module below an entry of the
map has its inputs sent to the entry's device, except arguments that the model asks to skip (its cache); the model's
outputs come back to the device of its inputs; an offloaded module runs on the main device, and each module with tensors
of its own has them brought there before its forward and dropped after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from safe_loading._core.names import PEFT_PREFIX, nearest, without_peft_prefix

from .ledger import Ledger, device_of

Key = int | str
OFFLOADED = ("cpu", "disk")


class TracePlacement:
    """Where everything is, and where it runs.

    Args:
        device_map: Module or tensor path to device key, as for ``device_map=`` of transformers; ``""`` is all the rest.
            None puts everything on device 0.
    """

    def __init__(self, device_map: Mapping[str, Key] | None) -> None:
        self.map: dict[str, Key] = dict(device_map) if device_map is not None else {"": 0}
        devices = set(self.map.values())
        running = devices - set(OFFLOADED)
        self.main: Key = next(iter(running)) if running else "cpu"  # as dispatch_model chooses
        self.hooked = len(devices) > 1 or "disk" in devices
        self._offloads = ("disk",) if self.main == "cpu" else OFFLOADED

    def entry(self, path: str) -> str | None:
        """Return the entry of the map that holds a module or tensor: the longest whole prefix."""
        if not any(key.startswith(PEFT_PREFIX) for key in self.map):
            path = without_peft_prefix(path)  # the map was made for the base model
        return nearest(path, self.map)

    def home(self, path: str) -> Key:
        """Return the device on which a tensor lies when nothing runs."""
        entry = self.entry(path)
        return self.map[entry] if entry is not None else self.main

    def offloaded(self, path: str) -> bool:
        """Return whether a module's tensors are brought to its device for each forward."""
        return self.hooked and self.home(path) in self._offloads

    def runs_on(self, path: str) -> Key:
        """Return the device on which a module runs."""
        return self.main if self.offloaded(path) else self.home(path)


def install(
    model: torch.nn.Module, placement: TracePlacement, ledger: Ledger, boundary: Callable[[bool], None]
) -> None:
    """Put the hooks on every module; the caller's snapshot takes them off."""
    skip: Any = getattr(model, "_skip_keys_device_placement", None)
    for name, module in model.named_modules():
        _accounts(name, module, ledger)
        if not placement.hooked:
            continue
        if name and placement.entry(name) is not None and _holds_tensors(module):
            device = device_of(placement.runs_on(name))
            _sends(module, device, skip, boundary)
            if placement.offloaded(name) and any(p is not None for p in module._parameters.values()):
                _stages(name, module, device, ledger, boundary)
        elif not name:
            _sends(module, device_of(placement.main), skip, boundary, back=True)


def _accounts(name: str, module: torch.nn.Module, ledger: Ledger) -> None:
    def enter(*_: Any) -> None:
        ledger.enter(name)

    def leave(*_: Any) -> None:
        ledger.leave(name)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def _holds_tensors(module: torch.nn.Module) -> bool:
    own = (held for part in module.modules() for held in (part._parameters, part._buffers))
    return any(tensor is not None for held in own for tensor in held.values())


def _sends(
    module: torch.nn.Module, device: torch.device, skip: Any, boundary: Callable[[bool], None], *, back: bool = False
) -> None:
    from accelerate.utils import find_device, send_to_device

    came_from: list[Any] = []

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        if back:
            came_from[:] = [find_device([args, kwargs])]
        boundary(True)
        try:
            return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=skip)
        finally:
            boundary(False)

    def after(_: Any, __: Any, output: Any) -> Any:
        if not came_from or came_from[0] is None:
            return None
        boundary(True)
        try:
            return send_to_device(output, came_from[0], skip_keys=skip)
        finally:
            boundary(False)

    module.register_forward_pre_hook(before, with_kwargs=True)
    if back:
        module.register_forward_hook(after)


def _stages(
    name: str, module: torch.nn.Module, device: torch.device, ledger: Ledger, boundary: Callable[[bool], None]
) -> None:
    """Bring the module's own parameters to the device for each forward."""
    host = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}

    def before(_: Any, __: Any) -> None:
        boundary(True)
        try:
            for key, parameter in host.items():
                there = parameter.detach().to(device)
                ledger.mark(ledger.number(there), "weights", module=name, op="staged")
                module._parameters[key] = torch.nn.Parameter(there, requires_grad=parameter.requires_grad)
        finally:
            boundary(False)

    def after(_: Any, __: Any, ___: Any) -> None:
        module._parameters.update(host)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
