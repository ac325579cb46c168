"""The evaluation that a trainer runs between steps, as a traced pass of its own: in eval mode, without a graph."""

from __future__ import annotations

import dataclasses

import torch

from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .forward_pass import batch_of, forward_pass
from .inputs import StepInputs
from .ledger import Ledger
from .reference_pass import reference_pass
from .step_tensors import Inputs

NOTE = (
    "The evaluation keeps no logits. With compute_metrics= the Trainer keeps those of all its batches on the card, in "
    "float32 under mixed precision, unless preprocess_logits_for_metrics= or eval_accumulation_steps= takes them away. "
    "What predict_with_generate=True generates is not counted: Workload.generate forecasts it."
)


def evaluation_of(workload: Workload) -> Workload:
    """Return the evaluation of a training step as a workload."""
    return dataclasses.replace(workload, kind="evaluate")


def refuse_other_rows(workload: Workload, inputs: Inputs | None) -> None:
    """Refuse an evaluation of other rows than those of the caller's own tensors, which are of one size."""
    if inputs and workload.eval_batch_size not in (0, workload.batch_size):
        raise ArgumentError(
            f"eval_batch_size={workload.eval_batch_size}: inputs= are those of a training step. Forecast the rows of "
            f"the evaluation with inputs= of their own: "
            f"{workload.replace(batch_size=workload.eval_batch_size)}, or leave it out: "
            f"{workload.replace(eval_batch_size=0)}."
        )


def run_evaluation(
    model: torch.nn.Module,
    workload: Workload,
    inputs: StepInputs,
    ledger: Ledger,
    sharded_reference: torch.nn.Module | None,
) -> None:
    """Run the evaluation of one batch, whose loss is computed as in training.

    The batches of the step before it are still there.
    """
    reference = reference_pass(model, workload, ledger, sharded_reference)
    ledger.phase = "evaluation"
    held = [batch_of(workload, inputs, ledger) for _ in range(workload.gradient_accumulation_steps)]
    evaluated = dataclasses.replace(workload, batch_size=workload.eval_batch_size)
    with torch.no_grad():
        forward_pass(model, evaluated, batch_of(evaluated, inputs, ledger), inputs, reference)
    held.clear()
