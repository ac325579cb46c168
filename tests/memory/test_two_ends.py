"""A prompt and many tokens after it: as a forecast that runs each of them, to the byte."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocator_truth import above_start, generation
from peft import LoraConfig
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
)

from safe_loading import Spread, Workload, plan_device_map, predict_memory
from safe_loading.__main__ import main
from safe_loading._memory.trace.over_ranks import RankOfJob
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._memory.trace.two_ends import trace_two_ends
from safe_loading._sharding import fsdp2
from safe_loading._sharding.fsdp_units import plan_units
from safe_loading.errors import ArgumentError

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "sliding window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=24),
    "gpt2": GPT2Config(n_embd=256, n_layer=3, n_head=4, vocab_size=1000, dtype="bfloat16"),
    "t5": T5Config(d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4, vocab_size=1000, dtype="bfloat16"),
    "state space": Mamba2Config(
        hidden_size=128, num_hidden_layers=2, num_heads=8, head_dim=32, n_groups=2, state_size=16, vocab_size=1000
    ),
}


def test_the_ends_are_those_of_a_run_of_every_token() -> None:
    for name, (prompt, new) in {"llama": (40, 60), "qwen2": (8, 90), "gpt2": (64, 12)}.items():
        every = predict_memory(MODELS[name], Workload.generate(3, prompt, decode_steps=new - 1))
        ends = predict_memory(MODELS[name], Workload.generate(3, prompt, new_tokens=new))
        assert ends.phases == every.phases, name
        # what the allocator adds is the tails of its blocks, of which another one is taken now and then
        assert ends.allocated_peak_bytes == pytest.approx(every.allocated_peak_bytes, rel=5e-3)
        assert ends.reserved_peak_bytes == pytest.approx(every.reserved_peak_bytes, rel=0.05)
        rounding = {"rounding": 0}
        assert {**ends.components, **rounding} == {**every.components, **rounding}


@pytest.mark.parametrize("name", ["sliding window", "state space"])
def test_caches_that_do_not_grow_end_as_in_a_run_of_every_token(name: str) -> None:
    every = predict_memory(MODELS[name], Workload.generate(2, 40, decode_steps=19))
    ends = predict_memory(MODELS[name], Workload.generate(2, 40, new_tokens=20))
    assert ends.phases == every.phases


@pytest.mark.parametrize("spread", [Spread.fsdp2(2), Spread.fsdp2(3, param_dtype="float16", replicas=2)])
def test_the_ends_of_a_rank_are_those_of_a_run_of_every_token(spread: Spread) -> None:
    every = predict_memory(MODELS["llama"], Workload.generate(3, 40, decode_steps=29), spread=spread)
    ends = predict_memory(MODELS["llama"], Workload.generate(3, 40, new_tokens=30), spread=spread)
    assert ends.phases == every.phases
    assert ends.ranks == every.ranks
    assert ends.components["weights"] == every.components["weights"]


def test_a_rank_that_generates_takes_what_the_allocator_gives() -> None:
    """To the byte: fully_shard on real parameters, in a group whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model: Any = LlamaForCausalLM(MODELS["llama"]).float()
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        fsdp2.wrap(model, plan_units(model), mesh, MixedPrecisionPolicy(), OffloadPolicy(), (), True)
        found = generation(model, 3, 40, steps=29)
    finally:
        dist.destroy_process_group()
    config = copy.deepcopy(MODELS["llama"])
    config.dtype = torch.float32

    def trace(work: Workload) -> StepTrace:
        with torch.device("meta"):
            whole = LlamaForCausalLM(config).float()
        return trace_step(whole, work, job=RankOfJob(Spread.fsdp2(2)))

    ends = trace_two_ends(Workload.generate(3, 40, new_tokens=30), trace)
    assert found == above_start(ends, "prefill", "decode")


def test_a_prompt_that_an_encoder_reads_takes_steps() -> None:
    with pytest.raises(ArgumentError, match=r"decode_steps=19\)"):
        predict_memory(MODELS["t5"], Workload.generate(2, 40, new_tokens=20))
    assert predict_memory(MODELS["t5"], Workload.generate(2, 40, decode_steps=19)).phases


def test_a_long_text_grows_in_stages_and_an_adapter_is_attached() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    short, long = (
        predict_memory(MODELS["llama"], Workload.generate(4, 32, new_tokens=new, adapter=adapter)) for new in (2, 2000)
    )
    tokens = 3 * 2 * 4 * 2 * 64 * 2  # layers, keys and values, rows, heads, size, bytes
    assert long.components["kv_cache"] == pytest.approx(
        2032 * tokens, rel=0.34
    )  # and once more of the layer that grows
    assert long.components["adapters"] == short.components["adapters"] > 0
    assert long.phases["prompt"] == short.phases["prompt"]


def test_reports_tell_the_ends_apart(capsys: pytest.CaptureFixture[str]) -> None:
    workload = Workload.generate(2, 64, new_tokens=100)
    assert eval(repr(workload)) == workload
    assert Workload.from_facts(json.loads(json.dumps(workload.facts()))) == workload
    forecast = predict_memory(MODELS["llama"], workload)
    assert json.loads(forecast.to_json())["phases"] == dict(forecast.phases)
    assert "while the prompt is read" in str(forecast)
    assert "as the last token is written" in str(forecast)
    trained = predict_memory(MODELS["llama"], Workload.train(2, 64))
    assert trained.phases == {}
    assert "prompt is read" not in str(trained)


def test_the_command_takes_a_prompt_and_its_answer(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    MODELS["llama"].save_pretrained(tmp_path)
    MODELS["llama"].architectures = ["LlamaForCausalLM"]
    MODELS["llama"].save_pretrained(tmp_path)
    main(["predict", str(tmp_path), "--generate", "2x64+100", "--json"])
    told = json.loads(capsys.readouterr().out)["rows"][0]["forecast"]
    assert told["workload"]["new_tokens"] == 100
    assert set(told["phases"]) == {"prompt", "end"}


def test_where_the_ends_are_not_known_they_are_refused() -> None:
    workload = Workload.generate(2, 64, new_tokens=100)
    with pytest.raises(ArgumentError, match=r"context_length=164"):
        plan_device_map(MODELS["llama"], {0: "1GiB"}, workload=workload)
    plan_device_map(MODELS["llama"], {0: "1GiB"}, workload=Workload.generate(2, 164))
    with pytest.raises(ArgumentError, match="new_tokens=-1"):
        Workload.generate(2, 64, new_tokens=-1)


def test_one_new_token_is_the_prompt_alone() -> None:
    one = predict_memory(MODELS["llama"], Workload.generate(2, 64, new_tokens=1))
    assert one.phases["prompt"] == predict_memory(MODELS["llama"], Workload.generate(2, 64)).phases["prompt"]
