"""The job over ranks of a trainer's arguments: that of the tables whose jobs were run, DeepSpeed's, a launcher's."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import ParallelismConfig
from engines import needs
from peft import LoraConfig
from trainer_jobs import ADAPTER, IN_FOUR_BITS, JOBS, OF_TRL, ROWS, TOKENS, Job, fsdp
from transformers import LlamaConfig, TrainingArguments

from safe_loading import ArgumentError, Spread, Workload, fewest_ranks, predict_memory

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=1001)
# as most published ones: DeepSpeed's own names, and "auto" where transformers fills in
PUBLISHED: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
    },
}
of_now = needs("transformers", "5.23")  # before, FSDP1 was the default, and fsdp=True wrapped no layers


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back a variable that TrainingArguments sets for FSDP."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")


def arguments(folder: Path, **said: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], **said)


def under_deepspeed(folder: Path, settings: dict[str, Any] | str, **said: Any) -> TrainingArguments:
    """Return what these arguments are with ``deepspeed=settings``, which only DeepSpeed's package lets make."""
    args = copy.copy(arguments(folder, **said))
    args.deepspeed = settings
    return args


@of_now
@pytest.mark.parametrize("job", [*JOBS.values(), *IN_FOUR_BITS.values()], ids=lambda job: str(job.spread))
def test_the_job_and_the_step_of_arguments_are_those_that_were_run(tmp_path: Path, job: Job) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=ROWS, **job.arguments)
    adapter = LoraConfig(**ADAPTER) if job.adapted else None
    assert Spread.from_training_args(args, 2, adapter) == job.spread
    assert Workload.from_training_args(args, TOKENS, adapter) == Workload.train(
        ROWS, TOKENS, adapter=adapter, **job.step
    )


@of_now
@pytest.mark.parametrize("name", OF_TRL)
def test_the_job_of_a_config_of_trls(tmp_path: Path, name: str) -> None:
    trl = pytest.importorskip("trl", minversion="1.16", reason="this trl has other defaults")
    job = OF_TRL[name]
    args = trl.SFTConfig(
        str(tmp_path), use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False, **job.arguments
    )
    assert Spread.from_training_args(args, 2, LoraConfig(**ADAPTER) if job.adapted else None) == job.spread


@of_now
def test_a_job_goes_into_a_forecast_and_a_search(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=2, bf16=True, **fsdp(2))
    step, job = Workload.from_training_args(args, 16), Spread.from_training_args(args, 4)
    assert len(predict_memory(CONFIG, step, spread=job).ranks) == 4
    open_job = Spread.from_training_args(args, None)
    assert open_job == Spread.fsdp2(None, param_dtype="bfloat16", reduce_dtype="bfloat16", wrapped_by="accelerate")
    assert len(fewest_ranks(CONFIG, step, "80GiB", open_job).ranks) == 1
    assert Spread.from_training_args(args, 4, wrapped_by="safe_loading").wrapped_by == "safe_loading"


@of_now
def test_groups_of_ranks_that_hold_the_model_each(tmp_path: Path) -> None:
    groups = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    args = arguments(tmp_path, parallelism_config=groups, **fsdp(2))
    assert Spread.from_training_args(args, 8) == Spread.fsdp2(4, replicas=2, wrapped_by="accelerate")
    assert Spread.from_training_args(args, None).replicas == 2
    with pytest.raises(ArgumentError, match=r"ranks=7 are no groups.*dp_replicate_size=2: pass all of them"):
        Spread.from_training_args(args, 7)
    split = arguments(tmp_path, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ArgumentError, match="parallelism_config has tp_size=2"):
        Spread.from_training_args(split, 8)


def test_ddp(tmp_path: Path) -> None:
    assert Spread.from_training_args(arguments(tmp_path), 4) == Spread.ddp(4, find_unused_parameters=True)
    said = arguments(tmp_path, ddp_find_unused_parameters=False, ddp_bucket_cap_mb=100)
    assert Spread.from_training_args(said, 4) == Spread.ddp(4, bucket_cap_mb=100)
    with pytest.raises(ArgumentError, match="args is a dict: pass TrainingArguments"):
        Spread.from_training_args({}, 4)  # type: ignore[arg-type]  # which a caller of no type checker may pass


def test_deepspeeds_settings_are_filled_in_as_transformers_does(tmp_path: Path) -> None:
    args = under_deepspeed(tmp_path, PUBLISHED, bf16=True)
    with pytest.raises(
        ArgumentError, match=r'stage3_prefetch_bucket_size="auto" depends on the model: pass hidden_size='
    ):
        Spread.from_training_args(args, 8)
    job = Spread.from_training_args(args, 8, hidden_size=100)
    assert job == Spread.zero(
        8,
        stage=3,
        param_dtype="bfloat16",
        reduce_bucket_size=10_000,
        stage3_prefetch_bucket_size=9_000,
        stage3_param_persistence_threshold=1_000,
    )
    step = Workload.from_training_args(args, 16)  # whose parameters the engine casts, without autocast
    assert step == Workload.train(8, 16)
    assert len(predict_memory(CONFIG, step, dtype="bfloat16", spread=job).ranks) == 8


def test_a_file_of_deepspeeds_and_what_is_not_forecast(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 2e8, "overlap_comm": True}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"zero_optimization": zero, "fp16": {"enabled": "auto"}}))
    job = Spread.from_training_args(under_deepspeed(tmp_path, str(file)), 2)
    assert job == Spread.zero(2, stage=2, offload_optimizer=True, reduce_bucket_size=200_000_000, overlap_comm=True)
    without = under_deepspeed(tmp_path, {"zero_optimization": {"stage": 2}}, bf16=True)  # to which accelerate adds bf16
    assert Spread.from_training_args(without, 2) == Spread.zero(2, stage=2, param_dtype="bfloat16")
    scattered = under_deepspeed(tmp_path, {"zero_optimization": {"stage": 1, "contiguous_gradients": False}})
    with pytest.raises(ArgumentError, match=r"contiguous_gradients=False: only True was held"):
        Spread.from_training_args(scattered, 2)
    with pytest.raises(ArgumentError, match=r"stage=0.*Spread\.ddp\(ranks\)"):
        Spread.from_training_args(under_deepspeed(tmp_path, {"train_batch_size": "auto"}), 2)


def test_names_that_deepspeed_takes_too(tmp_path: Path) -> None:
    """As axolotl's ``zero3.json`` has them, and files from before there were ``offload_optimizer`` and its like."""
    zero = {"stage": 3, "max_live_parameters": 0, "max_reuse_distance": 0, "prefetch_bucket_size": "auto"}
    job = Spread.from_training_args(under_deepspeed(tmp_path, {"zero_optimization": zero}), 2, hidden_size=100)
    assert job == Spread.zero(
        2, stage=3, stage3_max_live_parameters=0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=9_000
    )
    offloaded = under_deepspeed(tmp_path, {"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert Spread.from_training_args(offloaded, 2) == Spread.zero(2, stage=2, offload_optimizer=True)
    by_turns = under_deepspeed(tmp_path, {"zero_optimization": {"stage": 2, "round_robin_gradients": True}})
    assert Spread.from_training_args(by_turns, 2) == Spread.zero(2, stage=2, round_robin_gradients=True)


def test_parameters_on_the_host(tmp_path: Path) -> None:
    """As in the files for ZeRO-3 of LLaMA-Factory and axolotl; the other stages have their parameters on the card."""
    host: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    for stage, parameters in ((2, False), (3, True)):
        args = under_deepspeed(tmp_path, {"zero_optimization": {"stage": stage, **host}})
        job = Spread.zero(2, stage=stage, offload_optimizer=True, offload_param=parameters)
        assert Spread.from_training_args(args, 2) == job
    old = {"stage": 3, "cpu_offload_param": True}
    job = Spread.from_training_args(under_deepspeed(tmp_path, {"zero_optimization": old}), 2)
    assert job == Spread.zero(2, stage=3, offload_param=True)
    disk = under_deepspeed(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
    with pytest.raises(ArgumentError, match=r"offload_param\.device=nvme"):
        Spread.from_training_args(disk, 2)


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("zero_optimization.zero_quantized_weights=True", {"zero_optimization": {"zero_quantized_weights": True}}),
        ("zero_optimization.offload_optimizer.ratio=0.3", {"zero_optimization": {"offload_optimizer": {"ratio": 0.3}}}),
        ("tensor_parallel.autotp_size=2", {"tensor_parallel": {"autotp_size": 2}}),
        ("torch_autocast.enabled=True", {"torch_autocast": {"enabled": True}}),
        ("data_types.grad_accum_dtype=fp32", {"data_types": {"grad_accum_dtype": "fp32"}}),
        ("communication_data_type=fp32", {"communication_data_type": "fp32"}),
        ("optimizer.type=OneBitAdam", {"optimizer": {"type": "OneBitAdam"}}),
    ],
)
def test_settings_of_deepspeeds_that_were_not_held_against_it(
    tmp_path: Path, name: str, section: dict[str, Any]
) -> None:
    plain = {"zero_optimization": {"stage": 2}}
    settings = {**plain, **section, "zero_optimization": {"stage": 2, **section.get("zero_optimization", {})}}
    with pytest.raises(ArgumentError, match=f"DeepSpeed's {re.escape(name)}: only .* Leave it out of a copy"):
        Spread.from_training_args(under_deepspeed(tmp_path, settings), 2)
    assert Spread.from_training_args(under_deepspeed(tmp_path, plain), 2) == Spread.zero(2, stage=2)


def test_settings_that_trainer_cannot_read_are_refused(tmp_path: Path) -> None:
    """Published files have comments, and zero_optimization as a flag, as the first releases of DeepSpeed took it."""
    (tmp_path / "comments.json").write_text('{"zero_optimization": {"stage": 2}}  // for eight cards')
    with pytest.raises(ArgumentError, match=r"comments\.json': no valid JSON"):
        Spread.from_training_args(under_deepspeed(tmp_path, str(tmp_path / "comments.json")), 2)
    with pytest.raises(ArgumentError, match=r'no object.*write "zero_optimization": \{"stage": 1\}'):
        Spread.from_training_args(under_deepspeed(tmp_path, {"zero_optimization": True}), 2)
    written = under_deepspeed(tmp_path, {"zero_optimization": {"stage": 1}})
    assert Spread.from_training_args(written, 2) == Spread.zero(2, stage=1)


def test_the_fsdp_of_torch_xla_is_not_taken_for_ddp(tmp_path: Path) -> None:
    args = arguments(tmp_path, fsdp="full_shard", fsdp_config={"xla": True, "xla_fsdp_v2": True})
    with pytest.raises(ArgumentError, match=r"fsdp_config has xla=True.*leave it out"):
        Spread.from_training_args(args, 2)


Launched = Callable[..., tuple[Spread, Workload]]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Return a call that reads the job and the step in a script which ``accelerate launch`` started with options."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    def job_and_step(*options: str, ranks: int = 2, **said: Any) -> tuple[Spread, Workload]:
        fixed = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        layers = ["--mixed_precision", "bf16", "--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
        compiler = [] if "--dynamo_backend" in options else ["--dynamo_backend", "no"]
        given = launch_command_parser().parse_args([*fixed, *compiler, *layers, *options, "train.py"])
        with monkeypatch.context() as patch:
            for name, value in prepare_multi_gpu_env(given).items():
                if name.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")):
                    patch.setenv(name, value)
            args = arguments(tmp_path, **said)
            return Spread.from_training_args(args, ranks), Workload.from_training_args(args, 16)

    return job_and_step


def test_the_variables_of_accelerate_launch(launched: Launched) -> None:
    half: dict[str, Any] = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "wrapped_by": "accelerate"}
    two = ["--fsdp_version", "2", "--fsdp_reshard_after_forward", "false", "--fsdp_activation_checkpointing", "true"]
    assert launched(*two) == (
        Spread.fsdp2(2, reshard_after_forward=False, **half),
        Workload.train(8, 16, autocast="bfloat16", gradient_checkpointing=True),
    )
    one = [
        "--fsdp_use_orig_params",
        "true",
        "--fsdp_backward_prefetch",
        "BACKWARD_PRE",
        "--fsdp_forward_prefetch",
        "true",
        "--fsdp_offload_params",
        "true",
    ]
    assert launched(*one, "--fsdp_sharding_strategy", "SHARD_GRAD_OP")[0] == Spread.fsdp1(
        2,
        reshard_after_forward=False,
        cpu_offload=True,
        backward_prefetch="backward_pre",
        forward_prefetch=True,
        **half,
    )
    with pytest.raises(ArgumentError) as refused:
        launched("--fsdp_sharding_strategy", "HYBRID_SHARD")
    assert "pass Spread.fsdp1(ranks of a machine, replicas=machines)" in str(refused.value)
    flat = launched("--fsdp_use_orig_params", "false", "--fsdp_sharding_strategy", "FULL_SHARD")[0]
    assert flat == Spread.fsdp1(2, use_orig_params=False, **half)


TWO = ("--fsdp_version", "2")


@needs("accelerate", "1.12")
def test_the_parallelism_of_accelerates_file(launched: Launched) -> None:
    file = (*TWO, "--use_parallelism_config")
    groups = launched(*file, "--parallelism_config_dp_replicate_size", "2", ranks=8)[0]
    assert (groups.ranks, groups.replicas) == (4, 2)
    with pytest.raises(ArgumentError, match=r"cp_size=2.*leave it out of accelerate's file"):
        launched(*file, "--parallelism_config_cp_size", "2", ranks=8)
    whole = launched(*TWO, ranks=8)[0]  # without it, as the message says
    assert (whole.ranks, whole.replicas) == (8, 1)
    assert launched(*file, "--parallelism_config_cp_size", "2", parallelism_config=ParallelismConfig())[0].ranks == 2


def test_settings_of_accelerates_file_that_no_forecast_has(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"ACCELERATE_DYNAMO_BACKEND=INDUCTOR.*leave dynamo_config out"):
        launched("--dynamo_backend", "inductor")
    with pytest.raises(ArgumentError, match="reshard_after_forward=full_shard: accelerate takes true or false"):
        launched(*TWO, "--fsdp_reshard_after_forward", "FULL_SHARD")
    assert launched(*TWO)  # as the message says
    with monkeypatch.context() as patch:
        patch.setenv("FSDP_IGNORED_MODULES", ".*router")
        with pytest.raises(ArgumentError, match=r"ignored_modules=\.\*router: .*leave it out"):
            launched(*TWO)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")  # an option of accelerate's newest releases
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        ArgumentError, match=r"activation_checkpointing_offload=True.*leave it out of accelerate's file"
    ):
        Workload.from_training_args(arguments(Path("out")), 16)
    monkeypatch.delenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
    assert Workload.from_training_args(arguments(Path("out")), 16).gradient_checkpointing


@of_now
def test_units_of_a_size_are_refused_with_the_setting_that_is_forecast(tmp_path: Path) -> None:
    by_size = arguments(
        tmp_path, fsdp=True, fsdp_config={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
    )
    with pytest.raises(ArgumentError, match=r"auto_wrap_policy=SIZE_BASED_WRAP.*TRANSFORMER_BASED_WRAP"):
        Spread.from_training_args(by_size, 2)
    layers = arguments(tmp_path, fsdp=True, fsdp_config={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"})
    assert Spread.from_training_args(layers, 2) == Spread.fsdp2(2, wrapped_by="accelerate")
