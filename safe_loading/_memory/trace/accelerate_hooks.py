"""Imitates accelerate's hooks at the boundaries of modules, on fake devices.

The rules are those of ``accelerate.dispatch_model`` (accelerate 1.15, ``hooks.py``): a module with an entry in the
device map, and every one with tensors below it, has its inputs sent to the entry's device, except arguments that the
model asks to skip (its cache); the model's outputs come back to the device of its inputs; the tensors that the model
itself holds go to the main device, whatever the map says of them; an offloaded module runs on the main device, and each
module with tensors of its own has them copied there before its forward and dropped after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook

from safe_loading._core.names import nearest
from safe_loading._core.parse_size import HOST, Device

from .ledger import Ledger, fake_device

InHook = Callable[[], AbstractContextManager[None]]


class TracePlacement:
    """Where every tensor is stored, and where every module runs.

    The device map is one of transformers, whose ``""`` is all the rest; None puts everything on device 0. With
    `offload_buffers`, buffers that are saved are offloaded as parameters are. With `attached_there` the buffers that an
    adapter leaves on the host are in `left_on_host`, which is None otherwise.
    """

    def __init__(self, device_map: Mapping[str, Device] | None, *, offload_buffers: bool, attached_there: bool) -> None:
        self.offload_buffers = offload_buffers
        self.left_on_host: set[str] | None = set() if attached_there else None
        self.map: dict[str, Device] = dict(device_map) if device_map is not None else {"": 0}
        devices = set(self.map.values())
        self.main = main_device(self.map.values())
        # for a single device dispatch_model only moves the model, but disk weights always need hooks that load them
        self.hooked = len(devices) > 1 or "disk" in devices
        # a model that runs on the CPU has its "cpu" modules where they run
        self._offloads = ("disk",) if self.main == "cpu" else HOST
        self.around = ""  # what stands before the names of the map's modules, once an adapter is around them

    def entry(self, path: str) -> str | None:
        """Return the entry of the map that a module or tensor belongs to: the longest whole prefix of its path."""
        return nearest(path.removeprefix(self.around), self.map)

    def moves_to_main(self, owner: str) -> bool:
        """Return whether a module's own tensors go to the main device: those of the model that the map is for do."""
        return self.hooked and owner in ("", self.around.removesuffix("."))

    def stored_on(self, path: str) -> Device:
        """Return the device that stores a tensor while nothing runs."""
        entry = self.entry(path)
        return self.map[entry] if entry is not None else self.main

    def is_entry(self, path: str) -> bool:
        """Return whether a module has an entry of its own."""
        return path.removeprefix(self.around) in self.map

    def is_offloaded(self, path: str) -> bool:
        """Return whether a module's tensors are copied to its device for each forward."""
        return self.hooked and self.stored_on(path) in self._offloads

    def runs_on(self, path: str) -> Device:
        """Return the device on which a module runs."""
        return self.main if self.is_offloaded(path) else self.stored_on(path)


def main_device(devices: Iterable[Device]) -> Device:
    """Return the device for offloaded modules, of those in a map: ``accelerate.dispatch_model``'s choice.

    It takes the first element of a set, which for integers below 8 is the smallest; the set {2, 9} starts with 9.
    """
    return next(iter(set(devices) - set(HOST)), "cpu")


def install_hooks(
    model: torch.nn.Module,
    placement: TracePlacement,
    ledger: Ledger,
    in_hook: InHook,
    never_called: Collection[torch.nn.Module],
) -> None:
    """Register the hooks on every module that may be called; the caller's snapshot of the model removes them."""
    skip_keys: object = getattr(model, "_skip_keys_device_placement", None)
    offloaded = {
        module: name for name, module in model.named_modules() if has_tensors(module) and placement.is_offloaded(name)
    }
    for name, module in model.named_modules():
        if module not in never_called:
            _note_calls(name, module, ledger)
        if not placement.hooked:
            continue
        if name and (placement.is_entry(name) or (placement.entry(name) is not None and has_tensors(module))):
            device = fake_device(placement.runs_on(name))
            _send_inputs(module, device, skip_keys, in_hook, offloaded)
            if placement.is_offloaded(name):
                _load_for_forward(name, module, device, ledger, in_hook, with_buffers=placement.offload_buffers)
        elif not name:  # io_same_device=True, which dispatch_model sets for the model as a whole
            _send_inputs(module, fake_device(placement.main), skip_keys, in_hook, offloaded, outputs_back=True)


def _note_calls(name: str, module: torch.nn.Module, ledger: Ledger) -> None:
    # prepended, so that what other hooks bring in counts to the module; always called, since checkpointing ends a
    # recomputation with an exception
    module.register_forward_pre_hook(lambda *_: ledger.enter(name), prepend=True)
    module.register_forward_hook(lambda *_: ledger.leave(name), always_call=True)


def has_tensors(module: torch.nn.Module) -> bool:
    """Return whether a module, or any module inside it, has a parameter or a buffer."""
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))


def _send_inputs(
    module: torch.nn.Module,
    device: torch.device,
    skip_keys: object,
    in_hook: InHook,
    offloaded: Mapping[torch.nn.Module, str],
    *,
    outputs_back: bool = False,
) -> None:
    """Send a module's inputs to a device, and its outputs back to where the inputs came from if asked to."""
    from accelerate.utils import find_device, send_to_device

    came_from: list[torch.device | None] = []

    def before(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, Any]:
        if outputs_back:
            came_from[:] = [find_device([args, kwargs])]
        # as DoRA's magnitudes get the layer around them
        modules = {key: value for key, value in kwargs.items() if isinstance(value, torch.nn.Module)}
        for key, given in modules.items():
            _refuse_to_move(key, given, offloaded)
        there = {key: given for key, given in modules.items() if _is_on(given, device)}
        kwargs = {key: value for key, value in kwargs.items() if key not in there}
        with in_hook():
            return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=skip_keys) | there

    def after(_: object, __: object, output: object) -> object:
        if not came_from or came_from[0] is None:
            return None
        with in_hook():
            return send_to_device(output, came_from[0], skip_keys=skip_keys)

    module.register_forward_pre_hook(before, with_kwargs=True)
    if outputs_back:
        module.register_forward_hook(after)


def _refuse_to_move(key: str, given: torch.nn.Module, offloaded: Mapping[torch.nn.Module, str]) -> None:
    """Raise for a module that is offloaded and is an input of another one: the hook calls its ``to``, which fails."""
    if given in offloaded:
        raise RuntimeError(
            f"its {key} is offloaded ({offloaded[given]}), and its tensors are on meta unless it runs. The step itself "
            f"raises this, too"
        )


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    """Whether all tensors of a module are on a device: to move it there does nothing, and cannot be done with fakes."""
    return all(tensor.device == device for tensor in itertools.chain(module.parameters(), module.buffers()))


def _load_for_forward(
    name: str, module: torch.nn.Module, device: torch.device, ledger: Ledger, in_hook: InHook, *, with_buffers: bool
) -> None:
    """Copy an offloaded module's own parameters, and saved buffers if these are offloaded, there for each forward."""
    parameters = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    buffers = {
        key: buffer
        for key, buffer in module._buffers.items()
        if with_buffers and buffer is not None and key not in module._non_persistent_buffers_set
    }
    if not parameters and not buffers:
        return

    def before(_: object, __: object) -> None:
        with in_hook():
            for key, parameter in parameters.items():
                # the copy is a weight of this module for as long as the forward runs
                copy = parameter.detach().to(device)
                ledger.classify(copy, "weights", module=name, op="staged")
                module._parameters[key] = torch.nn.Parameter(copy, requires_grad=parameter.requires_grad)
            for key, buffer in buffers.items():
                copy = module._buffers[key] = buffer.to(device)
                ledger.classify(copy, "weights", module=name, op="staged")

    def after(*_: object) -> None:
        module._parameters.update(parameters)
        module._buffers.update(buffers)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def take_hooks_off(model: torch.nn.Module) -> tuple[str, ...]:
    """Let no hook of ``dispatch_model`` or ``cpu_offload`` move tensors, until the caller puts ``forward`` back.

    Returns:
        What a trace of the model on one device assumes then; empty where nothing was hooked.
    """
    hooked = [m for m in model.modules() if "_old_forward" in vars(m) and _only_moves(vars(m).get("_hf_hook"))]
    for module in hooked:
        vars(module)["forward"] = vars(module)["_old_forward"]
    if not hooked:
        return ()
    return (
        f"accelerate has dispatched {type(model).__name__}: the figures are of one device that holds all of it, and "
        f"those of each device are in plan_device_map(...).devices",
    )


def _only_moves(hook: ModelHook | None) -> bool:
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return all(isinstance(each, AlignDevicesHook) for each in hooks)
