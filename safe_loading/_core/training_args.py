"""The step that a Trainer's arguments describe, or those of one of trl's. Imports no torch."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Literal, cast

from safe_loading.errors import ArgumentError

if TYPE_CHECKING:
    from peft import PeftConfig

PairLoss = Literal["orpo", "cpo", "cpo_without_nll"]
# of trl, read in 1.16
_KNOWN = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig", "ORPOConfig", "CPOConfig")
_OTHER_TRAINERS = ("sentence_transformers",)  # which run a model for each text of a row, and compare
_OF_SAMPLES = ("GRPOConfig", "RLOOConfig")  # whose trainers generate the rows
_OF_PAIRS = ("DPOConfig", "RewardConfig", "CPOConfig", "ORPOConfig")  # whose collators make two rows of an example
_FROM_LOGITS = ("ORPOConfig", "CPOConfig")  # whose trainers read all logits
_WITH_REFERENCE = ("DPOConfig", "KTOConfig", *_OF_SAMPLES)
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # of transformers from 5.23 on, and before
_NOT_OF_TORCH = ("offload", "selective")  # of the options of checkpointing: of transformers, and of trl
# beside those that are counted the ones that are of the host
_COUNTED_OF_CHECKPOINTS = {"use_reentrant", "every_n_layers", "preserve_rng_state", "determinism_check", "debug"}
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
_SPLITS = ("tp_size", "cp_size", "sp_size")  # of accelerate's ParallelismConfig: of layers, and of rows
TRUE, FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")  # as accelerate reads them
_SET_IT = "set it to False on a copy of the arguments"
_NOT_COUNTED = {
    "activation_offloading": f"trl leaves some of them on the card, and no workload says which: {_SET_IT}, which takes "
    f"more.",
    "generate_during_eval": f"what the evaluation generates is not counted: {_SET_IT}.",
    "torch_compile": f"a forecast runs the model's own code: {_SET_IT}.",
    "full_determinism": f"it chooses other kernels, and other scratch of cuBLAS: {_SET_IT}.",
    "cast_lm_head_to_fp32": f"the head's copy in 32 bits is not counted: {_SET_IT}.",
    "use_transformers_continuous_batching": f"its cache of all samples in pages is not counted: {_SET_IT}.",
    "use_transformers_paged": f"its cache of all samples in pages is not counted: {_SET_IT}.",
}


def step_of(
    args: Any, sequence_length: int | None, adapter: PeftConfig | str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Return the arguments of ``Workload.train`` for the step of a trainer with these arguments."""
    classes = _classes(args)
    refuse_other(args)
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
        "gradient_checkpointing": _checkpointing(args, adapter is not None) or Fsdp(args).checkpoints,
        "optimizer": _optimizer(args),
        "adapter": adapter,
        "autocast": None if uses_deepspeed(args) else mixed_precision(args),  # whose engine casts the parameters
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "use_cache": bool(getattr(args, "use_cache", False)),
        "fused_lm_head": _fused_head(args),
        "reference": _reference(args, classes, adapter is not None),
        "eval_batch_size": evaluation_rows(args),
        "label_smoothing": smoothes and args.label_smoothing_factor > 0,
        "padding_free": is_padding_free(args),
        "pair_loss": pair_loss_of(args),
        "router_aux_loss_coef": getattr(args, "router_aux_loss_coef", 0.0),
        "model_init_kwargs": _loading_by_trl(args, classes),
        **samples_of(args, length),
    }


def refuse_other(args: object) -> None:
    """Refuse an object that has no arguments of a trainer."""
    if not hasattr(args, "per_device_train_batch_size"):
        raise ArgumentError(f"args is a {type(args).__name__}: pass TrainingArguments, or a config of trl's.")


def keeps_checkpoints(args: object) -> bool:
    """Whether the model itself checkpoints its layers."""
    return next(bool(getattr(args, name)) for name in _CHECKPOINTING if hasattr(args, name))


def _checkpointing(args: Any, adapted: bool) -> bool | dict[str, Any]:
    """Return whether the model checkpoints its layers, with the options that count."""
    if not keeps_checkpoints(args):
        return False
    given = {name: value for name, value in _checkpoint_options(args).items() if name not in _NOT_OF_TORCH}
    every = given.pop("every_n_layers", 1)
    stage = getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0)
    by_trl = _trl_class(args) is not None and adapted and stage == 3  # which then asks for it: forecast without
    # torch's default, where it is given any option
    reentrant = not by_trl and given.get("use_reentrant", bool(given))
    options = {"use_reentrant": True} if reentrant else {}
    return options | ({"every_n_layers": every} if every > 1 else {}) or True


def pair_loss_of(args: Any) -> PairLoss | None:
    """Return the loss of trl's trainers that read all logits of pairs; None for the arguments of any other."""
    classes = _classes(args)
    if not classes.intersection(_FROM_LOGITS):
        return None
    return "orpo" if "ORPOConfig" in classes else "cpo" if args.cpo_alpha else "cpo_without_nll"


def _optimizer(args: Any) -> str:
    """Return the name of the optimizer's rule, by its options and by whether it decays weights."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in ("sgd", "rmsprop"):
        return name
    momentum = "_momentum" if _optimizer_options(args).keys() & {"momentum"} else ""
    return f"{name}{momentum}{'_decayed' if args.weight_decay else ''}"


def _optimizer_options(args: object) -> dict[str, str]:
    """Return the options of ``optim_args`` that are not off."""
    said: str = getattr(args, "optim_args", None) or ""
    options = (each.partition("=") for each in said.replace(" ", "").split(","))
    return {name: value for name, _, value in options if value and value.lower() not in ("0.0", *FALSE)}


def _checkpoint_options(args: object) -> dict[str, Any]:
    return next((of for name in _CHECKPOINTING if (of := getattr(args, f"{name}_kwargs", None))), {})


def mixed_precision(args: Any) -> str | None:
    """Return the dtype of mixed precision, which a launcher's variable may ask for, too; None for full precision."""
    given = "bf16" if args.bf16 else "fp16" if args.fp16 else getattr(args, "mixed_precision", "no")
    return PRECISIONS.get(given)


def uses_deepspeed(args: object) -> bool:
    """Whether DeepSpeed's engine runs the step: by these arguments, or by accelerate's file."""
    return any(getattr(args, name, None) for name in ("deepspeed", "deepspeed_plugin"))


def rows_of_example(args: object) -> int:
    """Return how many rows of a batch trl makes of one example: two of a pair of preferences."""
    return 2 if _classes(args).intersection(_OF_PAIRS) else 1


def evaluation_rows(args: object) -> int:
    """Return the rows of a batch of the evaluation between steps on one device; 0 where there is none."""
    examples = getattr(args, "per_device_eval_batch_size", 0)
    if not _evaluates(args) or not isinstance(examples, int):
        return 0
    return 0 if _classes(args).intersection(_OF_SAMPLES) else examples * rows_of_example(args)


def _evaluates(args: object) -> bool:
    strategy = getattr(args, "eval_strategy", "no")
    return getattr(strategy, "value", strategy) in ("steps", "epoch")


def is_known_trainer(kind: type) -> bool:
    """Whether the loss of a class of trainers is known: transformers' own, and of trl's those that were read."""
    library = kind.__module__.partition(".")[0]
    return library == "transformers" or (library == "trl" and kind.__name__.replace("Trainer", "Config") in _KNOWN)


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
    usual = "auto" if classes.intersection(_FROM_LOGITS) else "float32"
    loading: dict[str, Any] = {
        "dtype": str(said.get("dtype", usual) or "auto").removeprefix("torch."),
        "attn_implementation": said.get("attn_implementation"),
        "quantization_config": quantization.to_dict() if hasattr(quantization, "to_dict") else quantization,
    }
    if "RewardConfig" in classes:
        loading |= {"auto_class": "AutoModelForSequenceClassification", "num_labels": 1}
    return {name: value for name, value in loading.items() if value is not None}


def _problems(args: Any, classes: set[str], length: object) -> list[str]:
    """Return the problems of arguments that no workload can express, and of a length that none of them gives."""
    problems = [f"{name}=True: {why}" for name, why in _NOT_COUNTED.items() if getattr(args, name, False) is True]
    problems += problems_of_split(args) + _problems_of_launch(Fsdp(args)) + _problems_of_other_passes(args, classes)
    others = {name for name, value in _checkpoint_options(args).items() if value} - _COUNTED_OF_CHECKPOINTS
    if keeps_checkpoints(args) and others:
        problems.append(
            f"gradient_checkpointing_kwargs has {', '.join(sorted(others))}, and no workload says what that leaves on "
            f"the card: leave it out of a copy of the arguments."
        )
    more = _optimizer_options(args).keys() & {"momentum", "centered"}
    if more and _optimizer(args).startswith("rmsprop"):
        problems.append(
            f"optim_args has {' and '.join(sorted(more))}, for which RMSprop keeps more: leave it out of a copy of the "
            f"arguments, and then .replace(optimizer=) by a subclass of torch.optim.RMSprop whose __init__ gives it."
        )
    if getattr(args, "mixed_precision", "no") == "fp8":
        problems.append(
            'mixed_precision="fp8", which ACCELERATE_MIXED_PRECISION sets: a step in bfloat16 takes no less, so set it '
            'to "bf16" on a copy of the arguments.'
        )
    if getattr(args, "predict_with_generate", False) is True and evaluation_rows(args):
        problems.append(
            f"predict_with_generate=True: the evaluation generates, with a cache for each beam. Forecast it by itself "
            f"with Workload.generate, and {_SET_IT}."
        )
    name, of_trl = type(args).__name__, _trl_class(args)
    if _elsewhere(args) or (of_trl is not None and of_trl.__name__ not in _KNOWN):  # also where it is made from these
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


def _problems_of_other_passes(args: Any, classes: set[str]) -> list[str]:
    """Return the problems of passes beside the steps that may take more than these, and are not counted."""
    problems = []
    trained, evaluated = args.per_device_train_batch_size, getattr(args, "per_device_eval_batch_size", 0)
    evaluates = _evaluates(args)
    if getattr(args, "eval_on_start", False) is True and not evaluates:
        problems.append(f'eval_on_start=True with eval_strategy="no" evaluates before the first step alone: {_SET_IT}.')
    if getattr(getattr(args, "accelerator_config", None), "split_batches", False) is True:
        problems.append(f"split_batches=True of accelerator_config: a batch is that of all ranks: {_SET_IT}.")
    scored = getattr(args, "precompute_ref_batch_size", None) or 0
    if getattr(args, "precompute_ref_log_probs", False) and scored > max(trained, evaluated * evaluates):
        problems.append(
            f"precompute_ref_batch_size={scored}: so many rows are scored before the first step, which has {trained}: "
            f"set it to None on a copy of the arguments."
        )
    if not classes.intersection(_OF_SAMPLES):
        return problems
    if evaluates and evaluated > trained:
        problems.append(
            f"per_device_eval_batch_size={evaluated}: more samples than the {trained} of a step are generated and "
            f"scored at once: set it to {trained} on a copy of the arguments."
        )
    other = {"cache_implementation", "num_beams"} & (args.generation_kwargs or {}).keys()
    if args.use_vllm is not True and (other or args.cache_implementation):
        problems.append(
            f"{' and '.join(sorted(other)) or 'cache_implementation'} of how samples are generated: a forecast has one "
            f"beam and a cache that grows: leave it out of a copy of the arguments."
        )
    return problems


def problems_of_split(args: object) -> list[str]:
    """Return the problem of a job that splits layers or rows over ranks."""
    split = [f"{name}={size}" for name in _SPLITS if (size := parallel_size(args, name)) > 1]
    why = (
        "and a forecast is of whole layers and rows, which take more: set it to None on a copy of the arguments, or "
        "leave it out of accelerate's file."
    )
    return [f"parallelism_config has {', '.join(split)}, {why}"] if split else []


def parallel_size(args: object, name: str) -> int:
    """Return a size of accelerate's ParallelismConfig: of the arguments, or of a launcher's variables."""
    given = getattr(args, "parallelism_config", None)
    if given is not None:
        return int(getattr(given, name, 1))
    launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) if launched else 1


def _problems_of_launch(fsdp: Fsdp) -> list[str]:
    """Return the problems of settings of a step that a launcher's variables alone have."""
    problems = []
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if compiler.upper() != "NO":
        problems.append(
            f"ACCELERATE_DYNAMO_BACKEND={compiler}, by which accelerate compiles the model: a forecast runs its own "
            f"code, so leave dynamo_config out of accelerate's file."
        )
    if fsdp.offloads_checkpoints:
        problems.append(
            "activation_checkpointing_offload=True, which leaves the inputs of layers on the host: leave it out of "
            "accelerate's file, which takes more."
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


def _elsewhere(args: object) -> bool:
    """Whether they are of a library whose trainers run steps of their own."""
    return any(kind.__module__.partition(".")[0] in _OTHER_TRAINERS for kind in type(args).__mro__)


def _trl_class(args: object) -> type | None:
    """Return the class of trl that some arguments are of, or are made from; None for the Trainer's own."""
    return next((kind for kind in type(args).__mro__ if kind.__module__.partition(".")[0] == "trl"), None)


def _classes(args: object) -> set[str]:
    return {kind.__name__ for kind in type(args).__mro__}


class Fsdp:
    """The FSDP of a trainer's arguments, and where these say nothing, of a launcher's variables, as for accelerate."""

    def __init__(self, args: object) -> None:
        self._given: dict[str, Any] = getattr(args, "fsdp_plugin_args", None) or {}
        self.on = bool(self._given) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        self.version = int(self.said("fsdp_version", "VERSION", 1))
        self.checkpoints = self.on and self.flag("activation_checkpointing", "ACTIVATION_CHECKPOINTING")
        offload = "activation_checkpointing_offload"
        self.offloads_checkpoints = self.checkpoints and self.flag(offload, offload.upper())

    def said(self, name: str, variable: str, default: object) -> Any:
        given = self._given.get(name)
        return os.environ.get(f"FSDP_{variable}", default) if given is None else given

    def flag(self, name: str, variable: str) -> bool:
        return str(self.said(name, variable, False)).lower() in TRUE
