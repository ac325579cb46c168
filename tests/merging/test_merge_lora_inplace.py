"""merge_lora_inplace: right to the last bit, in place, all or nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from models import KINDS, save_adapter, save_llama
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.lora import variants
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from test_lora_update import nearest
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    ArgumentError,
    MergeError,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)
from safe_loading._merging.weights import apply
from safe_loading._merging.weights.update import RowMerger

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = torch.arange(1, 25).reshape(2, 12)


def randomized(model: nn.Module, seed: int = 0, size: float = 0.1) -> nn.Module:
    """The model with random numbers in every parameter of its adapters (lora_B starts at zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if any(word in name for word in ("lora_A", "lora_B", "lora_embedding", "trainable_tokens_delta")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return model.eval()


def peft_model(base: nn.Module, *configs: Any, seed: int = 0) -> Any:
    """A PeftModel with an adapter for each config, all of them active; the first is "default", then "a1", "a2", ..."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, configs[0])
        names = ["default"]
        for number, config in enumerate(configs[1:], 1):
            names.append(f"a{number}")
            model.add_adapter(names[-1], config)
        model.base_model.set_adapter(names)
    return randomized(model, seed)


class Zoo(nn.Module):
    """One layer of each kind that LoRA knows."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 24)
        self.linear = nn.Linear(24, 32)
        self.conv1d = Conv1D(24, 32)
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.one = nn.Conv1d(24, 20, 3, padding=1)
        self.two = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.small = nn.Conv2d(6, 5, 1)
        self.three = nn.Conv3d(1, 4, (1, 3, 3), padding=(0, 1, 1))
        self.head = nn.Linear(10, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.conv1d(torch.tanh(self.linear(self.embedding(tokens))))
        x, _ = self.attention(x, x, x, need_weights=False)
        y = self.one(x.transpose(1, 2))
        z = self.small(self.two(y.unsqueeze(1)))
        z = self.three(z.unsqueeze(1)).flatten(1)
        return self.head(z[:, : z.shape[1] // 10 * 10].unflatten(1, (-1, 10)))


EVERYTHING = ["embedding", "linear", "conv1d", "attention", "one", "two", "small", "three", "head"]
NO_DORA = ["attention"]


def zoo(*configs: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    whole = [LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": EVERYTHING, **config}) for config in configs]
    return peft_model(Zoo().to(dtype), *whole)


def deltas(layer: Any, names: list[str]) -> list[torch.Tensor]:
    """peft's own deltas, in float64."""
    wide = copy.deepcopy(layer).double()
    return [wide.get_delta_weight(name) for name in names]


def expected(model: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """{data_ptr: the merged weight} of every plain LoRA layer: peft's deltas in float64, summed and rounded once."""
    found = {}
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        there = [n for n in names if n in layer.lora_A or n in layer.lora_embedding_A]
        base = layer.get_base_layer()
        if isinstance(layer, MultiheadAttention):
            weight, factor = base.in_proj_weight.data, 1
        elif isinstance(layer, ParamWrapper):
            weight, factor = layer.get_param().data, 1
        else:
            # peft applies out_proj of MultiheadAttention twice (huggingface/peft#3774)
            weight, factor = base.weight.data, 2 if isinstance(base, type(nn.MultiheadAttention(2, 1).out_proj)) else 1
        exact = found.get(weight.data_ptr(), weight.double())
        for name, delta in zip(there, deltas(layer, there), strict=True):
            if layer.use_dora.get(name):
                dims = {"Embedding": (0,)}.get(type(layer).__name__, tuple(range(1, weight.dim())))
                dims = (0,) if getattr(layer, "fan_in_fan_out", False) else dims
                norm = (weight.double() + delta).square().sum(dims, keepdim=True).sqrt()
                magnitude = layer.lora_magnitude_vector[name].weight.double().reshape(norm.shape)
                exact = magnitude / norm * (exact + delta)
            else:
                exact = exact + factor * delta
        found[weight.data_ptr()] = exact
    return found


def check_merged(model: Any, names: list[str], **options: Any) -> Any:
    """Merge, and compare every weight with its float64 reference and every address with what it was."""
    reference = expected(model, names)
    before = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    merged = merge_lora_inplace(model, adapter_names=names, **options)
    seen = set()
    for path, parameter in merged.named_parameters():
        assert parameter.data_ptr() in before, path
        if parameter.data_ptr() in reference:
            seen.add(parameter.data_ptr())
            assert torch.equal(parameter.data, nearest(reference[parameter.data_ptr()], parameter.dtype)), path
    assert seen == set(reference)
    assert not [m for m in merged.modules() if isinstance(m, BaseTunerLayer)]
    assert not hasattr(merged, "peft_config")
    return merged


def bits(model: nn.Module) -> dict[str, Any]:
    """Everything that a refused merge must leave: modules, merge state, addresses and bits."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        state[path] = (id(module), type(module), list(getattr(module, "merged_adapters", ())) if path else ())
    for path, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        state[f"tensor {path}"] = (tensor.data_ptr(), tensor.dtype, hashlib.sha256(raw).hexdigest())
    return state


# ------------------------------------------------------------------------------------------------------- every kind


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [  # each kind in one dtype, each dtype with a third of the kinds; the rest is slow
        pytest.param(kind, dtype, marks=[] if number % len(DTYPES) == place else [pytest.mark.slow])
        for number, kind in enumerate(KINDS)
        for place, dtype in enumerate(DTYPES)
    ],
)
def test_every_kind_on_a_llama(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    base = save_llama(tmp_path / "base", dtype, attention_bias=kind == "trained bias")
    adapter = save_adapter(tmp_path / "adapter", base, dtype=dtype, **KINDS[kind])
    model = load_peft_on_rank(base, adapter)
    plain = load_peft_on_rank(base, adapter)
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
    merged = check_merged(model, ["default"])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = plain.merge_and_unload()
        after = merged(input_ids=TOKENS).logits
    assert torch.allclose(before, after, atol={torch.float32: 1e-5}.get(dtype, 3e-2), rtol=2e-2)
    assert merged.state_dict().keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        assert torch.allclose(merged.state_dict()[key].float(), tensor.float(), rtol=2e-2, atol=1e-3), key
    assert merged.merge_report.ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_layer(dtype: torch.dtype) -> None:
    model = zoo({}, dtype=dtype)
    if dtype == torch.float32:
        before = model(TOKENS)
    merged = check_merged(model, ["default"])
    if dtype == torch.float32:
        assert torch.allclose(merged(TOKENS), before, atol=1e-4, rtol=1e-4)
    assert len(merged.merge_report.weights) == len(EVERYTHING) + 1  # in_proj and out_proj


def test_several_adapters_are_rounded_once() -> None:
    model = zoo({}, {"r": 2, "use_rslora": True}, {"r": 8, "target_modules": ["linear", "two", "attention"]})
    before = model(TOKENS)
    merged = check_merged(model, ["default", "a1", "a2"])
    assert torch.allclose(merged(TOKENS), before, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("configs", [[{"use_dora": True}], [{}, {"use_dora": True}, {"use_dora": True}, {"r": 2}]])
def test_dora_of_every_kind_and_in_any_company(configs: list[dict[str, Any]], dtype: torch.dtype) -> None:
    targets = [name for name in EVERYTHING if name not in NO_DORA]
    model = zoo(*[{"target_modules": targets, **config} for config in configs], dtype=dtype)
    if dtype == torch.float32:
        before = model(TOKENS)
    merged = check_merged(model, ["default", "a1", "a2", "a3"][: len(configs)])
    if dtype == torch.float32:
        assert torch.allclose(merged(TOKENS), before, atol=1e-3, rtol=1e-3)


def test_lora_bias_is_added_to_the_bias_with_its_scaling() -> None:
    model = zoo({"lora_bias": True, "target_modules": ["linear", "two", "one"]})
    layer = model.base_model.model.linear
    with torch.no_grad():
        for name in ("linear", "two", "one"):
            getattr(model.base_model.model, name).lora_B["default"].bias.normal_()
    exact = layer.base_layer.bias.double() + 1.5 * layer.lora_B["default"].bias.double()
    before, address = model(TOKENS), layer.base_layer.bias.data_ptr()
    merged = merge_lora_inplace(model)
    assert torch.equal(merged.linear.bias.data, nearest(exact.detach(), torch.float32))
    assert merged.linear.bias.data_ptr() == address
    assert torch.allclose(merged(TOKENS), before, atol=1e-4, rtol=1e-4)


@needs("peft", "0.20")
@pytest.mark.parametrize("variant", ["mica", "velora"])
def test_variants_that_add_what_a_plain_lora_adds(variant: str) -> None:
    if variant == "mica":
        config: dict[str, Any] = {"init_lora_weights": "mica"}
    else:
        from peft.tuners.lora import VeloraConfig

        config = {"velora_config": VeloraConfig(num_groups=4)}
    model = zoo({"target_modules": ["linear", "head"], "r": 2, **config})
    assert model.base_model.model.linear.lora_variant
    before = model(TOKENS)
    assert torch.allclose(check_merged(model, ["default"])(TOKENS), before, atol=1e-4, rtol=1e-4)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, vocab_size=50)
    )


@needs("peft", "0.20")
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_experts_two_parameters_of_one_module(dtype: torch.dtype) -> None:
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = {"target_modules": ["q_proj"], "target_parameters": parameters, "r": 2, "lora_alpha": 3}
    model = peft_model(mixtral().to(dtype), LoraConfig(**config), LoraConfig(**{**config, "lora_alpha": 5}))
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
        merged = check_merged(model, ["default", "a1"])
        after = merged(input_ids=TOKENS).logits
    assert torch.allclose(after.float(), before.float(), atol=1e-5 if dtype == torch.float32 else 5e-2)
    assert sum("experts" in weight.name for weight in merged.merge_report.weights) == 4
    assert {weight.name for weight in merged.merge_report.weights} <= dict(merged.named_parameters()).keys()


def test_gpt2_whose_weights_are_transposed() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=60, n_positions=32))
    config = LoraConfig(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    model = peft_model(base, config, LoraConfig(target_modules=["c_fc"], use_dora=True, fan_in_fan_out=True))
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
        merged = check_merged(model, ["default", "a1"])
        assert torch.allclose(merged(input_ids=TOKENS).logits, before, atol=1e-5)


def test_a_convolution_in_channels_last_keeps_its_strides() -> None:
    model = zoo({"target_modules": ["two"]})
    layer = model.base_model.model.two
    layer.base_layer.weight.data = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    layer.lora_A["default"].weight.data = torch.randn(4, 4, 3, 3)
    strides = layer.base_layer.weight.stride()
    merged = check_merged(model, ["default"])
    assert merged.two.weight.stride() == strides


def test_a_weight_that_is_a_view_changes_nothing_beside_it() -> None:
    model = zoo({"target_modules": ["linear"]})
    layer, wide = model.base_model.model.linear, torch.full((40, 70), 7.0)
    wide[2:34, 3:51:2] = layer.base_layer.weight.data
    layer.base_layer.weight.data = wide[2:34, 3:51:2]
    merged = check_merged(model, ["default"])
    assert merged.linear.weight.data_ptr() == wide[2:, 3:].data_ptr()
    beside = torch.ones(40, 70, dtype=torch.bool)
    beside[2:34, 3:51:2] = False
    assert bool((wide[beside] == 7).all())


def test_the_same_layer_in_two_places_is_merged_once_and_replaced_in_both() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    base = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.ReLU(), shared)})
    model = peft_model(base, LoraConfig(target_modules=["a"]))
    layer = model.base_model.model["a"]
    model.base_model.model["b"][1] = layer
    merged = check_merged(model, ["default"])
    assert merged["a"] is merged["b"][1] is shared


# --------------------------------------------------------------------------------------------------------- in place


def test_the_file_that_the_weights_are_mapped_from_is_not_written(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules="all-linear")
    files = sorted([*base.rglob("*.safetensors"), *adapter.rglob("*.safetensors")])
    before = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    merged = merge_lora_inplace(load_peft_on_rank(base, adapter))
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == before
    fresh = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, fresh.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("config", [{}, {"use_dora": True, "target_modules": ["linear", "embedding", "one", "conv1d"]}])
def test_the_bytes_do_not_depend_on_scratch_and_threads(config: dict[str, Any]) -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            for scratch in (1 << 10, 1 << 14, 1 << 20, 1 << 24):
                torch.set_num_threads(threads)
                model = zoo(config, {"r": 3, "target_modules": ["linear"]})
                torch.set_num_threads(count)
                results.append(merge_lora_inplace(model, scratch_bytes=scratch).state_dict())
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(result[key], tensor) for key, tensor in results[0].items())


# ---------------------------------------------------------------------------------------------------- all or nothing


def lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


COUNT = len(EVERYTHING) + 1


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.parametrize("part", ["A", "B", "base"])
def test_a_nan_in_any_layer_leaves_everything(number: int, part: str) -> None:
    model = zoo({})
    layer = lora_layers(model)[number]
    with torch.no_grad():
        if part == "base":
            base = layer.get_base_layer()
            (base.in_proj_weight if isinstance(layer, MultiheadAttention) else base.weight).view(-1)[-1] = torch.nan
        elif "default" in layer.lora_embedding_A:
            getattr(layer, f"lora_embedding_{part}")["default"][-1, -1] = torch.nan
        else:
            getattr(layer, f"lora_{part}")["default"].weight.view(-1)[-1] = torch.inf
    before = bits(model)
    with pytest.raises(MergeError, match="NaN or infinity") as refused:
        merge_lora_inplace(model)
    assert bits(model) == before
    assert len(refused.value.problems) == 1
    merge_lora_inplace(model, check_finite=False)


def test_overflow_is_refused_before_anything_is_written() -> None:
    model = zoo({"target_modules": ["linear", "head"]}, dtype=torch.float16)
    with torch.no_grad():
        model.base_model.model.head.lora_B["default"].weight.fill_(6e4)
        model.base_model.model.head.lora_A["default"].weight.fill_(3)
    before = bits(model)
    with pytest.raises(MergeError, match=r"head.weight: .*beyond the largest number of torch.float16, 65504"):
        merge_lora_inplace(model)
    assert bits(model) == before


def test_all_problems_are_listed_at_once() -> None:
    model = zoo({})
    with torch.no_grad():
        for layer in lora_layers(model)[3:6]:
            for factor in layer.lora_A.values():
                factor.weight.fill_(torch.nan)
    with pytest.raises(MergeError) as refused:
        merge_lora_inplace(model)
    assert len(refused.value.problems) == 3


def test_a_problem_of_every_layer_is_told_once(tiny_llama: Path, tiny_adapter: Path) -> None:
    model = load_peft_on_rank(tiny_adapter, tiny_llama, device="cpu")
    with torch.no_grad():
        for layer in lora_layers(model):
            layer.lora_B["default"].weight.fill_(torch.nan)
    with pytest.raises(MergeError) as refused:
        merge_lora_inplace(model)
    assert len(refused.value.problems) == 3  # of q_proj, v_proj and down_proj
    assert all("The same in 2 more, of layers [0, 1, 2]." in problem for problem in refused.value.problems)


def test_a_problem_of_every_layer_is_told_once_on_disk_too(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, alora_invocation_tokens=[1, 2])
    with pytest.raises(MergeError, match=r"Keep adapter 'default' as an adapter\. The same in 2 more") as refused:
        merge_lora_checkpoint(tiny_llama, adapter, tmp_path / "out")
    assert len(refused.value.problems) == 3


def lora_bias_without_a_bias() -> Any:
    return zoo({"lora_bias": True, "target_modules": ["linear", "head"]})


def grouped() -> Any:
    return peft_model(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), LoraConfig(target_modules=["0"], r=4))


def dilated() -> Any:
    return peft_model(nn.Sequential(nn.Conv2d(4, 4, 3, dilation=2)), LoraConfig(target_modules=["0"], r=4))


def circular(padding: int | str) -> Any:
    convolution = nn.Conv2d(4, 4, 3, padding=padding, padding_mode="circular")
    return peft_model(nn.Sequential(convolution), LoraConfig(target_modules=["0"], r=4))


def computed(compute: Callable[[nn.Module], nn.Module], config: Any = None) -> Any:
    base = nn.ModuleDict({"linear": compute(nn.Linear(8, 8))})
    return peft_model(base, config or LoraConfig(target_modules=["linear"], r=4))


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)


def varied(variant: Any) -> Any:
    """Made by hand: Arrow wants adapters on disk, QALoRA the layers of GPTQ, whose merge peft refuses before."""
    model = zoo({"target_modules": ["linear"]})
    model.base_model.model.linear.lora_variant["default"] = variant
    return model


def tied_llama(**config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, tie_word_embeddings=True))
    return peft_model(base, LoraConfig(**config))


def on_meta() -> Any:
    model = zoo({"target_modules": ["linear", "head"]})
    model.base_model.model.head.base_layer.to("meta")
    return model


def alora() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40))
    config = {"alora_invocation_tokens": [1, 2], "task_type": "CAUSAL_LM"}
    return peft_model(base, LoraConfig(target_modules=["q_proj"], **config))


def dora_on_merged() -> Any:
    model = zoo({"target_modules": ["linear"]}, {"target_modules": ["linear"], "use_dora": True})
    model.merge_adapter(["default"])
    return model


def normed_embedding(**config: Any) -> Any:
    module = "transformers.models.inkling2.modeling_inkling2"
    Inkling2NormedEmbedding = pytest.importorskip(module).Inkling2NormedEmbedding

    base = nn.ModuleDict({"embed": Inkling2NormedEmbedding(20, 8, 0, 1e-6), "linear": nn.Linear(8, 8)})
    return peft_model(base, LoraConfig(**config))


def tokens_of_a_head_with_a_bias() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    base = BertForMaskedLM(BertConfig(vocab_size=40, **sizes))
    return peft_model(base, LoraConfig(target_modules=["query"], trainable_token_indices={"word_embeddings": [1]}))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lora_bias without a bias": (
        lora_bias_without_a_bias,
        r"head: adapter 'default' has lora_bias=True.*layer\.bias =",
    ),
    "groups": (grouped, "groups=2"),
    "dilation": (dilated, r"its convolution has dilation=\(2, 2\), which peft's lora_A has not"),
    "padding of its own": (lambda: circular(1), "its convolution has padding_mode='circular', which peft's lora_A has"),
    "the same size": (lambda: circular("same"), "its convolution has padding_mode='circular', which peft's lora_A has"),
    "weight norm": (
        lambda: computed(parametrizations.weight_norm),
        "linear: its weight is computed from other tensors",
    ),
    "spectral norm": (lambda: computed(parametrizations.spectral_norm), "linear: its weight is computed from other"),
    "weight norm by a hook": (
        lambda: computed(nn.utils.weight_norm),
        "linear: its weight is computed from other tensors",
    ),
    "pruned": (lambda: computed(pruned), "linear: its weight is computed from other tensors"),
    "weight norm, LoKr": (
        lambda: computed(parametrizations.weight_norm, LoKrConfig(target_modules=["linear"], r=4)),
        "linear: its weight is computed from other tensors",
    ),
    "weight norm, fused": (
        lambda: computed(
            parametrizations.orthogonal, LoraConfig(target_modules=[], target_parameters=["linear.weight"], r=4)
        ),
        "linear: its weight is computed from other tensors",
    ),
    "OFT of a kernel": (
        lambda: peft_model(nn.Sequential(nn.Conv2d(4, 4, 3)), OFTConfig(target_modules=["0"], oft_block_size=4)),
        r"0: peft's OFT of a convolution with kernel_size=\(3, 3\)",
    ),
    "Arrow": (lambda: varied(variants.ArrowLinearVariant()), "linear: Arrow chooses among its adapters by the input"),
    "QALoRA": (lambda: varied(variants.QALoraLinearVariant()), "linear: QALoRA changes the zero points"),
    "meta": (on_meta, "head: its weight is on meta"),
    "aLoRA": (alora, "aLoRA applies its delta only after"),
    "an embedding with a norm": (
        lambda: normed_embedding(target_modules=["embed"]),
        r"embed: its Inkling2NormedEmbedding does more than look up rows of its weight \(embed_norm\)",
    ),
    "tokens of a head with a bias": (tokens_of_a_head_with_a_bias, "tokens are trained without its bias"),
    "DoRA onto a merged adapter": (dora_on_merged, "unmerge_adapter"),
}


@pytest.mark.parametrize("padding", [0, "valid"])
def test_how_a_convolution_would_pad_is_no_matter_where_it_pads_nothing(padding: int | str) -> None:
    model = circular(padding)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(x)
        merged = merge_lora_inplace(model)
        assert torch.allclose(merged(x), expected, atol=1e-5)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_with_the_fix(case: str) -> None:
    make, text = REFUSED[case]
    model = make()
    if case == "meta":
        with pytest.raises(MergeError, match=text):
            merge_lora_inplace(model)
        return
    before = bits(model)
    with pytest.raises(MergeError, match=text):
        merge_lora_inplace(model)
    assert bits(model) == before


def test_layers_that_are_repeated_are_merged_once_each_has_its_own_weights(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, layer_replication=[[0, 2], [1, 3]])
    model: Any = load_peft_on_rank(tiny_llama, adapter)
    tokens = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    with pytest.raises(MergeError, match=r"layer_replication made layers that share.*copy\.deepcopy\(layer\)"):
        merge_lora_inplace(model)
    layers = model.get_base_model().model.layers
    for i, layer in enumerate(layers):
        layers[i] = copy.deepcopy(layer)
    merge_lora_inplace(model).save_pretrained(tmp_path / "out")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.config.num_hidden_layers == 4
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=tokens).logits, expected, atol=1e-4)


@needs("peft", "0.20")
def test_tied_weights_with_the_same_adapter_change_once() -> None:
    model = tied_llama(target_modules=["embed_tokens"], ensure_weight_tying=True)
    inner = model.base_model.model
    # peft ties lora_A of the head to lora_embedding_B of the embedding; randomized() wrote both through one of them
    exact = expected_once(inner.model.embed_tokens)
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
        merged = merge_lora_inplace(model)
        assert torch.equal(merged.lm_head.weight.data, nearest(exact, torch.float32))
        assert torch.allclose(merged(input_ids=TOKENS).logits, before, atol=1e-5)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    (entry,) = merged.merge_report.weights
    assert entry.also == ("lm_head",)


def expected_once(layer: Any) -> torch.Tensor:
    return layer.base_layer.weight.data.double() + deltas(layer, ["default"])[0].detach()


def test_tied_tokens_change_both_by_design() -> None:
    model = tied_llama(target_modules=["q_proj"], trainable_token_indices=[1, 5, 7])
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
        merged = merge_lora_inplace(model)
        assert torch.allclose(merged(input_ids=TOKENS).logits, before, atol=1e-5)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


def test_a_saved_head_is_no_longer_tied_and_the_report_says_so(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, **KINDS["modules to save"])
    merged = merge_lora_inplace(load_peft_on_rank(base, adapter))
    assert [finding.code for finding in merged.merge_report.findings] == ["no-longer-tied"]
    assert merged.config.tie_word_embeddings is False


@pytest.mark.parametrize("names", [None, ["default"]])
def test_a_saved_module_under_trained_tokens_of_another_adapter_is_the_module_itself(
    tmp_path: Path, names: list[str] | None
) -> None:
    """peft wraps the wrapper of the saved module, and unloads the outer one alone."""
    base = save_llama(tmp_path / "base")
    saved = save_adapter(tmp_path / "saved", base, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    tokens = save_adapter(tmp_path / "tokens", base, target_modules=["q_proj"], trainable_token_indices=[1, 5], seed=1)
    model = load_peft_on_rank(base, saved)
    with pytest.raises(AdapterError, match=r"peft's forward fails at both\. Load it with a base of its own"):
        load_adapter_on_rank(model, tokens, "tokens")
    model.load_adapter(str(tokens), "tokens")
    wanted = load_file(saved / "adapter_model.safetensors")["base_model.model.model.embed_tokens.weight"]
    merged: Any = merge_lora_inplace(model, adapter_names=names)
    assert type(merged.get_input_embeddings()) is nn.Embedding
    assert torch.equal(merged.get_input_embeddings().weight, wanted)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in merged.state_dict().items())


@pytest.mark.parametrize("kind", ["bart", "bert"])
def test_what_is_tied_beside_an_own_head_is_saved_under_each_name(tmp_path: Path, kind: str) -> None:
    from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    if kind == "bart":  # encoder, decoder and head have one embedding
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        config = BartConfig(vocab_size=60, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, **sizes)
        base, saved = BartForConditionalGeneration(config), "lm_head"
    else:  # a bias has two names
        config = BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
        )
        base, saved = BertForMaskedLM(config), "predictions"
    targets = ["q_proj", "query"]
    model = randomized(get_peft_model(base, LoraConfig(target_modules=targets, modules_to_save=[saved]))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
        before = model(input_ids=TOKENS).logits
        merged = merge_lora_inplace(model)
        merged.save_pretrained(tmp_path)
        again, info = type(merged).from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert torch.allclose(again(input_ids=TOKENS).logits, before, atol=1e-5)
    assert "copy of its own" in str(merged.merge_report)


# ---------------------------------------------------------------------------------------------- interrupted, resumed


@pytest.mark.parametrize("number", range(0, COUNT, 2))
def test_ctrl_c_finishes_the_layer_and_a_second_call_the_rest(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    model, whole = zoo({}), merge_lora_inplace(zoo({}))
    merge, calls = apply.merge_matrix, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number + 1:
            signal.raise_signal(signal.SIGINT)
        return merge(*args, **options)

    monkeypatch.setattr(apply, "merge_matrix", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        merge_lora_inplace(model)
    assert signal.getsignal(signal.SIGINT) is before
    merged = merge_lora_inplace(model)
    assert all(torch.equal(merged.state_dict()[key], tensor) for key, tensor in whole.state_dict().items())
    assert not lora_layers(merged)


def test_what_another_thread_raises_within_a_layer_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, calls = apply.merge_matrix, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return merge(*args, **options)

    monkeypatch.setattr(apply, "merge_matrix", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"\d+ of \d+ layers are merged, and .* may be in part: load the base"):
        merge_lora_inplace(zoo({}))


@pytest.mark.parametrize("config", [{}, {"use_dora": True, "target_modules": ["linear", "embedding", "head"]}])
@pytest.mark.parametrize("times", [1, 99])
def test_when_the_memory_runs_out_within_a_weight_it_is_finished_or_named(
    monkeypatch: pytest.MonkeyPatch, times: int, config: dict[str, Any]
) -> None:
    whole = merge_lora_inplace(zoo(config)).state_dict()
    merged, calls = RowMerger._merged, []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(self)
        if number <= len(calls) < number + times:
            merged(self, *args)  # the scratch is used, and nothing was written
            raise MemoryError("no more memory")
        return merged(self, *args)

    monkeypatch.setattr(RowMerger, "_merged", failing)
    for number in (1, 2, 5, 9):
        calls.clear()
        model = zoo(config)
        if times == 1:
            found = merge_lora_inplace(model, scratch_bytes=1, check_finite=False).state_dict()
            assert calls[number - 1] is calls[number]  # once more
            assert calls[number]._spare is None
            assert all(torch.equal(found[key], tensor) for key, tensor in whole.items())
        else:
            with pytest.raises(MergeError, match=r"could not be finished; \d+ of \d+ layers are merged") as error:
                merge_lora_inplace(model, scratch_bytes=1, check_finite=False)
            assert "rows are merged, the rest is not (no more memory)" in str(error.value)


def test_when_the_memory_runs_out_between_weights_the_rest_can_be_merged_later(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, make = merge_lora_inplace(zoo({})).state_dict(), RowMerger.__init__
    for number in range(COUNT):
        made: list[int] = []

        def failing(self: Any, *args: Any, made: list[int] = made, number: int = number, **options: Any) -> None:
            made.append(1)
            if len(made) == number + 1:
                raise RuntimeError("can't allocate memory")
            make(self, *args, **options)

        monkeypatch.setattr(RowMerger, "__init__", failing)
        model = zoo({})
        try:
            merged = merge_lora_inplace(model, check_finite=False)
        except MergeError as error:  # the first weight of a layer; a later one is merged in the smallest blocks
            assert "others are unchanged" in str(error) and "can't allocate memory" in str(error)  # noqa: PT017, PT018
            assert lora_layers(model)
            merged = merge_lora_inplace(model)
        assert len(made) > number
        assert all(torch.equal(merged.state_dict()[key], tensor) for key, tensor in whole.items())


@pytest.mark.parametrize("unload", [True, False])
def test_a_second_call_that_merges_nothing_keeps_the_report_of_the_first(unload: bool) -> None:
    model = zoo({})
    first: Any = merge_lora_inplace(model, unload=unload)
    weights, report = first.state_dict(), first.merge_report
    again: Any = merge_lora_inplace(model, unload=unload)
    assert again is first
    assert again.merge_report is report
    assert report.weights
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in weights.items())


def test_a_failing_layer_of_peft_leaves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.loha.layer import Linear as LoHaLinear

    torch.manual_seed(0)
    model: Any = get_peft_model(Zoo(), LoHaConfig(target_modules=["linear", "head"], init_weights=False))
    merge, calls = LoHaLinear.merge, []

    def failing(self: Any, *args: Any, **options: Any) -> None:
        merge(self, *args, **options)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no more memory")

    monkeypatch.setattr(LoHaLinear, "merge", failing)
    before = bits(model)
    with pytest.raises(MergeError, match="no more memory"):
        merge_lora_inplace(model)
    assert bits(model) == before
    monkeypatch.setattr(LoHaLinear, "merge", merge)
    merge_lora_inplace(model)


@pytest.mark.parametrize("config", [LoHaConfig(target_modules=["linear", "head"], init_weights=False)])
def test_other_tuners_go_peft_s_own_way_and_keep_their_storage(config: Any) -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(Zoo(), config).eval()
    theirs = copy.deepcopy(model).double().merge_and_unload(safe_merge=True).state_dict()
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    merged = merge_lora_inplace(model)
    assert {parameter.data_ptr() for parameter in merged.parameters()} <= addresses
    assert all(torch.equal(tensor, nearest(theirs[key], tensor.dtype)) for key, tensor in merged.state_dict().items())
    assert [(f.code, f.severity) for f in merged.merge_report.findings] == [("merged-by-peft", "info")]
    assert {weight.method for weight in merged.merge_report.weights} == {"peft"}


def test_a_mixed_model_is_merged_each_layer_by_its_own_road() -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(Zoo(), LoraConfig(target_modules=["linear"], r=4), "default", mixed=True)
    model.add_adapter("other", LoHaConfig(target_modules=["head"], init_weights=False))
    model.set_adapter(["default", "other"])
    before = randomized(model)(TOKENS)
    merged = merge_lora_inplace(model)
    assert torch.allclose(merged(TOKENS), before, atol=1e-4, rtol=1e-4)
    assert {weight.method for weight in merged.merge_report.weights} == {"blocks", "peft"}


def test_ia3_goes_too() -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(
        Zoo(), IA3Config(target_modules=["linear"], feedforward_modules=[], init_ia3_weights=False)
    )
    model.base_model.model.linear.ia3_l["default"].data.uniform_(0.5, 2)
    before = model.eval()(TOKENS)
    assert torch.allclose(merge_lora_inplace(model)(TOKENS), before, atol=1e-4)


# ------------------------------------------------------------------------------------------------ names and unload


def test_only_the_named_adapters_are_merged() -> None:
    check_merged(zoo({}, {"r": 2}), ["a1"])


def test_none_takes_the_active_ones() -> None:
    model = zoo({}, {"r": 2})
    model.set_adapter("a1")
    reference = expected(model, ["a1"])
    merged = merge_lora_inplace(model)
    assert torch.equal(merged.linear.weight.data, nearest(reference[merged.linear.weight.data_ptr()], torch.float32))
    assert merged.merge_report.adapters == ("a1",)


@needs("peft", "0.20")
def test_a_saved_module_is_that_of_the_named_adapter() -> None:
    def model() -> Any:
        made = get_peft_model(Zoo(), LoraConfig(target_modules=["linear"], modules_to_save=["head"]), adapter_name="a")
        made.add_adapter("b", LoraConfig(target_modules=["linear"], modules_to_save=["head"]))
        made.add_adapter("c", LoraConfig(target_modules=["linear"]))
        for number, saved in enumerate(made.head.modules_to_save.values(), 1):
            nn.init.constant_(saved.weight, number)
        return randomized(made)  # "a" is the active one

    for names, head in ((["a"], 1), (["b"], 2), (["c", "b"], 2)):
        assert bool((merge_lora_inplace(model(), adapter_names=names).head.weight == head).all())
    assert torch.equal(merge_lora_inplace(model(), adapter_names=["c"]).head.weight, Zoo().head.weight)
    before = bits(both := model())
    with pytest.raises(MergeError, match=r"head: the adapters \['a', 'b'\] each have a copy of it"):
        merge_lora_inplace(both, adapter_names=["a", "b"])
    assert bits(both) == before


@pytest.mark.parametrize("names", ["default", ["other"], [], ["default", "default"]])
def test_names_that_make_no_sense(names: Any) -> None:
    model = zoo({})
    before = bits(model)
    with pytest.raises(ArgumentError, match="adapter_names"):
        merge_lora_inplace(model, adapter_names=names)
    assert bits(model) == before


def test_models_without_adapters_that_merge() -> None:
    with pytest.raises(ArgumentError, match="PeftModel"):
        merge_lora_inplace(nn.Linear(2, 2))
    base = AutoModelForCausalLM.from_config(tied_llama(target_modules=["q_proj"]).config)
    prompt = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ArgumentError, match=r"\(PROMPT_TUNING adds inputs"):
        merge_lora_inplace(prompt)
    with pytest.raises(ArgumentError, match="scratch_bytes"):
        merge_lora_inplace(zoo({}), scratch_bytes=0)


@pytest.mark.parametrize(
    "config",
    [
        {},
        pytest.param(
            {"use_dora": True, "target_modules": [n for n in EVERYTHING if n not in NO_DORA]},
            marks=needs("peft", "0.20"),  # which unmerges the DoRA of a convolution with groups
        ),
    ],
)
def test_without_unloading_peft_can_take_it_out_again(config: dict[str, Any]) -> None:
    model = zoo(config)
    with torch.no_grad():
        before, start = model(TOKENS), bits(model)
        weights = {path: parameter.clone() for path, parameter in model.named_parameters()}
        assert merge_lora_inplace(model, unload=False) is model
        assert model.base_model.model.linear.merged_adapters == ["default"]
        assert torch.allclose(model(TOKENS), before, atol=1e-3)
        again = bits(model)
        merge_lora_inplace(model, unload=False)  # nothing is left to merge
        assert bits(model) == again
        model.unmerge_adapter()
    for path, parameter in model.named_parameters():
        assert torch.allclose(parameter, weights[path], atol=1e-5), path
    assert bits(model).keys() == start.keys()


def test_merging_in_two_calls() -> None:
    model = zoo({}, {"r": 2})
    merge_lora_inplace(model, adapter_names=["default"], unload=False)
    merged = merge_lora_inplace(model, adapter_names=["default", "a1"])
    assert merged.merge_report.adapters == ("a1",)
    assert [finding.code for finding in merged.merge_report.findings] == ["merged-before"]
    together = merge_lora_inplace(zoo({}, {"r": 2}), adapter_names=["default", "a1"])
    assert torch.allclose(merged.linear.weight, together.linear.weight, atol=1e-6)


def test_the_lora_model_itself_can_be_passed() -> None:
    model = zoo({})
    assert not lora_layers(merge_lora_inplace(model.base_model))


# ---------------------------------------------------------------------------------------------------------- report


def test_the_report(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, logger="safe_loading"):
        merged = merge_lora_inplace(zoo({}, {"r": 2, "target_modules": ["linear"]}), progress=False)
    report = merged.merge_report
    assert report.ok
    assert report.unloaded
    assert report.adapters == ("default", "a1")
    by_name = {weight.name: weight for weight in report.weights}
    assert by_name.keys() == {
        *(f"{n}.weight" for n in EVERYTHING if n != "attention"),
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    assert by_name["linear.weight"].adapters == ("default", "a1")
    assert by_name["linear.weight"].bytes == 24 * 32 * 4
    assert 0 < by_name["linear.weight"].delta_rms < 1
    assert str(report) in caplog.text
    assert json.loads(report.to_json())["bytes"] == report.bytes
    assert "<table>" in report._repr_html_()
    assert capsys.readouterr().out == ""
    broken = zoo({})
    broken.base_model.model.linear.lora_A["default"].weight.data.fill_(torch.nan)
    assert "NaN" not in merge_lora_inplace(broken, check_finite=False).merge_report.to_json()


def test_a_peft_model_is_what_load_peft_on_rank_returns(tiny_llama: Path, tiny_adapter: Path) -> None:
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    assert isinstance(model, PeftModel)
    assert type(merge_lora_inplace(model)) is type(AutoModelForCausalLM.from_pretrained(tiny_llama))


@pytest.mark.parametrize("mended", [False, True])
def test_an_active_adapter_that_is_not_merged_is_told(mended: bool) -> None:
    """peft's layers compute with their weights alone once one adapter is in them."""
    model = zoo({}, {"r": 2})
    model.base_model.set_adapter(["default", "a1"])
    with torch.no_grad():
        before = model(TOKENS)
        named = None if mended else ["default"]
        found = merge_lora_inplace(model, adapter_names=named, unload=False).merge_report.findings
        assert [finding.code for finding in found] == ([] if mended else ["active-left-out"])
        assert torch.allclose(model(TOKENS), before, atol=1e-3) is mended
        model.unmerge_adapter()
        assert torch.allclose(model(TOKENS), before, atol=1e-5)


class Mixer(nn.Module):
    """A layer with weights of its own beside the layers in it, as Funnel's attention has."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, 6, 8))
        self.rows = nn.Parameter(torch.randn(8, 8))
        self.query, self.key = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.rows
        return self.query(x) + self.key(x) + (x @ self.kernel.transpose(1, 2)).sum(0)


@needs("peft", "0.20")
@pytest.mark.parametrize("parameters", [["mixer.kernel"], ["mixer.kernel", "mixer.rows"]])
@pytest.mark.parametrize("unload", [True, False])
def test_layers_inside_a_module_whose_parameters_are_adapted(parameters: list[str], unload: bool) -> None:
    torch.manual_seed(0)
    base = nn.ModuleDict({"mixer": Mixer(), "last": nn.Linear(6, 3)})
    base.forward = lambda x: base["last"](base["mixer"](x))  # type: ignore[method-assign]
    config = {"target_modules": ["query", "key", "last"], "target_parameters": parameters}
    model = peft_model(base, LoraConfig(r=2, lora_alpha=3, **config))
    with torch.no_grad():
        before = model(x := torch.randn(5, 8))
        merged = check_merged(model, ["default"]) if unload else merge_lora_inplace(model, unload=False)
        assert torch.allclose(merged(x), before, atol=1e-4)
    names = {"mixer.query.weight", "mixer.key.weight", "last.weight", *parameters}
    assert {weight.name for weight in merged.merge_report.weights} == names
    if unload:
        assert names <= dict(merged.named_parameters()).keys()


@needs("peft", "0.20")
@pytest.mark.parametrize("experts", [1, 2])
def test_experts_whose_features_are_the_other_way_round(experts: int) -> None:
    """With one expert peft takes no account of the order, in forward as in merge."""

    class Experts(nn.Module):
        is_transposed = True

        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(experts, 8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bi,eio->beo", x, self.kernel)

    torch.manual_seed(0)
    model = peft_model(nn.Sequential(Experts()), LoraConfig(r=2, target_modules=[], target_parameters=["0.kernel"]))
    with torch.no_grad():
        before = model(x := torch.randn(5, 8))
        assert torch.allclose(merge_lora_inplace(model)(x), before, atol=1e-4)


def test_a_module_at_two_places_of_which_one_is_adapted() -> None:
    """peft puts its layer at one of them, and the other would compute with the merged weight."""

    def model(layer: nn.Module, other: nn.Module) -> Any:
        base = nn.ModuleDict({"first": layer, "inner": nn.ModuleDict({"second": other})})
        base.forward = lambda x: base["inner"]["second"](base["first"](x))  # type: ignore[method-assign]
        return peft_model(base, LoraConfig(r=2, target_modules=["first"]))

    layer = nn.Linear(8, 8)
    shared = model(layer, layer)
    with pytest.raises(MergeError, match=r"first: the same module is at inner\.second too, where no adapter is"):
        merge_lora_inplace(shared)
    copied = model(layer, copy.deepcopy(layer))  # as the message says
    with torch.no_grad():
        before = copied(x := torch.randn(5, 8))
        assert torch.allclose(merge_lora_inplace(copied)(x), before, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_a_layer_without_elements(shape: tuple[int, int]) -> None:
    model = peft_model(nn.Sequential(nn.Linear(*shape)), LoraConfig(r=2, target_modules=["0"]))
    before = model(x := torch.randn(5, shape[0]))
    assert torch.equal(merge_lora_inplace(model)(x), before)
