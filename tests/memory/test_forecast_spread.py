"""Steps of jobs over several ranks: torch's FSDP2 on fake tensors, held against real ranks and the CPU's allocator."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allocator_truth import above_start
from models import SIZES
from peft import LoraConfig
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrun import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, Spread, Workload, predict_memory
from safe_loading.__main__ import main
from safe_loading._memory.trace.trace_step import trace_step

STEP = """
    import warnings
    import torch
    import torch.distributed as dist
    from allocator_truth import peak_above_start
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
    from transformers import LlamaConfig, LlamaForCausalLM

    from safe_loading._sharding import fsdp2
    from safe_loading._sharding.fsdp_units import plan_units

    warnings.simplefilter("ignore")
    START
    for name, options in CASES.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
        ranks, replicas = options["ranks"], options.get("replicas", 1)
        shape, names = ((replicas, ranks), ("replicate", "shard")) if replicas > 1 else ((ranks,), ("shard",))
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        dtypes = {key: getattr(torch, options[key]) for key in ("param_dtype", "reduce_dtype") if key in options}
        units = plan_units(model)
        fsdp2.wrap(
            model, units, mesh, MixedPrecisionPolicy(**dtypes), OffloadPolicy(), (),
            options.get("reshard_after_forward", True),
        )
        if options.get("checkpointing"):
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
            )

        def step():
            ids = torch.full((2, 48), 5)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full((2, 48), 5)}
            del ids
            loss = model(**batch, use_cache=False).loss
            del batch
            loss.backward()

        report(**{name: peak_above_start(step)})
    dist.destroy_process_group()
"""
CASES: dict[str, dict[str, Any]] = {
    "two": {"ranks": 2},
    "three, uneven": {"ranks": 3},
    "kept": {"ranks": 2, "reshard_after_forward": False},
    "mixed precision": {"ranks": 2, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "checkpointed": {"ranks": 4, "checkpointing": True},
    "hybrid": {"ranks": 2, "replicas": 2},
}


def on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES))


def script(start: str, cases: dict[str, Any]) -> str:
    text = textwrap.dedent(STEP).replace("START", start)
    return f"SIZES = {SIZES!r}\nCASES = {cases!r}\n{text}"


def traced(rank: int, *, checkpointing: bool = False, **options: Any) -> int:
    workload = Workload.train(2, 48, checkpointing, optimizer="none")
    return above_start(trace_step(on_meta(), workload, spread=Spread.fsdp2(**options), rank=rank), *PHASES)


PHASES = ("forward", "backward")


@pytest.mark.parametrize("case", CASES)
def test_a_rank_allocates_what_torchs_hooks_allocate_on_real_tensors(case: str) -> None:
    """To the byte: fully_shard on real parameters, in a group whose other ranks are not there."""
    options = CASES[case]
    for rank in sorted({0, options["ranks"] - 1}):
        world = options["ranks"] * options.get("replicas", 1)
        start = f"""dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size={world})"""
        found: dict[str, int] = {}
        exec(script(start, {case: options}), {"FakeStore": FakeStore, "report": _into(found)})
        assert traced(rank, **options) == found[case]


def _into(found: dict[str, int]) -> Callable[..., None]:
    return lambda **values: found.update(values)


def test_real_ranks_allocate_nearly_the_same() -> None:
    """Gloo works in threads of its own, so when it lets go of a buffer differs from run to run."""
    run = run_ranks(script('dist.init_process_group("gloo")', CASES_OF_TWO), 2)
    for name, options in CASES_OF_TWO.items():
        for rank, found in enumerate(run.found):
            assert found[name] == pytest.approx(traced(rank, **options), rel=0.1)


CASES_OF_TWO = {name: options for name, options in CASES.items() if options["ranks"] == 2 and "replicas" not in options}


def test_the_forecast_of_a_job() -> None:
    whole = predict_memory(on_meta(), Workload.train(2, 48))
    eight = predict_memory(on_meta(), Workload.train(2, 48), spread=Spread.fsdp2(8))
    assert eight.components["optimizer"] == pytest.approx(whole.components["optimizer"] / 8, rel=0.05)
    assert eight.components["saved_activations"] == pytest.approx(whole.components["saved_activations"], rel=0.01)
    assert sorted(eight.ranks) == [0, 7]  # 101 words over 8 ranks
    assert max(eight.ranks.values()) <= eight.allocated_peak_bytes
    assert whole.ranks == {}
    assert "One of 8 ranks" in eight.notes[1]
    hybrid = predict_memory(on_meta(), Workload.train(2, 48), spread=Spread.fsdp2(8, replicas=2))
    assert hybrid.allocated_peak_bytes == pytest.approx(eight.allocated_peak_bytes, rel=0.05)


def test_an_adapter_is_sharded_too_and_the_model_is_left_as_it_was() -> None:
    model = on_meta()
    classes = [type(module) for module in model.modules()]
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    steps = Workload.train(2, 48, adapter=lora, gradient_accumulation_steps=2)
    first, again = (predict_memory(model, steps, spread=Spread.fsdp2(2)) for _ in range(2))
    assert first == again
    assert first.components["adapters"] < predict_memory(model, steps).components["adapters"]
    assert [type(module) for module in model.modules()] == classes
    assert not torch.distributed.is_initialized()


def test_a_job_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert main(["predict", str(tmp_path), "--train", "2x48", "--gpus", "2", "--card", "24GB", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    expected = predict_memory(str(tmp_path), Workload.train(2, 48), spread=Spread.fsdp2(2))
    assert row["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes


def test_what_is_refused(one_rank: None) -> None:
    step = Workload.train(1, 8)
    with pytest.raises(ArgumentError, match="has one already"):
        predict_memory(on_meta(), step, spread=Spread.fsdp2(2))
    with pytest.raises(ArgumentError, match="needs a step"):
        predict_memory(on_meta(), Workload.weights_only(), spread=Spread.fsdp2(2))
    with pytest.raises(ArgumentError, match="pass a Spread"):
        predict_memory(on_meta(), step, spread=8)  # type: ignore[arg-type]
    for wrong in ({"ranks": 0}, {"ranks": 2, "replicas": 0}, {"ranks": 2, "param_dtype": "int8"}):
        with pytest.raises(ArgumentError):
            Spread.fsdp2(**wrong)  # type: ignore[arg-type]
    sharded = LlamaForCausalLM(LlamaConfig(**SIZES))
    fully_shard(sharded)
    with pytest.raises(ArgumentError, match="sharded already"):
        predict_memory(sharded, step)
