"""Findings about a device map: units without a device, keys that name nothing, and crossings between devices."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from safe_loading._core.names import without_peft_prefix
from safe_loading._core.parse_size import Device
from safe_loading._core.report import Finding, counted
from safe_loading._memory.trace.accelerate_hooks import main_device
from safe_loading._memory.trace.records import Crossing

from .map_keys import device_of, running_device
from .module_tree import ModuleTree

_LEAST_MOVED = 1 << 16  # bytes from which on it is worth a finding that the model moves tensors itself


def not_proven_best(model: str, bounds: Iterable[str]) -> list[Finding]:
    """Return a finding where the search for a placement did not try every way."""
    reasons = "; ".join(sorted(bounds))
    message = f"keeps every limit, and a better placement may exist: {reasons}."
    fix = "none needed; limits that are equal, and fewer cards, leave fewer ways to try."
    return [Finding("not-proven-best", "info", model, message, fix)] if reasons else []


def incomplete_map(
    model: torch.nn.Module, tree: ModuleTree, device_map: Mapping[str, Device]
) -> tuple[list[Finding], str]:
    """Return findings for units without a device and for keys that name nothing, and the first error in few words.

    The engines pass over a key that names nothing. It is an error where a unit has no device, for then it may be the
    mistyped name of that unit; else a warning, as maps written for another release of a model have such keys.
    """
    findings: list[Finding] = []
    lost = [unit.path for unit in tree.units if device_of(unit.path, device_map) is None]
    if lost:
        message, fix = (
            f"{counted(len(lost), 'module or tensor has', 'modules or tensors have')} no device.",
            "name it in the map, or plan anew.",
        )
        findings.append(Finding("not-placed", "error", lost[0], message, fix))
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    names |= {without_peft_prefix(name) for name in names}
    for key in device_map:
        if key not in names:
            near = _nearest_name(key, names)
            fix = f"write {near!r}, or remove the key." if near else "remove the key."
            message = "the model has no module or tensor of this name."
            findings.append(Finding("unknown-key", "error" if lost else "warning", key, message, fix))
    return findings, f"no device for {lost[0]}" if lost else ""


def _nearest_name(key: str, names: Collection[str]) -> str | None:
    """Return the name that a key most likely means: one that ends with it or that it ends with, else the most alike."""
    same_end = [name for name in names if name and (f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}"))]
    if same_end:
        return min(same_end, key=lambda name: (abs(len(name) - len(key)), name))
    return next(iter(difflib.get_close_matches(key, names, n=1)), None)


def count_crossings(tree: ModuleTree, device_map: Mapping[str, Device], node_of: Mapping[Device, int]) -> list[int]:
    """Return how often the hidden state goes from one device to another, and how often from one node to another.

    What is offloaded runs on the main device.
    """
    devices = _running_devices(tree, device_map)
    changes = [(one, other) for one, other in pairwise(devices) if one != other]
    return [len(changes), sum(node_of.get(one) != node_of.get(other) for one, other in changes)]


def between_nodes(
    tree: ModuleTree, device_map: Mapping[str, Device], node_of: Mapping[Device, int], crossings: Sequence[Crossing]
) -> Iterator[Finding]:
    """Yield a finding for each link between cards of different nodes that the hidden state takes."""
    links: dict[tuple[Device, Device], int] = {}
    for one, other in pairwise(_running_devices(tree, device_map)):
        if node_of.get(one) != node_of.get(other):
            links[one, other] = 0
    for crossing in crossings:
        if (crossing.source, crossing.target) in links:
            links[crossing.source, crossing.target] += crossing.bytes
    for (one, other), size in links.items():
        message = f"the cards are on nodes {node_of.get(one)} and {node_of.get(other)}"
        message += f", and {size} bytes go between them in the traced step." if size else "."
        fix = "none needed; no placement that is as even has fewer links between nodes."
        yield Finding("between-nodes", "info", f"{one} -> {other}", message, fix, size)


def moved_by_the_model(crossings: Iterable[Crossing]) -> Iterator[Finding]:
    """Yield a finding for each module whose own code moves tensors between devices."""
    moved: dict[tuple[str, Device, Device], int] = {}
    for crossing in crossings:
        if crossing.in_model_code:
            key = (crossing.module, crossing.source, crossing.target)
            moved[key] = moved.get(key, 0) + crossing.bytes
    fix = "keep the modules that it reads together, with no_split_modules=."
    for (module, source, target), size in moved.items():
        if size >= _LEAST_MOVED:
            message = f"its own code moves {size} bytes from {source} to {target} in each step."
            yield Finding("moved-by-the-model", "warning", module, message, fix, size)


def _running_devices(tree: ModuleTree, device_map: Mapping[str, Device]) -> list[Device]:
    """Return the device that runs each unit; offloaded units run on the main one."""
    main = main_device(device_map.values())
    return [running_device(unit.path, device_map, main) for unit in tree.units]
