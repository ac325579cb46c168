"""One fake step, and what happened in it: flags say what was wished, and the step says what is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from safe_loading._core.report import Finding, format_bytes
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.quantized.stand_ins import StandIn

from . import loss
from .subject import Subject


def check_step(subject: Subject, workload: Workload) -> Iterator[Finding]:
    """Yield findings about checkpointing, gradients, what 8-bit layers keep, what outlives the step, and the loss.

    Raises:
        TraceError: The model's own code cannot run without data.
    """
    as_it_is = workload.replace(gradient_checkpointing=False, optimizer="none")
    # a trainer calls model.train() before each step
    left = _left_alone(subject.model) if subject.trainer is None else contextlib.nullcontext()
    with left, loss.counting(subject) as count, _inputs_of_8_bits(subject.model) as inputs:
        trace = trace_step(subject.model, as_it_is)
    yield from _checkpointing(subject, workload, trace)
    yield from _kept_inputs(subject, workload, trace, inputs)
    yield from _gradients(subject, trace)
    yield from _survivors(trace)
    yield from loss.check_denominator(subject, workload, count)


def checkpointed(subject: Subject, trace: StepTrace) -> tuple[list[str], list[str]]:
    """Return the layers whose parts ran more often than they, and so were computed again, and all layers that ran."""
    layers = [n for n, m in subject.model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    ran = [name for name in layers if name in trace.calls]
    calls = trace.calls
    most = {name: max([n for part, n in calls.items() if part.startswith(f"{name}.")], default=0) for name in ran}
    return [name for name in ran if most[name] > calls[name] or calls[name] > 1], ran


def _checkpointing(subject: Subject, workload: Workload, trace: StepTrace) -> Iterator[Finding]:
    again, layers = checkpointed(subject, trace)
    arguments = getattr(subject.trainer, "args", None)
    later = workload.gradient_checkpointing or bool(getattr(arguments, "gradient_checkpointing", False))
    flagged = any(getattr(module, "gradient_checkpointing", False) for module in subject.model.modules())
    if not layers or len(again) == len(layers) or not (flagged or later):
        return
    can = callable(getattr(subject.model, "gradient_checkpointing_enable", None))
    if not flagged and later and can:
        return  # the trainer will switch it on, and can
    peaks = _peak(trace)
    training = all(subject.model.get_submodule(name).training for name in layers)
    cause = "its wrapper hides the switch" if training or subject.trainer is not None else "the model is in eval mode"
    with_it = _peak_with_checkpointing(subject, workload)
    saved = max(0, peaks - with_it) if with_it is not None else 0
    yield Finding(
        "SL120",
        "error",
        layers[0],
        f"checkpointing is asked for, and {len(again)} of {len(layers)} layers did it in one step"
        + (f": {format_bytes(peaks)} at the peak in place of {format_bytes(with_it)}" if with_it is not None else "")
        + f". The likely cause: {cause}.",
        "call model.train(), and gradient_checkpointing_enable() on the model that has the layers.",
        saved,
    )


def _kept_inputs(
    subject: Subject, workload: Workload, trace: StepTrace, inputs: dict[str, dict[int, int]]
) -> Iterator[Finding]:
    """bitsandbytes keeps the input of a layer in 8 bits on the graph's node, where checkpointing cannot drop it."""
    arguments = getattr(subject.trainer, "args", None)
    later = workload.gradient_checkpointing or bool(getattr(arguments, "gradient_checkpointing", False))
    if (getattr(arguments, "gradient_checkpointing_kwargs", None) or {}).get("use_reentrant"):
        return
    again, layers = checkpointed(subject, trace)
    inside = {n: kept for n, kept in inputs.items() if any(n.startswith(f"{a}.") for a in (layers if later else again))}
    size = sum({key: size for kept in inside.values() for key, size in kept.items()}.values())
    if size:
        yield Finding(
            "SL124",
            "warning",
            next(iter(inside)),
            f"{len(inside)} layers in 8 bits keep {format_bytes(size)} of inputs that checkpointing should drop.",
            "gradient_checkpointing_kwargs={'use_reentrant': True} and enable_input_require_grads(), or 4 bits.",
            size,
        )


@contextlib.contextmanager
def _inputs_of_8_bits(model: torch.nn.Module) -> Iterator[dict[str, dict[int, int]]]:
    """Note the storages that go into layers in 8 bits while a graph is built, and so are kept; not the recomputed."""
    found: dict[str, dict[int, int]] = {}

    def note(name: str, given: tuple[Any, ...]) -> None:
        recomputed = torch._C._current_graph_task_id() != -1  # inside a backward pass
        for tensor in () if recomputed else given[:1]:
            if tensor.requires_grad:
                storage = tensor.untyped_storage()
                found.setdefault(name, {})[storage._cdata] = storage.nbytes()

    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: note(name, given))
        for name, module in model.named_modules()
        if isinstance(module, StandIn) and hasattr(module, "scales")
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _peak_with_checkpointing(subject: Subject, workload: Workload) -> int | None:
    from safe_loading.errors import TraceError

    try:
        return _peak(trace_step(subject.inner, workload.replace(gradient_checkpointing=True, optimizer="none")))
    except TraceError:
        return None


def _gradients(subject: Subject, trace: StepTrace) -> Iterator[Finding]:
    trained = {id(p): p for p in subject.model.parameters() if p.requires_grad}
    reached = sum(block.component == "gradients" for block in trace.allocations)
    if trained and reached < len(trained):
        yield Finding(
            "SL121",
            "error" if reached == 0 else "warning",
            type(subject.model).__name__,
            f"{len(trained)} parameters are trainable, and {reached} got a gradient in one step.",
            "with reentrant checkpointing over a frozen base call enable_input_require_grads(); else look for a "
            "detach(), a no_grad() or a branch that is never taken.",
            sum(p.nbytes for p in trained.values()),
        )


def _survivors(trace: StepTrace) -> Iterator[Finding]:
    """What was made in the forward pass and is alive after the step: attributes, closures, lists of the model's."""
    freed = {event.allocation for event in trace.events if event.freed}
    left = [b for i, b in enumerate(trace.allocations) if i not in freed and b.phase in ("forward", "backward")]
    # numbers in 16 bits and more: small masks are kept by the trace itself, beside their true values
    left = [block for block in left if block.component in ("activations", "temporary") and block.dtype_bytes in (2, 4)]
    size = sum(block.bytes for block in left)
    if left:
        largest = max(left, key=lambda block: block.bytes)
        yield Finding(
            "SL122",
            "error",
            largest.module or "the model",
            f"{len(left)} tensors of the step, {format_bytes(size)}, are alive when it is over: something keeps them.",
            "look for self.last_output = ..., a list of losses, or a hook that stores what it sees; keep .detach()ed "
            "values on the CPU.",
            size,
        )


def _peak(trace: StepTrace) -> int:
    return next(iter(trace.devices.values())).peak_bytes


@contextlib.contextmanager
def _left_alone(model: torch.nn.Module) -> Iterator[None]:
    """Inside, ``model.train(mode)`` changes nothing, so that the step runs in the mode that the model is in."""
    held: Any = vars(model)
    held["train"] = lambda mode=True: model
    try:
        yield
    finally:
        del held["train"]
