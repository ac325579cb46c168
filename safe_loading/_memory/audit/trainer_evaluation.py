"""The evaluation that a trainer runs between steps: as a workload, and its parts that no forecast counts."""

from __future__ import annotations

from typing import Any

from safe_loading._core.training_args import evaluation_rows
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.step_tensors import Inputs

_OF_OTHER_ROWS = (
    "forecast: the evaluation in batches of {} rows: inputs= are those of a training step. Audit with inputs= of the "
    "evaluation and as many rows."
)
_COLLECTED = (
    "forecast: the logits that compute_metrics= collects on the card, of all batches of the evaluation: pass "
    "preprocess_logits_for_metrics= or eval_accumulation_steps=1."
)
_GENERATED = "forecast: predict_with_generate=True: what the evaluation generates. Forecast it by Workload.generate."


def with_evaluation_of(
    trainer: Any, workload: Workload | None, inputs: Inputs | None
) -> tuple[Workload | None, list[str]]:
    """Return a training step with the evaluation that the trainer asks for, and sentences about the parts left out."""
    rows = _rows_of(trainer)
    if workload is None or workload.kind != "train" or not rows or workload.completion_length:
        return workload, []
    arguments = trainer.args
    left_out = [_GENERATED] if getattr(arguments, "predict_with_generate", False) is True else []
    collects = getattr(trainer, "compute_metrics", None) is not None
    reduced = getattr(trainer, "preprocess_logits_for_metrics", None) is not None
    if collects and not left_out and not reduced and getattr(arguments, "eval_accumulation_steps", None) is None:
        left_out.append(_COLLECTED)
    if workload.eval_batch_size:
        return workload, left_out
    if inputs and rows != workload.batch_size:
        return workload, [*left_out, _OF_OTHER_ROWS.format(rows)]
    return workload.replace(eval_batch_size=rows), left_out


def _rows_of(trainer: Any) -> int:
    """Return the rows of a batch of the evaluation on one device; 0 where a Trainer runs none between steps."""
    evaluates = getattr(trainer, "eval_dataset", None) is not None
    return evaluation_rows(getattr(trainer, "args", None)) if evaluates else 0
