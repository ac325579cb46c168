"""load_peft_on_rank with a device map: a base over several cards of one rank, on the simulated accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from models import save_adapter, save_llama

from safe_loading import AdapterError, ArgumentError, load_peft_on_rank

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Simulated

LOADS = """
    import sys, torch, torch_npu
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from safe_loading import load_adapter_on_rank, load_peft_on_rank, meta_model, plan_device_map

    base, adapter, second, saved = sys.argv[1:]
    tokens = torch.arange(1, 25).reshape(2, 12)

    def logits(model):
        with torch.no_grad():
            return model(input_ids=tokens.to("npu:1")).logits.cpu()

    def one(folder):
        return logits(load_peft_on_rank(base, folder, device=1))

    expected, of_second, of_saved = one(adapter), one(second), one(saved)
    spread = {"model.embed_tokens": 1, "model.rotary_emb": 1, "model.layers.0": 1, "model.layers.1": 2,
              "model.layers.2": 2, "model.norm": 2, "lm_head": 4}
    plan = plan_device_map(meta_model(base), {1: 100_000, 2: 400_000})

    def run(name, load):
        torch_npu.reset()
        model = load()
        facts = {"equal": torch.equal(logits(model), expected), "contexts": torch_npu.contexts(),
                 "device": model.load_report.device}
        facts["beside its layer"] = all(
            parameter.device == model.get_submodule(path.split(".lora_")[0]).base_layer.weight.device
            for path, parameter in model.named_parameters() if ".lora_" in path)
        load_adapter_on_rank(model, second, "second")
        load_adapter_on_rank(model, second, "third")
        for name_of in ("second", "third"):
            model.set_adapter(name_of)
            facts[name_of] = torch.equal(logits(model), of_second)
        facts["end"] = torch_npu.contexts()
        facts["report"] = model.load_report.device
        report({name: facts})

    run("map", lambda: load_peft_on_rank(base, adapter, device_map=spread))
    run("plan", lambda: load_peft_on_rank(base, adapter, device_map=plan))
    run("object", lambda: load_peft_on_rank(
        AutoModelForCausalLM.from_pretrained(base, device_map=spread), adapter))
    model = load_peft_on_rank(base, saved, device_map=spread)
    report({"saved": torch.equal(logits(model), of_saved)})
    model = load_peft_on_rank(base, adapter, device_map=spread, is_trainable=True)
    loss = model(input_ids=tokens.to("npu:1"), labels=tokens.to("npu:1")).loss
    loss.backward()
    report({"trained": all(p.grad is not None and p.grad.device == p.device
                           for p in model.parameters() if p.requires_grad)})

    def tried(**arguments):
        try:
            load_peft_on_rank(arguments.pop("base", base), adapter, **arguments)
        except Exception as error:
            return [type(error).__name__, str(error)]
        return []

    dispatched = AutoModelForCausalLM.from_pretrained(base, device_map=spread)
    report({
        "left out": tried(device_map={"model": 1, "model.layers": 2}),
        "elsewhere": tried(device=3, base=dispatched),
        "base on one": tried(device_map=spread, base=AutoModelForCausalLM.from_pretrained(base)),
    })
"""


@pytest.fixture(scope="module")
def facts(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("spread")
    base = save_llama(root / "base")
    adapter = save_adapter(root / "adapter", base)
    second = save_adapter(root / "second", base, seed=4, target_modules=["q_proj", "down_proj", "lm_head"])
    saved = save_adapter(root / "saved", base, modules_to_save=["embed_tokens", "lm_head"])
    return simulated.run_forked(LOADS, args=[base, adapter, second, saved], timeout=300)


@pytest.mark.parametrize(("way", "devices"), [("map", [1, 2, 4]), ("plan", [1, 2]), ("object", [1, 2, 4])])
def test_a_base_over_several_devices_gets_each_tensor_beside_its_layer(
    facts: dict[str, Any], way: str, devices: list[int]
) -> None:
    result = facts[way]
    assert result["equal"]
    assert result["beside its layer"]
    assert result["second"]
    assert result["third"]
    assert result["contexts"] == result["end"] == devices
    assert result["device"] == result["report"]
    assert sorted(result["device"].split(", ")) == [f"npu:{index}" for index in devices]


def test_a_head_on_a_device_of_its_own_is_saved_and_trained_there(facts: dict[str, Any]) -> None:
    assert facts["saved"]
    assert facts["trained"]


def test_what_contradicts_a_map_is_refused(facts: dict[str, Any]) -> None:
    kind, text = facts["left out"]
    assert kind == "ArgumentError"
    assert "lm_head.weight" in text
    kind, text = facts["elsewhere"]
    assert kind == "DeviceError"
    assert "Leave device out" in text
    kind, text = facts["base on one"]
    assert kind == "DeviceError"
    assert "from_pretrained(device_map=...)" in text


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({}, "maps no module"),
        ({"model": "cpu", "lm_head": "disk"}, "offloads"),
        ({"model": 0, "lm_head": "cpu"}, "offloads"),
    ],
)
def test_a_map_that_offloads_is_refused(
    tiny_llama: Path, tiny_adapter: Path, device_map: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_peft_on_rank(tiny_llama, tiny_adapter, device_map=device_map)


def test_a_map_of_one_device_is_that_device(tiny_llama: Path, tiny_adapter: Path) -> None:
    assert load_peft_on_rank(tiny_llama, tiny_adapter, device_map={"": "cpu"}).load_report.device == "cpu"
    with pytest.raises(AdapterError, match="Use load_adapter_on_rank"):
        load_peft_on_rank(load_peft_on_rank(tiny_adapter, tiny_llama), tiny_adapter)
