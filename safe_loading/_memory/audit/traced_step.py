"""The planned step of an audited model on fake tensors: as the model is configured, and with one thing changed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from safe_loading._core.interrupts import undone
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.cuda_paths import cuda_paths
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.scan_kernels import scan_stand_ins
from safe_loading._memory.trace.step_tensors import Inputs
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.formats.packed_linear import StandIn
from safe_loading._model.snapshot import Snapshot
from safe_loading.errors import TraceError

from .audited_model import AuditedModel
from .kept_memory import is_average, is_teacher
from .loss import TokenCountUse, watching_token_count
from .other_batches import other_batches
from .packed_rows import RowsSeen, fills_cache, watching_rows
from .step_record import StepRecord, recorded_step

# by layer: the bytes of the storages that it keeps, by their addresses
LayerInputs = dict[str, dict[int, int]]
_MOST_SEEDS = 8  # of steps with other random numbers, or of batches that bring nothing new
_LONG = 512  # tokens of a row, where no length was planned
_CAPABILITY = (8, 0)  # of the GPU whose attention kernels the figures are for, an A100's


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step of the audited model as it is configured; the parts of a step that is planned are compared with it.

    Attributes:
        audited: The model.
        workload: The step. Whether it checkpoints is the model's configuration and not the workload's.
        planned: Whether the step has the size that was planned, so that differences in bytes mean something.
        inputs: What the model takes beside tokens.
        trace: The record of the step.
        token_count: The use that the model made of the number of tokens.
        inputs_of_8bit: What layers in 8 bits keep.
        recomputed: The layers that ran again in the backward pass, whole or in part.
        reached: The layers to whose output a gradient came, or that ran again.
        rows: Whether the mask was made with the bounds of packed rows.
        teachers: The modules beside the model in its wrapper that built a graph of their own, and got no gradient.
        record: The parameters that gradients reached, and the buffers that changed.
    """

    audited: AuditedModel
    workload: Workload
    planned: bool
    inputs: Inputs | None
    trace: StepTrace
    token_count: TokenCountUse
    inputs_of_8bit: LayerInputs
    recomputed: set[str]
    reached: set[str]
    rows: RowsSeen
    teachers: dict[str, torch.nn.Module]
    record: StepRecord

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive."""
        return peak_of(self.trace)

    @functools.cached_property
    def peak_when_right(self) -> int | None:
        """The peak with checkpointing and without wrappers; None where that cannot be traced."""
        with _in_right_order(self.audited) as model:
            return _peak_or_none(model, self.workload.replace(gradient_checkpointing=True), self.inputs)

    @functools.cached_property
    def trained_teachers(self) -> dict[str, dict[str, torch.nn.Parameter]]:
        """The modules of the wrapper that should not be trained, and their parameters that require gradients."""
        found = {}
        names = {id(p): name for name, p in self.audited.outermost.named_parameters() if p.requires_grad}
        for where, other in self.audited.others():
            named = where.startswith("model.") and (is_teacher(where) or is_average(where, other))
            if where in self.teachers or (named and any(isinstance(m, PreTrainedModel) for m in other.modules())):
                found[where] = {names[id(p)]: p for p in other.parameters() if id(p) in names}
        return {where: trainable for where, trainable in found.items() if trainable}

    @property
    def names_of_teachers(self) -> set[str]:
        """The parameters of the wrapper that belong to models which should not be trained."""
        return {name for trainable in self.trained_teachers.values() for name in trainable}

    def reached_at_random(self) -> set[str]:
        """Return the parameters that gradients reach when the step is run again with other random numbers.

        A layer may be left out at random (LayerDrop), and its parameters then get their gradients in other steps.
        """
        reached = set(self.record.reached)
        for seed in range(1, _MOST_SEEDS):
            found = self._reached(self.workload, self.inputs, seed)
            if seed == 1 and found == reached:
                break
            reached |= found
        return reached

    def reached_by_other_batches(self, missing: Collection[str]) -> set[str]:
        """Return those of the parameters to which the next batch brings gradients, or one of other inputs or length."""
        reached: set[str] = set()
        in_vain = 0
        steps = [(self.workload.replace(gradient_accumulation_steps=2), self.inputs)]  # of a module that counts them
        if not self.planned and not self.inputs:  # some layers compress many tokens to one
            steps.append((self.workload.replace(sequence_length=_LONG), self.inputs))
        others = other_batches(self.audited, self.inputs, self.workload.batch_size)
        for workload, batch in itertools.chain(steps, ((self.workload, other) for other in others)):
            more = self._reached(workload, batch).intersection(missing) - reached
            reached |= more
            in_vain = 0 if more else in_vain + 1
            if len(reached) == len(missing) or in_vain == _MOST_SEEDS:
                break
        return reached

    def _reached(self, workload: Workload, inputs: Inputs | None, seed: int = 0) -> set[str]:
        """Return the parameters that gradients reach in another step; those of its part that ran where it fails."""
        model = self.audited.outermost
        with mode_kept(self.audited), recorded_step(model) as record, contextlib.suppress(TraceError):
            _trace(model, workload, inputs, seed)
        return record.reached

    def in_passes(self) -> tuple[StepTrace, StepTrace] | None:
        """Return the traces of one micro-batch and of two, one after the other; None if they cannot be made."""
        accumulated = self.workload.gradient_accumulation_steps > 1  # of which a trace runs two
        other = self.workload.replace(gradient_accumulation_steps=1 if accumulated else 2)
        with mode_kept(self.audited):
            try:
                made = _trace(self.audited.outermost, other, self.inputs)
            except TraceError:
                return None
        return (made, self.trace) if accumulated else (self.trace, made)

    def peak_when(self, change: Callable[[], None]) -> int | None:
        """Return the peak after a change of the model's configuration, which is undone; None if it cannot be traced."""
        with undone(Snapshot(self.audited.model).restore):
            change()
            with mode_kept(self.audited):
                return _peak_or_none(self.audited.outermost, self.workload, self.inputs)


def trace_configured(audited: AuditedModel, workload: Workload, inputs: Inputs | None, *, planned: bool) -> TracedStep:
    """Run the step as the model is configured, or raise `TraceError`."""
    model = audited.outermost
    configured = _as_configured(workload)
    configured = configured.replace(use_cache=configured.use_cache or fills_cache(audited, inputs))
    with (
        mode_kept(audited),
        watching_token_count(audited) as count,
        _inputs_of_8bit_layers(model) as kept,
        _recomputed_layers(model) as (recomputed, used),
        watching_rows() as rows,
        _graphs_of_others(audited) as (built, reached),
        recorded_step(model) as record,
    ):
        trace = _trace(model, configured, inputs)
    teachers = {where: other for where, other in audited.others() if where in built - reached}
    layers = (recomputed, used | recomputed)
    return TracedStep(audited, configured, planned, inputs, trace, count, kept, *layers, rows, teachers, record)


def peaks_of_wrapped(audited: AuditedModel, workload: Workload, inputs: Inputs | None) -> tuple[int, int] | None:
    """Return `TracedStep`'s `peak_bytes` and `peak_when_right` where a wrapper's own forward cannot be traced.

    The model inside it is traced then, as it is configured.
    """
    plain = _as_configured(workload)
    with _in_right_order(audited) as model:
        with mode_kept(audited):
            as_it_is = _peak_or_none(model, plain, inputs)
        right = _peak_or_none(model, plain.replace(gradient_checkpointing=True), inputs)
    return None if as_it_is is None or right is None else (as_it_is, right)


def _as_configured(workload: Workload) -> Workload:
    """Return a step with nothing around its forward and backward pass, which checkpoints as the model says."""
    return workload.replace(gradient_checkpointing=False, optimizer="none", reference=None, eval_batch_size=0)


def peak_of(trace: StepTrace) -> int:
    """Return the most bytes that were alive on the device of a step."""
    return next(iter(trace.devices.values())).peak_bytes


@contextlib.contextmanager
def mode_kept(audited: AuditedModel) -> Iterator[None]:
    """Inside, the audited model stays in its mode: a trainer calls ``train()`` before each step, a loop may not."""
    if audited.trainer is not None:
        yield
        return
    models = [audited.outermost, *([audited.inner] if audited.wrapped else [])]
    for model in models:
        # an attribute of the instance hides the method; set through vars() because __setattr__ may be overridden
        vars(model)["train"] = lambda mode=True, model=model: model
    try:
        yield
    finally:
        for model in models:
            del vars(model)["train"]


@contextlib.contextmanager
def _in_right_order(audited: AuditedModel) -> Iterator[torch.nn.Module]:
    """Yield the model without the wrappers around it and inside it; afterwards it is restored."""
    with undone(Snapshot(audited.model).restore):
        for wrapper in audited.wrappers:
            for module in audited.model.modules():
                for name, child in module._modules.items():
                    if child is wrapper.module:
                        module._modules[name] = wrapper.inside
            if wrapper.above is not None and hasattr(wrapper.inside, "config"):
                vars(wrapper.above)["config"] = wrapper.inside.config
        _prepare_as_peft(audited)
        yield audited.inner


def _prepare_as_peft(audited: AuditedModel) -> None:
    """Switch checkpointing on in a quantized base as ``prepare_model_for_kbit_training`` does: with reentry."""
    base = audited.base
    hidden = base is not None and any(wrapper.inside is base for wrapper in audited.wrappers)
    if base is None or not hidden or not getattr(base, "is_quantized", False):
        return
    if not any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={})  # type: ignore[no-untyped-call]  # of transformers
        base.enable_input_require_grads()  # type: ignore[no-untyped-call]  # of transformers


def _trace(model: torch.nn.Module, workload: Workload, inputs: Inputs | None, seed: int = 0) -> StepTrace:
    # whose kernel of a whole layer reads the weights of its projections, and passes adapters on them by
    fused = importlib.util.find_spec("mamba_ssm") is not None
    with cuda_paths(_CAPABILITY), scan_stand_ins(model, fused=fused):
        return trace_step(model, workload, inputs=inputs, every_layer=True, seed=seed)


def _peak_or_none(model: torch.nn.Module, workload: Workload, inputs: Inputs | None) -> int | None:
    try:
        return peak_of(_trace(model, workload, inputs))
    except TraceError:
        return None


@contextlib.contextmanager
def _inputs_of_8bit_layers(model: torch.nn.Module) -> Iterator[LayerInputs]:
    """Record the inputs of 8-bit layers that are kept because a graph is built; those of a recomputation are not."""
    inputs: LayerInputs = {}

    def record(name: str, _: torch.nn.Module, args: tuple[object, ...]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        tensor = args[0] if args and not in_backward else None
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            storage = tensor.untyped_storage()
            inputs.setdefault(name, {})[storage._cdata] = storage.nbytes()

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, StandIn) and hasattr(module, "scales"):
                hooks.enter_context(module.register_forward_pre_hook(partial(record, name)))
        yield inputs


@contextlib.contextmanager
def _recomputed_layers(model: torch.nn.Module) -> Iterator[tuple[set[str], set[str]]]:
    """Record the layers that run in the backward pass, and those to whose output a gradient comes.

    In a forward pass an encoder may well run twice, and a layer whose output nothing reads, or that is frozen below
    all that is trained, has nothing to recompute.
    """
    recomputed: set[str] = set()
    reached: set[str] = set()

    def record(name: str, _: torch.nn.Module, __: tuple[object, ...]) -> None:
        if torch._C._current_graph_task_id() != -1:
            recomputed.add(name)

    def record_output(name: str, _: torch.nn.Module, __: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.requires_grad and torch._C._current_graph_task_id() == -1:
            first.register_hook(lambda _: reached.add(name))  # type: ignore[no-untyped-call]  # of torch

    with contextlib.ExitStack() as hooks:
        for name, layer in model.named_modules():
            if isinstance(layer, GradientCheckpointingLayer):
                # a recomputation enters the layer itself again, or only the modules inside it
                for module in layer.modules():
                    hooks.enter_context(module.register_forward_pre_hook(partial(record, name)))
                hooks.enter_context(layer.register_forward_hook(partial(record_output, name)))
        yield recomputed, reached


@contextlib.contextmanager
def _graphs_of_others(audited: AuditedModel) -> Iterator[tuple[set[str], set[str]]]:
    """Record which modules beside the model in its wrapper build a graph of their own, and which a gradient reaches."""
    built: set[str] = set()
    reached: set[str] = set()
    continues: dict[str, bool] = {}  # whether the first call of a module got what the model computed: it is a head

    def record(where: str, module: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        # not in a recomputation: without the graph of the forward pass there would be none
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        got = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        continues.setdefault(where, any(value.requires_grad for value in got))
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not continues[where]:
                built.add(where)
                parameter.register_hook(lambda _: reached.add(where))  # type: ignore[no-untyped-call]  # of torch

    with contextlib.ExitStack() as hooks:
        for where, other in audited.others():
            # a child may be a list of modules, or be used by its parts, so that its own forward never runs
            for module in other.modules() if where.startswith("model.") else ():
                hooks.enter_context(module.register_forward_pre_hook(partial(record, where), with_kwargs=True))
        yield built, reached
