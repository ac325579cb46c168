"""The advice of messages about merging, taken: what a message names is done, and the merged model is right."""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from models import save_adapter, save_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_merge_lora_checkpoint import TOKENS, loaded
from test_merge_lora_checkpoint_expert_codes import adapter_of as experts_adapter
from test_merge_lora_checkpoint_expert_codes import qwen_moe
from test_merge_lora_inplace import dora_on_merged, peft_model, zoo
from test_merge_lora_inplace_quantized import adapted, experts
from torch import nn
from torchrun import run_ranks
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, MergeError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace
from safe_loading._merging.disk.base import MergeBase


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
    return base, adapter, logits(load_peft_on_rank(base, adapter))


def test_a_base_that_is_given_biases_by_its_config_takes_those_of_an_adapter(
    tmp_path: Path, biases: tuple[Path, Path, torch.Tensor]
) -> None:
    base, adapter, expected = biases
    text = r"no bias to add it to.*from_pretrained\(base, attention_bias=True\)\.save_pretrained\(new_base\)"
    refused(load_peft_on_rank(base, adapter), text)
    with pytest.raises(MergeError, match=text):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    new_base = tmp_path / "new_base"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoModelForCausalLM.from_pretrained(base, attention_bias=True).save_pretrained(new_base)
    merge_lora_checkpoint(new_base, adapter, tmp_path / "out")
    merge_lora_inplace(load_peft_on_rank(new_base, adapter)).save_pretrained(tmp_path / "memory")
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
    model = load_peft_on_rank(base, adapter)
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
    model = load_peft_on_rank(base, adapter)
    layer = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.shape[0], 3))
    refused(model, r"its weight is .* and its adapter's delta .*Load the adapter onto the base that it was trained on")
    model = load_peft_on_rank(base, adapter)
    expected = logits(model)
    assert torch.allclose(logits(merge_lora_inplace(model)), expected, atol=1e-5)


def test_a_base_that_cannot_be_built_on_meta_is_merged_in_memory(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("it reads its weights")

    with monkeypatch.context() as patched:
        patched.setattr(MergeBase, "on_meta", fails)
        with pytest.raises(MergeError, match=r"Load it, merge it with merge_lora_inplace and save it\."):
            merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "disk")
        merge_lora_inplace(load_peft_on_rank(tiny_llama, tiny_adapter)).save_pretrained(tmp_path / "memory")
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "disk")
    found, expected = (loaded(tmp_path / name).state_dict() for name in ("memory", "disk"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Coded(torch.Tensor):
    """A tensor whose values stand for others, as torchao's do: those times 2."""


@needs("transformers", "5.10")
def test_what_is_dequantized_first_is_merged(tmp_path: Path) -> None:
    advice = "Dequantize the model first"
    coded = nn.Linear(32, 32)
    coded.weight = nn.Parameter(coded.weight.detach().as_subclass(Coded), requires_grad=False)
    with pytest.raises(MergeError, match=f"a Coded, not a plain tensor. {advice}"):
        merge_lora_inplace(adapted(nn.Sequential(coded), target_modules=["0"]))
    coded.weight = nn.Parameter(2 * coded.weight.detach().as_subclass(torch.Tensor))
    inputs = torch.randn(3, 32)
    model = adapted(nn.Sequential(coded), target_modules=["0"])
    expected = model(inputs)
    torch.testing.assert_close(merge_lora_inplace(model)(inputs), expected)

    model = adapted(nn.ModuleDict({"0": experts()}), target_modules=[], target_parameters=["0.gate_up_proj"])
    text = rf"float8_e4m3fn. {advice}: from_pretrained\(..., quantization_config=FineGrainedFP8Config\(dequantize=True"
    with pytest.raises(MergeError, match=text):
        merge_lora_inplace(model)
    folder, plain = qwen_moe(tmp_path)
    adapter = experts_adapter(tmp_path / "adapter", plain)
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    assert {parameter.dtype for parameter in base.parameters()} <= {torch.float32, torch.bfloat16}
    model = load_peft_on_rank(base.float(), adapter)
    tokens = torch.arange(1, 13).reshape(1, 12)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        torch.testing.assert_close(merge_lora_inplace(model)(input_ids=tokens).logits, expected)


ZERO_3 = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from safe_loading import MergeError, merge_lora_inplace

def make():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    options = dict(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(**options))

deepspeed.init_distributed("gloo")
expected, model = merge_lora_inplace(make()).state_dict(), make()
config = {
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "zero_force_ds_cpu_optimizer": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
deepspeed.initialize(model=model, model_parameters=trained, config=config)
try:
    merge_lora_inplace(model)
except MergeError as error:
    report(error=str(error))
with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
    merged = merge_lora_inplace(model)
report(spread=all(parameter.numel() == 0 for parameter in merged.parameters()))
with deepspeed.zero.GatheredParameters(list(merged.parameters())):
    report(equal=all(torch.equal(value, expected[name]) for name, value in merged.state_dict().items()))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_what_zero_3_has_spread_is_merged_once_it_is_gathered() -> None:
    advice = "GatheredParameters(list(model.parameters()), modifier_rank=0)"
    for facts in run_ranks(ZERO_3, 2, timeout=300).found:
        assert advice in facts.pop("error")
        assert facts == {"spread": True, "equal": True}


def test_a_base_of_other_names_is_saved_under_those_of_its_class(
    tiny_llama: Path, tiny_adapter: Path, tmp_path: Path
) -> None:
    """transformers#46766: a save after a load with key_mapping= gives the tensors their old names back."""
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    model.save_pretrained(tmp_path / "renamed")
    tensors = load_file(tmp_path / "renamed" / "model.safetensors")
    renamed = {name.replace("model.", "backbone."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "renamed" / "model.safetensors", metadata={"format": "pt"})
    mapping: dict[str, Any] = {"key_mapping": {"^backbone": "model"}}
    with pytest.raises(ArgumentError, match="load it so, and save it with save_original_format=False"):
        merge_lora_checkpoint(tmp_path / "renamed", tiny_adapter, tmp_path / "out", base_kwargs=mapping)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "renamed", **mapping)
    loaded.save_pretrained(tmp_path / "base", save_original_format=False)
    merge_lora_checkpoint(tmp_path / "base", tiny_adapter, tmp_path / "out")
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "expected")
    found, expected = (LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "expected"))
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name
