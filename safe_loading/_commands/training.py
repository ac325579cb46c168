"""The arguments that describe a training step, shared by ``audit``, ``plan`` and ``predict``."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safe_loading._core.workload import Workload


_OF_TRAINER = ("eval_batch_size", "label_smoothing")
# what describes a training step alone, by the names under which argparse keeps it
OF_A_STEP = ("gradient_checkpointing", "optimizer", "kbit", "bf16", "fp16", "accumulation", "reference", *_OF_TRAINER)


def add_training(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that describe a training step."""
    declare = parser.add_argument
    declare("--train", metavar="[ROWSx]TOKENS", help="a training step of ROWS x TOKENS, such as 4x1024")
    declare(
        "--gradient-checkpointing",
        "--checkpointing",
        action="store_true",
        help="recompute activations when backpropagating",
    )
    declare("--optimizer", help="such as adamw_8bit or sgd (default: adamw)")
    precision = parser.add_mutually_exclusive_group()
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        more = f"mixed precision: the forward pass under torch.autocast in {dtype}, as the Trainer's {name}=True"
        precision.add_argument(f"--{name}", action="store_true", help=more)
    batches = "micro-batches of --train whose gradients are summed before a step of the optimizer (default: 1)"
    declare("--accumulation", "--gradient-accumulation", type=int, metavar="N", help=batches)
    who = "prepares a base in 4 or 8 bits: trl (the default), peft's prepare_model_for_kbit_training, or another"
    declare("--kbit", choices=("trl", "peft", "axolotl", "unsloth", "none"), help=who)
    more = (
        "DPO, KTO or GRPO with a reference: a copy of the base (model), or the base without the adapter (adapter_off)"
    )
    declare("--reference", choices=("model", "adapter_off"), help=more)
    more = "rows of a batch of the evaluation between steps, as per_device_eval_batch_size (default: none)"
    declare("--eval-batch-size", type=int, metavar="ROWS", help=more)
    smoothed = "smooth the labels, as the Trainer's label_smoothing_factor, which takes all logits once more"
    declare("--label-smoothing", action="store_true", help=smoothed)
    declare("--adapter", metavar="DIR", help="the folder of the adapter that is trained")


def training(arguments: argparse.Namespace, rows: int = 1) -> Workload:
    """Return the step that the arguments describe, with ``rows`` rows if ``--train`` gives only tokens."""
    from safe_loading._core.workload import Workload
    from safe_loading.errors import ArgumentError

    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", arguments.train.lower())
    if match is None:
        raise ArgumentError(f"--train {arguments.train}: write ROWSxTOKENS, such as 4x1024, or only TOKENS.")
    if match[1] is not None and rows not in (1, int(match[1])):
        raise ArgumentError(f"--train {arguments.train} has {match[1]} rows, but --batch is {rows}.")
    return Workload.train(
        int(match[1] or rows),
        int(match[2]),
        gradient_checkpointing=arguments.gradient_checkpointing,
        optimizer=arguments.optimizer or "adamw",
        adapter=arguments.adapter,
        autocast="bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else None,
        reference=arguments.reference,
        eval_batch_size=arguments.eval_batch_size or 0,
        label_smoothing=arguments.label_smoothing,
        gradient_accumulation_steps=1 if arguments.accumulation is None else arguments.accumulation,
    )


def refuse_unused(arguments: argparse.Namespace, *names: str, needs: str = "--train") -> None:
    """Refuse arguments that would silently have no effect; the message names all of them."""
    from safe_loading.errors import ArgumentError

    unused = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) not in (None, False)]
    if unused:
        raise ArgumentError(f"{', '.join(unused)}: has no effect without {needs}; add {needs}, or drop it.")
