"""The advice of errors and findings about plans and forecasts, taken: what a message names makes them work."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMultipleChoice,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from safe_loading import (
    ArgumentError,
    CheckpointNotFound,
    DeviceMapInfeasible,
    DeviceMapPlan,
    Spread,
    TraceError,
    Workload,
    audit_model,
    largest_micro_batch,
    meta_model,
    plan_device_map,
    predict_memory,
)
from safe_loading._memory.plan import device_memory

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
}
CONFIG = LlamaConfig(**SIZES)
STEP = Workload.train(1, 16)
FORECAST: dict[str, Any] = {"context_bytes": 0}


def any_of(wrong: object) -> Any:
    """Return what a type checker would refuse."""
    return wrong


def planned(**options: Any) -> DeviceMapPlan:
    return plan_device_map(CONFIG, **{"max_memory": {0: "1GB", 1: "1GB"}, **options})


CALLS: dict[str, tuple[Callable[[], Any], str, Callable[[], Any]]] = {
    "the disk alone": (
        lambda: planned(max_memory={"disk": "9GB"}),
        r'add \{0: "20GiB"\} or \{"cpu": "9GB"\}',
        lambda: planned(max_memory={"disk": "9GB", "cpu": "9GB"}, offload="disk"),
    ),
    "overhead elsewhere": (
        lambda: planned(overhead={3: "1MB"}),
        "name one of these",
        lambda: planned(overhead={1: "1MB"}),
    ),
    "classes that stay whole": (
        lambda: planned(no_split_modules="LlamaDecoderLayer"),
        r"pass a list of class names, for example \['LlamaDecoderLayer'\]",
        lambda: planned(no_split_modules=["LlamaDecoderLayer"]),
    ),
    "nodes as text": (
        lambda: planned(nodes="01"),
        r"pass the cards of each node, such as \[\[0, 1\], \[2, 3\]\]",
        lambda: planned(nodes=[[0], [1]]),
    ),
    "a card of a node without a limit": (
        lambda: planned(nodes=[[0, 1], [2]]),
        "name it in max_memory",
        lambda: planned(nodes=[[0, 1], [2]], max_memory={0: "1GB", 1: "1GB", 2: "1GB"}),
    ),
    "a card on two nodes": (
        lambda: planned(nodes=[[0, 1], [1]]),
        "name it once",
        lambda: planned(nodes=[[0], [1]]),
    ),
    "a card on no node": (lambda: planned(nodes=[[0]]), "name it in nodes", lambda: planned(nodes=[[0], [1]])),
    "no workload of a plan": (
        lambda: planned(workload="train"),
        r"pass a Workload, for example Workload\.generate\(1, 4096\)",
        lambda: planned(workload=Workload.generate(1, 64)),
    ),
    "a plan without its model": (
        lambda: DeviceMapPlan.from_json(planned().to_json()).verify(),
        r"plan again with plan_device_map\(model, \.\.\.\)",
        lambda: planned().verify(),
    ),
    "no model": (
        lambda: plan_device_map(any_of(3), {0: "1GB"}),
        "pass a folder, a hub id or one of Module, PreTrainedConfig",
        lambda: (planned(), plan_device_map(meta_model(CONFIG), {0: "1GB"})),
    ),
    "a dtype that a built model does not have": (
        lambda: plan_device_map(meta_model(CONFIG), {0: "1GB"}, dtype=torch.float64),
        r"dtype: .*is built already, in float32\. Pass model\.to\(torch\.float64\), or leave dtype out",
        lambda: (
            plan_device_map(meta_model(CONFIG).to(torch.float64), {0: "1GB"}, dtype="float64"),
            plan_device_map(meta_model(CONFIG), {0: "1GB"}, dtype="auto"),
            plan_device_map(meta_model(CONFIG), {0: "1GB"}),
        ),
    ),
    "weights that have no rows": (
        lambda: largest_micro_batch(CONFIG, Workload.weights_only(), "1GB", **FORECAST),
        r"Pass Workload\.train\(\.\.\.\) or Workload\.generate\(\.\.\.\)",
        lambda: largest_micro_batch(CONFIG, Workload.generate(1, 8), "24MiB", **FORECAST),
    ),
    "inputs of no name": (
        lambda: predict_memory(CONFIG, STEP, inputs=any_of([torch.ones(1)])),
        r"pass tensors by argument name, such as",
        lambda: predict_memory(CONFIG, STEP, inputs={"input_ids": torch.ones(1, 16, dtype=torch.long)}),
    ),
    "a way to load": (
        lambda: predict_memory(CONFIG, STEP, loaded_by=any_of("hand")),
        'pass "to" or "device_map"',
        lambda: (predict_memory(CONFIG, STEP, loaded_by="to"), predict_memory(CONFIG, STEP, loaded_by="device_map")),
    ),
    "a number of ranks": (
        lambda: predict_memory(CONFIG, STEP, spread=any_of(8)),
        r"pass a Spread, for example Spread\.fsdp2\(ranks=8\)",
        lambda: predict_memory(CONFIG, STEP, spread=Spread.fsdp2(ranks=8)),
    ),
    "choices": (
        lambda: predict_memory(BertForMultipleChoice(BertConfig(**SIZES)), STEP),
        r"Pass the tokens, for example inputs=\{'input_ids': torch\.ones\(1, choices, 16, dtype=torch\.long\)\}",
        lambda: predict_memory(
            BertForMultipleChoice(BertConfig(**SIZES)), STEP, inputs={"input_ids": torch.ones(1, 3, 16).long()}
        ),
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_works_once_the_advice_is_taken(kind: str) -> None:
    refused, advice, taken = CALLS[kind]
    with pytest.raises((ArgumentError, TraceError), match=advice):
        refused()
    assert taken()


def test_free_memory_that_cannot_be_read_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "accelerator", lambda: "xpu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(device_memory, "_total", lambda kind, index: None)
    with pytest.raises(ArgumentError, match=r"Pass the limits: max_memory=\{0: \.\.\.\}"):
        plan_device_map(CONFIG)
    assert plan_device_map(CONFIG, {0: "1GB"}, capability=(8, 0))


def test_a_row_that_is_too_much_is_made_to_fit() -> None:
    def rows(limit: int, workload: Workload, **options: Any) -> str:
        return largest_micro_batch(CONFIG, workload, limit, **FORECAST, **options).workload

    full = Workload.train(1, 4096)
    lora = full.replace(adapter=LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    ways = (Workload.train(1, 8), full.replace(gradient_checkpointing=True), lora)
    for way in ways:
        limit = predict_memory(CONFIG, way, **FORECAST).total_bytes
        with pytest.raises(DeviceMapInfeasible, match=r"Shorten the rows, switch gradient check.* or train an adapter"):
            rows(limit, full)
        assert rows(limit, way)


def test_an_adapter_that_names_no_base_is_put_into_the_workload(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    document = json.loads((tiny_adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**document, "base_model_name_or_path": None}))
    with pytest.raises(ArgumentError, match=r"Pass the base, and this adapter in the workload\."):
        predict_memory(tmp_path, STEP)
    found = predict_memory(tiny_llama, STEP.replace(adapter=str(tmp_path)))
    assert found.total_bytes == predict_memory(tiny_adapter, STEP).total_bytes


def test_a_base_of_another_machine_is_passed_with_its_adapter_in_the_workload(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    document = json.loads((tiny_adapter / "adapter_config.json").read_text())
    document["base_model_name_or_path"] = "/home/somebody/models/base"
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    said = (
        r"adapter_config\.json names this base; if it lies elsewhere now, pass it, and this adapter in the workload\."
    )
    planned = functools.partial(plan_device_map, max_memory={0: "1GiB"})
    for verb in (predict_memory, audit_model, lambda model, step: planned(model, workload=step)):
        with pytest.raises(CheckpointNotFound, match=rf"(?s)somebody/models/base' is not a folder.*{said}"):
            verb(tmp_path, STEP)
    found = predict_memory(tiny_llama, STEP.replace(adapter=str(tmp_path)))
    assert found.total_bytes == predict_memory(tiny_adapter, STEP).total_bytes


class Keeping(nn.Module):
    """Reads an array in its forward, as the errors say and as they do not."""

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = LlamaForCausalLM(CONFIG)
        self.read = read

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        out = self.inner(input_ids=input_ids, **options)
        self.read(out.logits)
        return out


READS: dict[str, tuple[Callable[[torch.Tensor], Any], str, Callable[[torch.Tensor], Any]]] = {
    "an array of the device": (
        lambda scores: scores.detach().numpy(),
        r"call \.cpu\(\) on it first",
        lambda scores: scores.detach().cpu().numpy(),
    ),
    "an array with a gradient": (
        lambda scores: scores.cpu().numpy(),
        r"call \.detach\(\) on it first",
        lambda scores: scores.detach().cpu().numpy(),
    ),
    "a shape of values": (
        lambda scores: scores[scores > 0],
        r"Use an operation with a fixed output shape \(torch\.where in place of x\[mask\]\)",
        lambda scores: torch.where(scores > 0, scores, 0.0),
    ),
    "a line that is skipped": (
        lambda scores: scores[scores > 0],
        r"or skip the line when its tensor is a torch\._subclasses\.FakeTensor",
        lambda scores: None if isinstance(scores, torch._subclasses.FakeTensor) else scores[scores > 0],
    ),
}


@pytest.mark.parametrize("kind", READS)
def test_a_step_is_traced_once_the_advice_is_taken(kind: str) -> None:
    refused, advice, taken = READS[kind]
    with pytest.raises(TraceError, match=advice):
        predict_memory(Keeping(refused), STEP)
    assert predict_memory(Keeping(taken), STEP).total_bytes


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.out

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(pixels)
        return out


def test_what_a_workload_does_not_describe_is_passed() -> None:
    prompt = Workload.generate(2, 6)
    with pytest.raises(TraceError, match=r"Pass what else the model needs, as inputs=\{'pixels': torch\.empty"):
        predict_memory(Pictures(), prompt)
    assert predict_memory(Pictures(), prompt, inputs={"pixels": torch.empty(2, 4, device="meta")}).total_bytes


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_images_are_passed_to_a_model_that_compares_them_with_texts(name: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes["intermediate_size"] = 32
    config = AutoConfig.for_model(name, text_config=sizes, vision_config={**sizes, "image_size": 32, "patch_size": 16})
    prompt = Workload.generate(2, 6)
    with pytest.raises(TraceError, match=r"inputs=\{'pixel_values': torch\.empty"):
        predict_memory(config, prompt)
    assert predict_memory(config, prompt, inputs={"pixel_values": torch.empty(2, 3, 32, 32, device="meta")}).total_bytes


def test_the_part_is_passed_of_a_model_whose_parts_are_run_one_by_one() -> None:
    class Speaker(PreTrainedModel):  # as Qwen2.5-Omni and Bark are: generate() runs their parts
        config_class = LlamaConfig

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.thinker = LlamaForCausalLM(config)

    model, prompt = Speaker(LlamaConfig(**SIZES)), Workload.generate(2, 6)
    with pytest.raises(TraceError, match=r"Pass the part that the step runs, such as meta_model\(\.\.\.\)\.thinker\."):
        predict_memory(model, prompt)
    assert predict_memory(model.thinker, prompt).total_bytes


def test_edits_of_a_map_are_mended() -> None:
    def findings(plan: DeviceMapPlan) -> dict[str, str]:
        plan.verify()
        return {finding.code: finding.fix for finding in plan.findings}

    plan = planned(workload=Workload.generate(1, 8))
    place = plan.pop("lm_head")
    assert findings(plan)["not-placed"] == "name it in the map, or plan anew."
    plan["lm_head"] = place
    assert plan.verify()
    plan["nothing_like_it"] = 0
    assert findings(plan)["unknown-key"] == "remove the key."
    del plan["nothing_like_it"]
    assert plan.verify()
    small = planned(workload=Workload.generate(1, 8), max_memory={0: "1GB", 1: "1KB"})
    small["lm_head"] = 1
    assert findings(small)["over-limit"] == "plan anew."
    assert planned(workload=Workload.generate(1, 8), max_memory={0: "1GB", 1: "1KB"}).verify()


def test_room_for_a_step_that_cannot_be_traced_is_left() -> None:
    class Choosing(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out: Any = super().forward(*args, **kwargs)
            out.logits[out.logits > 0].sum()
            return out

    model = Choosing(CONFIG)
    step = Workload.generate(1, 8)
    plan = plan_device_map(model, {0: "1GB"}, workload=step)
    (finding,) = [finding for finding in plan.findings if finding.code == "not-traced"]
    assert finding.fix == "leave room for them in max_memory, or pass overhead=."
    with_room = plan_device_map(model, {0: "1GB"}, workload=step, overhead="1MB")
    assert with_room.devices[0].used >= plan.devices[0].used


def test_a_module_that_cannot_be_built_on_meta_is_passed_itself() -> None:
    class Counting(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.count = float(self.lm_head.weight.sum())  # of values, which meta has not

    advice = "Correct the config, or pass the class that it is for"
    with pytest.raises(ArgumentError, match=advice):
        plan_device_map(CONFIG, {0: "1GB"}, auto_class=any_of(Counting))
    assert plan_device_map(Counting(CONFIG), {0: "1GB"})


def test_checkpointing_is_switched_on_in_the_model_itself() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out, self.checkpointing = nn.Embedding(8, 4), nn.Linear(4, 8), False

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            x = self.embed(input_ids)
            if not self.checkpointing:
                return {"loss": self.out(x).sum()}
            return {"loss": checkpoint(self.out, x, use_reentrant=False).sum()}

    model = Own()
    with pytest.raises(TraceError, match="Switch it on in the model itself, and leave it out of the workload"):
        predict_memory(model, STEP.replace(gradient_checkpointing=True))
    model.checkpointing = True
    assert predict_memory(model, STEP).total_bytes
