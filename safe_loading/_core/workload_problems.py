"""Problems of a workload's fields, as its constructors refuse them: flags, and the words of GRPO. Imports no torch."""

from __future__ import annotations

from typing import Any

_FLAGS = (
    "gradient_checkpointing",
    "labels",
    "activation_offload",
    "use_cache",
    "fused_lm_head",
    "old_log_probs",
    "do_sample",
    "label_smoothing",
)


def problems_of_flags(workload: Any) -> list[str]:
    """Return the problems of the fields that are on or off."""
    flags = {name: getattr(workload, name) for name in _FLAGS}
    wrong = {n: f for n, f in flags.items() if not isinstance(f, bool) and (n, f) != ("fused_lm_head", "liger")}
    problems = [f"{name}={flag!r}: True or False." for name, flag in wrong.items()]
    if workload.fused_lm_head and workload.labels is False:
        problems.append("fused_lm_head=True computes the loss from labels: leave labels=False out.")
    if workload.label_smoothing is True and workload.labels is False:
        problems.append("label_smoothing=True computes the loss from labels: leave labels=False out.")
    if workload.label_smoothing is True and workload.fused_lm_head == "liger":
        problems.append("label_smoothing=True needs the logits that Liger's head leaves out: fused_lm_head=False.")
    return problems


def problems_of_grpo(workload: Any) -> list[str]:
    """Return the problems of a step of GRPO, whose rows are prompts with their completions."""
    if not workload.completion_length:
        extra = workload.steps_per_generation or workload.old_log_probs
        return ["steps_per_generation= and old_log_probs= are of GRPO: pass completion_length= too."] if extra else []
    problems = []
    if workload.eval_batch_size or workload.label_smoothing:
        problems.append("eval_batch_size= and label_smoothing= are not for GRPO, whose evaluation generates.")
    if workload.fused_lm_head is not True:
        problems.append("completion_length= is of GRPO in trl, which has a fused head: pass fused_lm_head=True.")
    if workload.sequence_length and not workload.completion_length < workload.sequence_length:
        problems.append(
            f"completion_length={workload.completion_length!r}: fewer tokens than a row of {workload.sequence_length}."
        )
    return problems
