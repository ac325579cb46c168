"""What may not be split is found by running the step: the blocks are merged, or the plan says that it does not run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig
from transformers import LlamaConfig

from safe_loading import ArgumentError, DeviceMapInfeasible, DeviceMapPlan, Workload, plan_device_map, smallest_limits
from safe_loading._memory.plan.module_tree import never_split

STEP = Workload.generate(2, 64)


def llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=101,
    )


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key_value = torch.nn.Linear(64, 128)
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pair = torch.stack(self.key_value(x).chunk(2, dim=-1))
        pair = pair if cache is None else torch.cat((cache, pair), dim=2)
        return x + self.out(pair.sum(0)[:, -x.shape[1] :]), pair


class Encoder(torch.nn.Module):
    """A stack that joins its layers' caches into one tensor on reading the prompt, as ChatGLM's remote code does."""

    def __init__(self, moved: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(6))
        self.moved = moved

    def forward(self, x: torch.Tensor, caches: Any) -> tuple[torch.Tensor, Any]:
        presents: Any = ()
        for number, layer in enumerate(self.layers):
            x, pair = layer(x, None if caches is None else caches[number])
            if caches is not None:
                presents = (*presents, pair)
            elif number == 0:
                presents = pair[None]
            else:
                presents = torch.cat((presents, pair[None].to(presents.device) if self.moved else pair[None]))
        return x, presents


class ChatGLM(torch.nn.Module):
    def __init__(self, moved: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 64)
        self.encoder = Encoder(moved)
        self.head = torch.nn.Linear(64, 512)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True
    ) -> dict[str, torch.Tensor]:
        x, presents = self.encoder(self.embedding(input_ids), past_key_values)
        return {"logits": self.head(x), "past_key_values": presents}


class Weights(torch.nn.Module):
    """A model that reads the weights of two children in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Embedding(256, 32)
        self.other = torch.nn.Linear(32, 256, bias=False)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.one

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": (self.one.weight + self.other.weight)[input_ids]}


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ({"A", "B"}, {"A", "B", "Inner"}),
        (("A", "B"), {"A", "B", "Inner"}),
        (["A"], {"A", "Inner"}),
        ("A", {"A", "Inner"}),
        ([], {"Inner"}),
        (None, {"Inner"}),
    ],
)
def test_what_may_not_be_split_is_read_in_every_form_and_from_nested_models(says: Any, found: set[str]) -> None:
    outer, inner = torch.nn.Module(), torch.nn.Module()
    inner._no_split_modules = ["Inner"]  # type: ignore[assignment]  # as models of transformers do
    outer.add_module("vision", inner)
    assert never_split(outer) == {"Inner"}
    outer._no_split_modules = says
    assert never_split(outer) == found
    assert never_split(outer, ["C"]) == {"C"}


def codes(plan: DeviceMapPlan) -> list[str]:
    return [finding.code for finding in plan.findings]


@pytest.mark.parametrize("no_split", [[], ["LlamaAttention"]])
def test_a_decoder_layer_that_may_be_split_is_merged_at_its_residual_add(no_split: list[str]) -> None:
    plan = plan_device_map(llama(), {0: "90KB", 1: "90KB"}, no_split_modules=no_split)
    assert plan.verified
    assert set(plan.values()) == {0, 1}
    assert not any(path.startswith("model.layers.1.") for path in plan)
    found = [f for f in plan.findings if f.code == "merged-blocks" and "aten.add.Tensor" in f.message]
    assert [finding.where for finding in found] == ["model.layers.1"]
    assert plan.verify()


@pytest.mark.parametrize(
    "workload", [None, STEP, Workload.train(1, 8, adapter=LoraConfig(target_modules="all-linear"))]
)
def test_a_map_that_was_edited_is_counted_anew(workload: Workload | None) -> None:
    model = llama()
    # without the proof, which takes most of the time, and a little more in its place
    least = smallest_limits(model, 2, workload=workload, verify=False)
    limits = {device: size * 21 // 20 for device, size in least.items()}
    plan = plan_device_map(model, {**limits, 7: 0}, workload=workload)
    facts = plan.facts
    assert plan.verify()
    assert plan.facts == facts
    half = dict(plan)
    plan.update(dict.fromkeys(plan, 0))
    for edited in (plan, copy.copy(plan), DeviceMapPlan.from_json(plan.to_json())):
        assert not edited.verified
        assert "not verified (the map was edited" in str(edited)
    plan.update(half)
    assert plan.facts == facts
    plan.update(dict.fromkeys(plan, 0))
    assert not plan.verify()
    assert codes(plan) == ["over-limit"]
    assert plan.crossings == 0
    assert [bool(use.used) for use in plan.devices] == [True, False, False]
    assert plan.devices[0].weights >= facts.devices[0].weights + facts.devices[1].weights
    plan.update({path: torch.device("cuda", 1 + device) for path, device in half.items()})
    assert not plan.verify()
    assert [finding.where for finding in plan.findings] == ["2"]
    plan.update(half)
    assert plan.verify()
    assert plan.facts == facts
    del plan["lm_head"]
    assert not plan.verify()
    assert codes(plan) == ["not-placed"]
    assert plan.reason == "no device for lm_head"
    plan["lm_head"] = "gpu"
    with pytest.raises(ArgumentError, match="'gpu' is not a device"):
        plan.verify()


def test_without_the_proof_the_split_layer_stays_and_the_plan_says_that_it_is_not_verified() -> None:
    plan = plan_device_map(llama(), {0: "90KB", 1: "90KB"}, no_split_modules=[], verify=False)
    assert any(path.startswith("model.layers.1.") for path in plan)
    assert (plan.verified, plan.reason) == (False, "verify=False")
    assert not plan.verify()
    assert "cross-device" in codes(plan)
    assert "aten.add.Tensor" in str(plan)
    assert not plan.ok


@pytest.mark.parametrize("workload", [STEP, None])
def test_a_cache_that_is_joined_across_cards_keeps_the_stack_on_one(workload: Workload | None) -> None:
    with torch.device("meta"):
        model = ChatGLM()
    plan = plan_device_map(model, {0: "1.4MB", 1: "1.4MB"}, workload=workload)
    assert plan.verified
    assert len({plan[path] for path in plan if path.startswith("encoder")}) == 1
    assert set(plan.values()) == {0, 1}
    (found,) = [finding for finding in plan.findings if finding.code == "merged-blocks"]
    assert found.where == "encoder"
    assert "aten.cat" in found.message


def test_a_joined_cache_that_no_card_takes_whole_is_refused_with_the_reason() -> None:
    with torch.device("meta"):
        model = ChatGLM()
    with pytest.raises(DeviceMapInfeasible, match=r"met tensors of two: encoder\."):
        plan_device_map(model, {0: "400KB", 1: "400KB"})


def test_a_cache_that_the_model_moves_is_a_finding_with_its_bytes() -> None:
    with torch.device("meta"):
        model = ChatGLM(moved=True)
    plan = plan_device_map(model, {0: "1.2MB", 1: "1.2MB"}, workload=STEP)
    assert plan.verified
    assert {plan.get(f"encoder.layers.{n}") for n in range(6)} == {0, 1}
    (found,) = [finding for finding in plan.findings if finding.code == "moved-by-the-model"]
    layers = sum(plan[f"encoder.layers.{n}"] == 1 for n in range(6))
    assert found.bytes == layers * 2 * 2 * 64 * 64 * 4


def test_a_model_that_joins_its_children_itself_goes_to_one_device_as_a_whole() -> None:
    with torch.device("meta"):
        model = Weights()
    plan = plan_device_map(model, {0: "100KB", 1: "100KB"})
    assert dict(plan) == {"": 0}
    assert plan.verified
    assert "merged-blocks" in codes(plan)
    with pytest.raises(DeviceMapInfeasible, match="the whole model"):
        plan_device_map(model, {0: "50KB", 1: "50KB"})


def test_what_cannot_be_mended_is_never_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_loading._memory.plan import planner

    cut_model = planner.cut_model
    monkeypatch.setattr(planner, "cut_model", lambda model, asked, *kept: cut_model(model, asked))
    plan = plan_device_map(llama(), {0: "90KB", 1: "90KB"}, no_split_modules=[])
    assert not plan.verified
    assert "between devices" in plan.reason
    assert "cross-device" in codes(plan)
    assert not plan.ok


class Sums(torch.nn.Module):
    """A decoder that adds two embeddings itself, before its layers, as BioGPT and Blenderbot do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(128, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))
        self.positions = torch.nn.Embedding(64, 64)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.tokens

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) * 8 + self.positions(places) / 2
        for layer in self.layers:
            x = layer(x)
        return {"logits": x}


class Masks(Sums):
    """A model of embeddings that multiplies its projection with the mask that it was given, as ColPali does."""

    def __init__(self) -> None:
        super().__init__()
        del self.positions
        self.projection = torch.nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.projection(x) * attention_mask[..., None]}


def test_what_meets_an_input_of_the_model_goes_to_the_device_of_its_inputs_and_the_stack_is_still_split() -> None:
    with torch.device("meta"):
        model = Masks()
    plan = plan_device_map(model, {0: "100KB", 1: "100KB"}, no_split_modules=["Linear"])
    assert plan.verified
    assert plan["tokens"] == plan["projection"] == 0
    assert {plan.get(f"layers.{n}") for n in range(8)} == {0, 1}


def test_two_embeddings_that_are_added_go_together_and_the_stack_is_still_split() -> None:
    with torch.device("meta"):
        model = Sums()
    plan = plan_device_map(model, {0: "100KB", 1: "100KB"}, no_split_modules=["Linear"])
    assert plan.verified
    assert plan["tokens"] == plan["positions"]
    assert {plan.get(f"layers.{n}") for n in range(8)} == {0, 1}
    (found,) = [finding for finding in plan.findings if finding.code == "merged-blocks"]
    assert "aten.add.Tensor" in found.message
    with pytest.raises(DeviceMapInfeasible, match=r"met tensors of two: tokens with positions"):
        plan_device_map(model, dict.fromkeys(range(9), "40KB"), no_split_modules=["Linear"])


class Pooling(torch.nn.Module):
    """The mean of the tokens that a mask keeps: nothing that a device could hold."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Embedder(torch.nn.Module):
    """A stack whose output meets the mask of the inputs in a module without tensors, as NeoMME's head for retrieval."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(128, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))
        self.pooling = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
        self.head = torch.nn.ModuleDict({"mean": Pooling()})

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.tokens

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head["mean"](self.pooling(x), attention_mask)}


def test_a_module_without_tensors_gets_a_key_where_tensors_of_two_devices_meet_in_it() -> None:
    with torch.device("meta"):
        model = Embedder()
    plan = plan_device_map(model, {0: "100KB", 1: "100KB"}, no_split_modules=["Linear"])
    assert plan.verified, plan.reason
    assert set(plan.values()) == {0, 1}
    assert plan["head.mean"] == 1
    assert "pooling" not in plan
    assert not plan.findings
    assert plan.verify()
    del plan["head.mean"]
    assert not plan.verify()
    assert set(codes(plan)) == {"cross-device"}


def test_accelerate_sends_the_inputs_of_a_module_without_tensors_that_has_a_key(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Embedder()
    ids, mask = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    expected = model(ids, mask)["logits"]
    plan = plan_device_map(model, {0: "100KB", 1: "100KB"}, no_split_modules=["Linear"])
    where = {key: ("cpu", "disk")[int(device)] for key, device in plan.items()}
    split = dispatch_model(model, where, main_device="cpu", offload_dir=tmp_path)
    assert hasattr(split.head["mean"], "_hf_hook")
    assert torch.equal(split(ids, mask)["logits"], expected)


def test_the_caches_of_several_layers_add_up_in_the_count() -> None:
    one, two = (
        sum(use.kv_cache for use in plan_device_map(llama(), limits, workload=STEP, verify=False).devices)
        for limits in ({0: "1GB"}, {0: "800KB", 1: "800KB"})
    )
    assert one == two == 3 * 2 * 2 * (64 + 1) * 2 * 8 * 4  # layers, keys and values, rows, tokens, heads, size, bytes
