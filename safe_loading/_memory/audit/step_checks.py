"""Checks on a traced step: the configuration states the intention, the trace shows the outcome."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CellType

import torch
from peft.tuners.tuners_utils import BaseTuner
from transformers.modeling_layers import GradientCheckpointingLayer

from safe_loading._core.names import first_names
from safe_loading._core.report import Finding, Severity, counted, format_bytes
from safe_loading._core.workload import Workload
from safe_loading._memory.forecast.idle_parts import idle_modules
from safe_loading._memory.trace.forward_pass import NOTHING_TRAINED
from safe_loading._memory.trace.inputs import forward_arguments, takes_targets
from safe_loading._memory.trace.records import Allocation, StepTrace
from safe_loading._memory.trace.trace_error import FIX_FOR_DEVICES, FIX_FOR_METHODS, PICTURES_AND_SOUNDS
from safe_loading.errors import TraceError

from .audited_model import AuditedModel, size_of
from .kept_memory import TEACHER_FIX, is_made_anew
from .loss import COUNT_ARGUMENT, check_denominator
from .modes import kept_in_eval
from .packed_rows import check_rows
from .running_statistics import check_changed_buffers
from .traced_step import TracedStep
from .wrappers import hides

_KNOWN_FIXES = (FIX_FOR_DEVICES, FIX_FOR_METHODS)  # the ends of the errors of a trace

_SMALL = 100  # what is kept and replaced is told where it is more than such a part of the peak
_UNEXPECTED = "unexpected keyword argument"  # in the TypeError of a call


def check_step(step: TracedStep, workload: Workload) -> Iterator[Finding]:
    """Yield findings about checkpointing, inputs of 8-bit layers, gradients, surviving tensors, and the loss."""
    yield from _check_checkpointing(step, workload)
    yield from _check_8bit_inputs(step, workload)
    yield from _check_gradients(step)
    yield from _check_hidden(step)
    yield from check_changed_buffers(step)
    yield from _check_teachers(step)
    yield from check_rows(step.audited, step.inputs, step.rows)
    yield from _check_survivors(step)
    yield from check_denominator(step.audited, workload, step.token_count)


def not_run(audited: AuditedModel, error: TraceError) -> Finding:
    """Return the finding for a step that could not be run, without which an audit says little."""
    reason = str(error)
    fix = error.fix or next((known for known in _KNOWN_FIXES if reason.endswith(f" {known}")), "")
    trained = [name for name, parameter in audited.model.named_parameters() if parameter.requires_grad]
    if fix:
        reason = reason.removesuffix(f" {fix}")
    elif not trained and audited.adapted is not None and not audited.adapter_parameters:
        reason = reason.replace(NOTHING_TRAINED, "the adapter has put no parameter into the model.")
        fix = (
            "take a method that adapts the layers of this model, such as LoraConfig; peft passes over others silently."
        )
    elif trained and NOTHING_TRAINED in reason:
        reason = reason.replace(NOTHING_TRAINED, "the loss depends on no parameter that has requires_grad.")
        fix = f"compute the loss from what is trained, {first_names(trained)}; or train what it is computed from."
    elif COUNT_ARGUMENT in reason and _UNEXPECTED in reason:
        fix = "set model.accepts_loss_kwargs = False, so that the Trainer does not pass it; or let the forward take it."
    elif _UNEXPECTED in reason:
        fix = "let the forward take the argument, or **kwargs: what is around the model passes it in training too."
    elif trained:
        fix = "pass what the model needs in inputs=, or audit the model inside its wrapper."
    else:
        fix = "load the adapter with is_trainable=True, enable its layers, or call requires_grad_() on what is trained."
    return Finding(
        "SL126",
        "error",
        type(audited.model).__name__,
        f"the step could not be run, so nothing is known of checkpointing, of gradients and of what outlives it: "
        f"{reason}",
        fix,
    )


def _checkpointed_layers(step: TracedStep) -> tuple[list[str], list[str]]:
    """Return the layers that were recomputed, and all through which a gradient went; the chosen ones, if some are."""
    modules = step.audited.outermost.named_modules()
    reached = {n: m for n, m in modules if isinstance(m, GradientCheckpointingLayer) and n in step.reached}
    layers = [name for name, layer in reached.items() if layer.gradient_checkpointing] or [*reached]
    return [name for name in layers if name in step.recomputed], layers


def _wants_checkpointing(audited: AuditedModel, workload: Workload) -> bool:
    in_arguments = getattr(audited.training_arguments, "gradient_checkpointing", False)
    return bool(workload.gradient_checkpointing or in_arguments)


def _check_checkpointing(step: TracedStep, workload: Workload) -> Iterator[Finding]:
    audited = step.audited
    recomputed, layers = _checkpointed_layers(step)
    planned = _wants_checkpointing(audited, workload)
    switched_on = any(getattr(module, "gradient_checkpointing", False) for module in audited.model.modules())
    if not layers or len(recomputed) == len(layers) or not (switched_on or planned):
        return
    if not switched_on and callable(getattr(audited.outermost, "gradient_checkpointing_enable", None)):
        return  # the trainer can switch it on, and will
    in_train_mode = all(audited.outermost.get_submodule(name).training for name in layers)
    cause = "the model is in eval mode"
    held = next((by for name, by in kept_in_eval(audited).items() if name in layers), None)
    if held is not None:
        cause = f"{held}.train() keeps it in eval mode"
    elif in_train_mode or audited.trainer is not None:
        hiding = next((w for w in audited.wrappers if hides(audited, w, "gradient_checkpointing_enable")), None)
        cause = "the switch cannot be reached"
        if hiding is not None:
            inside = type(hiding.inside).__name__
            cause = f"{hiding.classes[0]} hides gradient_checkpointing_enable of the {inside} inside it"
    lower = step.peak_when_right
    message = (
        f"checkpointing is requested, but only {len(recomputed)} of {len(layers)} layers were recomputed in one step"
        + (
            f": the peak is {format_bytes(step.peak_bytes)} instead of {format_bytes(lower)}"
            if lower is not None and lower < step.peak_bytes
            else ""
        )
        + f". The likely cause: {cause}."
    )
    fix = "call model.train(), and gradient_checkpointing_enable() on the model that has the layers."
    yield Finding("SL120", "error", layers[0], message, fix, max(0, step.peak_bytes - (lower or step.peak_bytes)))


def _check_8bit_inputs(step: TracedStep, workload: Workload) -> Iterator[Finding]:
    """The engine keeps the input of an 8-bit layer on the graph's node, where checkpointing cannot drop it."""
    audited = step.audited
    if (getattr(audited.training_arguments, "gradient_checkpointing_kwargs", None) or {}).get("use_reentrant"):
        return
    recomputed, layers = _checkpointed_layers(step)
    around = layers if _wants_checkpointing(audited, workload) else recomputed
    kept_by = step.inputs_of_8bit
    inside = {name: kept for name, kept in kept_by.items() if any(name.startswith(f"{layer}.") for layer in around)}
    # by address, since layers such as q_proj and v_proj share their input
    size = sum({address: size for kept in inside.values() for address, size in kept.items()}.values())
    if size:
        message = f"{len(inside)} layers in 8 bits keep {format_bytes(size)} of inputs that checkpointing should drop."
        fix = "use gradient_checkpointing_kwargs={'use_reentrant': True} with enable_input_require_grads(), or 4 bits."
        yield Finding("SL124", "warning", next(iter(inside)), message, fix, size)


def _check_gradients(step: TracedStep) -> Iterator[Finding]:
    model = step.audited.outermost
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    without = trainable.keys() - step.record.reached - step.names_of_teachers
    if without and step.record.reached:
        without -= step.reached_at_random()
    if without and step.record.reached:
        without -= step.reached_by_other_batches(without)
    if without and step.record.reached:
        idle = _without_pictures(step, without)
        yield from _idle_finding(step, idle, trainable)
        without -= idle
    if without:
        reached = len(trainable) - len(without)
        yield Finding(
            "SL121",
            "error" if reached == 0 else "warning",
            first_names(without),
            f"{counted(len(trainable), 'parameter is', 'parameters are')} trainable, but only {reached} got a gradient "
            f"in one step{_by_loss(model)}.",
            "with reentrant checkpointing over a frozen base call enable_input_require_grads(); else look for a "
            "detach(), a no_grad() or a branch that is never taken; or freeze what no loss reaches, such as the index "
            "of sparse attention: exclude_modules of an adapter.",
            size_of(trainable[name] for name in without),
        )


def _by_loss(model: torch.nn.Module) -> str:
    """Return in words by which loss a model was trained that has none of its own."""
    return "" if takes_targets(model) else ", by the mean of the first output, for it takes no labels"


def _without_pictures(step: TracedStep, names: Collection[str]) -> set[str]:
    """Return those of the parameters whose part did not run because the step has no pictures or sounds."""
    model = step.audited.outermost
    if not _not_passed(step):
        return set()
    idle = idle_modules(model, step.trace)
    return {name for name in names if any(name.startswith(f"{path}.") for path in idle)}


def _not_passed(step: TracedStep) -> list[str]:
    """Return the arguments for pictures and sounds that the model takes and the step does not have."""
    taken = forward_arguments(step.audited.outermost)
    return [name for name in PICTURES_AND_SOUNDS if name in taken and name not in (step.inputs or {})]


def _idle_finding(
    step: TracedStep, names: Collection[str], trainable: Mapping[str, torch.nn.Parameter]
) -> Iterator[Finding]:
    """Yield a finding for parts of which a step of text alone says nothing."""
    if names:
        argument = _not_passed(step)[0]
        message = (
            f"{counted(len(names), 'trainable parameter is', 'trainable parameters are')} in parts that did not run, "
            f"for the step has no {argument}: nothing is known of {'it' if len(names) == 1 else 'them'}."
        )
        fix = (
            f"pass inputs= with {argument}; or freeze these parts, if they get none in training: parameters without "
            f"gradients end DistributedDataParallel."
        )
        yield Finding("SL121", "warning", first_names(names), message, fix, size_of(trainable[n] for n in names))


def _check_hidden(step: TracedStep) -> Iterator[Finding]:
    """Yield a finding for parameters that a gradient reaches and torch does not see, in a list for example."""
    hidden = step.record.hidden
    if hidden:
        message = (
            f"{counted(len(hidden), 'parameter gets a gradient and is', 'parameters get gradients and are')} held in a "
            f"list, a dict or a tuple: no optimizer, checkpoint and .to(device) of the model has "
            f"{'it' if len(hidden) == 1 else 'them'}."
        )
        fix = "hold modules in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList or nn.ParameterDict."
        yield Finding("SL146", "error", first_names(hidden), message, fix)


def _check_teachers(step: TracedStep) -> Iterator[Finding]:
    """Yield a finding for each module of the wrapper whose graph is of no use, or that is a teacher and trained."""
    for where, trainable in step.trained_teachers.items():
        of_it = counted(len(trainable), "parameter")
        require = "requires" if len(trainable) == 1 else "require"
        severity: Severity = "error"
        if where in step.teachers:
            message = (
                f"it runs in the step and builds a graph, but none of its {of_it} that {require} gradients gets one: "
                f"its activations are kept for nothing."
            )
        elif step.record.reached & trainable.keys():
            message = f"its {of_it} {require} gradients and get them: the loss also changes it, to be like the model."
        else:
            severity = "warning"
            message = (
                f"none of its {of_it} that {require} gradients gets one, and an optimizer of model.parameters() has "
                f"them; DistributedDataParallel fails at the second step."
            )
        yield Finding("SL114", severity, where, message, TEACHER_FIX, size_of(trainable.values()))


def _check_survivors(step: TracedStep) -> Iterator[Finding]:
    """Yield a finding for tensors that were made in the step and are alive after it, in an attribute or a closure."""
    known = _only_of_adapters(step.audited) | _caches(step.audited)
    survivors = _survivors(step.trace, known)
    severity: Severity = "error"
    if survivors and (passes := step.in_passes()) is not None:
        once, twice = passes
        # what the first pass keeps and the second one does not make again is a cache, such as a mask
        survivors = survivors if _survivors(twice, known, _second_pass(twice)) else []
        if _bytes_of(_survivors(twice, known)) <= _bytes_of(_survivors(once, known)):
            severity = "info"
    size = _bytes_of(survivors)
    if survivors and (severity == "error" or size * _SMALL > step.peak_bytes):
        largest = max(survivors, key=lambda allocation: allocation.bytes)
        alive = counted(len(survivors), "tensor of the step is", "tensors of the step are")
        why = "something keeps them" if severity == "error" else "something keeps them until the next one replaces them"
        message = f"{alive} alive after it, {format_bytes(size)}: {why}."
        fix = (
            "look for self.last_output = ..., a list of losses, or a hook that stores its arguments; keep .detach()ed "
            "values on the CPU."
        )
        yield Finding("SL122", severity, largest.module or "the model", message, fix, size)


def _bytes_of(allocations: Iterable[Allocation]) -> int:
    return sum(allocation.bytes for allocation in allocations)


def _survivors(trace: StepTrace, left_out: Collection[str], first: int = 0) -> list[Allocation]:
    """Return the tensors of the passes, from the allocation `first` on, that are alive at the end."""
    freed = {index for index, gone in trace.events if gone}
    return [
        allocation
        for index, allocation in enumerate(trace.allocations)
        if index >= first
        and index not in freed
        and allocation.phase in ("forward", "backward")
        and allocation.component in ("activations", "temporary")
        # floating point of 16 and 32 bits; integers and masks may be kept by the trace itself, with their known values
        and allocation.dtype_bytes in (2, 4)
        and allocation.module not in left_out
    ]


def _second_pass(trace: StepTrace) -> int:
    """Return the index of the first allocation of the second forward pass."""
    phases = [allocation.phase for allocation in trace.allocations]
    return next((at for at in range(1, len(phases)) if phases[at - 1 : at + 1] == ["backward", "forward"]), 0)


def _only_of_adapters(audited: AuditedModel) -> set[str]:
    """Return the paths of modules that run for an adapter alone: tensors that they keep are for peft to know."""
    tuner: object = getattr(audited.peft, "base_model", None)
    parts: list[torch.nn.Module] = [tuner] if isinstance(tuner, BaseTuner) else []
    parts += [module for part in _parts_of_adapters(audited) for module in part.modules()]
    own = {id(part) for part in parts}
    return {path for path, module in audited.outermost.named_modules() if id(module) in own}


def _caches(audited: AuditedModel) -> set[str]:
    """Return the paths of modules with a method in an ``lru_cache`` of a size, which holds few results and no more.

    Tables of positions are kept so. Where one step asks for more of them than are held, each step makes them anew.
    So does torch a weight that it computes from others.
    """
    modules = dict(audited.outermost.named_modules())
    kinds = {kind for kind in {type(module) for module in modules.values()} if _is_cached(kind)}
    made = {path for path, module in modules.items() if any(is_made_anew(module, name) for name in vars(module))}
    return made | {path for path, module in modules.items() if type(module) in kinds}


def _is_cached(kind: type) -> bool:
    functions = [value for each in kind.__mro__ for value in vars(each).values() if callable(value)]
    # transformers' decorator holds it in the closure of a function of its own
    held = [_content(cell) for each in functions for cell in getattr(each, "__closure__", None) or ()]
    caches = [each for each in (*functions, *held) if isinstance(each, functools._lru_cache_wrapper)]
    return any(cache.cache_parameters()["maxsize"] is not None for cache in caches)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # of a function that is not defined yet
        return None


def _parts_of_adapters(audited: AuditedModel) -> Iterator[torch.nn.Module]:
    """Yield the encoder of a prompt, and the parts of a tuner beside the base."""
    tuner: object = getattr(audited.peft, "base_model", None)
    encoder: object = getattr(audited.peft, "prompt_encoder", None)
    if isinstance(encoder, torch.nn.Module):
        yield encoder
    if isinstance(tuner, BaseTuner):
        yield from (child for name, child in tuner.named_children() if name != "model")
