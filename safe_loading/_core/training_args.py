"""The step and the job over ranks that a Trainer's arguments describe, or those of one of trl's. Imports no torch."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safe_loading.errors import ArgumentError

if TYPE_CHECKING:
    from peft import PeftConfig

_KNOWN = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig")  # of trl, read in 1.16
_OTHER_TRAINERS = ("sentence_transformers",)  # which run a model for each text of a row, and compare
_OF_SAMPLES = ("GRPOConfig", "RLOOConfig")  # whose trainers generate the rows
_OF_PAIRS = ("DPOConfig", "RewardConfig", "CPOConfig", "ORPOConfig")  # whose collators make two rows of an example
_WITH_REFERENCE = ("DPOConfig", "KTOConfig", *_OF_SAMPLES)
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # of transformers from 5.23 on, and before
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
_SPLITS = ("tp_size", "cp_size", "sp_size")  # of accelerate's ParallelismConfig: of layers, and of rows
_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")  # as accelerate reads them
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
        "gradient_checkpointing": keeps_checkpoints(args) or _Fsdp(args).checkpoints,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "adapter": adapter,
        "autocast": None if uses_deepspeed(args) else mixed_precision(args),  # whose engine casts the parameters
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


def refuse_other(args: object) -> None:
    """Refuse an object that has no arguments of a trainer."""
    if not hasattr(args, "per_device_train_batch_size"):
        raise ArgumentError(f"args is a {type(args).__name__}: pass TrainingArguments, or a config of trl's.")


def keeps_checkpoints(args: object) -> bool:
    """Whether the model itself checkpoints its layers."""
    return next(bool(getattr(args, name)) for name in _CHECKPOINTING if hasattr(args, name))


def mixed_precision(args: Any) -> str | None:
    """Return the dtype of mixed precision, which a launcher's variable may ask for, too; None for full precision."""
    given = "bf16" if args.bf16 else "fp16" if args.fp16 else getattr(args, "mixed_precision", "no")
    return _PRECISIONS.get(given)


def uses_deepspeed(args: object) -> bool:
    """Whether DeepSpeed's engine runs the step: by these arguments, or by accelerate's file."""
    return any(getattr(args, name, None) for name in ("deepspeed", "deepspeed_plugin"))


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
    problems += _problems_of_split(args) + _problems_of_launch(_Fsdp(args))
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


def _problems_of_split(args: object) -> list[str]:
    """Return the problem of a job that splits layers or rows over ranks."""
    split = [f"{name}={size}" for name in _SPLITS if (size := _parallel_size(args, name)) > 1]
    why = (
        "and a forecast is of whole layers and rows, which take more: set it to None on a copy of the arguments, or "
        "leave it out of accelerate's file."
    )
    return [f"parallelism_config has {', '.join(split)}, {why}"] if split else []


def _parallel_size(args: object, name: str) -> int:
    """Return a size of accelerate's ParallelismConfig: of the arguments, or of a launcher's variables."""
    given = getattr(args, "parallelism_config", None)
    if given is not None:
        return int(getattr(given, name, 1))
    launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) if launched else 1


def _problems_of_launch(fsdp: _Fsdp) -> list[str]:
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


def job_of(args: Any, ranks: int | None, hidden_size: int | None, *, adapted: bool) -> tuple[str, dict[str, Any]]:
    """Return the kind of the ``Spread`` of a trainer's job, and the arguments that make it."""
    refuse_other(args)
    problems = _problems_of_split(args)
    if uses_deepspeed(args):
        kind, options = "zero", _zero(args, hidden_size, problems)
    elif (fsdp := _Fsdp(args)).on:
        kind, options = f"fsdp{fsdp.version}", fsdp.options(args, problems)
        ranks, options["replicas"] = _groups(args, ranks, problems)
    else:
        kind, options = "ddp", _ddp(args, adapted=adapted)
    if problems:
        raise ArgumentError("Spread.from_training_args cannot be sure of these:", problems)
    return kind, {"ranks": ranks, **options}


def _ddp(args: Any, *, adapted: bool) -> dict[str, Any]:
    """Return the options of DDP, among whose defaults are those of the Trainer."""
    unused = args.ddp_find_unused_parameters
    return {
        # of a model of transformers' own, which peft's wrapper is not
        "find_unused_parameters": adapted or not keeps_checkpoints(args) if unused is None else bool(unused),
        "bucket_cap_mb": args.ddp_bucket_cap_mb or 25,
        "static_graph": bool(getattr(args, "ddp_static_graph", None)),
    }


def _groups(args: Any, ranks: int | None, problems: list[str]) -> tuple[int | None, int]:
    """Return over how many ranks parameters are sharded, and how many such groups there are."""
    replicas = _parallel_size(args, "dp_replicate_size")
    if ranks is None or ranks % replicas == 0:
        return ranks and ranks // replicas, replicas
    problems.append(f"ranks={ranks} are no groups of the same size for dp_replicate_size={replicas}: pass all of them.")
    return ranks, replicas


class _Fsdp:
    """The FSDP of a trainer's arguments, and where these say nothing, of a launcher's variables, as for accelerate."""

    def __init__(self, args: object) -> None:
        self._given: dict[str, Any] = getattr(args, "fsdp_plugin_args", None) or {}
        self.on = bool(self._given) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        self.version = int(self._said("fsdp_version", "VERSION", 1))
        self.checkpoints = self.on and self._flag("activation_checkpointing", "ACTIVATION_CHECKPOINTING")
        offload = "activation_checkpointing_offload"
        self.offloads_checkpoints = self.checkpoints and self._flag(offload, offload.upper())

    def options(self, args: Any, problems: list[str]) -> dict[str, Any]:
        """Return the arguments of ``Spread.fsdp1`` or ``Spread.fsdp2``, and add the problems of others."""
        precision = mixed_precision(args)
        options: dict[str, Any] = {
            "param_dtype": precision,
            "reduce_dtype": precision,
            "cpu_offload": self._flag("cpu_offload", "OFFLOAD_PARAMS"),
            "sync_each_batch": args.gradient_accumulation_steps == 1 or _syncs_each_batch(args),
        }
        policy = str(self._said("auto_wrap_policy", "AUTO_WRAP_POLICY", "NO_WRAP"))
        if policy.upper() != "TRANSFORMER_BASED_WRAP":
            problems.append(
                f"auto_wrap_policy={policy}: a forecast has the model's layers as units, fsdp_config="
                f'{{"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}.'
            )
        if ignored := self._said("ignored_modules", "IGNORED_MODULES", None):
            problems.append(f"ignored_modules={ignored}: a forecast shards every module: leave it out.")
        if self.version == 2:
            reshards = self._said("reshard_after_forward", "RESHARD_AFTER_FORWARD", True)
            if str(reshards).lower() not in (*_TRUE, *_FALSE):
                problems.append(f"reshard_after_forward={reshards}: accelerate takes true or false with FSDP2.")
            return {**options, "reshard_after_forward": str(reshards).lower() in _TRUE}
        return {**options, **self._of_version_1(problems)}

    def _of_version_1(self, problems: list[str]) -> dict[str, Any]:
        # accelerate reads reshard_after_forward only where there is no strategy, and there always is one
        strategy = str(self._said("sharding_strategy", "SHARDING_STRATEGY", "FULL_SHARD")).rpartition(".")[2].upper()
        strategy = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD"}.get(strategy, strategy)
        if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            problems.append(f"sharding_strategy={strategy}: pass Spread.fsdp1(ranks of a machine, replicas=machines).")
        prefetch = str(self._said("backward_prefetch", "BACKWARD_PREFETCH", "NO_PREFETCH")).lower()
        return {
            "reshard_after_forward": strategy != "SHARD_GRAD_OP",
            "shard": strategy != "NO_SHARD",
            "backward_prefetch": None if prefetch == "no_prefetch" else prefetch,
            "forward_prefetch": self._flag("forward_prefetch", "FORWARD_PREFETCH"),
            "use_orig_params": self._flag("use_orig_params", "USE_ORIG_PARAMS"),
        }

    def _said(self, name: str, variable: str, default: object) -> Any:
        given = self._given.get(name)
        return os.environ.get(f"FSDP_{variable}", default) if given is None else given

    def _flag(self, name: str, variable: str) -> bool:
        return str(self._said(name, variable, False)).lower() in _TRUE


def _syncs_each_batch(args: Any) -> bool:
    kwargs = getattr(getattr(args, "accelerator_config", None), "gradient_accumulation_kwargs", None) or {}
    return bool(kwargs.get("sync_each_batch", False))


_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {  # of "auto", by transformers' trainer_config_finalize
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
_SIZES = ("reduce_bucket_size",)
_SIZES_OF_3 = (*_BY_HIDDEN_SIZE, "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size")
_HELD: dict[str, object] = {  # what was held against DeepSpeed, which are its defaults
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.parameter_alignment": False,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_nontrainable_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.stage3_model_persistence_threshold": sys.maxsize,
    "zero_optimization.stage3_module_granularity_threshold": 0,
    "zero_optimization.offload_optimizer.ratio": 1,
    "zero_optimization.zenflow": None,
    "tensor_parallel.autotp_size": 0,
    "torch_autocast.enabled": False,
    "compile.deepcompile": False,
    "data_types.grad_accum_dtype": None,
    "communication_data_type": None,
}


def _zero(args: Any, hidden_size: int | None, problems: list[str]) -> dict[str, Any]:
    """Return the arguments of ``Spread.zero``, with "auto" as transformers fills it, and add the problems of others."""
    config = _deepspeed_config(args)
    given: dict[str, Any] = config.get("zero_optimization") or {}
    options: dict[str, Any] = {"stage": given.get("stage", 0), "param_dtype": _dtype_of_zero(args, config)}
    if options["stage"] == 0:
        problems.append("zero_optimization has stage=0, DeepSpeed's own data parallelism: forecast Spread.ddp(ranks).")
    if "overlap_comm" in given:
        options["overlap_comm"] = given["overlap_comm"]
    options["offload_optimizer"] = _offload_device(given, "offload_optimizer", "cpu_offload") != "none"
    if options["stage"] == 3:
        options["offload_param"] = (device := _offload_device(given, "offload_param", "cpu_offload_param")) != "none"
        if device == "nvme":
            problems.append('offload_param.device=nvme: only "cpu" was held against DeepSpeed. Forecast that.')
    else:
        options["round_robin_gradients"] = bool(given.get("round_robin_gradients"))
    for name in _SIZES_OF_3 if options["stage"] == 3 else _SIZES:
        value = _said_to_deepspeed(given, name)
        if value == "auto" and hidden_size is None:
            problems.append(f'{name}="auto" depends on the model: pass hidden_size=, as in its config.')
        elif value is not None:
            options[name] = _BY_HIDDEN_SIZE[name](cast("int", hidden_size)) if value == "auto" else int(float(value))
    for name, usual in _HELD.items():
        value = _said_to_deepspeed(config, name)
        if value is not None and value != usual:
            problems.append(
                f"DeepSpeed's {name}={value}: only {usual} was held against it. Leave it out of a copy of the settings."
            )
    return options


def _offload_device(given: dict[str, Any], name: str, old: str) -> str:
    """Return the device of an offload, also by its old name, a flag for the CPU; "none" where there is none."""
    device = (given.get(name) or {}).get("device", "none")
    return "cpu" if device == "none" and given.get(old) else str(device)


def _said_to_deepspeed(config: dict[str, Any], name: str) -> Any:
    """Return a setting by its name, with dots between sections; a ``stage3_`` may be left out, as for DeepSpeed."""
    *sections, name = name.split(".")
    for section in sections:
        config = config.get(section) or {}
    return config.get(name, config.get(name.removeprefix("stage3_")))


def _deepspeed_config(args: Any) -> dict[str, Any]:
    """Return DeepSpeed's settings: of the arguments, a dict or a file, or of accelerate's file."""
    plugin = getattr(args, "deepspeed_plugin", None)
    given: Any = args.deepspeed if plugin is None else plugin.deepspeed_config
    config: dict[str, Any] = given if isinstance(given, dict) else json.loads(Path(given).read_text())
    return config


def _dtype_of_zero(args: Any, config: dict[str, Any]) -> str | None:
    for name, dtype in _PRECISIONS.items():
        section = config.get(name, {"enabled": "auto"})  # which accelerate adds where there is none
        enabled = section.get("enabled", False)
        if enabled is True or (enabled == "auto" and mixed_precision(args) == dtype):
            return dtype
    return None
