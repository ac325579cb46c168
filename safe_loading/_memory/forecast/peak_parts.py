"""The memory at the peak of a traced step: by component, by module, and in words. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from safe_loading._memory.trace.records import StepTrace, alive_after

from .report import COMPONENTS, ModuleMemory

_COMPONENT_OF = {
    "weights": "weights",
    "buffers": "weights",
    "adapters": "adapters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "saved_activations",
    "kv_cache": "kv_cache",
    "inputs": "temporary",
    "temporary": "temporary",
}
_CALLED = {"load": "weights alone", "optimizer": "optimizer's step", "evaluation": "evaluation"}


def components_at_peak(trace: StepTrace, device: int | str, workspaces: int, allocated: int) -> Mapping[str, int]:
    """Return the bytes of each component at the peak.

    The components sum to `allocated`, which is what the allocator counts at the peak: the rest is rounding.
    """
    parts = dict.fromkeys(COMPONENTS, 0)
    for component, size in trace.devices[device].at_peak.items():
        parts[_COMPONENT_OF[component]] += size
    parts["workspaces"] = workspaces
    parts["rounding"] = 0
    parts["rounding"] = allocated - sum(parts.values())
    return parts


def modules_at_peak(trace: StepTrace, device: int | str) -> tuple[ModuleMemory, ...]:
    """Return the modules down to the numbered ones, in the model's order, with their bytes at the peak."""
    sizes: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # weights, training, activations
    at_peak = alive_after(trace.events[: trace.devices[device].event + 1])
    for allocation in (trace.allocations[index] for index in at_peak):
        if allocation.device != device:
            continue
        component = _COMPONENT_OF[allocation.component]
        column = {"weights": 0, "adapters": 0, "gradients": 1, "optimizer": 1}.get(component, 2)
        sizes[_row_of(allocation.module)][column] += allocation.bytes
    return tuple(ModuleMemory(name, *row) for name, row in sizes.items())


def peak_in_words(trace: StepTrace, device: int | str) -> str:
    """Return when the peak is reached, as ``"backward pass, in model.layers.3"``."""
    use = trace.devices[device]
    phase = _CALLED.get(use.phase, f"{use.phase} pass")
    return f"{phase}, in {use.module}" if use.module else phase


def _row_of(name: str) -> str:
    """Return the module that stands for a path: down to the first number in it, or its first two parts."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:2])
