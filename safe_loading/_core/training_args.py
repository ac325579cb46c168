"""The step that a Trainer's arguments describe, or those of one of trl's trainers. Imports no torch."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, cast

from safe_loading.errors import ArgumentError

if TYPE_CHECKING:
    from peft import PeftConfig

_KNOWN = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig")  # of trl, read in 1.16
_OF_SAMPLES = ("GRPOConfig", "RLOOConfig")  # whose trainers generate the rows
_OF_PAIRS = ("DPOConfig", "RewardConfig", "CPOConfig", "ORPOConfig")  # whose collators make two rows of an example
_WITH_REFERENCE = ("DPOConfig", "KTOConfig", *_OF_SAMPLES)
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # of transformers from 5.23 on, and before
_SPLITS = ("tp_size", "cp_size", "sp_size")  # of accelerate's ParallelismConfig: of layers, and of rows
_SET_IT = "set it to False on a copy of the arguments"
_NOT_COUNTED = {
    "activation_offloading": f"trl leaves some of them on the card, and no workload says which: {_SET_IT}, which takes "
    f"more.",
    "torch_compile": f"a forecast runs the model's own code: {_SET_IT}.",
}


def step_of(
    args: Any, sequence_length: int | None, adapter: PeftConfig | str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Return the arguments of ``Workload.train`` for the step of a trainer with these arguments."""
    classes = _classes(args)
    if not hasattr(args, "per_device_train_batch_size"):
        raise ArgumentError(f"args is a {type(args).__name__}: pass TrainingArguments, or a config of trl's.")
    asked = getattr(args, "max_length", None) if sequence_length is None else sequence_length
    problems = _problems(args, classes, asked)
    if problems:
        raise ArgumentError("Workload.from_training_args cannot be sure of these:", problems)
    length = _padded_row(args, classes, cast("int", asked))
    # trl's other trainers have losses of their own, which read no smoothed labels
    smoothes = _trl_class(args) is None or ("SFTConfig" in classes and args.loss_type == "nll")
    return {
        "batch_size": args.per_device_train_batch_size * rows_of_example(args),
        "sequence_length": length,
        "gradient_checkpointing": next(bool(getattr(args, name)) for name in _CHECKPOINTING if hasattr(args, name)),
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "adapter": adapter,
        "autocast": "bfloat16" if args.bf16 else "float16" if args.fp16 else None,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "use_cache": bool(getattr(args, "use_cache", False)),
        "fused_lm_head": _fused_head(args),
        "reference": _reference(args, classes, adapter is not None),
        "eval_batch_size": evaluation_rows(args),
        "label_smoothing": smoothes and args.label_smoothing_factor > 0,
        "padding_free": is_padding_free(args),
        "router_aux_loss_coef": getattr(args, "router_aux_loss_coef", 0.0),
        "model_init_kwargs": _loading_by_trl(args, classes),
        **samples_of(args, length),
    }


def rows_of_example(args: object) -> int:
    """Return how many rows of a batch trl makes of one example: two of a pair of preferences."""
    return 2 if _classes(args).intersection(_OF_PAIRS) else 1


def evaluation_rows(args: object) -> int:
    """Return the rows of a batch of the evaluation between steps on one device; 0 where there is none."""
    strategy = getattr(args, "eval_strategy", "no")
    examples = getattr(args, "per_device_eval_batch_size", 0)
    if getattr(strategy, "value", strategy) not in ("steps", "epoch") or not isinstance(examples, int):
        return 0
    return 0 if _classes(args).intersection(_OF_SAMPLES) else examples * rows_of_example(args)


def is_padding_free(args: Any) -> bool:
    """Whether trl's ``SFTTrainer`` puts the rows of a batch one after the other in one row; its others pad them."""
    if "SFTConfig" not in _classes(args):
        return False
    wholly = getattr(args, "packing_strategy", "bfd") != "wrapped"  # that cuts texts, and its rows are full
    return bool(getattr(args, "padding_free", False) or (args.packing and wholly))


def samples_of(args: Any, sequence_length: int) -> dict[str, Any]:
    """Return how GRPO and RLOO make their samples, in the fields of a workload; nothing for other arguments."""
    classes = _classes(args)
    if not classes.intersection(_OF_SAMPLES):
        return {}
    by_vllm = args.use_vllm is True
    corrected = by_vllm and bool(getattr(args, "vllm_importance_sampling_correction", False))
    every = args.steps_per_generation * args.num_iterations
    again = "RLOOConfig" in classes or corrected or args.gradient_accumulation_steps % every != 0
    return {
        "completion_length": min(_padded(args, args.max_completion_length or sequence_length), sequence_length - 1),
        "steps_per_generation": 0 if by_vllm else args.steps_per_generation,
        "old_log_probs": again,
    }


def _padded_row(args: Any, classes: set[str], length: int) -> int:
    """Return the tokens of the longest row, padded as trl's collators do: of samples both parts, each by itself."""
    if not classes.intersection(_OF_SAMPLES):
        return _padded(args, length)
    return _padded(args, length - args.max_completion_length) + _padded(args, args.max_completion_length)


def _padded(args: Any, length: int) -> int:
    multiple = getattr(args, "pad_to_multiple_of", None)  # trl resolves its default, "auto"
    return length if not isinstance(multiple, int) or multiple < 1 else -(-length // multiple) * multiple


def _loading_by_trl(args: Any, classes: set[str]) -> dict[str, Any] | None:
    """Return the options with which trl loads a folder or hub id, read in its ``create_model_from_path``."""
    if _trl_class(args) is None:
        return None
    said: dict[str, Any] = dict(getattr(args, "model_init_kwargs", None) or {})
    quantization: Any = said.get("quantization_config")
    loading: dict[str, Any] = {
        "dtype": str(said.get("dtype", "float32") or "auto").removeprefix("torch."),
        "attn_implementation": said.get("attn_implementation"),
        "quantization_config": quantization.to_dict() if hasattr(quantization, "to_dict") else quantization,
    }
    if "RewardConfig" in classes:
        loading |= {"auto_class": "AutoModelForSequenceClassification", "num_labels": 1}
    return {name: value for name, value in loading.items() if value is not None}


def _problems(args: Any, classes: set[str], length: object) -> list[str]:
    """Return the problems of arguments that no workload can express, and of a length that none of them gives."""
    problems = [f"{name}=True: {why}" for name, why in _NOT_COUNTED.items() if getattr(args, name, False) is True]
    parallel = getattr(args, "parallelism_config", None)
    split = [f"{name}={size}" for name in _SPLITS if (size := getattr(parallel, name, 1)) > 1]
    if split:
        problems.append(
            f"parallelism_config has {', '.join(split)}, and a forecast is of whole layers and rows: set it to None on "
            f"a copy of the arguments, which takes more."
        )
    name, of_trl = type(args).__name__, _trl_class(args)
    if of_trl is not None and of_trl.__name__ not in _KNOWN:  # also where it is made from one of these
        problems.append(f"{name} is of a trainer whose step is not known: describe the step with Workload.train.")
    if length is None:
        problems.append(f"{name} says no length of rows: pass sequence_length=.")
    elif classes.intersection(_OF_SAMPLES) and args.max_completion_length is None:
        problems.append(f"{name} has max_completion_length=None: set it on a copy of the arguments, such as 512.")
    elif classes.intersection(_OF_SAMPLES) and isinstance(length, int) and length <= args.max_completion_length:
        more = args.max_completion_length + 512
        problems.append(
            f"sequence_length={length} leaves no prompt beside max_completion_length={args.max_completion_length}: "
            f"pass the tokens of both, such as {more} for prompts of 512."
        )
    return problems


def _reference(args: Any, classes: set[str], adapted: bool) -> str | None:
    """Return the reference that trl runs, which with an adapter is the base without it."""
    before = getattr(args, "precompute_ref_log_probs", False)
    if not classes.intersection(_WITH_REFERENCE) or before or (classes.intersection(_OF_SAMPLES) and args.beta == 0.0):
        return None
    return "adapter_off" if adapted else "model"


def _fused_head(args: Any) -> bool | str:
    """Return whose head computes the loss without logits: trl's in its trainers, Liger's in the plain one, or none."""
    of_trl = _trl_class(args)
    if of_trl is not None:
        trainer = importlib.import_module(of_trl.__module__.removesuffix("_config") + "_trainer")
        return hasattr(trainer, "add_fused_lm_head")
    return "liger" if asks_for_ligers_head(args) and args.label_smoothing_factor == 0 else False  # that is of logits


def asks_for_liger(args: object) -> bool:
    """Whether a Trainer lets Liger patch its model."""
    return getattr(args, "use_liger_kernel", False) is True


def asks_for_ligers_head(args: object) -> bool:
    """Whether it lets Liger patch the head and the loss, too."""
    options = getattr(args, "liger_kernel_config", None) or {}
    return asks_for_liger(args) and options.get("fused_linear_cross_entropy", True) is True


def _trl_class(args: object) -> type | None:
    """Return the class of trl that some arguments are of, or are made from; None for the Trainer's own."""
    return next((kind for kind in type(args).__mro__ if kind.__module__.partition(".")[0] == "trl"), None)


def _classes(args: object) -> set[str]:
    return {kind.__name__ for kind in type(args).__mro__}
