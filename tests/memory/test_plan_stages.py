"""Plans for what outgrows a machine: the fewest cards, several nodes, and stages of a pipeline that torch then runs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import pipeline
from torchrun import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import (
    ArgumentError,
    DeviceMapInfeasible,
    DeviceMapPlan,
    Workload,
    fewest_cards,
    meta_model,
    plan_device_map,
)

SHAPE: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
CONFIG = LlamaConfig(**SHAPE, vocab_size=1000, num_hidden_layers=6, dtype="float32", tie_word_embeddings=False)
STEP = Workload.generate(1, 16)


def parameters_of(model: torch.nn.Module, names: tuple[str, ...]) -> set[str]:
    return {name for name, _ in model.named_parameters() if any(name.startswith(f"{each}.") for each in names)}


def test_torch_splits_a_model_where_the_plan_does() -> None:
    cards = 3
    plan = plan_device_map(CONFIG, dict.fromkeys(range(cards), "1.5MB"), workload=STEP)
    model = LlamaForCausalLM(CONFIG).eval()
    model.config.use_cache = False
    ids = torch.randint(0, 1000, (2, 16))
    with torch.no_grad():
        expected = model(ids).logits
        pipe = pipeline(model, (ids,), split_spec=plan.split_spec())
        assert torch.equal(pipe(ids)[0], expected)
    assert pipe.num_stages == len(plan.stages()) == cards
    for number, stage in enumerate(plan.stages()):
        held = {name for name, _ in pipe.get_stage_module(number).named_parameters()}
        assert held == parameters_of(model, stage.modules)
        size = sum(model.get_parameter(name).nbytes for name in held)
        assert plan.devices[number].weights == size
        assert stage.device == plan.devices[number].device


def test_what_is_no_pipeline_is_refused_and_the_advice_works() -> None:
    tied = LlamaConfig(**SHAPE, vocab_size=1000, num_hidden_layers=6, tie_word_embeddings=True)
    plan = plan_device_map(tied, {0: "900KB", 1: "900KB"})
    with pytest.raises(ArgumentError, match="others run in between") as caught:
        plan.stages()
    assert "tie_word_embeddings=False" in str(caught.value)
    assert len(plan_device_map(CONFIG, {0: "900KB", 1: "900KB"}).split_spec()) == 1
    spilled = plan_device_map(CONFIG, {0: "900KB"}, offload="cpu")
    with pytest.raises(ArgumentError, match="is on the cpu"):
        spilled.split_spec()
    assert plan_device_map(CONFIG, {0: "9MB"}).split_spec() == {}
    assert len(DeviceMapPlan.from_json(plan_device_map(CONFIG, {0: "900KB", 1: "900KB"}).to_json()).stages()) == 2


def test_stages_follow_the_nodes_and_the_slow_links_are_named() -> None:
    # 0 and 2 share a node, and so do 1 and 3
    limits = dict.fromkeys(range(4), "600KB")
    plain = plan_device_map(CONFIG, limits, workload=STEP)
    plan = plan_device_map(CONFIG, limits, workload=STEP, nodes=[[0, 2], [1, 3]])
    assert [stage.device for stage in plain.stages()] == [0, 1, 2, 3]
    assert [stage.device for stage in plan.stages()] == [0, 2, 1, 3]
    assert (plain.node_crossings, plan.node_crossings, plan.crossings) == (0, 1, 3)
    assert plan.fraction == plain.fraction
    assert plan.verified
    (link,) = [finding for finding in plan.findings if finding.code == "between-nodes"]
    assert link.where == "2 -> 1"
    assert link.bytes >= 16 * 64 * 4  # the hidden state of the prompt
    assert DeviceMapPlan.from_json(plan.to_json()).node_crossings == 1
    # an edited map is counted again
    moved = {0: 0, 2: 1, 1: 2, 3: 3}
    for name, device in [*plan.items()]:
        plan[name] = moved[int(device)]
    assert plan.verify()
    assert plan.node_crossings == 3
    assert len([finding for finding in plan.findings if finding.code == "between-nodes"]) == 3


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([[0], [0, 1]], "0 is on node 0 and on node 1"),
        ([[0]], "1 has a limit and is on no node"),
        ([[0, 1], [7]], "7 of node 1 has no limit"),
        ([[0, "cpu"], [1]], "'cpu' of node 0 has no limit"),
        ([0, 1], "pass the cards of each node"),
    ],
)
def test_nodes_that_do_not_go_with_the_limits_are_refused(nodes: Any, problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        plan_device_map(CONFIG, {0: "9MB", 1: "9MB"}, nodes=nodes)


def test_nodes_and_offloading_do_not_go_together() -> None:
    with pytest.raises(ArgumentError, match="do not go together"):
        plan_device_map(CONFIG, {0: "9MB"}, nodes=[[0]], offload="cpu")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_one_card_fewer_does_not_do(seed: int) -> None:
    draw = random.Random(f"fewest {seed}")
    workload = draw.choice([Workload.weights_only(), STEP, Workload.train(2, 32), Workload.train(1, 64, True)])
    model = meta_model(LlamaConfig(**SHAPE, vocab_size=200, num_hidden_layers=draw.randint(2, 5)), dtype=torch.float32)
    size = draw.randint(1_000_000, 2_500_000)
    plan = fewest_cards(model, size, workload=workload)
    count = len(plan.devices)
    assert plan.verified
    assert all(0 < use.used <= use.limit == size for use in plan.devices)
    if count > 1:
        with pytest.raises(DeviceMapInfeasible) as caught:
            plan_device_map(model, dict.fromkeys(range(count - 1), size), workload=workload)
        # what the refusal says would do does, and is no less than the fewest
        more = caught.value.more_cards[0]
        assert f"{more} more card" in str(caught.value)
        assert plan_device_map(model, dict.fromkeys(range(count - 1 + more), size), workload=workload).verified


def test_cards_are_named_or_given_by_their_size() -> None:
    large = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        num_hidden_layers=14, dtype="bfloat16",
    )  # fmt: skip
    plan = fewest_cards(large, "rtx-4090", workload=Workload.generate(1, 4096))
    assert len(plan.devices) == 2
    assert plan.devices[0].overhead > 0  # a context
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for card, code in (("a100-80gb", "dequantized"), ("h100", "kernels-needed")):
        assert code in {finding.code for finding in fewest_cards(large, card, quantization_config=fp8).findings}
    assert fewest_cards(large, "24GB").devices[0].limit == 24 * 10**9
    with pytest.raises(ArgumentError, match="card 'h10000' is not known"):
        fewest_cards(large, "h10000")
    with pytest.raises(ArgumentError, match="takes no offload="):
        fewest_cards(large, "24GB", offload="cpu")


def test_a_card_that_is_too_small_for_a_layer_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(DeviceMapInfeasible) as caught:
        fewest_cards(CONFIG, "200KB", workload=STEP)
    assert not caught.value.more_cards
    assert "like device" not in str(caught.value)
    device, missing = caught.value.device, caught.value.missing_bytes
    limits = {**dict.fromkeys(range(12), 200_000), device: 200_000 + missing}
    assert plan_device_map(CONFIG, limits, workload=STEP).verified


def test_equal_cards_take_one_line_of_a_refusal() -> None:
    with pytest.raises(DeviceMapInfeasible) as caught:
        plan_device_map(CONFIG, {**dict.fromkeys(range(16), "50KB"), 17: "60KB"}, workload=STEP)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "{0-15: 48.8 KiB, 17: 58.6 KiB}" in lines[0]
    assert lines[1].endswith("or the same for any one of the cards 0-15")


SCRIPT = """
import copy, torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, pipeline
from transformers import LlamaConfig, LlamaForCausalLM
from safe_loading import plan_device_map, Workload

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
config = LlamaConfig(**shape, vocab_size=1000, num_hidden_layers=6, dtype="float32", use_cache=False)
plan = plan_device_map(config, {0: "1.5MB", 1: "1.5MB"}, workload=Workload.generate(1, 16))
model = LlamaForCausalLM(config).eval()
ids = torch.randint(0, 1000, (4, 16))
with torch.no_grad():
    expected = model(ids).logits
    pipe = pipeline(model, (ids[:1],), split_spec=plan.split_spec())
    stage = pipe.build_stage(rank, torch.device("cpu"))
    out = ScheduleGPipe(stage, n_microbatches=4).step(*([ids] if rank == 0 else []))
held = sum(p.nbytes for p in stage.submod.parameters())
right = rank == 0 or torch.allclose(getattr(out, "logits", out), expected, atol=1e-6)
report(logits=right, weights=held == plan.devices[rank].weights)

torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(7)]
whole = torch.nn.Sequential(*blocks).double()
parts = plan_device_map(whole, {0: 40000, 1: 40000}, no_split_modules=["Sequential"]).stages()
assert len(parts) == 2, parts
x, y = torch.randn(8, 32).double(), torch.randn(8, 32).double()
own = torch.nn.Sequential(*[copy.deepcopy(whole.get_submodule(name)) for name in parts[rank].modules])
loss = torch.nn.functional.mse_loss
schedule = Schedule1F1B(PipelineStage(own, rank, 2, torch.device("cpu")), n_microbatches=4, loss_fn=loss)
if rank == 0:
    schedule.step(x)
else:
    schedule.step(target=y)
loss(whole(x), y).backward()
right = [p.grad for name in parts[rank].modules for p in whole.get_submodule(name).parameters()]
report(gradients=all(torch.allclose(a.grad, b) for a, b in zip(own.parameters(), right, strict=True)))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchs_schedules_run_the_stages_on_their_ranks() -> None:
    run = run_ranks(SCRIPT, 2)
    for rank in range(2):
        assert run.found[rank] == {"logits": True, "weights": True, "gradients": True}
