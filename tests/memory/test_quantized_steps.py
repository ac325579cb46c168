"""The steps of quantized models are traced from their configs, on any machine, whatever is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3Config,
    FalconConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)

from safe_loading import (
    Workload,
    audit_model,
    largest_workload,
    meta_model,
    plan_device_map,
    predict_memory,
    smallest_limits,
)
from safe_loading._core.interrupts import undone
from safe_loading._memory.trace.attached_adapter import with_adapter
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.formats.format import TargetCard
from safe_loading._model.quantized.kbit_preparation import prepare_base
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading._model.quantized_meta_model import quantized_meta_model
from safe_loading._model.snapshot import Snapshot
from safe_loading.errors import ArgumentError, TraceError

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
    "dtype": "bfloat16",
}
LLAMA = LlamaConfig(**SIZES)
MOE = Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=64)
DEEPSEEK = DeepseekV3Config(
    **{**SIZES, "num_key_value_heads": 4},
    moe_intermediate_size=128,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
GPT_OSS = GptOssConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, head_dim=64)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GROUPS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
METHODS: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "nf4": (LLAMA, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "int8": (LLAMA, {"load_in_8bit": True}),
    "fp8": (LLAMA, FP8),
    "fp8 with experts": (MOE, FP8),
    "fp8, DeepSeek-V3": (DEEPSEEK, FP8),
    "mxfp4": (GPT_OSS, {"quant_method": "mxfp4"}),
    "fbgemm": (LLAMA, {"quant_method": "fbgemm_fp8"}),
    "compressed-tensors": (LLAMA, {"quant_method": "compressed-tensors", "config_groups": GROUPS}),
    "compressed-tensors in fp8": (
        LLAMA,
        {"quant_method": "compressed-tensors", "config_groups": GROUPS, "use_optimized_inference": True},
    ),
    "gptq": (LLAMA, {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "awq": (LLAMA, {"quant_method": "awq", "bits": 4, "group_size": 128}),
    "hqq": (LLAMA, {"quant_method": "hqq", "quant_config": {"nbits": 4, "group_size": 64}}),
    **{
        f"torchao {kind}": (LLAMA, {"quant_method": "torchao", "quant_type": {"_type": f"{kind}Config", "_data": {}}})
        for kind in ("Int8WeightOnly", "Int8DynamicActivationInt8Weight", "Float8WeightOnly", "Int4WeightOnly")
    },
}
NOT_TRAINED = ("mxfp4", "fbgemm", "compressed-tensors in fp8", "torchao Int4WeightOnly")


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("name", METHODS)
def test_a_plan_counts_the_cache_and_what_the_step_takes(name: str) -> None:
    config, quantization = METHODS[name]
    plan = plan_device_map(
        config, {0: "1GB"}, workload=Workload.generate(2, 64), quantization_config=quantization, capability=(9, 0)
    )
    assert plan.verified, plan.reason
    assert plan.ok
    (use,) = plan.devices
    assert use.kv_cache > 0
    assert use.activations > 0
    plain = plan_device_map(config, {0: "1GB"}, workload=Workload.generate(2, 64))
    # plain experts may peak at the token after the prompt, for which their weights are copied
    assert use.kv_cache <= plain.devices[0].kv_cache <= use.kv_cache * 65 / 64
    assert use.weights < plain.devices[0].weights or name == "compressed-tensors"


@pytest.mark.parametrize("name", METHODS)
def test_training_with_lora_is_traced_or_refused(name: str) -> None:
    config, quantization = METHODS[name]
    work = Workload.train(2, 32, adapter=lora())
    if name in NOT_TRAINED:
        with pytest.raises(ArgumentError, match="does not train"):
            plan_device_map(config, {0: "1GB"}, workload=work, quantization_config=quantization)
        return
    plan = plan_device_map(config, {0: "1GB"}, workload=work, quantization_config=quantization)
    assert plan.verified, plan.reason
    (use,) = plan.devices
    trained = 2 * 4 * (config.num_attention_heads * getattr(config, "v_head_dim", 64) + 256)
    width = 2 if name in ("nf4", "int8") else 4  # trl casts the adapter of bitsandbytes' layers to bfloat16
    assert use.gradients >= 2 * width * trained  # two states of AdamW, gradients where the peak has them
    found = predict_memory(config, work, quantization_config=quantization)
    assert found.components["saved_activations"] > 0


def test_whose_preparation_a_step_in_4_bits_begins_with_is_a_word() -> None:
    config, quantization = METHODS["nf4"]
    work = Workload.train(2, 32, adapter=lora())
    rest = sum(p.numel() for name, p in meta_model(config).named_parameters() if "proj" not in name)
    weights, adapters, assumed = {}, {}, {}
    for word in ("trl", "peft", "none", None):
        options: Any = {"workload": work, "quantization_config": quantization, "prepare_for_kbit": word}
        plan, found = plan_device_map(config, {0: "1GB"}, **options), predict_memory(config, **options)
        (use,) = plan.devices
        assert use.weights + use.buffers == found.components["weights"] + found.components["adapters"]
        weights[word], adapters[word] = found.components["weights"], found.components["adapters"]
        assumed[word] = [finding.message for finding in plan.findings if finding.code == "kbit-assumed"]
        (note,) = [note for note in found.notes if "in 4 or 8 bits" in note]
        assert {"none": "by nobody", "peft": "by peft's"}.get(str(word), "as trl does it") in note
    assert weights["trl"] == weights["none"] == weights[None] == weights["peft"] - 2 * rest  # four bytes for two
    assert 2 * adapters["trl"] == 2 * adapters[None] == adapters["peft"] == adapters["none"]
    assert [word for word, found_of in assumed.items() if found_of] == [None]
    with pytest.raises(
        ArgumentError, match='prepare_for_kbit=True: pass one of "trl", "peft", "axolotl", "unsloth", "none"'
    ):
        predict_memory(config, **{**options, "prepare_for_kbit": True})
    for word in ("trl", "peft"):  # the Trainer refuses a packed model without an adapter, and peft freezes it
        with pytest.raises(TraceError, match="Nothing is trained"):
            predict_memory(config, **{**options, "workload": Workload.train(1, 8), "prepare_for_kbit": word})


def test_axolotl_casts_back_by_names_and_unsloth_casts_the_adapter_alone() -> None:
    sizes = {name: getattr(METHODS["nf4"][0], name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
    config = Qwen2Config(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16")
    config.architectures = ["Qwen2ForCausalLM"]
    model = quantized_meta_model(config, METHODS["nf4"][1]).model
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    prepare_base(model, "axolotl")
    cast = {name for name, parameter in model.named_parameters() if parameter.dtype != before[name]}
    assert cast == {name for name in before if name.endswith("_proj.bias")}  # and no norm, embedding or output layer
    work = Workload.train(2, 32, adapter=lora())
    options: Any = {"workload": work, "quantization_config": METHODS["nf4"][1]}
    found = {word: predict_memory(config, **options, prepare_for_kbit=word) for word in ("none", "unsloth")}
    assert found["unsloth"].components == found["none"].components
    assert any("unsloth's own kernels" in note for note in found["unsloth"].notes)


def test_codes_stored_in_16_bits_are_not_cast() -> None:
    """As FSDP shards them: peft's own preparation of the same model is the judge, and leaves them as they are."""
    stored = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    ours, peft_s = (quantized_meta_model(METHODS["nf4"][0], stored).model for _ in range(2))
    prepare_base(ours, "peft")
    peft_s.is_loaded_in_4bit = True  # type: ignore[assignment]  # what a load sets
    prepare_model_for_kbit_training(peft_s, use_gradient_checkpointing=False)
    dtypes = {name: parameter.dtype for name, parameter in ours.named_parameters()}
    assert dtypes == {name: parameter.dtype for name, parameter in peft_s.named_parameters()}
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == torch.bfloat16


def test_trl_casts_what_is_trained_but_for_the_magnitudes_of_dora() -> None:
    model = quantized_meta_model(*METHODS["nf4"]).model
    biases = torch.nn.Parameter(torch.ones(256, dtype=torch.float32))
    model.get_submodule("model.layers.0.mlp.down_proj").bias = biases
    adapter = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, bias="all", modules_to_save=["lm_head"])
    with (
        undone(Snapshot(model).restore),
        with_adapter(model, Workload.train(1, 4, adapter=adapter), prepare_for_kbit="trl") as attached,
    ):
        trained = {name: p.dtype for name, p in attached.named_parameters() if p.requires_grad}
    assert {dtype for name, dtype in trained.items() if "magnitude" in name} == {torch.float32}
    assert {dtype for name, dtype in trained.items() if "magnitude" not in name} == {torch.bfloat16}
    assert {name.rpartition(".")[2] for name in trained} == {"weight", "bias"}
    assert model.get_submodule("model.layers.0.mlp.down_proj").bias is biases
    assert torch.equal(biases, torch.ones(256))


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "gptq", "hqq"])
def test_a_search_sees_the_context(name: str) -> None:
    config, quantization = METHODS[name]
    sizes = [
        smallest_limits(config, 1, workload=Workload.generate(1, length), quantization_config=quantization)[0]
        for length in (1, 2048)
    ]
    assert sizes[1] - sizes[0] > 2 * 2 * 2 * 64 * 2 * 2000  # layers, keys and values, heads, size, bytes, tokens


@pytest.mark.parametrize("name", ["nf4", "gptq", "hqq", "torchao Int8WeightOnly"])
def test_experts_that_a_method_leaves_alone_are_a_finding(name: str) -> None:
    """transformers' own quantizers replace linear layers, and experts are one parameter for all of them."""
    plan = plan_device_map(MOE, {0: "1GB"}, quantization_config=METHODS[name][1])
    (finding,) = [finding for finding in plan.findings if finding.code == "experts-not-quantized"]
    assert finding.bytes == 2 * 8 * 3 * 128 * 256 * 2  # layers, experts, matrices, their sizes, bytes
    assert plan.devices[0].weights > finding.bytes
    whole = plan_device_map(LLAMA, {0: "1GB"}, quantization_config=METHODS[name][1])
    assert "experts-not-quantized" not in [finding.code for finding in whole.findings]
    in_fp8 = plan_device_map(MOE, {0: "1GB"}, quantization_config=FP8)
    assert plan.devices[0].weights - in_fp8.devices[0].weights > finding.bytes // 4
    assert "experts-not-quantized" not in [finding.code for finding in in_fp8.findings]


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
def test_a_method_that_quantizes_nothing_is_a_finding(name: str) -> None:
    """transformers passes over Falcon's own class of linear layers, and so does the count."""
    falcon = FalconConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=640)
    plan = plan_device_map(falcon, {0: "1GB"}, quantization_config=METHODS[name][1], capability=(9, 0))
    (finding,) = [finding for finding in plan.findings if finding.code == "nothing-quantized"]
    plain = sum(parameter.nbytes for parameter in meta_model(falcon).parameters())
    assert finding.bytes == plan.devices[0].weights == plain
    assert "FalconLinear" in finding.message
    assert "plan without quantization_config" in finding.fix
    without = plan_device_map(falcon, {0: "1GB"})
    assert without.devices[0].weights == plain
    assert "nothing-quantized" not in [finding.code for finding in without.findings]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_quantizes_is_no_such_finding(name: str) -> None:
    config, quantization = METHODS[name]
    plan = plan_device_map(config, {0: "1GB"}, quantization_config=quantization, capability=(9, 0), verify=False)
    assert "nothing-quantized" not in [finding.code for finding in plan.findings]


def test_the_card_decides_and_not_the_machine_that_plans() -> None:
    work = Workload.generate(1, 16)
    on_disk = LlamaConfig(**SIZES, quantization_config=FP8)
    ampere, hopper, unknown, host = (
        plan_device_map(on_disk, limits, workload=work, capability=capability)
        for limits, capability in (
            ({0: "1GB"}, (8, 0)),
            ({0: "1GB"}, (9, 0)),
            ({0: "1GB"}, None),
            ({"cpu": "1GB"}, None),
        )
    )
    plain = plan_device_map(LLAMA, {0: "1GB"}, workload=work)
    assert ampere.devices[0].weights == host.devices[0].weights == plain.devices[0].weights
    assert [finding.code for finding in ampere.findings] == ["dequantized"]
    assert ampere.findings[0].bytes == plain.devices[0].weights
    assert hopper.devices == unknown.devices
    assert hopper.devices[0].weights < plain.devices[0].weights
    assert "capability 8.9" in unknown.findings[0].message
    for device, capability in ((plain.devices[0], (8, 0)), (hopper.devices[0], None)):
        found = predict_memory(on_disk, work, capability=capability)
        assert found.components["weights"] == device.weights + device.buffers


@pytest.mark.parametrize(("computed_in", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_weight_in_4_bits_is_unpacked_for_more_than_four_tokens(computed_in: str, width: int) -> None:
    """For so few every card multiplies what is packed; for up to 512 the card, the dtype and the sizes decide."""
    quantization = {**METHODS["nf4"][1], "bnb_4bit_compute_dtype": computed_in}
    wide = LlamaConfig(**{**SIZES, "intermediate_size": 8192})
    few, more = (
        predict_memory(wide, Workload.generate(1, tokens, decode_steps=0), quantization_config=quantization)
        for tokens in (4, 5)
    )
    unpacked = wide.hidden_size * 8192 * width
    assert abs(more.allocated_peak_bytes - few.allocated_peak_bytes - unpacked) < unpacked / 50


def test_a_forecast_says_what_is_assumed() -> None:
    found = predict_memory(GPT_OSS, Workload.generate(1, 16), quantization_config={"quant_method": "mxfp4"})
    assert any("triton" in note for note in found.notes)
    report = audit_model(LLAMA, Workload.train(1, 16, adapter=lora()), quantization_config=METHODS["nf4"][1])
    assert "step" in report.checked
    assert report.forecast is not None
    with pytest.raises(ArgumentError, match="built already"):
        audit_model(torch.nn.Linear(2, 2), quantization_config=FP8)


WITHOUT_BITSANDBYTES = """
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "bitsandbytes" else super().find_spec(name, path, target)
sys.meta_path = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
from tests.memory.test_quantized_steps import steps_of_bitsandbytes
print(steps_of_bitsandbytes())
assert "bitsandbytes" not in sys.modules
"""


def steps_of_bitsandbytes() -> list[object]:
    counted: list[object] = []
    for options in ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, {"load_in_8bit": True}):
        quantized = {"quant_method": "bitsandbytes", **options}
        adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
        for work in (Workload.generate(2, 48), Workload.train(2, 48, adapter=adapter)):
            plan = plan_device_map(LLAMA, {0: "1GB"}, workload=work, quantization_config=quantized)
            assert plan.verified, plan.reason
            found = predict_memory(LLAMA, work, quantization_config=quantized)
            counted += [plan.devices, found.allocated_peak_bytes, found.reserved_peak_bytes]
    return counted


def test_bitsandbytes_need_not_be_installed() -> None:
    """The same bytes with and without it, also under peft's LoRA layers, which differ from the plain ones."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra")
    command = [sys.executable, "-c", WITHOUT_BITSANDBYTES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(steps_of_bitsandbytes())


@pytest.mark.parametrize("kind", ["Int8WeightOnly", "Int8DynamicActivationInt8Weight", "Float8WeightOnly"])
def test_a_real_model_of_torchao_is_planned_as_its_config(kind: str) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16)
    chosen = getattr(torchao, f"{kind}Config")()
    torchao.quantize_(model, chosen, lambda layer, name: type(layer) is torch.nn.Linear and name != "lm_head")
    weights = [type(parameter) for parameter in model.parameters()]
    _, quantization = METHODS[f"torchao {kind}"]
    for work in (Workload.generate(2, 64), Workload.train(2, 32, adapter=lora())):
        of_config = plan_device_map(LLAMA, {0: "1GB"}, workload=work, quantization_config=quantization)
        assert plan_device_map(model, {0: "1GB"}, workload=work).devices == of_config.devices
    generation = Workload.generate(2, 64)
    of_config_alone = predict_memory(LLAMA, generation, quantization_config=quantization)
    assert predict_memory(model, generation).allocated_peak_bytes == of_config_alone.allocated_peak_bytes
    assert [type(parameter) for parameter in model.parameters()] == weights


@pytest.mark.parametrize("bits", [4, 8])
def test_biases_of_packed_layers_that_an_adapter_trains_are_counted(tmp_path: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).to(torch.bfloat16).save_pretrained(tmp_path)  # q, k, v have some
    packed: Any = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)

    def lora(bias: Any) -> LoraConfig:
        return LoraConfig(r=4, target_modules=["q_proj"], bias=bias)

    def of_folder(bias: str, quantization: Any) -> int:
        step = Workload.train(2, 16, adapter=lora(bias))
        return predict_memory(tmp_path, step, quantization_config=quantization).components["optimizer"]

    def of_model(bias: str) -> int:
        base = Qwen2ForCausalLM.from_pretrained(tmp_path, quantization_config=packed)
        return predict_memory(get_peft_model(base, lora(bias)), Workload.train(2, 16)).components["optimizer"]

    of_biases = of_folder("all", None) - of_folder("none", None)
    assert of_folder("all", packed) - of_folder("none", packed) == of_biases > 0
    assert of_model("all") - of_model("none") == of_biases


class Untraceable(torch.nn.Module):
    """Its step depends on a value that no trace knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(input_ids)
        return hidden[hidden.sum(-1) > 0]


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_a_single_quantized_layer_is_refused_by_name_and_planned_inside_a_module(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {}
    layer = getattr(bnb.nn, kind)(64, 64, **options)
    with pytest.raises(ArgumentError, match=rf"A single quantized layer \({kind}\).*torch.nn.Sequential"):
        plan_device_map(layer, {0: "1MB"})
    plan = plan_device_map(torch.nn.Sequential(layer), {0: "1MB"})
    assert plan.verified
    assert 64 * 64 // 2 < plan.devices[0].used < 64 * 64 * 2


def test_what_was_not_traced_is_not_ok_and_enters_no_search() -> None:
    with torch.device("meta"):
        model = Untraceable()
    plan = plan_device_map(model, {0: "1MB"}, workload=Workload.generate(1, 4))
    assert not plan.ok
    assert not plan.verified
    (finding,) = plan.findings
    assert (finding.code, finding.severity) == ("not-traced", "error")
    with pytest.raises(TraceError, match=r"cannot be traced.*overhead="):
        largest_workload(model, {0: "1MB"}, most=64)
    with pytest.raises(TraceError, match=r"cannot be traced.*overhead="):
        smallest_limits(model, 1, workload=Workload.generate(1, 4))
    assert (
        plan_device_map(model, {0: "1MB"}, workload=Workload.generate(1, 4), overhead="1KB").devices[0].overhead == 1000
    )
    assert smallest_limits(model, 1)[0] >= 16 * 8 * 4


@pytest.mark.parametrize(("bits", "nested"), [(4, False), (4, True), (8, False)])
def test_the_norm_of_dora_is_of_the_unpacked_weight(bits: int, nested: bool) -> None:
    """What peft asks bitsandbytes for, which gives 16 bits for 4 and float32 for 8."""
    options = {"load_in_4bit": True, "bnb_4bit_use_double_quant": nested} if bits == 4 else {"load_in_8bit": True}
    config = {"quant_method": "bitsandbytes", **options}
    layers = {"r": 4, "target_modules": ["down_proj"], "task_type": "CAUSAL_LM"}
    traces = [
        trace_of(config, Workload.train(1, 8, optimizer="none", adapter=LoraConfig(use_dora=dora, **layers)))
        for dora in (False, True)
    ]
    size = 256 * 512 * (2 if bits == 4 else 4)
    plain, dora = (
        sum(a.bytes == size for a in trace.allocations if "down_proj" in a.module and a.phase == "forward")
        for trace in traces
    )
    assert dora >= plain + SIZES["num_hidden_layers"]


def trace_of(config: dict[str, Any], workload: Workload) -> StepTrace:
    model = quantized_meta_model(LLAMA, config).model
    with with_stand_ins(model):
        return trace_step(model, workload)


def test_a_model_in_fp8_that_is_built_already_is_for_an_h100_as_its_config_is() -> None:
    config, quantization = METHODS["fp8"]
    built = quantized_meta_model(config, quantization, card=TargetCard((9, 0))).model
    of_module = predict_memory(built, Workload.generate(1, 16))
    of_config = predict_memory(config, Workload.generate(1, 16), quantization_config=quantization)
    assert of_module.allocated_peak_bytes == of_config.allocated_peak_bytes


def test_checkpointing_drops_what_peft_adds_up_of_experts_in_fp8() -> None:
    """peft adds an adapter of experts to all of their codes in each forward pass."""
    adapter = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=["gate_up_proj"], task_type="CAUSAL_LM")
    step = Workload.train(1, 16, adapter=adapter, gradient_checkpointing=True)
    kept = []
    for layers in (2, 4):
        config = type(MOE)(**{**MOE.to_diff_dict(), "num_hidden_layers": layers})
        found = predict_memory(config, step, quantization_config=FP8)
        kept.append(found.components["saved_activations"])
    assert kept[1] - kept[0] < MOE.num_experts * 2 * MOE.moe_intermediate_size * MOE.hidden_size
