"""ZeRO in a forecast, held against what DeepSpeed's own engine was seen to allocate, and against its arithmetic."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM
from zero_jobs import LORA, forecast, hold, on_meta

from safe_loading import ArgumentError, Spread, Workload, predict_memory
from safe_loading.__main__ import main
from safe_loading._memory.trace.ledger import Ledger
from safe_loading._memory.trace.over_ranks import RankOfJob
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._memory.trace.zero_step import parts_of_ranks

BUCKET = {"reduce_bucket_size": 2_000_000}
SMALL = {"reduce_bucket_size": 500_000}
SHORT: dict[str, Any] = {"rows": 4, "tokens": 32}
HOST = {**SMALL, "offload_optimizer": True}
TURNS = {"round_robin_gradients": True}
# The most bytes that a rank had asked of torch's allocator, less the workspaces of cuBLAS: DeepSpeed 0.19.8, torch 2.13
# over simulated H100s, by benchmarks/zero_on_cuda.py.
SEEN: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ZeRO-1": (53778256, {}, {"stage": 1, **BUCKET}),
    "ZeRO-1 offloaded": (29074048, {}, {"stage": 1, **HOST}),
    "ZeRO-2": (53778256, {}, {"stage": 2, **BUCKET}),
    "ZeRO-2 by default": (1044582484, {}, {"stage": 2}),
    "ZeRO-2, overlapped": (53778256, {}, {"stage": 2, **BUCKET, "overlap_comm": True}),
    "ZeRO-2, three ranks": (38959184, {}, {"stage": 2, "ranks": 3, **SMALL}),
    "ZeRO-2, float32": (72580248, {"dtype": "float32"}, {"stage": 2, **BUCKET}),
    "ZeRO-2, long": (88569944, {"rows": 2, "tokens": 512, "checkpointed": True}, {"stage": 2, **BUCKET}),
    "ZeRO-2, LoRA": (
        21976664,
        {"rows": 2, "tokens": 128, "checkpointed": True, "adapter": LORA},
        {"stage": 2, **SMALL},
    ),
    "ZeRO-2 offloaded": (23394100, {}, {"stage": 2, **HOST}),
    "ZeRO-2 accumulated": (54402392, {"steps": 2}, {"stage": 2, **BUCKET}),
    "ZeRO-1 by turns": (53581904, {}, {"stage": 1, **SMALL, **TURNS}),
    "ZeRO-2 by turns, three ranks": (39011152, {}, {"stage": 2, "ranks": 3, **SMALL, **TURNS}),
    "ZeRO-2 by turns, offloaded, accumulated": (23395380, {"steps": 2}, {"stage": 2, **HOST, **TURNS}),
    "ZeRO-1, trl's head": (54934708, {**SHORT, "head": True}, {"stage": 1, **BUCKET}),
    "ZeRO-2, trl's head, LoRA": (20818100, {**SHORT, "head": True, "adapter": LORA}, {"stage": 2, **SMALL}),
    "ZeRO-2, Liger's head": (53781328, {**SHORT, "head": "liger"}, {"stage": 2, **BUCKET}),
}
OF_DEFAULT = ("ZeRO-1 offloaded", "ZeRO-2 by default", "ZeRO-2, LoRA", "ZeRO-2, trl's head, LoRA")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in OF_DEFAULT else pytest.mark.slow) for case in SEEN]
)
def test_a_rank_takes_what_deepspeeds_engine_took(case: str) -> None:
    hold(*SEEN[case])


def test_buckets_are_counted_whatever_the_model() -> None:
    one, two = (forecast({"stage": 2, "overlap_comm": overlapped}) for overlapped in (False, True))
    assert two.allocated_peak_bytes - one.allocated_peak_bytes == pytest.approx(2 * 500_000_000, rel=0.001)
    small = forecast({"stage": 2, **SMALL})
    assert one.allocated_peak_bytes - small.allocated_peak_bytes > 900_000_000


@pytest.mark.slow
def test_stage_1_keeps_whole_gradients_until_the_last_micro_batch() -> None:
    first, second = (forecast({"stage": stage, **SMALL}, steps=2, tokens=128, rows=2) for stage in (1, 2))
    weights = sum(parameter.nbytes for parameter in on_meta().parameters())
    assert first.ranks[0] - second.ranks[0] > weights * 0.4


def test_a_part_of_each_rank() -> None:
    two, three, four = (Spread.zero(ranks, stage=2) for ranks in (2, 3, 4))
    assert parts_of_ranks([3, 5], two) == [[(0, 0, 3), (1, 0, 1)], [(1, 1, 5)]]
    held = parts_of_ranks([10, 1, 7], four)  # 18 elements in four shares of 6, which leaves 6 of padding
    assert [sum(part.stop - part.start for part in parts) for parts in held] == [6, 6, 6, 0]
    assert [len(parts_of_ranks([], three)), parts_of_ranks([2], three)] == [3, [[(0, 0, 2)], [], []]]
    by_turns = Spread.zero(2, stage=2, round_robin_gradients=True)
    assert parts_of_ranks([4, 1, 2, 3], by_turns) == [[(0, 0, 4), (2, 0, 2)], [(1, 0, 1), (3, 0, 3)]]


def test_what_is_shared_out() -> None:
    two, four = (forecast({"stage": 2, "ranks": ranks, **SMALL}) for ranks in (2, 4))
    assert four.components["optimizer"] == pytest.approx(two.components["optimizer"] / 2, rel=0.01)
    assert sorted(four.ranks) == [0, 1, 2, 3]
    assert four.components["weights"] == two.components["weights"]
    assert "Spread.zero(ranks=4, stage=2, reduce_bucket_size=500000, param_dtype='bfloat16')" in four.notes[1]
    assert "Nor is setting up" in four.notes[1]


def test_parameters_are_cast_as_the_config_says_and_the_model_is_left_as_it_was() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    step = Workload.train(2, 48)
    cast = predict_memory(model, step, spread=Spread.zero(2, stage=2, param_dtype="bfloat16", **SMALL))
    plain = predict_memory(on_meta("bfloat16", SIZES), step, spread=Spread.zero(2, stage=2, **SMALL))
    assert cast.ranks[0] == pytest.approx(plain.ranks[0], abs=256)  # whose buffers are in 16 bits too
    after = dict(model.named_parameters())
    assert all(after[name] is parameter and parameter.data_ptr() == at for name, (parameter, at) in before.items())
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()


def test_every_gradient_reaches_its_owner() -> None:
    """The master copies of all ranks are the model, and each rank's optimizer steps its share alone."""
    step = Workload.train(1, 8)
    for stage in (1, 2):
        held = 0
        for rank in range(3):
            trace = trace_step(
                on_meta("float32", SIZES), step, job=RankOfJob(Spread.zero(3, stage=stage, **SMALL), rank)
            )
            resident = [a for a in trace.allocations if a.phase == "load" and a.component == "optimizer"]
            held += max(allocation.bytes for allocation in resident)
        assert held - sum(p.nbytes for p in on_meta("float32", SIZES).parameters()) in range(4 * 2 * 3)


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_of_a_trace_outlives_it(stage: int) -> None:
    """Torch keeps the hooks of gradients where the garbage collector does not look, and with them what they hold."""

    def ledgers() -> int:
        gc.collect()
        return sum(type(kept) is Ledger for kept in gc.get_objects())

    before = ledgers()
    predict_memory(on_meta("bfloat16", SIZES), Workload.train(1, 8), spread=Spread.zero(2, stage=stage, **SMALL))
    assert ledgers() == before


def test_zero_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    command = ["predict", str(tmp_path), "--train", "2x48", "--gpus", "2", "--card", "24GB", "--json"]
    for words, options in (((), {}), (("--cpu-offload",), {"offload_optimizer": True})):
        assert main([*command, "--zero", "2", *words]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        expected = predict_memory(str(tmp_path), Workload.train(2, 48), spread=Spread.zero(2, stage=2, **options))
        assert row["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes
    assert main([*command, "--zero", "4"]) == 2
    assert "stage=4: 1, 2 or 3" in capsys.readouterr().err


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="stage=4: 1, 2 or 3"):
        Spread.zero(2, stage=4)
    with pytest.raises(ArgumentError, match="reduce_bucket_size=0"):
        Spread.zero(2, stage=2, reduce_bucket_size=0)
    with pytest.raises(ArgumentError, match="overlap_comm='yes': True or False"):
        Spread.zero(2, stage=2, overlap_comm="yes")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Spread.zero is for training. Spread.fsdp2 can"):
        predict_memory(on_meta(), Workload.generate(1, 8), spread=Spread.zero(2, stage=2))
    mixed = on_meta()
    mixed.lm_head.to(torch.float32)
    with pytest.raises(ArgumentError, match=r"torch.bfloat16 and torch.float32(.|\n)*param_dtype"):
        predict_memory(mixed, Workload.train(1, 8), spread=Spread.zero(2, stage=2))
