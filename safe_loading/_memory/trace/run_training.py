"""The stages of a traced training step: forward, loss, backward and the optimizer."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from safe_loading._core.optimizer_rules import OptimizerRule
from safe_loading._core.walk import unordered_modules
from safe_loading._core.workload import Workload
from safe_loading.errors import TraceError

from .evaluation import run_evaluation
from .forward_pass import NOTHING_TRAINED, Batch, batch_of, forward_pass
from .grpo_step import GrpoStep
from .inputs import StepInputs
from .ledger import Ledger
from .reference_pass import Reference, reference_pass
from .step_tensors import tensors_of
from .trained_parameters import TrainedParameters

_IMPORTANCE_LEFT_OUT = (
    "What AdaLoRA's update_and_allocate keeps, three numbers for each parameter, is not counted: peft cannot run it to "
    "the end where parameters or their gradients are sharded. With Spread.ddp it can."
)

_NOT_MADE = (
    "It is made with nothing but the parameters that are trained: pass a subclass whose __init__ gives it the rest."
)
_NOT_RUN = "Forecast one of another kind with the same state, or optimizer='none' and add its state yourself."


def run_training(
    model: torch.nn.Module,
    workload: Workload,
    inputs: StepInputs,
    ledger: Ledger,
    trained: TrainedParameters,
    sharded_reference: torch.nn.Module | None,
) -> None:
    """Run one training step in its steady state, with the optimizer's state already allocated."""
    _run_every_layer(model, ledger)
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    optimizer, first_update = _make_optimizer(workload, trained.stepped, trained.stepped_of(embeddings), ledger)
    importance = _Importance(model, trained, ledger)

    def classify(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.classify(parameter.grad, "gradients")

    for parameter in trained.parameters:
        parameter.register_post_accumulate_grad_hook(classify)  # type: ignore[no-untyped-call]  # of torch
    reference = reference_pass(model, workload, ledger, sharded_reference)
    micro_batches = min(workload.gradient_accumulation_steps, 2)  # every further one is like the first
    if workload.eval_batch_size and trained.remembers_evaluations:
        model.eval()
        run_evaluation(model, workload, inputs, ledger, sharded_reference)
        model.train()
        trained.evaluated()
    # a reference that is not resharded stays as its first pass has gathered it, for no backward pass frees it
    if trained.rehearses or sharded_reference is not None:
        _run_micro_batches(model, workload, inputs, ledger, trained, micro_batches, reference)
        trained.rehearsed()
        trained.drop_gradients()
    ledger.make_resident(first_update)
    held = _run_micro_batches(model, workload, inputs, ledger, trained, micro_batches, reference)
    ledger.phase = "optimizer"
    trained.before_step()
    if optimizer is not None:
        _drop_unused_state(optimizer, trained.unused(), ledger)
    trained.step(optimizer)
    if optimizer is not None:
        for tensor in tensors_of(list(optimizer.state.values())):  # which outlives this function
            ledger.keep_alive(tensor)
    for tensor in importance.update():
        ledger.keep_alive(tensor)
    trained.after_step()
    trained.drop_gradients()
    held.clear()


def _run_every_layer(model: torch.nn.Module, ledger: Ledger) -> None:
    """Let LayerDrop skip no layer: a training comes to such a step, and none takes more.

    A model with LayerDrop draws in each step which of its layers run. The trace's snapshot gives modules and configs
    their rates back.
    """
    modules = list(unordered_modules(model))
    configs = {id(config): config for module in modules if (config := vars(module).get("config"))}
    largest = 0.0
    for holder in (*modules, *configs.values()):
        attributes = getattr(holder, "__dict__", {})
        rates = {name: attributes[name] for name in attributes if name.endswith("layerdrop")}
        for name, rate in rates.items():
            if isinstance(rate, (int, float)) and rate > 0:
                largest = max(largest, rate)
                setattr(holder, name, type(rate)(0))  # configs of transformers check the type
    if largest:
        ledger.left_out.append(
            f"LayerDrop is taken to skip no layer, at a rate of {largest:g}: steps in which it skips some take less."
        )


def _run_micro_batches(
    model: torch.nn.Module,
    workload: Workload,
    inputs: StepInputs,
    ledger: Ledger,
    trained: TrainedParameters,
    micro_batches: int,
    reference: Reference | None,
) -> list[Batch]:
    """Run the forward and the backward pass of each micro-batch, and return the batches.

    Those of all micro-batches are on the device until the optimizer's step has ended, as the Trainer brings them.
    """
    ledger.phase = "forward"
    grpo = GrpoStep(model, workload, inputs, ledger, reference) if workload.completion_length else None
    batches: list[Batch] = []
    if grpo is not None:
        grpo.score()
    else:
        batches = [batch_of(workload, inputs, ledger) for _ in range(workload.gradient_accumulation_steps)]
    for number in range(micro_batches):
        last = number == micro_batches - 1
        trained.begin_micro_batch(last)
        ledger.phase = "forward"
        with _offloaded(workload):
            loss = forward_pass(model, workload, batches[number], inputs, reference) if grpo is None else grpo.loss()
        if not loss.requires_grad:
            raise TraceError(NOTHING_TRAINED)
        ledger.classify_temporary(ledger.live.values(), "activations")  # they are kept for the backward pass
        # from here on what a checkpoint recomputes is temporary, since it was not alive after the forward pass
        ledger.phase = "backward"
        trained.begin_backward(last)
        trained.scaled(loss).backward()  # type: ignore[no-untyped-call]  # of torch
        del loss
        trained.bring_gradients(ledger)
    return batches


class _Importance:
    """AdaLoRA's record of its parameters' importance: three numbers for each, from the first step on.

    A loop brings it up to date by ``update_and_allocate`` between the optimizer's step and ``zero_grad``.
    """

    def __init__(self, model: torch.nn.Module, trained: TrainedParameters, ledger: Ledger) -> None:
        self._ledger = ledger
        tuner = getattr(model, "base_model", None)
        self._adapted: Any = getattr(tuner, "model", None)
        self._allocator: Any = copy.copy(getattr(tuner, "rankallocator", None))  # the caller's keeps its numbers
        if self._allocator is not None and trained.sharded:
            self._allocator = None
            ledger.left_out.append(_IMPORTANCE_LEFT_OUT)
        if self._allocator is not None:
            self._allocator.reset_ipt()
            for parameter in trained.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.update()
            for parameter in trained.parameters:
                parameter.grad = None

    def update(self) -> list[torch.Tensor]:
        """Take the gradients of a step into account, where all that peft reads are there; return all numbers."""
        if self._allocator is None:
            return []
        adapter = self._allocator.adapter_name
        if any(p.grad is None for name, p in self._adapted.named_parameters() if "lora_" in name and adapter in name):
            return []
        self._allocator.update_ipt(self._adapted)
        known = vars(self._allocator)
        numbers = tensors_of([known[name] for name in ("ipt", "exp_avg_ipt", "exp_avg_unc")])
        for tensor in numbers:
            self._ledger.classify(tensor, "optimizer")
        return numbers


def _make_optimizer(
    workload: Workload, parameters: Sequence[torch.nn.Parameter], embeddings: Sequence[torch.Tensor], ledger: Ledger
) -> tuple[torch.optim.Optimizer | None, slice]:
    """Return the optimizer with its state, which is there from the second step on, and the events of its first one.

    It is None where only state is counted.
    """
    rule = workload.rule
    if not parameters or (rule is not None and rule.source is None):
        _allocate_state(rule, parameters, embeddings, ledger)
        return None, slice(0)
    optimizer = _made(workload, parameters)
    # Whether a CUDA graph is being captured is asked of the current GPU, which makes a context on it (torch 2.13).
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(optimizer, name, lambda: None)
    # optimizers allocate their state in the first step; only the fake gradients' shapes matter
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    begun = len(ledger.events)
    try:
        optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TraceError(
            f"A step of {type(optimizer).__name__} cannot be traced: {_first_line(error)} {_NOT_RUN}"
        ) from error
    first_update = slice(begun, len(ledger.events))
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for tensor in tensors_of(state):
            ledger.classify(tensor, "optimizer")
    return optimizer, first_update


def _made(workload: Workload, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of a workload over these parameters, ready for a step of training."""
    kind, rule = _class_of(workload), workload.rule
    options: dict[str, Any] = {} if rule is None else dict(rule.options)
    try:
        optimizer: torch.optim.Optimizer = kind(parameters, **options)
    except (TypeError, ValueError) as error:
        raise TraceError(f"optimizer={kind.__name__} cannot be made: {_first_line(error)} {_NOT_MADE}") from error
    to_train = getattr(optimizer, "train", None)  # of schedulefree's, which the Trainer calls
    if to_train is not None:
        to_train()
    return optimizer


def _class_of(workload: Workload) -> type[torch.optim.Optimizer]:
    """Return the class of a workload's optimizer, of which no rule alone is counted."""
    if workload.rule is None:
        return cast("type[torch.optim.Optimizer]", workload.optimizer)
    module, _, name = (workload.rule.source or "").partition(":")
    try:
        found: type[torch.optim.Optimizer] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise TraceError(
            f"optimizer={workload.optimizer!r} is run by its own code, of {module}, which is not installed: pip "
            f"install {module}."
        ) from error
    return found


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if text.endswith(".") else f"{text}."


def _drop_unused_state(optimizer: torch.optim.Optimizer, unused: Iterable[torch.nn.Parameter], ledger: Ledger) -> None:
    """Take back the state of parameters that the step gave no gradient, for which a real optimizer makes none."""
    for parameter in unused:
        if parameter in optimizer.state:
            ledger.first_update = ()  # of a step in which each parameter had a gradient
            for tensor in tensors_of(optimizer.state[parameter]):
                ledger.take_back(tensor)


def _allocate_state(
    rule: OptimizerRule | None,
    parameters: Iterable[torch.nn.Parameter],
    embeddings: Sequence[torch.Tensor],
    ledger: Ledger,
) -> None:
    """Allocate the state of an optimizer that is not run."""
    if rule is None:
        return
    for parameter in parameters:
        of_embedding = any(parameter is weight for weight in embeddings)
        parts = rule.state_parts(parameter.shape, parameter.itemsize, of_embedding=of_embedding)
        for size in filter(None, parts):
            state = torch.empty(size, dtype=torch.uint8, device=parameter.device)
            ledger.classify(state, "optimizer")
            ledger.keep_alive(state)


def _offloaded(workload: Workload) -> AbstractContextManager[object]:
    # pinned memory of the host would make no difference on the device
    return torch.autograd.graph.save_on_cpu() if workload.activation_offload else contextlib.nullcontext()
