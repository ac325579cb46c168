"""What a plan counts is what a loaded model holds, to the byte: quantized, cast, tied, or owned by a split module."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from models import SIZES
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PromptTuningConfig,
    get_peft_model,
)
from tiny_models import causal_lm_classes, skip_unless_buildable, tiny_config
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.integrations.accelerate import expand_device_map

from safe_loading import (
    DeviceMapInfeasible,
    DeviceMapPlan,
    Workload,
    load_peft_on_rank,
    meta_model,
    plan_device_map,
    predict_memory,
    smallest_limits,
)
from safe_loading._memory.plan.map_keys import collapse, device_of

EVERY = causal_lm_classes()
# buffers beside the layers, tensors that a split module holds itself, tables that no checkpoint has
KNOWN = ["Gemma4ForCausalLM", "OpenAIGPTLMHeadModel", "GPTJForCausalLM", "GPT2LMHeadModel", "CamembertForCausalLM"]
SAMPLE = sorted({*KNOWN, *random.Random(7).sample(EVERY, 3)})
REST = [pytest.param(name, marks=pytest.mark.slow) for name in EVERY if name not in SAMPLE]


def stored(model: torch.nn.Module) -> dict[str, int]:
    """The bytes of every storage that parameters and buffers hold, and the statistics that hang on them."""
    found: dict[int, tuple[str, int]] = {}

    def visit(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), (name, storage.nbytes()))
        if isinstance(value, torch.Tensor) or type(value).__name__ in ("QuantState", "MatmulLtState"):
            for key, inner in vars(value).items():
                if key not in ("module", "_grad"):
                    visit(inner, f"{name}.{key}")

    for path, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            visit(tensor, f"{path}.{leaf}")
        visit(vars(module).get("state"), f"{path}.state")
    return dict(found.values())


def counted(plan: DeviceMapPlan) -> int:
    return sum(use.weights + use.buffers for use in plan.devices)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose matrices fill no whole number of blocks, with biases and more than 256 blocks in one matrix."""
    config = LlamaConfig(
        hidden_size=72,
        intermediate_size=264,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=18,
        vocab_size=101,
        attention_bias=True,
        architectures=["LlamaForCausalLM"],
    )
    folder = tmp_path_factory.mktemp("sizes") / "plain"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4 in bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "8 bit": {"load_in_8bit": True},
    "8 bit, one in bfloat16": {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "down_proj"]},
}


@pytest.mark.parametrize("options", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_a_quantized_model_takes_what_bitsandbytes_stores(plain: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra")
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map={"": "cpu"})
    real = stored(model)
    assert counted(plan_device_map(plain, {0: "1GB"}, quantization_config=config)) == sum(real.values()), real
    assert counted(plan_device_map(model, {0: "1GB"})) == sum(real.values()), real
    model.save_pretrained(tmp_path)
    assert counted(plan_device_map(tmp_path, {0: "1GB"})) == sum(real.values()), real


def test_layers_with_transposed_weights_are_quantized_too(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra")
    transformers.GPT2LMHeadModel(tiny_config("GPT2LMHeadModel")).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map={"": "cpu"})
    assert counted(plan_device_map(tmp_path, {0: "1GB"}, quantization_config=config)) == sum(stored(model).values())


@pytest.mark.parametrize("name", ["Gemma4ForConditionalGeneration", "FlavaForPreTraining"])
def test_the_projection_before_a_tied_head_is_quantized(tmp_path: Path, name: str) -> None:
    """transformers leaves the module of the last parameter plain, and quantizes before it ties that to another."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    skip_unless_buildable(name)
    auto: Any = getattr(transformers, name)
    auto(tiny_config(name)).to(torch.bfloat16).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True)
    model = auto.from_pretrained(tmp_path, quantization_config=config, device_map={"": "cpu"})
    assert counted(plan_device_map(tmp_path, {0: "1GB"}, quantization_config=config)) == sum(stored(model).values())
    made = meta_model(tmp_path, auto, quantization_config=config)
    assert {name: type(module) for name, module in made.named_modules()} == {
        name: type(module) for name, module in model.named_modules()
    }


@pytest.mark.parametrize("bits", [4, 8])
def test_the_step_of_a_quantized_model_is_traced(plain: Path, bits: int) -> None:
    """Both ways of passing it: a config, of which the quantized layers are made, and bitsandbytes' own layers."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra")
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map={"": "cpu"})
    layers = list(model.modules())
    work = Workload.generate(2, 64)
    of_config = plan_device_map(plain, {0: "1GB"}, workload=work, quantization_config=config)
    of_model = plan_device_map(model, {0: "1GB"}, workload=work)
    assert list(model.modules()) == layers
    for plan in (of_config, of_model):
        assert plan.verified, plan.reason
        assert not plan.findings
        (use,) = plan.devices
        assert use.kv_cache == 2 * 2 * 2 * 2 * 64 * 18 * 2  # layers, k and v, rows, heads, tokens, size, bytes
        assert use.activations > 0
    assert of_config.devices == of_model.devices
    assert of_model.verify()
    split = plan_device_map(model, smallest_limits(model, 2, workload=work), workload=work)
    assert split.verified, split.reason
    assert set(split.values()) == {0, 1}


def test_what_a_class_keeps_in_float32_is_counted_so(tmp_path: Path) -> None:
    kind: Any = transformers.T5ForConditionalGeneration
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=101)
    kind(config).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, dtype=torch.float16)
    assert model.decoder.block[0].layer[2].DenseReluDense.wo.weight.dtype == torch.float32
    plan = plan_device_map(tmp_path, {0: "1GB"}, dtype=torch.float16)
    assert counted(plan) == sum(stored(model).values())


@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(n, marks=pytest.mark.slow) for n in EVERY if n not in SAMPLE)]
)
def test_sizes_and_maps_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    skip_unless_buildable(name)
    kind: Any = getattr(transformers, name)
    kind._from_config(tiny_config(name), dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    real = stored(model)
    whole = plan_device_map(tmp_path, {0: "1GB"}, dtype=torch.bfloat16, auto_class=kind, verify=False)
    assert counted(whole) == sum(real.values()), real
    limit = sum(real.values()) * 9 // 10
    plan = plan_device_map(tmp_path, {0: limit, 7: limit}, dtype=torch.bfloat16, auto_class=kind, verify=False)
    assert set(plan.values()) == {0, 7}
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    read = expand_device_map(dict(plan), list(named))
    assert read == {key: device_of(key, plan) for key in named}
    held: dict[int, set[int]] = {0: set(), 7: set()}
    for key, tensor in named.items():
        held[read[key]].add(tensor.untyped_storage().data_ptr())
    assert not held[0] & held[7], "a tied weight is on two devices"
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in named.values()}
    for use in plan.devices:
        assert use.weights + use.buffers == sum(sizes[address] for address in held[int(use.device)])
        assert use.used <= use.limit


@pytest.mark.parametrize("cut", [1, 2, 9, 10, 11, 100])
def test_layer_1_does_not_catch_10_and_11(cut: int) -> None:
    names = [f"model.layers.{n}.{part}" for n in range(112) for part in ("a.weight", "b.bias")]
    units = {"model.embed": 5, **{f"model.layers.{n}": (5 if n < cut else 8) for n in range(112)}, "model.norm": 8}
    units["model.layers.111.a"], units["model.layers.111.b"] = 8, 12
    del units["model.layers.111"]
    plan = collapse(units)
    read = expand_device_map(dict(plan), names)
    assert read == {name: device_of(name, units) for name in names}
    assert set(read.values()) == {5, 8, 12}
    assert len(collapse(dict.fromkeys(units, 3))) == 1


def test_a_head_that_its_owner_untied_is_counted_beside_the_embedding() -> None:
    sizes: dict[str, Any] = SIZES
    model = transformers.LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    tied = counted(plan_device_map(model, {0: "1GB"}))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    plan = plan_device_map(model, {0: "1GB"})
    assert counted(plan) == sum(stored(model).values()) == tied + model.lm_head.weight.nbytes
    with pytest.raises(DeviceMapInfeasible, match="does not fit"):
        plan_device_map(model, {0: counted(plan) - 1})


@pytest.mark.parametrize("attached", [False, True])
def test_a_limit_that_is_enough_for_what_is_trained_is_enough(attached: bool) -> None:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 6}
    model: Any = transformers.LlamaForCausalLM(LlamaConfig(**sizes))
    if attached:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    else:
        for parameter in model.model.parameters():
            parameter.requires_grad_(False)
    workload = Workload.train(1, 8)
    needed = plan_device_map(model, {0: "1GB"}, workload=workload).devices[0].used
    assert needed < 2.2 * sum(stored(model).values())  # with gradients and two moments of everything it were four times
    assert plan_device_map(model, {0: needed}, workload=workload).verified


LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
DORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", use_dora=True)
PROMPT = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("adapter", "attached"),
    [(LORA, False), (LORA, True), (PROMPT, False), (DORA, False), (DORA, True)],
    ids=["lora", "peft model", "prompt", "dora", "dora in a peft model"],
)
def test_each_layer_has_its_cache_where_it_lies_beside_an_adapter(
    adapter: PeftConfig, attached: bool, verify: bool
) -> None:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(LlamaConfig(**sizes))
        model = get_peft_model(model, adapter) if attached else model
    workload = Workload.generate(8, 512, adapter=None if attached else adapter)
    plan = plan_device_map(model, {0: "1GB", 1: "1GB"}, workload=workload, verify=verify)
    assert plan.verified == verify
    one_token = 2 * 2 * 8 * 4  # keys and values of two heads in float32
    for use in plan.devices:
        layers = sum(device == use.device and ".layers." in f".{path}" for path, device in plan.items())
        assert layers > 0
        assert layers * 8 * 512 * one_token <= use.kv_cache <= layers * 8 * 520 * one_token
        assert use.activations
        assert not use.staging


@pytest.mark.parametrize(
    "adapter",
    [
        DORA,
        LoHaConfig(r=2, target_modules=["q_proj"]),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        OFTConfig(oft_block_size=8, target_modules=["q_proj"]),
        LNTuningConfig(target_modules=["input_layernorm"]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_adapters_of_every_method_are_counted(adapter: PeftConfig) -> None:
    sizes: dict[str, Any] = SIZES
    workload = Workload.train(1, 8, adapter=adapter)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(LlamaConfig(**sizes))
    plain = plan_device_map(model, {0: "1GB"}).devices[0].weights
    forecast = predict_memory(model, workload)
    added = forecast.components["adapters"]
    assert added >= 3 * 32
    assert plan_device_map(model, {0: "1GB"}, workload=workload, verify=False).devices[0].weights == plain + added
    verified = plan_device_map(model, {0: "1GB"}, workload=workload).devices[0]
    assert (verified.weights, verified.staging) == (plain + added, 0)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside the config of its base"])
def test_an_adapters_folder_is_planned_as_its_base_with_it(tmp_path: Path, beside: bool) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(base)
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=8, target_modules="all-linear"))
    trained.save_pretrained(adapter)
    if beside:
        (adapter / "config.json").write_text((base / "config.json").read_text())
    limits = {0: "1GiB"}
    loaded = load_peft_on_rank(base, adapter, device="cpu")
    assert counted(plan_device_map(adapter, limits)) == sum(stored(loaded).values())
    for work in (Workload.generate(1, 16), Workload.train(1, 16)):
        of_folder = plan_device_map(adapter, limits, workload=work)
        of_both = plan_device_map(base, limits, workload=work.replace(adapter=str(adapter)))
        assert (of_folder, of_folder.devices) == (of_both, of_both.devices)
    whole = load_peft_on_rank(adapter, device_map=dict.fromkeys(plan_device_map(adapter, limits), "cpu"))
    assert sum(stored(whole).values()) == sum(stored(loaded).values())


@pytest.mark.parametrize("attached", [False, True])
def test_what_an_adapter_s_own_model_computes_with_every_layer_stays_on_one_device(attached: bool) -> None:
    """AdaLoRA's penalty adds numbers of all layers, in the model that peft puts around the base."""
    sizes: dict[str, Any] = SIZES
    config = AdaLoraConfig(target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM")
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(LlamaConfig(**sizes))
    model = get_peft_model(model, config) if attached else model
    workload = Workload.train(1, 8, adapter=None if attached else config)
    plan = plan_device_map(model, {0: "1GB", 1: "1GB"}, workload=workload)
    assert plan.verified
    assert plan.ok
    assert plan == {"": 0}


@pytest.mark.parametrize("attached", [False, True])
def test_a_layer_that_is_given_to_another_module_is_where_it_was(attached: bool) -> None:
    """DoRA's magnitudes get their base layer, which accelerate's hooks move as they move tensors."""
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 4}
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(LlamaConfig(**sizes))
    model = get_peft_model(model, DORA) if attached else model
    options: dict[str, Any] = {} if attached else {"adapter": DORA}
    for checkpointing in (False, True):
        workload = Workload.train(2, 16, gradient_checkpointing=checkpointing, **options)
        plan = plan_device_map(model, {0: "1GB", 1: "1GB"}, workload=workload)
        assert plan.verified
        assert all(use.activations for use in plan.devices)


def test_a_layer_that_is_offloaded_and_given_to_another_module_is_no_plan(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 6}
    model: Any = get_peft_model(transformers.LlamaForCausalLM(LlamaConfig(**sizes)), DORA)
    workload = Workload.generate(2, 16)
    whole = plan_device_map(model, {0: "1GB"}, workload=workload).devices[0].used
    plan = plan_device_map(model, {0: whole * 3 // 4, "cpu": "1GB"}, workload=workload, offload="cpu")
    assert "cpu" in plan.values()
    assert not plan.ok
    assert "lora_magnitude_vector" in plan.reason
    assert "is offloaded" in plan.reason
    on_disk = dict.fromkeys(plan, "cpu") | {path: "disk" for path, device in plan.items() if device == "cpu"}
    dispatched = dispatch_model(model, on_disk, main_device="cpu", offload_dir=str(tmp_path))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        dispatched(torch.ones(1, 4, dtype=torch.long))
