"""Checks on a traced step: the configuration says what was intended, the trace shows what happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from safe_loading._core.report import Finding, format_bytes
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.quantized.stand_ins import StandIn
from safe_loading.errors import TraceError

from .audited_model import AuditedModel
from .loss import check_denominator, watching_token_count

_LayerInputs = dict[str, dict[int, int]]  # by layer: the bytes of the storages that it keeps, by their addresses


def check_step(audited: AuditedModel, workload: Workload) -> Iterator[Finding]:
    """Yield findings about checkpointing, inputs of 8-bit layers, gradients, what outlives the step, and the loss.

    Raises `TraceError` where the model's own code cannot run without data.
    """
    as_configured = workload.replace(gradient_checkpointing=False, optimizer="none")
    # a trainer calls model.train() before each step; without one the step runs in the mode that the model is in
    mode = contextlib.nullcontext() if audited.trainer is not None else _mode_kept(audited.model)
    with mode, watching_token_count(audited) as token_count, _inputs_of_8bit_layers(audited.model) as inputs:
        trace = trace_step(audited.model, as_configured)
    yield from _check_checkpointing(audited, workload, trace)
    yield from _check_8bit_inputs(audited, workload, trace, inputs)
    yield from _check_gradients(audited, trace)
    yield from _check_survivors(trace)
    yield from check_denominator(audited, workload, token_count)


def _checkpointed_layers(audited: AuditedModel, trace: StepTrace) -> tuple[list[str], list[str]]:
    """Return the layers that were recomputed, and all layers that ran."""
    calls = trace.calls
    layers = [n for n, m in audited.model.named_modules() if isinstance(m, GradientCheckpointingLayer) and n in calls]
    # a recomputation enters the layer itself again, or only the modules inside it
    inside = {name: max((n for m, n in calls.items() if m.startswith(f"{name}.")), default=0) for name in layers}
    return [name for name in layers if inside[name] > calls[name] or calls[name] > 1], layers


def _wants_checkpointing(audited: AuditedModel, workload: Workload) -> bool:
    in_arguments = getattr(audited.training_arguments, "gradient_checkpointing", False)
    return workload.gradient_checkpointing or bool(in_arguments)


def _check_checkpointing(audited: AuditedModel, workload: Workload, trace: StepTrace) -> Iterator[Finding]:
    recomputed, layers = _checkpointed_layers(audited, trace)
    planned = _wants_checkpointing(audited, workload)
    switched_on = any(getattr(module, "gradient_checkpointing", False) for module in audited.model.modules())
    if not layers or len(recomputed) == len(layers) or not (switched_on or planned):
        return
    if not switched_on and callable(getattr(audited.model, "gradient_checkpointing_enable", None)):
        return  # the trainer can switch it on, and will
    peak = _peak(trace)
    in_train_mode = all(audited.model.get_submodule(name).training for name in layers)
    hidden = in_train_mode or audited.trainer is not None
    cause = "its wrapper hides the switch" if hidden else "the model is in eval mode"
    lower = _peak_with_checkpointing(audited, workload)
    message = (
        f"checkpointing is requested, but only {len(recomputed)} of {len(layers)} layers were recomputed in one step"
        + (f": the peak is {format_bytes(peak)} instead of {format_bytes(lower)}" if lower is not None else "")
        + f". The likely cause: {cause}."
    )
    fix = "call model.train(), and gradient_checkpointing_enable() on the model that has the layers."
    yield Finding("SL120", "error", layers[0], message, fix, max(0, peak - lower) if lower is not None else 0)


def _check_8bit_inputs(
    audited: AuditedModel, workload: Workload, trace: StepTrace, inputs: _LayerInputs
) -> Iterator[Finding]:
    """bitsandbytes keeps the input of an 8-bit layer on the graph's node, where checkpointing cannot drop it."""
    if (getattr(audited.training_arguments, "gradient_checkpointing_kwargs", None) or {}).get("use_reentrant"):
        return
    recomputed, layers = _checkpointed_layers(audited, trace)
    around = layers if _wants_checkpointing(audited, workload) else recomputed
    inside = {name: kept for name, kept in inputs.items() if any(name.startswith(f"{layer}.") for layer in around)}
    # by address, since layers such as q_proj and v_proj share their input
    size = sum({address: size for kept in inside.values() for address, size in kept.items()}.values())
    if size:
        message = f"{len(inside)} layers in 8 bits keep {format_bytes(size)} of inputs that checkpointing should drop."
        fix = "use gradient_checkpointing_kwargs={'use_reentrant': True} with enable_input_require_grads(), or 4 bits."
        yield Finding("SL124", "warning", next(iter(inside)), message, fix, size)


@contextlib.contextmanager
def _inputs_of_8bit_layers(model: torch.nn.Module) -> Iterator[_LayerInputs]:
    """Record the inputs of 8-bit layers that are kept because a graph is built; those of a recomputation are not."""
    inputs: _LayerInputs = {}

    def record(name: str, _: torch.nn.Module, args: tuple[object, ...]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        tensor = args[0] if args and not in_backward else None
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            storage = tensor.untyped_storage()
            inputs.setdefault(name, {})[storage._cdata] = storage.nbytes()

    handles = [
        module.register_forward_pre_hook(partial(record, name))
        for name, module in model.named_modules()
        if isinstance(module, StandIn) and hasattr(module, "scales")
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def _peak_with_checkpointing(audited: AuditedModel, workload: Workload) -> int | None:
    try:
        return _peak(trace_step(audited.inner, workload.replace(gradient_checkpointing=True, optimizer="none")))
    except TraceError:
        return None


def _check_gradients(audited: AuditedModel, trace: StepTrace) -> Iterator[Finding]:
    trainable = {id(p): p for p in audited.model.parameters() if p.requires_grad}
    reached = sum(allocation.component == "gradients" for allocation in trace.allocations)
    if trainable and reached < len(trainable):
        yield Finding(
            "SL121",
            "error" if reached == 0 else "warning",
            type(audited.model).__name__,
            f"{len(trainable)} parameters are trainable, but only {reached} got a gradient in one step.",
            "with reentrant checkpointing over a frozen base call enable_input_require_grads(); else look for a "
            "detach(), a no_grad() or a branch that is never taken.",
            sum(p.nbytes for p in trainable.values()),
        )


def _check_survivors(trace: StepTrace) -> Iterator[Finding]:
    """Yield a finding for tensors that were made in the step and are alive after it, in an attribute or a closure."""
    freed = {event.allocation for event in trace.events if event.freed}
    survivors = [
        allocation
        for index, allocation in enumerate(trace.allocations)
        if index not in freed
        and allocation.phase in ("forward", "backward")
        and allocation.component in ("activations", "temporary")
        # floating point of 16 and 32 bits; integers and masks may be kept by the trace itself, with their known values
        and allocation.dtype_bytes in (2, 4)
    ]
    if survivors:
        size = sum(allocation.bytes for allocation in survivors)
        largest = max(survivors, key=lambda allocation: allocation.bytes)
        message = (
            f"{len(survivors)} tensors of the step, {format_bytes(size)}, are alive after it: something keeps them."
        )
        fix = (
            "look for self.last_output = ..., a list of losses, or a hook that stores its arguments; keep .detach()ed "
            "values on the CPU."
        )
        yield Finding("SL122", "error", largest.module or "the model", message, fix, size)


def _peak(trace: StepTrace) -> int:
    return next(iter(trace.devices.values())).peak_bytes


@contextlib.contextmanager
def _mode_kept(model: torch.nn.Module) -> Iterator[None]:
    """Inside, ``model.train(mode)`` changes nothing."""
    # an attribute of the instance hides the method; set through vars() because Module.__setattr__ may be overridden
    vars(model)["train"] = lambda mode=True: model
    try:
        yield
    finally:
        del vars(model)["train"]
