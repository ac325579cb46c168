"""What a script's hooks do to a layer is done to the one that a merge puts in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from wrapped_models import TOKENS, peft_llama

from safe_loading import ArgumentError, merge_lora_inplace


def after(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda _, args, output: 2 * output)


def after_with_names(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda _, args, names, output: 2 * output, with_kwargs=True)


def before(module: nn.Module) -> Any:
    return module.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))


def before_with_names(module: nn.Module) -> Any:
    return module.register_forward_pre_hook(
        lambda _, args, names: ((2 * args[0], *args[1:]), names),
        with_kwargs=True,
    )


HOOKS = [after, after_with_names, before, before_with_names]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits.clone()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("path", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_a_hook_of_a_layer_with_an_adapter_stays(hook: Callable[[nn.Module], Any], path: str) -> None:
    model = peft_llama(modules_to_save=["lm_head"])
    plain = logits(model)
    handle = hook(model.base_model.model.get_submodule(path))
    hooked = logits(model)
    assert not torch.allclose(hooked, plain, atol=1e-3)
    merged = merge_lora_inplace(model)
    assert torch.allclose(logits(merged), hooked, atol=1e-5)
    handle.remove()
    assert torch.allclose(logits(merged), plain, atol=1e-5)


def test_it_comes_after_those_of_the_layer_in_it() -> None:
    model = peft_llama()
    layer = model.base_model.model.get_submodule("model.layers.0.self_attn.q_proj")
    order: list[str] = []
    layer.base_layer.register_forward_hook(lambda *_: order.append("the base's"))
    layer.register_forward_hook(lambda *_: order.append("the adapter's"))
    merged = merge_lora_inplace(model)
    logits(merged)
    assert order == ["the base's", "the adapter's"]


def test_gradients_are_seen() -> None:
    model = peft_llama()
    seen: list[torch.Tensor] = []
    layer = model.base_model.model.get_submodule("model.layers.2.mlp.down_proj")
    layer.register_full_backward_hook(lambda _, inputs, outputs: seen.append(outputs[0]))
    merged: Any = merge_lora_inplace(model).requires_grad_(True)
    merged(TOKENS, labels=TOKENS).loss.backward()
    assert [gradient.shape[-1] for gradient in seen] == [merged.config.hidden_size]


@pytest.mark.parametrize("inner", [False, True])
def test_a_layer_that_becomes_a_plain_one_keeps_it(inner: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra").nn
    model = peft_llama(target_modules=["q_proj"])
    layer = model.base_model.model.get_submodule("model.layers.0.self_attn.q_proj")
    quantized = bnb.Linear8bitLt(32, 32, bias=False, has_fp16_weights=False)
    quantized.load_state_dict(layer.base_layer.state_dict())
    layer.base_layer = quantized.to("cpu")
    calls: list[str] = []
    (layer.base_layer if inner else layer).register_forward_hook(lambda *_: calls.append("seen"))
    merged = merge_lora_inplace(model, dequantize=True)
    assert type(merged.get_submodule("model.layers.0.self_attn.q_proj")) is nn.Linear
    logits(merged)
    assert calls == ["seen"]


def test_a_model_in_a_wrapper_of_torch_is_named() -> None:
    model = peft_llama()
    wrapped = nn.DataParallel(model)
    with pytest.raises(ArgumentError, match=r"DataParallel has no adapter.*Pass the model in it: `model.module`"):
        merge_lora_inplace(wrapped)
    assert merge_lora_inplace(wrapped.module).merge_report.weights


def test_a_model_deeper_in_a_users_module_is_named() -> None:
    """As in a LightningModule, and in a SentenceTransformer, whose modules have numbers."""
    model = peft_llama()
    outer = nn.Module()
    outer.net = nn.ModuleDict({"policy": model})
    with pytest.raises(ArgumentError, match=r"Pass the model in it: `model.net.policy`"):
        merge_lora_inplace(outer)
    listed = nn.Sequential(nn.Sequential(model))
    with pytest.raises(ArgumentError, match=r"Pass the model in it: `model.get_submodule\('0.0'\)`"):
        merge_lora_inplace(listed)
    assert merge_lora_inplace(listed.get_submodule("0.0")).merge_report.weights


@pytest.mark.parametrize("name", ["default", "second"])
def test_a_model_with_a_peft_model_in_it_is_refused_whole_and_the_inner_one_is_merged(name: str) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(peft_llama(), config, adapter_name=name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = logits(model)
    with pytest.raises(ArgumentError, match=r"Pass the model in it: `model\.base_model\.model`"):
        merge_lora_inplace(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    merged = merge_lora_inplace(model.base_model.model)
    assert not any("lora" in key for key in merged.state_dict())
    assert torch.allclose(logits(merged), expected, atol=1e-5)
