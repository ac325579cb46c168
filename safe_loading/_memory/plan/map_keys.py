"""Device maps: written from a device for each unit (complete, explicit, few keys), and read.

transformers matches a key against the *beginning* of a parameter's name, whole parts or not, and tries keys with more
dots and more letters first (``expand_device_map``). In a map whose keys cover every tensor exactly once, the longest
matching key is always the right one. So no key stands for "the rest": ``""`` next to other keys would match everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from safe_loading._core.names import ancestors, nearest
from safe_loading._core.parse_size import HOST, Device


def collapse(devices: Mapping[str, Device], apart: Collection[str] = ()) -> dict[str, Device]:
    """Return the map with as few keys as there can be: a module whose parts are all on one device is one key.

    The devices are those of the units by their paths, in the order in which the units run. The units that stand `apart`
    keep keys of their own where there is more than one device.
    """
    inside: dict[str, set[Device]] = {}
    for path, device in devices.items():
        for parent in _parents(path):
            inside.setdefault(parent, set()).add(device)
    collapsed: dict[str, Device] = {}
    for path, device in devices.items():
        around = [parent for parent in _parents(path) if len(inside[parent]) == 1]
        keeps_its_own = path in apart and "" not in around
        collapsed[path if keeps_its_own or not around else around[0]] = device
    return collapsed


def _parents(path: str) -> Sequence[str]:
    """Return the modules around a path, the root (``""``) first."""
    return [*ancestors(path)][:0:-1]


def device_of(name: str, device_map: Mapping[str, Device]) -> Device | None:
    """Return the device that a map gives to a parameter, a buffer or a module; None when it names none."""
    key = nearest(name, device_map)
    return device_map[key] if key is not None else None


def is_offloaded(device: Device | None, main: Device) -> bool:
    """Whether the modules on a device run on the main one: those on a host that does not compute."""
    return device in HOST and device != main


def running_device(name: str, device_map: Mapping[str, Device], main: Device) -> Device:
    """Return the device that runs a module: the main one if it is offloaded, as a whole or in part."""
    device = device_of(name, device_map)
    return main if device is None or is_offloaded(device, main) else device
