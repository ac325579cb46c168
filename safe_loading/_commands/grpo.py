"""The arguments of ``predict`` that make a training step one of GRPO: trl's names, as its command line takes them."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading.errors import ArgumentError

from .training import refuse_unused

if TYPE_CHECKING:
    from safe_loading._core.workload import Reference, Workload

COMPLETION = "max_completion_length"
_WITH_IT = ("num_generations", "steps_per_generation", "num_iterations", "beta", "use_vllm")
OF_GRPO = (COMPLETION, *_WITH_IT)
_LEAST = {COMPLETION: 1, "num_generations": 2, "steps_per_generation": 1, "num_iterations": 1}


def add_grpo(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of GRPO, also with trl's underscores."""
    counts = {
        COMPLETION: "GRPO: this many tokens of each row of --train are generated, the last ones",
        "num_generations": "completions of one prompt, each a row; checked only",
        "steps_per_generation": "micro-batches that are generated at once (default: those of --accumulation)",
        "num_iterations": "how often the samples are used for a step of the optimizer (default: 1)",
    }
    for name, more in counts.items():
        parser.add_argument(*_spellings(name), type=int, metavar="N", help=more)
    parser.add_argument(
        "--beta", type=float, metavar="X", help="weight of GRPO's reference, which is there unless it is 0 (default: 0)"
    )
    parser.add_argument(*_spellings("use_vllm"), action="store_true", help="vLLM generates; its memory is not counted")


def with_grpo(arguments: argparse.Namespace, step: Workload) -> Workload:
    """Return a step of GRPO with these arguments, or the step itself where there are none of them."""
    completion = arguments.max_completion_length
    if completion is None:
        refuse_unused(arguments, *_WITH_IT, needs="--max-completion-length")
        return step
    for name, least in _LEAST.items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ArgumentError(f"{_spellings(name)[0]} {value}: a number from {least} on.")
    if step.sequence_length <= completion:
        raise ArgumentError(
            f"--max-completion-length {completion} leaves no prompt in --train {arguments.train}, whose tokens are of "
            f"both: write --train {step.batch_size}x{completion + 512} for a prompt of 512."
        )
    if arguments.gpus is not None:
        raise ArgumentError("--max-completion-length: a step of GRPO is forecast for one GPU; drop --gpus.")
    if arguments.packing:
        raise ArgumentError("--packing: trl pads the rows of GRPO; drop --packing or --max-completion-length.")
    steps = arguments.steps_per_generation or step.gradient_accumulation_steps
    _refuse_parts_of_a_group(arguments, step.batch_size, steps)
    reused = step.gradient_accumulation_steps % (steps * (arguments.num_iterations or 1)) != 0
    return step.replace(
        fused_lm_head=True,
        completion_length=completion,
        steps_per_generation=0 if arguments.use_vllm else steps,
        old_log_probs=arguments.use_vllm or reused,
        reference=_reference(arguments, step),
    )


def sizes_of_grpo(arguments: argparse.Namespace, sizes: list[int]) -> list[int]:
    """Return the sizes of a sweep that make a step of GRPO; one that was named and makes none is refused."""
    completion, group = arguments.max_completion_length, arguments.num_generations
    if completion is None:
        return sizes
    if arguments.sweep == "length":
        taken = [size for size in sizes if size > completion]
        why = f"rows are a prompt with --max-completion-length {completion}"
    else:
        steps = arguments.steps_per_generation or arguments.accumulation or 1
        taken = [size for size in sizes if size * steps % (group or 1) == 0]
        why = f"the rows of {steps} micro-batches are whole groups of --num-generations {group}"
    left = [str(size) for size in sizes if size not in taken]
    if left and (arguments.values is not None or not taken):
        raise ArgumentError(f"--sweep {arguments.sweep}: {why}, and these sizes are none: {', '.join(left)}.")
    return taken


def _refuse_parts_of_a_group(arguments: argparse.Namespace, rows: int, steps: int) -> None:
    """Refuse generations that trl refuses, because they are no whole number of prompts."""
    group = arguments.num_generations
    if group is None or arguments.sweep == "batch" or rows * steps % group == 0:
        return
    raise ArgumentError(
        f"--num-generations {group} does not divide the {rows * steps} rows of a generation ({rows} of --train x "
        f"{steps} micro-batches), which trl refuses: pass --steps-per-generation {group // math.gcd(rows, group)}."
    )


def _reference(arguments: argparse.Namespace, step: Workload) -> Reference | None:
    """Return the reference that trl takes: none without `--beta`, and with an adapter the base without it."""
    if not arguments.beta:
        if arguments.reference is not None:
            raise ArgumentError(
                f"--reference {arguments.reference}: GRPO has no reference with --beta 0, which is trl's default; add "
                f"--beta 0.04, or drop --reference."
            )
        return None
    adapted = step.adapter is not None or os.path.lexists(Path(arguments.model).expanduser() / ADAPTER_CONFIG)
    chosen: Reference | None = arguments.reference
    return chosen or ("adapter_off" if adapted else "model")


def _spellings(name: str) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", f"--{name}"
