"""``trace_step``: one step of a model without its memory, and all that the step takes.

The model's own forward, backward and cache run on fake tensors: shapes without content. See docs/tracing.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from safe_loading._core import progress as _progress
from safe_loading._core.workload import Workload
from safe_loading._model.snapshot import Snapshot
from safe_loading._ranks.launcher import local_rank
from safe_loading.errors import TraceError

from . import step
from .accelerate_hooks import TracePlacement, install
from .attach_adapter import attached
from .fake_tensors import FakeTensors
from .inputs import Inputs
from .known_values import Values
from .ledger import Ledger, device_of, device_traces
from .memo import Known, Memo
from .patched_functions import Functions
from .records import StepTrace
from .refusal import refusal
from .watch import Watch

_ONE_AT_A_TIME = threading.RLock()


def trace_step(
    model: torch.nn.Module,
    workload: Workload,
    *,
    placement: Mapping[str, int | str] | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    known: Known | None = None,
) -> StepTrace:
    """Run one step of `model` on fake tensors, and return all the memory that it takes.

    The model may be on ``meta`` or real. Its tensors are only described, and it is afterwards what it was: every
    attribute of every module, and the state of the random generators. Nothing is allocated. One trace runs at a time in
    a process; while it runs, other threads must leave the model alone.

    Args:
        model: The model, in the dtype and with the attention implementation with which it will run.
        workload: What it is asked to do.
        placement: Module path to device key, as for ``device_map=``: ``0``, ``1``, ``"cpu"``, ``"disk"``. Several
            devices run with what accelerate's hooks do at their boundaries. None puts everything on device 0.
        inputs: Tensors of which shape and dtype are taken, by the name of forward's argument, for models whose inputs
            are not tokens (on ``meta``, say); they replace those that would be made.
        known: What earlier traces of this model remembered of its operations; it grows.

    Raises:
        TraceError: The model cannot be traced; the text says why.
    """
    with _ONE_AT_A_TIME:
        ledger, values = Ledger(), Values()
        where = TracePlacement(placement)
        with _unchanged(model), attached(model, workload.adapter) as running:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            watch = Watch(ledger, values, Memo(fake, known), several=where.hooked)
            try:
                _run(running, workload, where, inputs, watch, fake)
            except Exception as error:
                raise refusal(running, workload, error, inputs) from error
    return StepTrace(
        workload=repr(workload),
        allocations=tuple(ledger.allocations),
        events=tuple(ledger.events),
        devices=device_traces(ledger.allocations, ledger.events),
        calls=dict(ledger.calls),
        crossings=watch.crossings,
        problems=tuple(watch.problems),
        assumptions=tuple(values.assumed),
    )


def _run(
    model: torch.nn.Module,
    workload: Workload,
    where: TracePlacement,
    given: Mapping[str, torch.Tensor] | None,
    watch: Watch,
    fake: FakeTensorMode,
) -> None:
    ledger = watch.ledger
    functions = Functions(watch.content)
    with _neutral(), functions, functions.lists(), fake:
        twins = FakeTensors(fake, ledger, where)
        twins.swap_in(model)
        if workload.kind == "weights_only":
            ledger.close()
            return
        model.train(workload.kind == "train")
        if workload.gradient_checkpointing:
            _checkpoint(model)
        made = Inputs(model, watch.values, device_of(where.main), given)
        install(model, where, ledger, lambda at: setattr(watch, "boundary", at))
        with _bar(model), watch:
            if workload.kind == "train":
                step.train(model, workload, made, ledger, list(twins.trainable()))
                cache = None
            else:
                cache = step.generate(model, workload, made, ledger)
        ledger.close()
        del cache  # it outlives the step


def _bar(model: torch.nn.Module) -> _progress.Bar:
    """Return a bar that counts the modules as they run, for a trace of more than a second."""
    bar = _progress.bar_of_a_rank("tracing", None, local_rank(), unit=" modules")
    for module in model.modules() if bar.shown else ():
        module.register_forward_pre_hook(lambda *_: bar.advance())
    return bar


def _checkpoint(model: torch.nn.Module) -> None:
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None:
        raise TraceError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(), so it cannot be traced with "
            f"gradient_checkpointing=True. Switch it on in the model itself, and leave it out of the workload."
        )
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        enable()  # else it is on already, reentrant or not as the caller wants it
    if not any(parameter.requires_grad for parameter in model.get_input_embeddings().parameters()):  # type: ignore[operator]  # a model's method
        # as the Trainer and peft do, lest a frozen base's checkpointed layers have no gradient; a hook on the embedding
        model.enable_input_require_grads()  # type: ignore[operator]  # a model's method


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    snapshot = Snapshot(model)
    try:
        yield
    finally:
        snapshot.restore()


@contextlib.contextmanager
def _neutral() -> Iterator[None]:
    """Keep what surrounds the call out of the trace, and the trace out of what surrounds it."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext(),
        # its branch for fake tensors builds a mask that the real run does not
        mock.patch("transformers.utils.import_utils.is_fake_tensor", _no),
    ):
        torch.default_generator.manual_seed(0)  # models that draw lots draw the same ones in every trace
        yield


def _no(_: object) -> bool:
    """Answer without a note of the question: a `Mock` keeps its arguments, and so the tensors, alive."""
    return False
