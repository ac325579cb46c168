"""Problems of a workload's fields, which its constructors refuse all at once. Imports no torch."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import Any

from safe_loading.errors import ArgumentError

from .optimizer_rules import OPTIMIZERS

SOUGHT = {"batch_size": "largest_micro_batch", "sequence_length": "largest_workload"}  # and the verb that finds it
MOST_DECODED = 256  # steps of one token in a trace, which runs the whole model in Python for each
_WORDS = {
    "reference": ("model", "adapter_off"),
    "autocast": ("bfloat16", "float16"),
    "pair_loss": ("orpo", "cpo", "cpo_without_nll"),
}
_MAY_BE_ZERO = ("decode_steps", "new_tokens", "completion_length", "steps_per_generation", "eval_batch_size")
_LOADING = ("dtype", "attn_implementation", "quantization_config", "auto_class", "num_labels")
_FLAGS = (
    "labels",
    "activation_offload",
    "use_cache",
    "fused_lm_head",
    "old_log_probs",
    "do_sample",
    "label_smoothing",
    "padding_free",
)


def is_count(value: object) -> bool:
    """Whether a value is an integer from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def checked_numbers(workload: Any) -> dict[str, Any]:
    """Return the numbers of a workload as ``int``, or raise an error that lists everything wrong with it."""
    if workload.kind == "weights_only":
        return {}
    numbers, problems = _numbers(workload)
    problems += [*_problems_of_flags(workload), *_problems_of_grpo(workload)]
    for name, words in _WORDS.items():
        if getattr(workload, name) not in (None, *words):
            problems.append(f"{name}={getattr(workload, name)!r}: one of {list(words)}, or None.")
    known = isinstance(workload.optimizer, type) or (
        isinstance(workload.optimizer, str) and workload.optimizer in OPTIMIZERS
    )
    if not known:
        problems.append(f"optimizer={workload.optimizer!r}: one of {sorted(OPTIMIZERS)}, or a torch.optim class.")
    adapter = workload.adapter
    if not (adapter is None or isinstance(adapter, (str, os.PathLike)) or hasattr(adapter, "peft_type")):
        kind = type(adapter).__name__
        problems.append(
            f"adapter is a {kind}: a config of peft, such as LoraConfig(r=16), or the folder of an adapter."
        )
    problems += _problems_of_loading(workload.model_init_kwargs) + _problems_of_checkpoints(workload)
    coefficient = workload.router_aux_loss_coef
    if coefficient is not None and (isinstance(coefficient, bool) or not isinstance(coefficient, (int, float))):
        problems.append(f"router_aux_loss_coef={coefficient!r}: a number, or None for that of the model's config.")
    if problems:
        raise ArgumentError(f"Workload.{workload.kind} cannot be made of these:", problems)
    return numbers


def _numbers(workload: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of a workload as ``int``, 0 where one is to be found, and their problems."""
    problems: list[str] = []
    numbers: dict[str, Any] = {}
    written_as = {"sequence_length": "context_length"} if workload.kind == "generate" else {}
    least: dict[str, int] = dict.fromkeys(_MAY_BE_ZERO, 0)
    for name in ("batch_size", "sequence_length", "gradient_accumulation_steps", *least):
        value, low = getattr(workload, name), least.get(name, 1)
        # Numpy's integers have __index__ too, and 2.0 does not; what has none fails the check below.
        try:
            number = operator.index(value)
        except TypeError:
            number = low - 1
        if value is None and name in SOUGHT:
            number = 0
        elif isinstance(value, bool) or number < low:
            problems.append(f"{written_as.get(name, name)}={value!r}: an integer, {low} or more.")
        numbers[name] = number
    if numbers["decode_steps"] > MOST_DECODED:
        length = numbers["sequence_length"] + numbers["decode_steps"] - MOST_DECODED
        problems.append(
            f"decode_steps={numbers['decode_steps']}: each step is traced, and {MOST_DECODED} at most. The cache of a "
            f"long prompt is as large: pass context_length={length} and decode_steps={MOST_DECODED}."
        )
    return numbers, problems


def _problems_of_flags(workload: Any) -> list[str]:
    """Return the problems of the fields that are on or off."""
    flags = {name: getattr(workload, name) for name in _FLAGS}
    wrong = {n: f for n, f in flags.items() if not isinstance(f, bool) and (n, f) != ("fused_lm_head", "liger")}
    problems = [f"{name}={flag!r}: True or False." for name, flag in wrong.items()]
    if workload.fused_lm_head and workload.labels is False:
        problems.append("fused_lm_head=True computes the loss from labels: leave labels=False out.")
    if workload.pair_loss and (
        workload.labels is False or workload.fused_lm_head or workload.label_smoothing or workload.padding_free
    ):
        problems.append(
            "pair_loss= is computed from the logits of padded rows with labels: leave labels=False, fused_lm_head=, "
            "label_smoothing= and padding_free= out."
        )
    if workload.label_smoothing is True and workload.labels is False:
        problems.append("label_smoothing=True computes the loss from labels: leave labels=False out.")
    if workload.label_smoothing is True and workload.fused_lm_head == "liger":
        problems.append("label_smoothing=True needs the logits that Liger's head leaves out: fused_lm_head=False.")
    return problems


def _problems_of_loading(options: object) -> list[str]:
    """Return the problems of the options with which a trainer loads its model."""
    if options is None or (isinstance(options, Mapping) and set(options) <= set(_LOADING)):
        return []
    return [f"model_init_kwargs={options!r:.80}: a dict of {', '.join(_LOADING)} that a forecast counts, or None."]


def _problems_of_checkpoints(workload: Any) -> list[str]:
    """Return the problem of checkpointing that is neither on nor off, nor on with options of it."""
    asked = workload.gradient_checkpointing
    if isinstance(asked, bool):
        return []
    options = dict(asked) if isinstance(asked, Mapping) else {}
    known = options and options.keys() <= {"use_reentrant", "every_n_layers"}
    if known and isinstance(options.get("use_reentrant", False), bool) and is_count(options.get("every_n_layers", 1)):
        return []
    return [
        f"gradient_checkpointing={asked!r:.80}: True or False, or options of it such as "
        f'{{"use_reentrant": True, "every_n_layers": 2}}.'
    ]


def _problems_of_grpo(workload: Any) -> list[str]:
    """Return the problems of a step of GRPO, whose rows are prompts with their completions."""
    if not workload.completion_length:
        extra = workload.steps_per_generation or workload.old_log_probs
        return ["steps_per_generation= and old_log_probs= are of GRPO: pass completion_length= too."] if extra else []
    problems = []
    if workload.eval_batch_size or workload.label_smoothing:
        problems.append("eval_batch_size= and label_smoothing= are not for GRPO, whose evaluation generates.")
    if workload.padding_free:
        problems.append("padding_free= is not for GRPO, whose rows trl pads: leave it out.")
    if workload.fused_lm_head is not True:
        problems.append("completion_length= is of GRPO in trl, which has a fused head: pass fused_lm_head=True.")
    if workload.sequence_length and not workload.completion_length < workload.sequence_length:
        problems.append(
            f"completion_length={workload.completion_length!r}: fewer tokens than a row of {workload.sequence_length}."
        )
    return problems
