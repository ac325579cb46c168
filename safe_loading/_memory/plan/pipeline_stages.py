"""A plan as stages of a pipeline, for an engine that runs them on different ranks or nodes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safe_loading._core.parse_size import HOST, Device
from safe_loading.errors import ArgumentError


@dataclass(frozen=True)
class PlannedStage:
    """The modules of one stage.

    Attributes:
        device: The card that runs it.
        modules: Their names, in the order in which they run.
    """

    device: Device
    modules: tuple[str, ...]


def stages_of(device_map: Mapping[str, Device]) -> tuple[PlannedStage, ...]:
    """Return the stages of a map with its keys in the order in which modules run; refuse a map that is no pipeline."""
    runs: list[tuple[Device, list[str]]] = []
    for name, device in device_map.items():
        if not runs or runs[-1][0] != device:
            runs.append((device, []))
        runs[-1][1].append(name)
    problems = [f"{name} is on the {device}." for device, names in runs if device in HOST for name in names]
    if len({device for device, _ in runs}) == 1:
        problems = []  # one stage, wherever it runs
    first: dict[Device, list[str]] = {}
    for device, names in runs:
        if device in first and device not in HOST:
            problems.append(f"Device {device!r} has {first[device][-1]} and {names[0]}, and others run in between.")
        first[device] = names
    if problems:
        raise ArgumentError(
            "This plan is no pipeline, whose stages are runs of modules on a card each. Plan without offload=, and a "
            "model with tied weights from a config with tie_word_embeddings=False:",
            problems,
        )
    return tuple(PlannedStage(device, tuple(names)) for device, names in runs)
