"""The job over ranks that a Trainer's arguments describe, or those of one of trl's. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from safe_loading.errors import ArgumentError

from .training_args import (
    FALSE,
    PRECISIONS,
    TRUE,
    Fsdp,
    keeps_checkpoints,
    mixed_precision,
    parallel_size,
    problems_of_split,
    refuse_other,
    uses_deepspeed,
)


def job_of(args: Any, ranks: int | None, hidden_size: int | None, *, adapted: bool) -> tuple[str, dict[str, Any]]:
    """Return the kind of the ``Spread`` of a trainer's job, and the arguments that make it."""
    refuse_other(args)
    problems = problems_of_split(args)
    if (getattr(args, "fsdp_config", None) or {}).get("xla"):
        problems.append("fsdp_config has xla=True: the FSDP of torch_xla is not forecast: leave it out.")
    if uses_deepspeed(args):
        kind, options = "zero", _zero(args, hidden_size, problems)
    elif (fsdp := _FsdpJob(args)).on:
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
    replicas = parallel_size(args, "dp_replicate_size")
    if ranks is None or ranks % replicas == 0:
        return ranks and ranks // replicas, replicas
    problems.append(f"ranks={ranks} are no groups of the same size for dp_replicate_size={replicas}: pass all of them.")
    return ranks, replicas


class _FsdpJob(Fsdp):
    """The FSDP of a trainer's arguments as a job over ranks."""

    def options(self, args: Any, problems: list[str]) -> dict[str, Any]:
        """Return the arguments of ``Spread.fsdp1`` or ``Spread.fsdp2``, and add the problems of others."""
        precision = mixed_precision(args)
        options: dict[str, Any] = {
            "param_dtype": precision,
            "reduce_dtype": precision,
            "cpu_offload": self.flag("cpu_offload", "OFFLOAD_PARAMS"),
            "sync_each_batch": args.gradient_accumulation_steps == 1 or _syncs_each_batch(args),
        }
        policy = str(self.said("auto_wrap_policy", "AUTO_WRAP_POLICY", "NO_WRAP"))
        if policy.upper() != "TRANSFORMER_BASED_WRAP":
            problems.append(
                f"auto_wrap_policy={policy}: a forecast has the model's layers as units, fsdp_config="
                f'{{"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}.'
            )
        if ignored := self.said("ignored_modules", "IGNORED_MODULES", None):
            problems.append(f"ignored_modules={ignored}: a forecast shards every module: leave it out.")
        if self.version == 2:
            reshards = self.said("reshard_after_forward", "RESHARD_AFTER_FORWARD", True)
            if str(reshards).lower() not in (*TRUE, *FALSE):
                problems.append(f"reshard_after_forward={reshards}: accelerate takes true or false with FSDP2.")
            return {**options, "reshard_after_forward": str(reshards).lower() in TRUE}
        return {**options, **self._of_version_1(problems)}

    def _of_version_1(self, problems: list[str]) -> dict[str, Any]:
        # accelerate reads reshard_after_forward only where there is no strategy, and there always is one
        strategy = str(self.said("sharding_strategy", "SHARDING_STRATEGY", "FULL_SHARD")).rpartition(".")[2].upper()
        strategy = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD"}.get(strategy, strategy)
        if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            problems.append(f"sharding_strategy={strategy}: pass Spread.fsdp1(ranks of a machine, replicas=machines).")
        prefetch = str(self.said("backward_prefetch", "BACKWARD_PREFETCH", "NO_PREFETCH")).lower()
        return {
            "reshard_after_forward": strategy != "SHARD_GRAD_OP",
            "shard": strategy != "NO_SHARD",
            "backward_prefetch": None if prefetch == "no_prefetch" else prefetch,
            "forward_prefetch": self.flag("forward_prefetch", "FORWARD_PREFETCH"),
            "use_orig_params": self.flag("use_orig_params", "USE_ORIG_PARAMS"),
        }


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
            problems.append(_not_held(name, value, f"{usual} was"))
    made = _said_to_deepspeed(config, "optimizer.type")  # by DeepSpeed, in the place of the arguments' own
    if made is not None and str(made).lower() not in ("adam", "adamw"):
        problems.append(_not_held("optimizer.type", made, "Adam and AdamW were"))
    return options


def _not_held(name: str, value: object, others: str) -> str:
    return f"DeepSpeed's {name}={value}: only {others} held against it. Leave it out of a copy of the settings."


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
    try:
        config: object = given if isinstance(given, dict) else json.loads(Path(given).read_text())
    except ValueError as error:
        raise ArgumentError(f"deepspeed={str(given)!r}: no valid JSON, which Trainer reads: {error}.") from error
    if isinstance(config, dict) and isinstance(config.get("zero_optimization") or {}, dict):
        return config
    raise ArgumentError(
        f"deepspeed={str(given)!r:.200}: zero_optimization is no object, which Trainer reads: write "
        f'"zero_optimization": {{"stage": 1}}, say.'
    )


def _dtype_of_zero(args: Any, config: dict[str, Any]) -> str | None:
    for name, dtype in PRECISIONS.items():
        section = config.get(name, {"enabled": "auto"})  # which accelerate adds where there is none
        enabled = section.get("enabled", False)
        if enabled is True or (enabled == "auto" and mixed_precision(args) == dtype):
            return dtype
    return None
