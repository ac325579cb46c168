"""ZeRO-3 in a forecast, held against what DeepSpeed's own engine was seen to allocate, and against its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_jobs
from models import SIZES as NARROW
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from zero_jobs import LORA, hold, on_meta

from safe_loading import ArgumentError, MemoryForecast, Spread, TraceError, Workload, predict_memory
from safe_loading.__main__ import main
from safe_loading._memory.trace.zero3_step import real_elements

SIZES: dict[str, Any] = {**NARROW}
BUCKET: dict[str, Any] = {"reduce_bucket_size": 500_000}
SMALL: dict[str, Any] = {
    "reduce_bucket_size": 500_000,
    "stage3_prefetch_bucket_size": 300_000,
    "stage3_max_live_parameters": 1_000_000,
    "stage3_max_reuse_distance": 500_000,
    "stage3_param_persistence_threshold": 1_000,
}
HOST: dict[str, Any] = {**SMALL, "offload_optimizer": True}
ALL_ON_HOST: dict[str, Any] = {**HOST, "offload_param": True}
SHORT: dict[str, Any] = {"rows": 4, "tokens": 32}
CHECKPOINTED: dict[str, Any] = {"rows": 2, "tokens": 128, "checkpointed": True, "adapter": LORA}
# The most bytes that a rank had asked of torch's allocator, less the workspaces of cuBLAS: DeepSpeed 0.19.8, torch 2.13
# over simulated H100s, by benchmarks/zero_on_cuda.py.
SEEN: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "a large bucket": (57193341, {}, {"reduce_bucket_size": 2_000_000}),
    "by default": (1053193341, {}, {}),
    "small": (50040741, {}, SMALL),
    "small, three ranks": (33694235, {}, {"ranks": 3, **SMALL}),
    "small, two micro-batches": (50040741, {"steps": 2}, SMALL),
    "small, float32": (57501597, {"dtype": "float32"}, SMALL),
    "small, sub-groups": (42242397, {}, {**SMALL, "sub_group_size": 300_000}),
    "small, long, checkpointed": (91621533, {"rows": 2, "tokens": 512, "checkpointed": True}, SMALL),
    "small, long": (126343373, {"rows": 2, "tokens": 512}, SMALL),
    "small, no overlap_comm": (50040741, {}, {**SMALL, "overlap_comm": False}),
    "small, offloaded": (15162436, {}, HOST),
    "LoRA": (27590557, CHECKPOINTED, BUCKET),
    "LoRA, small, checkpointed": (20701085, CHECKPOINTED, SMALL),
    "small, offloaded, two micro-batches": (15162436, {"steps": 2}, HOST),
    "LoRA, small": (28344269, {**CHECKPOINTED, "checkpointed": False}, SMALL),
    "all on the host": (10704708, {}, ALL_ON_HOST),
    "all on the host, three ranks, two micro-batches": (11046694, {"steps": 2}, {"ranks": 3, **ALL_ON_HOST}),
    "all on the host, LoRA": (16150672, CHECKPOINTED, ALL_ON_HOST),
    "all on the host, LoRA, four tokens": (6681808, {"tokens": 4, "adapter": LORA}, ALL_ON_HOST),
    "parameters on the host": (45583269, {}, {**SMALL, "offload_param": True}),
    "float16": (50041509, {"dtype": "float16"}, SMALL),
    "float16, all on the host": (10704708, {"dtype": "float16"}, ALL_ON_HOST),
    "one rank": (99082149, {}, {"ranks": 1, **SMALL}),
    "one rank, LoRA": (30855373, {**CHECKPOINTED, "checkpointed": False}, {"ranks": 1, **SMALL}),
    "one rank, all on the host": (15825204, {}, {"ranks": 1, **ALL_ON_HOST}),
    "one rank, parameters on the host": (90165669, {}, {"ranks": 1, **SMALL, "offload_param": True}),
    "trl's head": (67851193, {**SHORT, "head": True}, {"reduce_bucket_size": 2_000_000}),
    "small, trl's head": (57986297, {**SHORT, "head": True}, SMALL),
}
OF_DEFAULT = ("small", "LoRA, small", "all on the host, LoRA, four tokens", "one rank, LoRA", "small, trl's head")


def forecast(zero: dict[str, Any], **step: Any) -> MemoryForecast:
    return zero_jobs.forecast({"stage": 3, **zero}, **step)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in OF_DEFAULT else pytest.mark.slow) for case in SEEN]
)
def test_a_rank_takes_what_deepspeeds_engine_took(case: str) -> None:
    seen, step, zero = SEEN[case]
    hold(seen, step, {"stage": 3, **zero})


def test_settings_say_how_much_is_whole_at_a_time() -> None:
    """Of frozen weights a rank holds half, and what is gathered: all of them by default, few with small settings."""
    weights = sum(parameter.nbytes for parameter in on_meta().parameters())
    few, all_of_them = (forecast(zero, **CHECKPOINTED).components["weights"] for zero in (SMALL, BUCKET))
    assert all_of_them > 1.2 * weights
    assert weights / 2 < few < weights


def test_a_rank_holds_its_part_of_everything() -> None:
    two, four = (forecast({"ranks": ranks, **SMALL}) for ranks in (2, 4))
    assert four.components["optimizer"] == pytest.approx(two.components["optimizer"] / 2, rel=0.01)
    assert sorted(four.ranks) == [0, 1, 2, 3]
    assert (
        "Spread.zero(ranks=4, stage=3, reduce_bucket_size=500000, stage3_prefetch_bucket_size=300000" in four.notes[1]
    )
    assert str(Spread.zero(2, stage=3)) == "Spread.zero(ranks=2, stage=3)"
    assert str(Spread.zero(2, stage=3, overlap_comm=False)) == "Spread.zero(ranks=2, stage=3, overlap_comm=False)"


def test_ranks_that_send_other_amounts_to_the_host_are_told_apart() -> None:
    parameters = [torch.nn.Parameter(torch.empty(size)) for size in (6, 2)]
    offloaded = Spread.zero(4, stage=3, offload_optimizer=True)
    assert real_elements(parameters, offloaded) == {0: (2, 1), 1: (2, 1), 2: (2, 0), 3: (0, 0)}
    assert set(real_elements(parameters, Spread.zero(4, stage=3)).values()) == {()}


def test_the_model_is_what_it_was() -> None:
    model, linear = LlamaForCausalLM(LlamaConfig(**SIZES)), torch.nn.functional.linear
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    predict_memory(model, Workload.train(1, 8), spread=Spread.zero(2, stage=3, param_dtype="bfloat16", **SMALL))
    assert torch.nn.functional.linear is linear
    assert all(type(module._parameters) is dict for module in model.modules())
    after = dict(model.named_parameters())
    assert all(after[name] is parameter and parameter.data_ptr() == at for name, (parameter, at) in before.items())
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()


def test_zero_3_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    command = ["predict", str(tmp_path), "--train", "2x48", "--gpus", "2", "--card", "24GB", "--json", "--zero", "3"]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    expected = predict_memory(str(tmp_path), Workload.train(2, 48), spread=Spread.zero(2, stage=3))
    assert row["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"round_robin_gradients": True}, "round_robin_gradients=True is a setting of stages 1 and 2"),
        ({"sub_group_size": -1}, "sub_group_size=-1: pass a number of elements, 0 or more"),
        ({"stage": 2, "stage3_max_live_parameters": 5}, r"of stage 3(.|\n)*stage3_max_live_parameters=5"),
        ({"stage": 2, "offload_param": True}, r"of stage 3(.|\n)*offload_param=True"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Spread.zero(**{"ranks": 2, "stage": 3, **options})


def test_steps_that_are_refused() -> None:
    spread, step = Spread.zero(2, stage=3, param_dtype="bfloat16", **SMALL), Workload.train(1, 8)
    for option in ({"autocast": "bfloat16"}, {"activation_offload": True}):
        with pytest.raises(ArgumentError, match=rf"not held against DeepSpeed(.|\n)*{next(iter(option))}="):
            predict_memory(on_meta(sizes=SIZES), step.replace(**option), spread=spread)
        predict_memory(on_meta(sizes=SIZES), step.replace(**option), spread=Spread.fsdp2(2))


def test_reentrant_checkpoints_are_refused_and_others_are_not() -> None:
    spread, step = Spread.zero(2, stage=3, param_dtype="bfloat16", **SMALL), Workload.train(1, 8, True)
    model = on_meta(sizes=SIZES)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(TraceError, match=r"runs forward without gradients(.|\n)*use_reentrant=False"):
        predict_memory(model, step, spread=spread)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert predict_memory(model, step, spread=spread).ranks


def test_a_linear_product_takes_the_names_of_its_arguments() -> None:
    """As peft calls it for a tied head of trainable tokens."""
    config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2], task_type="CAUSAL_LM")
    model = on_meta(sizes={**SIZES, "tie_word_embeddings": True})
    assert predict_memory(model, Workload.train(1, 8, adapter=config), spread=Spread.zero(2, stage=3)).ranks


class Returning(torch.nn.Module):
    """A layer that hands out its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter]:
        return rows @ self.weight, self.weight


class Alternating(torch.nn.Module):
    """Layers that run in another order in each pass."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers, self.turn = torch.nn.ModuleList(layers), 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        first, second = self.layers if self.turn % 2 else reversed(self.layers)
        made: torch.Tensor = second(first(rows))
        return made


class OfPackedWeights(torch.nn.Module):
    """A layer of which a weight is no tensor in floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8))
        self.packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Returning(), "A Returning returns a parameter"),
        (Alternating(torch.nn.Linear(8, 8), torch.nn.ReLU()), "do not run in the same order in each pass"),
        (OfPackedWeights(), r"quantized weights \(uint8\) is not forecast"),
    ],
)
def test_models_that_are_refused_can_be_forecast_otherwise(model: torch.nn.Module, words: str) -> None:
    step, inputs = Workload.train(2, 8), {"rows": torch.zeros(2, 8)}
    with pytest.raises(TraceError, match=words):
        predict_memory(model, step, inputs=inputs, spread=Spread.zero(2, stage=3))
    other = Spread.zero(2, stage=2) if isinstance(model, OfPackedWeights) else Spread.fsdp2(2)
    assert predict_memory(model, step, inputs=inputs, spread=other).ranks
