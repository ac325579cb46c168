"""Adapters alike: what follows the plan of the first of them is what peft would make, without its walks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import adapters as faults
from loaded_models import logits, state, two_steps
from models import Made, save_adapter, save_llama
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from safetensors.torch import load_file

from safe_loading import AdapterError, load_adapter_on_rank, load_peft_on_rank, merge_lora_inplace
from safe_loading._loading import alike, attach_alike
from safe_loading._model.peft_layers import is_lora_layer

KINDS: dict[str, dict[str, Any]] = {
    "another rank and alpha": {"r": 8, "lora_alpha": 3},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 5}},
    "dropout": {"lora_dropout": 0.5},
}


@pytest.fixture
def without_injection(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after which peft's injection fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("peft's injection was called")

    return lambda: monkeypatch.setattr(BaseTuner, "inject_adapter", refuse)


def _facts(model: PeftModel) -> dict[str, Any]:
    """All that two models may differ in, without identities."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    layers = {
        path: {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
        | {name: dict(getattr(module, name)) for name in ("r", "lora_alpha", "scaling") if is_lora_layer(module)}
        for path, module in model.named_modules()
    }
    configs = {name: config.to_dict() for name, config in model.peft_config.items()}
    return {
        "tensors": {name: (tensor.dtype, tensor.requires_grad, type(tensor)) for name, tensor in named},
        "modules": {path: (type(module), module.training) for path, module in model.named_modules()},
        "layers": layers,
        "configs": configs,
        "active": model.active_adapters,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_trainable", [False, True])
def test_it_makes_what_peft_makes(
    made: Made, monkeypatch: pytest.MonkeyPatch, without_injection: Any, kind: str, is_trainable: bool
) -> None:
    base = made.llama(torch.bfloat16)
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 7}}
    first = made.adapter(base, **(patterns if kind == "patterns" else {}))
    second = made.adapter(base, seed=2, **KINDS[kind])
    slow, fast = load_peft_on_rank(base, first), load_peft_on_rank(base, first)
    with monkeypatch.context() as patch:
        patch.setattr(alike, "plan_for", lambda *_: None)
        load_adapter_on_rank(slow, second, "second", is_trainable=is_trainable)
    without_injection()
    load_adapter_on_rank(fast, second, "second", is_trainable=is_trainable)
    assert _facts(fast) == _facts(slow)
    states = fast.state_dict(), slow.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    fast.set_adapter("second")
    slow.set_adapter("second")
    assert torch.equal(logits(fast.eval()), logits(slow.eval()))


def test_several_in_one_call_are_checked_and_attached_by_the_plan(
    made: Made, without_injection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made.llama()
    adapters = {name: made.adapter(base, seed=number) for number, name in enumerate("abcd")}
    injections = []
    inject = BaseTuner.inject_adapter
    monkeypatch.setattr(BaseTuner, "inject_adapter", lambda *a, **k: (injections.append(1), inject(*a, **k))[1])
    model = load_peft_on_rank(base, adapters, active="c")
    assert len(injections) == 1, "on meta, from where the modules went to the base"
    for name, adapter in adapters.items():
        model.set_adapter(name)
        assert torch.equal(logits(model), logits(two_steps(adapter, base)))


def test_the_targets_are_those_of_the_plan_where_another_adapter_has_the_name_of_its_first(
    made: Made, tmp_path: Path
) -> None:
    base = made.llama()
    first, second = (made.adapter(base, seed=seed, target_modules=["q_proj", "v_proj"]) for seed in (1, 2))
    more = made.adapter(base, target_modules=["q_proj", "v_proj", "k_proj"])
    model = load_peft_on_rank(base, first)
    load_adapter_on_rank(model, second, "kept")
    model.set_adapter("kept")
    model.delete_adapter("default")
    load_adapter_on_rank(model, more, "default")
    load_adapter_on_rank(model, second, "third")
    assert model.peft_config["third"].to_dict()["target_modules"] == {"q_proj", "v_proj"}
    model.save_pretrained(tmp_path, selected_adapters=["third"])
    assert torch.equal(logits(load_peft_on_rank(base, tmp_path / "third")), logits(two_steps(second, base)))


def test_it_is_an_adapter_like_any_other(made: Made, tmp_path: Path) -> None:
    base = made.llama()
    first, second = made.adapter(base), made.adapter(base, seed=2)
    model = load_peft_on_rank(base, first)
    load_adapter_on_rank(model, second, "second")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "second" / "adapter_model.safetensors")
    on_file = load_file(second / "adapter_model.safetensors")
    assert saved.keys() == on_file.keys()
    assert all(torch.equal(saved[key], on_file[key]) for key in saved)
    assert torch.equal(logits(load_peft_on_rank(base, tmp_path / "second")), logits(two_steps(second, base)))
    load_adapter_on_rank(model, first, "second", hotswap=True)
    load_adapter_on_rank(model, second, "third")
    model.delete_adapter("default")  # the one that the plan was found with
    load_adapter_on_rank(model, second, "fourth")
    model.set_adapter("fourth")
    truth = logits(two_steps(second, base))
    assert torch.equal(logits(model), truth)
    assert torch.allclose(logits(merge_lora_inplace(model, adapter_names=["fourth"])), truth, atol=1e-5)


@pytest.mark.parametrize("fault", ["a key is missing", "another shape", "not a number"])
def test_a_fault_is_refused_as_for_the_first(made: Made, tmp_path: Path, fault: str) -> None:
    base = made.llama()
    adapter = made.adapter(base)

    def edit(tensors: faults.Tensors) -> None:
        key = next(key for key in tensors if "lora_A" in key)
        if fault == "a key is missing":
            del tensors[key]
        else:
            tensors[key] = tensors[key][:, 1:].contiguous() if fault == "another shape" else tensors[key] / 0

    broken = faults.edited(adapter, tmp_path / "broken", tensors=edit)
    model = load_peft_on_rank(base, adapter)
    before = state(model)
    with pytest.raises(AdapterError) as alone:
        load_peft_on_rank(base, broken)
    for refused in (
        lambda: load_adapter_on_rank(model, broken, "second"),
        lambda: load_peft_on_rank(base, {"first": adapter, "second": broken}),
    ):
        with pytest.raises(AdapterError) as later:
            refused()
        problems = [problem.replace(".second.", ".default.") for problem in later.value.problems]
        assert problems == list(alone.value.problems)
    assert state(model) == before


@pytest.mark.parametrize("in_training", [False, True])
def test_an_interrupted_load_is_undone(made: Made, monkeypatch: pytest.MonkeyPatch, in_training: bool) -> None:
    base = made.llama()
    model = load_peft_on_rank(base, made.adapter(base))
    model.train(in_training)
    before, facts = state(model), _facts(model)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attach_alike, "fill_slots", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_adapter_on_rank(model, made.adapter(base, seed=2), "second")
    assert state(model) == before
    assert _facts(model) == facts


@pytest.mark.parametrize(
    "other",
    [
        {"target_modules": ["q_proj"]},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_another_structure_is_left_to_peft(made: Made, tmp_path: Path, other: dict[str, Any]) -> None:
    base = made.llama()
    second = save_adapter(tmp_path / "second", base, seed=2, **other)
    model = load_peft_on_rank(base, made.adapter(base))
    load_adapter_on_rank(model, second, "second")
    load_adapter_on_rank(model, second, "third")
    model.set_adapter("third")
    assert torch.equal(logits(model), logits(two_steps(second, base)))


@pytest.mark.parametrize("has_biases", [False, True])
def test_biases_of_the_base_are_trained_by_one_adapter_alone(tmp_path: Path, has_biases: bool) -> None:
    base = save_llama(tmp_path / "base", attention_bias=has_biases)
    first, second = (save_adapter(tmp_path / f"{seed}", base, seed=seed, bias="all") for seed in (0, 1))
    model = load_peft_on_rank(base, first)
    before = state(model)
    if has_biases:
        with pytest.raises(AdapterError, match="only 1 adapter with bias"):
            load_adapter_on_rank(model, second, "second")
        assert state(model) == before
    else:
        load_adapter_on_rank(model, second, "second")
        model.set_adapter("second")
        assert torch.equal(logits(model), logits(two_steps(second, base)))
