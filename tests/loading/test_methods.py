"""Adapters of every method of peft: the table of docs/methods.md, and what is special about some of them."""

from __future__ import annotations

import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import method_table
import peft
import pytest
import torch
from adapter_methods import METHODS, Method, save_trained
from faults import adapters as faults
from loaded_models import logits, state, two_steps
from method_table import Bench
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM

from safe_loading import AdapterError, load_adapter_on_rank, load_peft_on_rank
from safe_loading._loading import starts
from safe_loading._loading.starts import refuse_start_without_card

# Methods that broke once, and a few of the others.
SAMPLE = {"LoRA, PiSSA", "KaSA", "VeLoRA", "Adaption prompt", "FRoD", "OSF", "Prefix tuning", "LoRA, replicated layers"}
SAMPLE |= set(random.Random(0).sample(sorted(METHODS), 2))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("methods"))


@pytest.mark.parametrize(
    "method", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_the_table_says_what_can_be_done_with_each_method(bench: Bench, method: str) -> None:
    assert method_table.row(method, bench) == method_table.written()[method]


def test_every_method_of_peft_is_in_the_table() -> None:
    configs = {config.__name__ for config in PEFT_TYPE_TO_CONFIG_MAPPING.values()}
    left_out = {"XLoraConfig", "AdamssConfig"}  # docs/methods.md says why
    assert configs - left_out == {method.config for method in METHODS.values()} - left_out
    assert list(method_table.written()) == list(METHODS)


@pytest.mark.parametrize(
    "method", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_a_start_that_changes_the_base_is_known(bench: Bench, method: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(bench.base)
    before = [(tensor, tensor.detach().clone()) for tensor in (*base.parameters(), *base.buffers())]
    config = METHODS[method].make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(base, config)
    changed = any(not torch.equal(tensor, values) for tensor, values in before)
    assert changed == starts.starts_on_base(config)
    assert starts.may_change_base(config) or not changed


def test_a_field_that_is_not_known_is_started_on_the_base_and_watched() -> None:
    @dataclasses.dataclass
    class Newer(peft.LoraConfig):
        newest_start: str | None = None

    known, unknown = Newer(target_modules=["q_proj"]), Newer(target_modules=["q_proj"], newest_start="x")
    assert starts.builds_on_meta(known)
    assert not starts.may_change_base(known)
    assert not starts.builds_on_meta(unknown)
    assert starts.may_change_base(unknown)


@pytest.mark.parametrize("method", ["LoRA, PiSSA", "LoRA, OLoRA", "KaSA"])
def test_the_base_is_changed_by_the_load_and_the_report_says_so(bench: Bench, method: str) -> None:
    model = load_peft_on_rank(bench.base, bench.adapter(method))
    assert [finding.code for finding in model.load_report.findings] == ["base-changed"]
    plain = two_steps(bench.adapter(method), bench.base)
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("method", ["LoRA, PiSSA", "LoRA, OLoRA", "KaSA"])
@pytest.mark.parametrize("other", [{"r": 2}, {"target_modules": ["q_proj"]}])
def test_a_start_that_would_change_the_base_again_is_refused_and_undone(
    bench: Bench, tmp_path: Path, method: str, other: dict[str, Any]
) -> None:
    second = save_trained(METHODS[method], bench.base, tmp_path / "second", **other)
    model = load_peft_on_rank(bench.base, bench.adapter(method))
    before, outputs = state(model), logits(model)
    with pytest.raises(AdapterError, match="load it onto a base of its own") as refused:
        load_adapter_on_rank(model, second, "second")
    assert len(refused.value.problems) == 1
    assert {**state(model), "tensors": None} == {**before, "tensors": None}
    assert torch.equal(logits(model), outputs)
    with pytest.raises(AdapterError, match="changes the weights of the base"):
        load_peft_on_rank(bench.base, {"first": bench.adapter(method), "second": second})
    # the advice
    assert torch.equal(logits(load_peft_on_rank(bench.base, second)), logits(two_steps(second, bench.base)))


def test_a_caller_s_base_has_its_weights_back_when_a_later_adapter_is_refused(
    bench: Bench, tmp_path: Path, tiny_adapter: Path
) -> None:
    broken = faults.edited(tiny_adapter, tmp_path / "broken", tensors=faults.without("lora_B"))
    for method in ("LoRA, PiSSA", "LoRA, OLoRA"):
        base = AutoModelForCausalLM.from_pretrained(bench.base)
        before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        with pytest.raises(AdapterError):
            load_peft_on_rank(base, {"first": bench.adapter(method), "second": broken})
        after = base.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_plain_adapter_on_a_base_that_was_changed_is_a_warning(bench: Bench, tiny_adapter: Path) -> None:
    model = load_peft_on_rank(bench.base, bench.adapter("LoRA, PiSSA"))
    report = load_adapter_on_rank(model, tiny_adapter, "second")
    assert [(finding.code, finding.severity) for finding in report.findings] == [("base-already-changed", "warning")]


FLOAT32 = {
    **{name: METHODS[name] for name in ("LoRA", "Adaption prompt", "LN tuning", "OSF", "UniLoRA", "RandLora")},
    **{
        f"{name} without its projections": Method(
            METHODS[name].config, {**METHODS[name].options, "save_projection": False}
        )
        for name in ("VeRA", "PVeRA", "RandLora")
    },
}


@pytest.mark.parametrize("method", FLOAT32)
def test_a_float32_adapter_computes_on_a_16_bit_base_as_with_peft(bench: Bench, tmp_path: Path, method: str) -> None:
    adapter = save_trained(FLOAT32[method], bench.base, tmp_path / "adapter")
    AutoModelForCausalLM.from_pretrained(bench.base, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(adapter))
        model = load_peft_on_rank(tmp_path / "base", adapter)
    assert torch.equal(logits(model.eval()), logits(plain.eval()))


def test_a_start_that_cannot_be_repeated_is_an_error(bench: Bench, tmp_path: Path) -> None:
    random_start = Method("LoraConfig", {**METHODS["LoRA"].options, "init_lora_weights": "pissa_niter_4"})
    adapter = save_trained(random_start, bench.base, tmp_path / "adapter")
    with pytest.raises(AdapterError, match=r"randomized SVD.*path_initial_model_for_weight_conversion"):
        load_peft_on_rank(bench.base, adapter)
    with pytest.warns(UserWarning, match="randomized SVD"):
        model = load_peft_on_rank(bench.base, adapter, strict=False)
    assert {finding.code for finding in model.load_report.findings} == {"base-changed", "start-not-repeatable"}
    # beside the adapter of the same run it is right
    again = load_adapter_on_rank(model, adapter, "again")
    assert again.ok
    assert {finding.code for finding in again.findings} == {"base-changed", "start-not-repeatable"}
    outputs = logits(model)
    model.set_adapter("again")
    assert torch.equal(logits(model), outputs)


def test_the_conversion_that_the_error_names_works(bench: Bench, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = METHODS["LoRA"].make(init_lora_weights="pissa_niter_4")
        trained: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(bench.base), config)
        trained.peft_config["default"].init_lora_weights = True
        trained.save_pretrained(tmp_path / "start")
        trained.peft_config["default"].init_lora_weights = "pissa_niter_4"
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
    truth = logits(trained)
    trained.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    model = load_peft_on_rank(bench.base, tmp_path / "plain")
    assert torch.allclose(logits(model), truth, atol=1e-5)


@pytest.mark.parametrize("start", ["lora_ga", "lora-ga"])  # as peft writes it, and ms-swift
def test_an_adapter_of_lora_ga_is_an_error(bench: Bench, tmp_path: Path, start: str) -> None:
    def as_lora_ga(config: dict[str, Any]) -> None:
        config.update(init_lora_weights=start, lora_ga_config={})

    adapter = faults.edited(bench.adapter("LoRA"), tmp_path / "adapter", config=as_lora_ga)
    with pytest.raises(AdapterError, match="another base than it was trained on"):
        load_peft_on_rank(bench.base, adapter)


def test_a_start_of_loftq_needs_a_card_and_the_error_says_so() -> None:
    config = peft.LoraConfig()
    config.init_lora_weights = "loftq"  # as an argument it needs scipy
    message = r"^adapter_config.json: init_lora_weights='loftq' .* on CUDA or XPU alone.*path_initial_model_for_weight"
    with pytest.raises(AdapterError, match=message):
        refuse_start_without_card(config, "adapter_config.json")


@pytest.mark.parametrize("method", ["P-tuning", "Prefix tuning, projected"])
def test_a_prompt_whose_encoder_is_in_no_file_is_not_trained(bench: Bench, method: str) -> None:
    with pytest.raises(AdapterError, match="Leave is_trainable=True out"):
        load_peft_on_rank(bench.base, bench.adapter(method), is_trainable=True)
    adapter = bench.adapter(method)
    assert torch.equal(logits(load_peft_on_rank(bench.base, adapter)), logits(two_steps(adapter, bench.base)))


@pytest.mark.parametrize("method", ["VeRA", "RandLora"])
def test_projections_that_differ_from_the_shared_ones_are_refused(bench: Bench, tmp_path: Path, method: str) -> None:
    def other_projections(tensors: faults.Tensors) -> None:
        for key in tensors:
            if key.endswith(("_A", "_B")):
                tensors[key] = tensors[key] + 1

    other = faults.edited(bench.adapter(method, seed=2), tmp_path / "other", tensors=other_projections)
    model = load_peft_on_rank(bench.base, bench.adapter(method))
    before, outputs = state(model), logits(model)
    with pytest.raises(AdapterError, match="share this tensor"):
        load_adapter_on_rank(model, other, "other")
    assert state(model) == before
    assert torch.equal(logits(model), outputs)
    load_peft_on_rank(bench.base, other)  # the advice
    with pytest.warns(UserWarning, match="share this tensor"):
        report = load_adapter_on_rank(model, other, "other", strict=False)
    assert "shared-tensor-differs" in {finding.code for finding in report.findings}


@pytest.mark.parametrize("loaded", ["LoRA", "LoRA, PiSSA"])
def test_a_swap_between_starts_is_refused(bench: Bench, tmp_path: Path, loaded: str) -> None:
    """The base is what the loaded adapter left of it."""
    pissa = save_trained(METHODS["LoRA, PiSSA"], bench.base, tmp_path / "pissa", r=2)
    model = load_peft_on_rank(bench.base, bench.adapter(loaded))
    outputs = logits(model)
    with pytest.raises(AdapterError, match="Load it onto a new base"):
        load_adapter_on_rank(model, pissa, "default", hotswap=True)
    assert torch.equal(logits(model), outputs)


def test_another_replication_of_layers_is_refused(bench: Bench, tmp_path: Path, tiny_adapter: Path) -> None:
    method = "LoRA, replicated layers"
    other = save_trained(METHODS[method], bench.base, tmp_path / "other", layer_replication=[[0, 3], [1, 3]])
    for first in (bench.adapter(method), tiny_adapter):
        model = load_peft_on_rank(bench.base, first)
        before, outputs = state(model), logits(model)
        with pytest.raises(AdapterError, match="onto a base of its own"):
            load_adapter_on_rank(model, other, "other")
        assert state(model) == before
        assert torch.equal(logits(model), outputs)


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.attention(tokens, tokens, tokens)[0]


def test_the_base_weights_of_an_attention_module_stay_frozen(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["attention"], init_lora_weights=False)
    base: Any = _Attention()
    peft.get_peft_model(_copy_of(base), config).save_pretrained(str(tmp_path / "adapter"))
    ours = load_peft_on_rank(_copy_of(base), tmp_path / "adapter", is_trainable=True)
    plain = peft.PeftModel.from_pretrained(_copy_of(base), tmp_path / "adapter", is_trainable=True)

    def trained(model: torch.nn.Module) -> set[str]:
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    assert trained(ours) == trained(plain) != set()
    tokens = torch.randn(1, 3, 8)
    assert torch.equal(ours(tokens), plain(tokens))


def _copy_of(base: _Attention) -> Any:
    copied = _Attention()
    copied.load_state_dict(base.state_dict())
    return copied
