"""attach_head: trained, saved, loaded and merged with the adapter, or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from models import save_llama
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, BitsAndBytesConfig, LlamaForCausalLM
from wrapped_models import TOKENS, Count, llama, lora, peft_llama

from safe_loading import (
    AdapterError,
    ArgumentError,
    Transparent,
    WrapError,
    attach_head,
    load_peft_on_rank,
    merge_lora_inplace,
    prepare_and_wrap,
    wrap_transparent,
)


class Value(Transparent):
    """Calls the head on the last hidden states."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **{**kwargs, "output_hidden_states": True})
        out.value = self.value_head(out.hidden_states[-1]).squeeze(-1)
        return out


def trained(base: nn.Module | None = None, **options: Any) -> Any:
    """A PeftModel whose head has taken some steps."""
    model = attach_head(peft_llama(base), "value_head", nn.Linear(32, 1), **options)
    wrap_transparent(model, Value)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.5)
    for _ in range(2):
        out = model(input_ids=TOKENS, labels=TOKENS)
        (out.loss + (out.value - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


WITHOUT_ITS_FILE = {
    "compiled": (torch.compile, r"the PeftModel in it, model\._orig_mod, .*attach it to that one, before any wrapper"),
    "of torch": (nn.DataParallel, r"the PeftModel in it, model\.module, .*attach it to that one, before any wrapper"),
    "its base": (PeftModel.get_base_model, "a PeftModel around it, .*attach it to that one, before any wrapper"),
}


@pytest.mark.parametrize("kind", WITHOUT_ITS_FILE)
def test_a_head_that_no_adapter_would_save_is_refused(kind: str, tmp_path: Path) -> None:
    around, advice = WITHOUT_ITS_FILE[kind]
    model = peft_llama()
    with pytest.raises(WrapError, match=advice):
        attach_head(around(model), "value_head", nn.Linear(32, 1))  # type: ignore[operator]
    assert not hasattr(model, "value_head")
    attach_head(model, "value_head", nn.Linear(32, 1))
    around(model)  # type: ignore[operator]
    model.save_pretrained(tmp_path)
    assert any("value_head" in key for key in load_file(tmp_path / "adapter_model.safetensors"))


def test_a_head_comes_before_the_adapter_that_transformers_puts_in(tmp_path: Path) -> None:
    late = llama()
    late.add_adapter(lora())
    with pytest.raises(WrapError, match=r"attach it before model\.add_adapter\(LoraConfig\(.*=\['value_head'\]\)\)"):
        attach_head(late, "value_head", nn.Linear(32, 1))
    head = nn.Linear(32, 1)
    model = attach_head(llama(), "value_head", head)
    model.add_adapter(lora(modules_to_save=["value_head"]))
    model.save_pretrained(tmp_path / "adapter")
    base = attach_head(llama(), "value_head", nn.Linear(32, 1))
    loaded: Any = load_peft_on_rank(base, tmp_path / "adapter")
    assert torch.equal(loaded.value_head.modules_to_save["default"].weight, head.weight)


def test_the_head_is_the_module_that_was_given_and_it_is_trained() -> None:
    head = nn.Linear(32, 1)
    model = peft_llama()
    assert attach_head(model, "value_head", head) is model
    assert model.value_head.modules_to_save["default"] is head
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and "value" in name]
    path = "base_model.model.value_head.modules_to_save.default"
    assert names == [f"{path}.weight", f"{path}.bias"]
    before = head.weight.detach().clone()
    wrap_transparent(model, Value)
    model(TOKENS).value.sum().backward()
    torch.optim.SGD(head.parameters(), 0.1).step()
    assert not torch.equal(head.weight, before)
    assert torch.equal(model.value_head.original_module.weight, before)


def test_what_is_saved_is_loaded_by_peft_and_on_a_rank(tiny_llama: Path, tmp_path: Path) -> None:
    model = trained(LlamaForCausalLM.from_pretrained(tiny_llama))
    expected = model(TOKENS)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["value_head"]
    assert torch.equal(
        load_file(tmp_path / "adapter_model.safetensors")["base_model.model.value_head.weight"],
        model.value_head.weight,
    )

    def place() -> LlamaForCausalLM:
        return attach_head(LlamaForCausalLM.from_pretrained(tiny_llama), "value_head", nn.Linear(32, 1))

    for again in (
        PeftModel.from_pretrained(place(), str(tmp_path)),
        load_peft_on_rank(place(), tmp_path, device="cpu"),
        attach_head(
            PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_llama), str(tmp_path)),
            "value_head",
            nn.Linear(32, 1),
            source=tmp_path,
        ),
    ):
        found = wrap_transparent(again.eval(), Value)(TOKENS)
        assert torch.equal(found.value, expected.value)
        assert torch.equal(found.logits, expected.logits)
        assert not [name for name, parameter in again.named_parameters() if parameter.requires_grad]
    again = PeftModel.from_pretrained(place(), str(tmp_path), is_trainable=True)
    assert again.value_head.weight.requires_grad
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/adapter_model.safetensors").read_bytes() == (
        tmp_path / "adapter_model.safetensors"
    ).read_bytes()


def test_a_head_that_was_loaded_without_is_told_by_everyone(tiny_llama: Path, tmp_path: Path) -> None:
    trained(LlamaForCausalLM.from_pretrained(tiny_llama)).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=r"call attach_head\(base, 'value_head', \.\.\.\)"):
        load_peft_on_rank(tiny_llama, tmp_path, device="cpu")
    silent = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_llama), str(tmp_path))
    with pytest.raises(WrapError, match=r"was saved with 'value_head' .*, which this model does not have"):
        wrap_transparent(silent, Count)
    with pytest.raises(WrapError, match="Pass source=, the adapter's folder"):
        attach_head(silent, "value_head", nn.Linear(32, 1))
    assert not hasattr(silent, "value_head")
    with pytest.raises(AdapterError) as refused:
        attach_head(silent, "value_head", nn.Linear(32, 2, bias=False), source=tmp_path)
    assert refused.value.problems == (
        "bias: the file has it ([1]), the module does not.",
        "weight: the file has [1, 32], the module [2, 32].",
    )
    assert not hasattr(silent, "value_head")


def test_a_head_of_several_layers_that_was_loaded_without_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    head = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 1))
    attach_head(peft_llama(), "value_head", head).save_pretrained(tmp_path)
    with pytest.raises(AdapterError) as refused:
        load_peft_on_rank(tiny_llama, tmp_path, device="cpu")
    assert len(refused.value.problems) == str(refused.value).count("call attach_head(base, 'value_head', ...)") == 4
    like = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 1))
    base: Any = attach_head(AutoModelForCausalLM.from_pretrained(tiny_llama), "value_head", like)
    model: Any = load_peft_on_rank(base, tmp_path)
    assert model.load_report.ok
    trained = load_file(tmp_path / "adapter_model.safetensors")["base_model.model.value_head.2.weight"]
    assert torch.equal(model.base_model.model.value_head.modules_to_save["default"][2].weight, trained)


def test_a_head_that_is_there_is_not_said_to_be_missing() -> None:
    model = attach_head(peft_llama(), "value_head", nn.Linear(32, 1))
    with pytest.raises(WrapError) as refused:
        attach_head(model, "value_head", nn.Linear(32, 1))
    assert "has 'value_head' already" in str(refused.value)
    assert "loaded without" not in str(refused.value)


def test_a_head_on_a_base_that_nobody_trains_is_told(tiny_llama: Path) -> None:
    base = attach_head(LlamaForCausalLM.from_pretrained(tiny_llama), "value_head", nn.Linear(32, 1))
    model = get_peft_model(base, lora())
    with pytest.raises(WrapError, match="neither trained nor saved: LoraConfig"):
        wrap_transparent(model, Count)
    base = attach_head(LlamaForCausalLM.from_pretrained(tiny_llama), "value_head", nn.Linear(32, 1))
    model = wrap_transparent(get_peft_model(base, lora(modules_to_save=["value_head"])), Count)
    assert model.value_head.weight.requires_grad


def test_the_merged_model_keeps_the_trained_head() -> None:
    # In float64: the two roads add up in another order, and steps of 0.5 make large values.
    model = trained().double()
    value, weight = model(TOKENS).value, model.value_head.weight.detach().clone()
    merged = merge_lora_inplace(model)
    assert type(merged) is LlamaForCausalLM
    assert type(merged.value_head) is nn.Linear
    assert torch.equal(merged.value_head.weight, weight)
    hidden = merged(TOKENS, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(merged.value_head(hidden).squeeze(-1), value, rtol=1e-5, atol=1e-6)


def test_a_disabled_adapter_leaves_the_head_as_it_was_attached() -> None:
    model = trained()
    on = model(TOKENS).value
    with model.disable_adapter():
        off = model(TOKENS).value
        assert torch.equal(model.value_head(torch.ones(32)), model.value_head.original_module(torch.ones(32)))
    assert not torch.equal(on, off)
    assert torch.equal(model(TOKENS).value, on)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_head_gets_the_dtype_of_the_last_hidden_states(dtype: torch.dtype) -> None:
    model = attach_head(peft_llama(llama(dtype)), "value_head", nn.Linear(32, 1))
    assert model.value_head.weight.dtype == dtype
    wrap_transparent(model, Value)
    assert model(TOKENS).value.dtype == dtype
    wide = attach_head(peft_llama(llama(dtype)), "value_head", nn.Linear(32, 1), dtype=torch.float64)
    assert wide.value_head.weight.dtype == torch.float64


def test_the_head_of_an_encoder_has_not_the_dtype_of_an_adapter_on_its_last_layer() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    base: Any = BertModel(BertConfig(**sizes, vocab_size=64)).to(torch.bfloat16)
    model: Any = get_peft_model(base, LoraConfig(target_modules="all-linear"))  # peft keeps it in float32
    attach_head(model, "value_head", nn.Linear(32, 1))
    assert model.value_head(model(input_ids=TOKENS % 64).last_hidden_state).dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_on_a_quantized_base_computes(bits: int, tmp_path: Path) -> None:
    # 64 wide: on CPUs with AVX512-BF16 bitsandbytes cannot compute with 4 bits below its block size
    wide = save_llama(tmp_path, hidden_size=64)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    base = AutoModelForCausalLM.from_pretrained(
        wide, quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    model = wrap_transparent(attach_head(peft_llama(base), "value_head", nn.Linear(64, 1)), Value)
    assert model.value_head.weight.dtype == torch.bfloat16
    model(TOKENS).value.sum().backward()
    assert model.value_head.weight.grad is not None


def test_the_device_map_stays_complete() -> None:
    base = llama()
    devices = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    dispatch_model(base, {**devices, "lm_head": "cpu"}, force_hooks=True)
    model = attach_head(peft_llama(base), "value_head", nn.Linear(32, 1))
    assert model.hf_device_map["value_head"] == torch.device("cpu")
    assert model.value_head.weight.device == torch.device("cpu")


def test_several_adapters_have_heads_of_their_own(tmp_path: Path) -> None:
    model = attach_head(peft_llama(), "value_head", nn.Linear(32, 1))
    model.add_adapter("other", lora(modules_to_save=["value_head"]))
    model.set_adapter("other")
    with torch.no_grad():
        model.value_head.weight.fill_(2.0)
    assert not torch.equal(model.value_head.modules_to_save["default"].weight, model.value_head.weight)
    model.save_pretrained(tmp_path)
    key = "base_model.model.value_head.weight"
    assert (load_file(tmp_path / "other/adapter_model.safetensors")[key] == 2).all()
    assert not (load_file(tmp_path / "adapter_model.safetensors")[key] == 2).any()
    model.base_model.set_adapter(["default"])
    attach_head(model, "scorer", nn.Linear(32, 3), adapter_name="other")
    assert model.peft_config["other"].modules_to_save == ["value_head", "scorer"]
    assert model.peft_config["default"].modules_to_save == ["value_head"]


def test_copies_have_heads_of_their_own() -> None:
    model = trained()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.value_head.weight.zero_()
        twin.value_head.bias.zero_()
    assert not twin(TOKENS).value.any()
    assert model(TOKENS).value.any()


def test_what_cannot_be_kept_is_refused_and_nothing_changes() -> None:
    model = peft_llama()
    tied = nn.Linear(32, 101, bias=False)
    tied.weight = model.get_base_model().lm_head.weight
    before, config = list(model.state_dict()), copy.deepcopy(model.peft_config["default"])
    for name, head, message in (
        ("head", nn.Linear(32, 1), "'lm_head' ends in it too"),
        ("lm_head", nn.Linear(32, 1), "the model has 'lm_head' already"),
        ("generate", nn.Linear(32, 1), "the model has 'generate' already"),
        ("a.b", nn.Linear(32, 1), "'a.b' is not a valid name"),
        ("heads", nn.ModuleList([nn.Linear(32, 1)]), "a ModuleList cannot be a head"),
        ("tied", tied, "it shares a parameter with the model"),
        ("empty", nn.Linear(32, 1, device="meta"), "it is on meta"),
    ):
        with pytest.raises(WrapError, match=message):
            attach_head(model, name, head)
    assert list(model.state_dict()) == before
    assert model.peft_config["default"] == config
    with pytest.raises(ArgumentError, match="is not a head"):
        attach_head(model, "value_head", torch.ones(2))
    with pytest.raises(ArgumentError, match=r"Linear is not a head: pass .*torch\.nn\.Linear\(4096, 1\)"):
        attach_head(model, "value_head", nn.Linear)
    with pytest.raises(ArgumentError, match="adapter_name='nobody'"):
        attach_head(model, "value_head", nn.Linear(32, 1), adapter_name="nobody")
    with pytest.raises(WrapError, match="source= is for a PeftModel"):
        attach_head(llama(), "value_head", nn.Linear(32, 1), source="x")


def test_a_prompt_has_a_head_too(tiny_llama: Path, tmp_path: Path) -> None:
    base = LlamaForCausalLM.from_pretrained(tiny_llama)
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    attach_head(model, "value_head", nn.Linear(32, 1))
    model.save_pretrained(tmp_path)
    place = attach_head(LlamaForCausalLM.from_pretrained(tiny_llama), "value_head", nn.Linear(32, 1))
    again = PeftModel.from_pretrained(place, str(tmp_path))
    assert torch.equal(again.value_head.weight, model.value_head.weight)
    late = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_llama), str(tmp_path))
    attach_head(late, "value_head", nn.Linear(32, 1), source=tmp_path)
    assert torch.equal(late.value_head.weight, model.value_head.weight)


def test_an_adapter_that_saves_no_modules_has_no_head() -> None:
    model = peft_llama()
    model.peft_config["default"] = PeftConfig(peft_type=PeftType.LORA)  # as some configs, without the field
    with pytest.raises(ArgumentError, match=r"^LORA adapters save no modules"):
        attach_head(model, "value_head", nn.Linear(32, 1))


class Scaled(Transparent):
    """Divides the logits by a temperature."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        out.loss = self.scale(out.logits).square().mean() + 0 * self.scale.value
        return out


@pytest.mark.parametrize("at_once", [False, True])
def test_a_bare_parameter_is_trained_saved_and_loaded(at_once: bool, tmp_path: Path) -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    if at_once:
        model = prepare_and_wrap(llama(), lora(), Scaled, heads={"scale": scale}, gradient_checkpointing=False)
    else:
        model = wrap_transparent(attach_head(peft_llama(), "scale", scale), Scaled)
    model(input_ids=TOKENS).loss.backward()
    assert scale.grad is not None
    assert any(parameter is scale for parameter in model.parameters())
    with torch.no_grad():
        scale.fill_(3.5)
    model.save_pretrained(tmp_path)
    zero = nn.Parameter(torch.zeros(()))
    again: Any = PeftModel.from_pretrained(attach_head(llama(), "scale", zero), tmp_path)
    assert again.scale.value.item() == 3.5
    assert torch.equal(again.scale(torch.ones(2)), torch.full((2,), 3.5))
    zero = nn.Parameter(torch.zeros(()))
    late: Any = attach_head(PeftModel.from_pretrained(llama(), tmp_path), "scale", zero, source=tmp_path)
    assert late.scale.value.item() == 3.5
