"""``RankDevices``: the devices of one rank that a load puts its tensors on, most often one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from safe_loading._core.names import nearest, without_peft_prefix
from safe_loading._core.walk import walk_parameters
from safe_loading.errors import ArgumentError, DeviceError

from .device_guard import check_devices, one_device, own_device

DeviceMap = Mapping[str, "torch.device | str | int"]
"""A device for each module of the base, as for ``from_pretrained(device_map=...)``."""


@dataclasses.dataclass(frozen=True)
class RankDevices:
    """One device for everything, or a device for each module of the base."""

    main: torch.device  # the current one during a load; the inputs, and what belongs to no module, go there
    by_module: Mapping[str, torch.device] = dataclasses.field(default_factory=dict)  # empty for one device

    def __str__(self) -> str:
        """Name the devices, the main one first."""
        return ", ".join(dict.fromkeys(map(str, (self.main, *self.by_module.values()))))

    @property
    def are_several(self) -> bool:
        """Whether there is more than one."""
        return bool(self.by_module)

    def of(self, name: str) -> torch.device:
        """Return the device of the parameter or module of this name, in the base or in a PeftModel of it."""
        module = nearest(without_peft_prefix(name), self.by_module)
        return self.main if module is None else self.by_module[module]

    def without_device(self, names: Iterable[str]) -> list[str]:
        """Return those of the names in the base that the map has no device for."""
        return [name for name in names if self.are_several and nearest(name, self.by_module) is None]

    def check(self, model: torch.nn.Module) -> None:
        """Fail if a tensor of the model is on another device."""
        if not self.are_several:
            check_devices(model, self.main)
            return
        own = {self.main, *self.by_module.values()}
        tensors = (*model.named_parameters(), *model.named_buffers())
        problems = [f"{name} is on {tensor.device}" for name, tensor in tensors if tensor.device not in own]
        if problems:
            raise DeviceError(f"Not all tensors are on the devices of the map, {self}:", problems)


def rank_devices(device: torch.device | str | int | DeviceMap | None) -> RankDevices:
    """Return the devices that an argument ``device=`` names; an unusable one raises ArgumentError."""
    if not isinstance(device, Mapping):
        return RankDevices(own_device(device))
    if not device:
        raise ArgumentError("device_map={} maps no module; pass device=, or a map for all modules of the base.")
    offloaded = sorted(name for name, place in device.items() if str(place) in ("cpu", "disk"))
    if "disk" in map(str, device.values()) or 0 < len(offloaded) < len(device):
        raise ArgumentError(
            f"device= offloads {offloaded[:3]} ({len(offloaded)} of {len(device)} modules). A load puts everything on "
            f"accelerators: pass a map without 'cpu' and 'disk' (plan_device_map(..., offload='never')), or load with "
            f"from_pretrained(device_map=...) and PeftModel.from_pretrained."
        )
    places = {name: own_device(place) for name, place in device.items()}
    main = next(iter(places.values()))
    return RankDevices(main) if set(places.values()) == {main} else RankDevices(main, places)


def devices_of(model: torch.nn.Module) -> RankDevices:
    """Return the devices that a model is on: one, or those over which accelerate dispatched it."""
    found = getattr(model, "hf_device_map", None)
    places = set(map(str, found.values())) if isinstance(found, Mapping) else set()
    if len(places) < 2 or places & {"cpu", "disk"} or len({each.device for each in walk_parameters(model)}) < 2:
        return RankDevices(one_device(model))
    return rank_devices(found)
