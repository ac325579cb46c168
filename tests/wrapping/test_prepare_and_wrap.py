"""prepare_and_wrap: the whole order in one call, checked before the base is touched."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PromptTuningConfig
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from wrapped_models import TOKENS, AuxLoss, Count, Plain, llama, lora, peft_llama

from safe_loading import ArgumentError, WrapError, prepare_and_wrap


def bits_of(model: nn.Module) -> Any:
    return (
        {path: (id(module), type(module), str(vars(module))) for path, module in model.named_modules()},
        [(id(each), each.dtype, each.requires_grad, each.data_ptr()) for each in model.parameters()],
    )


def checkpointing(model: nn.Module) -> int:
    return sum(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules())


def test_checkpointing_is_switched_on_by_the_name_that_the_engine_does_not_warn_of() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradient_checkpointing_enable.*", category=FutureWarning)
        model = prepare_and_wrap(llama(), lora(), Count, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert checkpointing(model) > 0


def test_an_unquantized_base_keeps_its_dtype_and_checkpoints() -> None:
    base = llama(torch.bfloat16)
    head = nn.Linear(32, 1)
    model = prepare_and_wrap(base, lora(), Count, heads={"value_head": head}, calls=0, log=[])
    assert isinstance(model, PeftModel)
    assert isinstance(model, Count)
    assert model.get_base_model() is base
    assert base.lm_head.weight.dtype == torch.bfloat16
    assert checkpointing(model) > 0
    assert model.value_head.modules_to_save["default"] is head
    assert not base.model.norm.weight.requires_grad
    assert (model.calls, model.log) == (0, [])
    out = model.train()(input_ids=TOKENS, labels=TOKENS)
    out.loss.backward()
    assert model.calls == 1
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)
    assert not checkpointing(prepare_and_wrap(llama(), lora(), Count, gradient_checkpointing=False))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_base_is_prepared_first(bits: int, tiny_llama: Path) -> None:
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    base = AutoModelForCausalLM.from_pretrained(
        tiny_llama, quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    packed = [name for name, each in base.named_parameters() if not each.is_floating_point()]
    assert packed
    model = prepare_and_wrap(base, lora(), AuxLoss, coefficient=0.1)
    assert base.model.norm.weight.dtype == torch.float32  # what prepare_model_for_kbit_training casts
    after = dict(base.named_parameters())
    assert all(
        not after.get(name, after.get(name.replace(".weight", ".base_layer.weight"))).is_floating_point()
        for name in packed
    )
    assert checkpointing(model) > 0
    out = model.train()(input_ids=TOKENS, labels=TOKENS)
    out.loss.backward()
    assert any(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "lora_" in n)


def test_what_is_wrong_is_found_before_the_base_is_touched() -> None:
    base = llama(torch.bfloat16)
    before = bits_of(base)
    with pytest.raises(ArgumentError, match="peft cannot add this LoraConfig to LlamaForCausalLM"):
        prepare_and_wrap(base, lora(target_modules=["nowhere"]), Count)
    with pytest.raises(WrapError, match="the state 'base_model' would hide"):
        prepare_and_wrap(base, lora(), Count, peft_config_=1, base_model=1)
    with pytest.raises(WrapError, match="the state 'print_trainable_parameters' would hide"):
        prepare_and_wrap(base, lora(), Count, print_trainable_parameters=1)
    with pytest.raises(WrapError, match="head 'head': peft matches"):
        prepare_and_wrap(base, lora(), Count, heads={"head": nn.Linear(32, 1)})
    with pytest.raises(WrapError, match="is the name of a head and of a state"):
        prepare_and_wrap(base, lora(), Count, heads={"value_head": nn.Linear(32, 1)}, value_head=3)
    with pytest.raises(ArgumentError, match="dict is not a peft config"):
        prepare_and_wrap(base, {}, Count)
    with pytest.raises(ArgumentError, match="is not a mixin"):
        prepare_and_wrap(base, lora(), Plain)
    with pytest.raises(ArgumentError, match="pass modules by name"):
        prepare_and_wrap(base, lora(), Count, heads=[nn.Linear(32, 1)])  # type: ignore[arg-type]
    assert bits_of(base) == before
    base.generate = lambda *args, **options: None
    before = bits_of(base)
    for config in (lora(), lora(init_lora_weights="pissa"), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)):
        with pytest.raises(WrapError, match="generate: a call of PeftModelForCausalLM ended without it"):
            prepare_and_wrap(base, config, Count)
    assert bits_of(base) == before


def test_what_is_no_base_is_refused() -> None:
    with pytest.raises(WrapError, match="with the LlamaForCausalLM inside it"):
        prepare_and_wrap(Plain(llama()), lora(), Count)
    with pytest.raises(ArgumentError, match="has an adapter already: call wrap_transparent"):
        prepare_and_wrap(peft_llama(), lora(), Count)
    with pytest.raises(ArgumentError, match="Linear is not a PreTrainedModel"):
        prepare_and_wrap(nn.Linear(2, 2), lora(), Count)
