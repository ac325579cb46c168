"""``trace_step``: run one step of a model on fake tensors, and record all the memory that it would take.

The model's own forward, backward and cache run on tensors that have a shape and no content. See docs/tracing.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import import_utils

from safe_loading._core import progress
from safe_loading._core.interrupts import signals_held, undone
from safe_loading._core.log import without_records
from safe_loading._core.thread_patches import answer_no, patched
from safe_loading._core.walk import hidden_modules, hidden_parts
from safe_loading._core.workload import Workload
from safe_loading._model.formats.registry import kernel_stand_ins
from safe_loading._model.quantized.kbit_preparation import KbitPreparation
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.torch_state import TorchSwitches
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading._ranks.launcher import local_rank
from safe_loading._ranks.own_generators import OwnGenerators, own_generators
from safe_loading.errors import ArgumentError, TraceError

from .accelerate_hooks import TracePlacement, install_hooks, take_hooks_off
from .adapter_starts import computed_starts, widened_adapters
from .attached_adapter import with_adapter
from .attention_kernels import attention_stand_ins
from .cuda_autocast import cuda_autocast
from .dispatch_mode import TraceDispatchMode
from .evaluation import evaluation_of, refuse_other_rows, run_evaluation
from .fake_tensor_maker import FakeTensorMaker
from .fake_tensors import FakeTensors
from .function_mode import TraceFunctionMode
from .fused_lm_head import with_fused_lm_head
from .inputs import StepInputs
from .known_values import KnownValues
from .layer_segments import NotAlikeError, whole_step
from .ledger import Ledger, device_traces, fake_device
from .operation_cache import CachedOutputs, OperationCache
from .pass_between import with_pass
from .records import Component, StepTrace
from .reference_pass import refuse_reference
from .repeated_layers import repeated_layers
from .run_generation import run_generation
from .run_training import run_training
from .skipped_layers import GradientsOfSkipped, SkippedLayers
from .step_tensors import Inputs
from .trace_error import trace_error
from .trained_parameters import OneCard

# the model's attributes and torch's modes are replaced for a while, and the modes are the process's
ONE_AT_A_TIME = threading.RLock()


def trace_step(
    model: torch.nn.Module,
    workload: Workload,
    *,
    placement: Mapping[str, int | str] | None = None,
    inputs: Inputs | None = None,
    cached_outputs: CachedOutputs | None = None,
    offload_buffers: bool = False,
    job: OneCard | None = None,
    attached_there: bool = False,
    prepare_for_kbit: KbitPreparation = "none",
    every_layer: bool = False,
    seed: int = 0,
) -> StepTrace:
    """Run one step of `model` on fake tensors, and return all the memory that it takes; or raise `TraceError`.

    The model may be on ``meta`` or real. Its tensors are only described, and afterwards it is what it was: every
    attribute of every module, and the state of the random generators. Nothing is allocated. One trace runs at a time in
    a process; while it runs, other threads must leave the model alone.

    The placement is a device map, with whose devices accelerate's hooks move tensors at the boundaries of modules; None
    puts everything on device 0. Of the inputs, by argument name, shape and dtype are taken; they replace those that
    would be made. `cached_outputs` is what earlier traces of this model remembered of its operations; it grows.
    `offload_buffers` is as for `accelerate.dispatch_model`.
    With a `job` the step is that of one of its ranks. `attached_there` is for a model that is on its device when the
    adapter is attached: what peft leaves on the host then stays there, such as the permutations of BOFT.
    `prepare_for_kbit` is for the adapter of a base in 4 or 8 bits. Of layers that are alike a few run and stand for the
    others where their steps are found to be equal; with `every_layer` all of them run, for whoever watches them. The
    model draws its random numbers from `seed`.
    """
    if workload.new_tokens:
        end = workload.replace(new_tokens=0, sequence_length=workload.sequence_length + workload.new_tokens)
        raise ArgumentError(f"new_tokens= is for predict_memory alone. Pass the whole length: {end}.")
    refuse_reference(model, workload)
    refuse_other_rows(workload, inputs)
    one_device = placement is None or len(set(placement.values())) == 1
    job = job or OneCard()
    traced = functools.partial(
        _traced,
        model,
        placement=placement,
        inputs=inputs,
        cached_outputs=cached_outputs,
        offload_buffers=offload_buffers,
        job=job,
        attached_there=attached_there,
        prepare_for_kbit=prepare_for_kbit,
        seed=seed,
    )
    with ONE_AT_A_TIME:
        alike = workload.kind == "train" and workload.reference is None  # which runs the layers once more
        alike = alike and not workload.completion_length  # as its samples are scored
        asked = workload.gradient_checkpointing
        alike = alike and not (isinstance(asked, Mapping) and "every_n_layers" in asked)
        step = None
        if alike and not job.over_ranks and one_device and not every_layer:
            with contextlib.suppress(NotAlikeError):
                step = traced(workload, skip_layers=True)
        step = step or traced(workload)
        if not workload.eval_batch_size:
            return step
        return with_pass(step, traced(evaluation_of(workload)), after=True)


def _traced(
    model: torch.nn.Module,
    workload: Workload,
    *,
    placement: Mapping[str, int | str] | None,
    inputs: Inputs | None,
    cached_outputs: CachedOutputs | None,
    offload_buffers: bool,
    job: OneCard,
    attached_there: bool,
    prepare_for_kbit: KbitPreparation,
    seed: int,
    skip_layers: bool = False,
) -> StepTrace:
    """Trace a step, in which one of each few equal layers stands for the others if they may be skipped."""
    ledger, values = Ledger(), KnownValues(seed)
    where = TracePlacement(placement, offload_buffers=offload_buffers, attached_there=attached_there)
    with contextlib.ExitStack() as stack:
        # torch's switches of this thread, which are turned off for single calls: Ctrl-C may come before one is on again
        stack.enter_context(undone(TorchSwitches().put_back))
        stack.enter_context(cuda_autocast(workload))
        stack.enter_context(job.joined())
        stack.enter_context(undone(Snapshot(model, others=hidden_modules(model)).restore))
        dispatched = take_hooks_off(model)
        adapted = with_adapter(model, workload, where.left_on_host, prepare_for_kbit=prepare_for_kbit)
        running = stack.enter_context(adapted)
        where.around = next((f"{path}." for path, inner in running.named_modules() if path and inner is model), "")
        stack.enter_context(with_fused_lm_head(running, workload))
        attached = workload.adapter is not None
        widened, starts = (widened_adapters(running), computed_starts(running)) if attached else ({}, {})
        skipped = SkippedLayers(repeated_layers(running) if skip_layers else (), ledger)
        maker = FakeTensorMaker(FakeTensorMode(allow_non_fake_inputs=True))
        mode = TraceDispatchMode(ledger, values, OperationCache(maker, cached_outputs), multi_device=where.hooked)
        # torch logs an operation that fails, with the lines of its own code; the error below says it
        stack.enter_context(without_records("torch", below=logging.CRITICAL))
        try:
            _run(running, workload, where, inputs, mode, maker, job, skipped)
        except Exception as error:
            if skipped.reached:
                raise NotAlikeError("a layer may miss what another one makes") from error
            if job.over_ranks and isinstance(error, ArgumentError):
                raise  # of what spreads the model, which says it in words of its own
            raise trace_error(running, workload, error, inputs) from error
    assumptions = (*values.assumptions, *ledger.left_out, *(dispatched if placement is None else ()))
    allocations, events, calls = whole_step(ledger, skipped, assumptions)
    return StepTrace(
        workload=workload,
        allocations=tuple(allocations),
        events=tuple(events),
        devices=device_traces(allocations, events),
        calls=calls,
        crossings=mode.crossings,
        problems=tuple(mode.problems),
        assumptions=assumptions,
        first_update=ledger.first_update,
        widened=widened,
        starts=starts,
        begun=tuple(ledger.begun),
        around=where.around,
    )


def _run(
    model: torch.nn.Module,
    workload: Workload,
    where: TracePlacement,
    user_inputs: Inputs | None,
    mode: TraceDispatchMode,
    maker: FakeTensorMaker,
    job: OneCard,
    skipped: SkippedLayers,
) -> None:
    ledger = mode.ledger
    main = fake_device(where.main)
    functions = TraceFunctionMode(mode.content, main)
    # the fake mode is entered before the dispatch mode, which therefore sees each operation first and can answer it
    with (
        signals_held() as mode.held,
        _isolated(mode.values.generators),
        attention_stand_ins(model),
        functions,
        functions.whole_lists(),
        functions.in_backward_passes(),
        maker.mode,
    ):
        reference = job.reference_to_shard(model, workload)
        tensors = FakeTensors(maker, ledger, mode.values, where)
        tensors.replace_tensors(model)
        if workload.kind == "weights_only":
            ledger.close()
            return
        # an audit that wants the mode in which the model is replaces train() by a function that does nothing
        model.train(workload.kind == "train")
        if workload.gradient_checkpointing:
            _enable_checkpointing(model, workload)
        inputs = StepInputs(model, mode.values, main, user_inputs, padding_free=workload.padding_free)
        install_hooks(model, where, ledger, mode.in_hook, skipped.inner_modules())
        skipped.install()
        if reference is not None:
            FakeTensors(maker, ledger, mode.values, where).replace_tensors(reference)
        spread = job.spread_over_ranks(model, reference, list(tensors.trainable()), main, ledger)
        with _progress_bar(model), mode, spread as of_rank:
            tensors.forget()
            running, trained, reference = of_rank
            trained = GradientsOfSkipped(trained.parameters, skipped) if skipped.lists else trained
            cache = None
            if workload.kind == "train":
                run_training(running, workload, inputs, ledger, trained, reference)
                if not job.over_ranks:
                    _count_as_own(model, ledger)
            elif workload.kind == "evaluate":
                run_evaluation(running, workload, inputs, ledger, reference)
            else:
                cache = run_generation(running, workload, inputs, ledger)
        ledger.close()
        del cache  # after the ledger is closed, because it outlives the step


def _count_as_own(model: torch.nn.Module, ledger: Ledger) -> None:
    """Count the tensors in the model's parameters and buffers as theirs after a step: code may have put others in.

    A parameter that the model holds past torch keeps its gradient, which no optimizer drops.
    """
    hidden = [*hidden_parts(model).values()]
    parts = [model, *(part for part in hidden if isinstance(part, torch.nn.Module))]
    parameters = [
        *(p for part in parts for p in part.parameters()),
        *(p for p in hidden if isinstance(p, torch.nn.Parameter)),
    ]
    own: dict[Component, list[torch.Tensor]] = {
        "weights": [*parameters],
        "buffers": [buffer for part in parts for buffer in part.buffers()],
        "gradients": [p.grad for p in parameters if p.grad is not None],
    }
    for component, tensors in own.items():
        for tensor in tensors:
            made = ledger.allocation_of(tensor)
            if made is not None and made.component in ("activations", "temporary"):
                ledger.classify(tensor, component)


def _progress_bar(model: torch.nn.Module) -> progress.Bar:
    """Return a bar that counts the modules as they run, for a trace of more than a second."""
    bar = progress.bar_of_a_rank("tracing", None, local_rank(), unit=" modules")
    for module in model.modules() if bar.shown else ():
        module.register_forward_pre_hook(lambda *_: bar.advance())
    return bar


def _enable_checkpointing(model: torch.nn.Module, workload: Workload) -> None:
    # transformers 5.17 renamed it, and warns of the old name
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None:
        raise TraceError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(), so it cannot be traced with "
            f"gradient_checkpointing=True. Switch it on in the model itself, and leave it out of the workload."
        )
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # where it is on already, it stays reentrant or not as the caller chose
        asked = workload.gradient_checkpointing
        options = dict(asked) if isinstance(asked, Mapping) else {}
        few = {"every_n_layers": options.pop("every_n_layers")} if "every_n_layers" in options else {}
        enable(options or None, **few)
    try:
        embeddings: torch.nn.Module = model.get_input_embeddings()  # type: ignore[operator]  # a model's method
    except NotImplementedError:  # models of sounds have none
        return
    if not any(parameter.requires_grad for parameter in embeddings.parameters()):
        # as the Trainer and peft do for a frozen base, whose reentrant checkpoints would have no input with a gradient
        model.enable_input_require_grads()  # type: ignore[operator]  # a model's method


@contextlib.contextmanager
def _isolated(generators: OwnGenerators) -> Iterator[None]:
    """Keep the caller's modes and random generators out of the trace, and the trace out of theirs.

    A model that draws random numbers draws the same ones in every trace.
    """
    with (
        own_generators(generators, operations=False),
        torch.inference_mode(False),
        torch.enable_grad(),
        # the workload's to say; one around its own, if only to switch it off, keeps that one's copies of weights alive
        torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext(),
        tensors_on_host(),
        # for fake tensors transformers builds a mask that a real run does not
        patched(import_utils, "is_fake_tensor", answer_no),
        kernel_stand_ins(),
    ):
        yield
