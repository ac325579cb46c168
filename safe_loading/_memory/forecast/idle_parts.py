"""The parts of a model that did not run in a forecast step, such as a vision tower in a step of text, in words."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from safe_loading._core.names import first_names
from safe_loading._core.report import format_bytes
from safe_loading._memory.trace.records import StepTrace


def idle_parts(model: torch.nn.Module, trace: StepTrace, *, own_inputs: bool) -> tuple[str, ...]:
    """Return a sentence about the parts of several layers that did not run, if there are any.

    A single layer says nothing: attention and fused losses read its weight themselves. ``own_inputs`` says that the
    caller passed inputs.
    """
    idle = idle_modules(model, trace)
    if not idle:
        return ()
    size = sum(parameter.nbytes for part in idle.values() for parameter in part.parameters())
    with_what = "with these inputs" if own_inputs else "in a step of tokens alone; pass inputs= if yours has more"
    counted = f"The weights, {format_bytes(size)}, are counted, activations are not."
    return (f"{first_names(idle)} did not run {with_what}. {counted}",)


def idle_modules(model: torch.nn.Module, trace: StepTrace) -> dict[str, torch.nn.Module]:
    """Return the outermost parts of several layers in which nothing ran, by their paths."""
    called = [trace.own_name(name).split(".") for name, count in trace.calls.items() if count]
    busy = {".".join(path[:depth]) for path in called for depth in range(1, len(path) + 1)}
    return dict(_idle(model, "", busy)) if called else {}


def _idle(module: torch.nn.Module, path: str, busy: set[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost modules below ``path`` that hold several layers with weights and in which nothing ran."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if inner in busy:
            yield from _idle(child, inner, busy)
        elif sum(1 for layer in child.modules() if layer._parameters) > 1:
            yield inner, child
