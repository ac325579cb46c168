"""AdaLoRA whose training gave each layer a rank of its own, which the file has and its config lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import adapters as faults
from peft import AdaLoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from safe_loading import AdapterError, load_adapter_on_rank, load_peft_on_rank, merge_lora_inplace

TOKENS = torch.arange(1, 13)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """An adapter of which some layers have no rank left, and none the one that it started with."""
    torch.manual_seed(0)
    schedule = {"init_r": 6, "target_r": 2, "tinit": 1, "tfinal": 2, "deltaT": 1, "total_step": 8}
    targets: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), AdaLoraConfig(**schedule, **targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_E" in name:
                parameter.add_(torch.randn_like(parameter))
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)
    for step in range(1, 8):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("adalora")
    model.save_pretrained(folder)
    ranks = {len(value) for name, value in load_file(folder / "adapter_model.safetensors").items() if "lora_E" in name}
    assert 0 in ranks
    assert 6 not in ranks
    assert len(ranks) > 2
    return folder


def plain(folder: Path, base: Path, **options: Any) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder, **options)


@pytest.mark.parametrize("is_trainable", [False, True])
def test_the_ranks_that_training_found_are_loaded(tiny_llama: Path, trained: Path, is_trainable: bool) -> None:
    theirs = plain(trained, tiny_llama, is_trainable=is_trainable)
    before = torch.get_rng_state()
    ours = load_peft_on_rank(tiny_llama, trained, is_trainable=is_trainable)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(ours), logits(theirs))
    expected = {name: (value.detach(), value.requires_grad) for name, value in theirs.named_parameters()}
    found = {name: (value.detach(), value.requires_grad) for name, value in ours.named_parameters()}
    assert found.keys() == expected.keys()
    for name, (value, trains) in expected.items():
        assert torch.equal(found[name][0], value), name
        assert found[name][1] == trains, name


def test_a_later_one_a_save_and_a_merge(tmp_path: Path, tiny_llama: Path, trained: Path) -> None:
    model = load_peft_on_rank(tiny_llama, trained)
    expected = logits(model)
    load_adapter_on_rank(model, trained, "two")
    model.set_adapter("two")
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path, selected_adapters=["two"])
    again = load_file(tmp_path / "two" / "adapter_model.safetensors")
    on_file = load_file(trained / "adapter_model.safetensors")
    assert again.keys() == on_file.keys()
    assert all(torch.equal(again[name], value) for name, value in on_file.items())
    merged = merge_lora_inplace(load_peft_on_rank(tiny_llama, trained))
    assert torch.allclose(logits(merged), expected, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda ranks: dict.fromkeys(ranks, 3),
        lambda ranks: {name: [*kept, True] for name, kept in ranks.items()},
        lambda ranks: {name.replace("layers.0", "layers.7"): kept for name, kept in ranks.items()},
    ],
    ids=["numbers", "of another length", "of another layer"],
)
def test_ranks_that_are_not_those_of_the_file_are_refused(
    tmp_path: Path, tiny_llama: Path, trained: Path, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    ranks = json.loads((trained / "adapter_config.json").read_text())["rank_pattern"]
    wrong = faults.edited(trained, tmp_path / "wrong", config=lambda c: c.update(rank_pattern=change(ranks)))
    with pytest.raises(
        AdapterError, match=r"adapter_model\.safetensors to the model: .*; its rank_pattern is not that"
    ):
        load_peft_on_rank(tiny_llama, wrong)
