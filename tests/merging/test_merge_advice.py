"""The advice of messages about merging, taken: what a message names is done, and the merged model is right."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from peft import LoraConfig, get_peft_model
from test_merge_lora_checkpoint import TOKENS, loaded
from test_merge_lora_inplace import dora_on_merged, peft_model, zoo
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from safe_loading import MergeError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def refused(model: Any, text: str, **options: Any) -> None:
    with pytest.raises(MergeError, match=text):
        merge_lora_inplace(model, **options)


@pytest.fixture
def biases(tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
    """A base without biases, an adapter with lora_bias=True, and the logits of both."""
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, lora_bias=True, target_modules=["q_proj", "o_proj"])
    return base, adapter, logits(load_peft_on_rank(adapter, base))


def test_a_base_that_is_given_biases_by_its_config_takes_those_of_an_adapter(
    tmp_path: Path, biases: tuple[Path, Path, torch.Tensor]
) -> None:
    base, adapter, expected = biases
    text = r"no bias to add it to.*from_pretrained\(base, attention_bias=True\)\.save_pretrained\(new_base\)"
    refused(load_peft_on_rank(adapter, base), text)
    with pytest.raises(MergeError, match=text):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    new_base = tmp_path / "new_base"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoModelForCausalLM.from_pretrained(base, attention_bias=True).save_pretrained(new_base)
    merge_lora_checkpoint(new_base, adapter, tmp_path / "out")
    merge_lora_inplace(load_peft_on_rank(adapter, new_base)).save_pretrained(tmp_path / "memory")
    for folder in (tmp_path / "out", tmp_path / "memory"):
        assert torch.allclose(logits(loaded(folder)), expected, atol=1e-5)


def test_an_adapter_of_a_random_start_is_merged_once_it_is_converted(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    targets: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "r": 4, "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(**targets, init_lora_weights="pissa_niter_4")
        trained = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        trained.peft_config["default"].init_lora_weights = True
        trained.save_pretrained(tmp_path / "start")
        trained.peft_config["default"].init_lora_weights = "pissa_niter_4"
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
    trained.save_pretrained(tmp_path / "random")
    with pytest.raises(
        MergeError, match=r"cannot be made again\. Convert it .*path_initial_model_for_weight_conversion"
    ):
        merge_lora_checkpoint(base, tmp_path / "random", tmp_path / "out")
    trained.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    merge_lora_checkpoint(base, tmp_path / "plain", tmp_path / "out")
    assert torch.allclose(logits(loaded(tmp_path / "out")), logits(trained), atol=1e-5)


def test_a_layer_that_is_given_a_bias_takes_that_of_an_adapter() -> None:
    model = zoo({"lora_bias": True, "target_modules": ["linear", "head"]})
    expected = output(model)
    refused(model, r"head: .*layer\.bias = torch\.nn\.Parameter\(torch\.zeros\(layer\.weight\.shape\[0\]\)\)")
    layer = model.base_model.model.head.base_layer
    layer.bias = torch.nn.Parameter(torch.zeros(layer.weight.shape[0]))
    assert torch.allclose(output(merge_lora_inplace(model)), expected, atol=1e-5)


def test_a_dora_is_merged_once_the_others_are_unmerged() -> None:
    model = dora_on_merged()
    refused(model, r"Call model\.unmerge_adapter\(\) first")
    model.unmerge_adapter()
    expected = output(model)
    assert torch.allclose(output(merge_lora_inplace(model)), expected, atol=1e-5)


def test_what_has_a_bias_is_merged_after_a_dora() -> None:
    first = {"lora_bias": True, "target_modules": ["linear"]}
    model = zoo(first, {"use_dora": True, "target_modules": ["linear"]})
    refused(model, r"a DoRA adapter follows 'default', .*Merge that one last")
    model.base_model.set_adapter(["a1", "default"])
    expected = output(model)
    assert torch.allclose(output(merge_lora_inplace(model, adapter_names=["a1", "default"])), expected, atol=1e-5)


def test_of_two_adapters_that_train_one_token_one_is_merged() -> None:
    config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5], task_type="CAUSAL_LM")
    other = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 7], task_type="CAUSAL_LM")
    model = peft_model(_tiny(tie_word_embeddings=False), config)
    model.add_adapter("a1", other)
    refused(model, r"two of its adapters train the same token.*Merge one of them", adapter_names=["default", "a1"])
    model.set_adapter("default")
    expected = logits(model)
    merged = merge_lora_inplace(model, adapter_names=["default"])
    assert torch.allclose(logits(merged), expected, atol=1e-5)


def test_a_convolution_of_other_strides_is_merged_once_it_is_contiguous() -> None:
    base = nn.Sequential(nn.Conv2d(4, 6, 3))
    model = peft_model(base, LoraConfig(target_modules=["0"], r=2))
    weight = model.base_model.model[0].base_layer.weight
    weight.data = weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    image = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        expected = model(image)
    refused(model, r"its weight has strides .*Call \.contiguous\(\) on it first")
    weight.data = weight.data.contiguous()
    with torch.no_grad():
        assert torch.allclose(merge_lora_inplace(model)(image), expected, atol=1e-5)


def test_a_model_of_inference_mode_is_merged_in_it() -> None:
    with torch.inference_mode():
        model = zoo({"target_modules": ["linear", "head"]})
        expected = output(model)
    refused(model, r"made in torch\.inference_mode\(\)\. Call this in torch\.inference_mode\(\) too")
    with torch.inference_mode():
        assert torch.allclose(output(merge_lora_inplace(model)), expected, atol=1e-5)


def _tiny(**config: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, **config))


def test_of_two_copies_of_a_module_one_is_named() -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = peft_model(_tiny(), config)
    model.add_adapter("a1", config)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["a1"].weight.add_(1)
    refused(model, r"and the copies differ\. Name one of them in adapter_names", adapter_names=["default", "a1"])
    for name in ("a1", "default"):
        chosen = copy.deepcopy(model)
        chosen.set_adapter(name)
        expected = logits(chosen)
        assert torch.allclose(logits(merge_lora_inplace(chosen, adapter_names=[name])), expected, atol=1e-5)


def test_attention_whose_parts_have_other_adapters_is_merged_once_they_are_set_again() -> None:
    model = zoo({"target_modules": ["attention"]}, {"target_modules": ["attention"]})
    attention = model.base_model.model.attention
    attention.base_layer.out_proj.set_adapter("a1")
    refused(model, r"its out_proj has other active adapters than itself\. Call model\.set_adapter\(\.\.\.\) again")
    model.set_adapter("default")
    expected = output(model)
    assert torch.allclose(output(merge_lora_inplace(model)), expected, atol=1e-5)


def test_weights_on_meta_are_merged_once_they_are_loaded(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    model = load_peft_on_rank(adapter, base)
    expected = logits(model)
    layer = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    weight = layer.weight.data
    layer.to("meta")
    refused(model, r"its weight is on meta, so it holds no values\. Load the weights first")
    layer.to_empty(device="cpu")
    layer.load_state_dict({"weight": weight})
    assert torch.allclose(logits(merge_lora_inplace(model)), expected, atol=1e-5)


def test_a_base_of_another_shape_is_refused_and_its_own_is_merged(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    model = load_peft_on_rank(adapter, base)
    layer = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.shape[0], 3))
    refused(model, r"its weight is .* and its adapter's delta .*Load the adapter onto the base that it was trained on")
    model = load_peft_on_rank(adapter, base)
    expected = logits(model)
    assert torch.allclose(logits(merge_lora_inplace(model)), expected, atol=1e-5)
