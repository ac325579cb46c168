"""Each code of the audit: a model with the fault, and the same model without it."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import SIZES
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from safe_loading import ArgumentError, Workload, attach_head, audit_model
from safe_loading.__main__ import main
from safe_loading._core.report import Finding
from safe_loading._memory.audit.device_checks import fsdp_units
from safe_loading._memory.audit.traced_step import peak_of
from safe_loading._memory.trace.cuda_paths import cuda_paths
from safe_loading._memory.trace.trace_step import trace_step

STEP = Workload.train(1, 8)


def base(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).train()


def adapted(model: Any = None, **changes: Any) -> Any:
    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    return get_peft_model(model if model is not None else base(), LoraConfig(**config)).train()


class Wrapper(nn.Module):
    """User code around a model, as many write it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def codes(model: Any, workload: Workload | None = None, **options: Any) -> dict[str, Any]:
    return {f.code: f for f in audit_model(model, workload, forecast=False, **options).findings}


def test_a_clean_model_has_nothing() -> None:
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    report = audit_model(model, STEP, optimizer=optimizer)
    assert report.ok, str(report)
    assert report.findings == ()
    assert report.skipped == ()
    assert {"wrappers", "step", "contexts"} <= set(report.checked)
    assert report.forecast is not None
    assert sum(report.dtypes.values()) == sum(p.nbytes for p in model.parameters())


def test_full_training_and_inference_are_clean_too() -> None:
    assert codes(base(), STEP) == {}
    frozen = base().requires_grad_(False).eval()
    assert audit_model(frozen).ok


def test_a_wrapper_is_one_finding_with_all_that_it_hides() -> None:
    found = audit_model(Wrapper(adapted()), STEP, forecast=False).findings
    (hidden,) = (f for f in found if f.code in ("SL101", "SL102", "SL106"))
    for site in ("gradient_checkpointing_enable", "peft_config", "config", "save_pretrained", "_no_split_modules"):
        assert f"{site} from" in hidden.message
    assert "isinstance(model, PeftModel) is False" in hidden.message
    assert "'model.'" in hidden.message
    assert any(f.code == "SL119" for f in found)


def test_a_prefix_of_compiled_or_parallel_models() -> None:
    compiled = torch.compile(adapted())
    assert codes(compiled)["SL106"].severity == "info"
    assert "SL106" not in codes(adapted())


def unfrozen(model: Any) -> None:
    model.requires_grad_(True)


def one_loose(model: Any) -> None:
    model.get_base_model().model.norm.weight.requires_grad_(True)


def frozen_adapter(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(False)


def untied(model: Any) -> None:
    llama = model.get_base_model()
    llama.config.tie_word_embeddings = True


def keeps_loss(model: Any) -> None:
    model.last = [model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss]


def in_float32(model: Any) -> None:
    model.get_base_model().config.dtype = torch.bfloat16


def says_quantized(model: Any) -> None:
    model.get_base_model().config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)


def wrong_map(model: Any) -> None:
    model.get_base_model().hf_device_map = {"": 0}


def short_map(model: Any) -> None:
    model.get_base_model().hf_device_map = {"model": "cpu"}


def eval_mode(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.eval()


@pytest.mark.parametrize(
    ("code", "spoil", "alone"),
    [
        ("SL109", unfrozen, False),
        ("SL103", one_loose, False),
        ("SL104", one_loose, False),
        ("SL105", frozen_adapter, True),
        ("SL111", untied, True),
        ("SL112", keeps_loss, True),
        ("SL108", in_float32, True),
        ("SL107", says_quantized, True),
        ("SL110", wrong_map, True),
        ("SL110", short_map, True),
    ],
)
def test_a_fault_and_its_absence(code: str, spoil: Callable[[Any], None], alone: bool) -> None:
    model = adapted()
    assert code not in codes(model)
    spoil(model)
    found = codes(model)
    assert code in found
    if alone:
        assert set(found) == {code}
    assert found[code].bytes > 0
    assert found[code].fix


def test_a_head_that_stock_peft_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    def loaded(llama: Any) -> Any:
        return PeftModel.from_pretrained(llama, str(tmp_path), is_trainable=True).train()

    head = nn.Linear(32, 1)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(tiny_llama), LoraConfig(target_modules=["q_proj"]))
    attach_head(model, "value_head", head).save_pretrained(tmp_path)
    silent = codes(loaded(LlamaForCausalLM.from_pretrained(tiny_llama)))
    assert set(silent) - {"SL108"} == {"SL123"}  # and a base in float32, as it was saved
    assert "value_head" in silent["SL123"].message
    assert "attach_head" in silent["SL123"].fix
    place = attach_head(LlamaForCausalLM.from_pretrained(tiny_llama), "value_head", head)
    assert "SL123" not in codes(loaded(place))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_step_of_bitsandbytes_own_layers_is_looked_at(bits: int, tiny_llama: Path) -> None:
    quantized = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    base: Any = LlamaForCausalLM.from_pretrained(
        tiny_llama, quantization_config=quantized, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")).train()
    report = audit_model(model, Workload.train(1, 128), forecast=False)
    assert "step" in report.checked
    assert not report.skipped


def test_what_layers_in_8_bits_keep_under_checkpointing(tiny_llama: Path) -> None:
    found = []
    for reentrant in (False, True):
        base: Any = LlamaForCausalLM.from_pretrained(
            tiny_llama, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"}
        )
        base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model = adapted(base)
        if not reentrant:
            base.enable_input_require_grads()
        found.append(codes(model, Workload.train(2, 64)))
    # three layers: the inputs of attention, of its output layer, and the two of the MLP, in float32
    assert found[0]["SL124"].bytes == 3 * 2 * 64 * (32 + 32 + 32 + 64) * 4
    assert "SL124" not in found[1]
    assert not [module for module in model.modules() if module._forward_pre_hooks]


def test_sizes_are_bytes() -> None:
    model = adapted()
    in_float32(model)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert codes(model)["SL108"].bytes == frozen // 2
    model = adapted()
    unfrozen(model)
    assert codes(model)["SL109"].bytes == 3 * sum(p.nbytes for p in base().parameters())


def test_a_base_of_16_bits_that_peft_prepared() -> None:
    llama = base().to(torch.bfloat16)
    llama.config.dtype = torch.bfloat16
    size = sum(p.nbytes for p in llama.parameters())
    assert "SL108" not in codes(adapted(copy.deepcopy(llama)))
    prepared = prepare_model_for_kbit_training(llama, use_gradient_checkpointing=False)
    found = codes(adapted(prepared))["SL108"]
    assert (found.severity, found.bytes) == ("warning", size)


def test_a_base_that_was_loaded_in_float32(tiny_llama: Path) -> None:
    model = adapted(LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32))
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    report = audit_model(model)
    assert [(f.code, f.severity, f.bytes) for f in report.findings] == [("SL108", "info", frozen // 2)]
    assert report.ok
    trainer = types.SimpleNamespace(model=model, args=types.SimpleNamespace(bf16=True))
    assert codes(model, trainer=trainer)["SL108"].severity == "warning"
    assert "SL108" not in codes(LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32))  # nothing is frozen


def test_checkpointing_that_does_not_happen() -> None:
    model = adapted()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    workload = Workload.train(2, 64)
    assert "SL120" not in codes(model, workload)
    eval_mode(model)
    found = codes(model, workload)["SL120"]
    assert "0 of 3 layers" in found.message
    assert "eval mode" in found.message
    assert found.bytes > 0
    assert not model.training
    for layer in model.train().get_base_model().model.layers[::2]:  # of a user who trades memory for time
        layer.gradient_checkpointing = False
    assert "SL120" not in codes(model, workload)
    # asked for later, by a trainer that cannot reach it through the wrapper
    asked = workload.replace(gradient_checkpointing=True)
    assert "SL120" in codes(Wrapper(adapted()), asked)
    assert "SL120" not in codes(adapted(), asked)


def test_a_trainer_puts_the_layers_in_train_mode_itself() -> None:
    # as from_pretrained and get_peft_model leave it: the PeftModel says that it trains, its layers do not
    model = adapted()
    model.gradient_checkpointing_enable()
    model.get_base_model().eval()
    workload = Workload.train(2, 64)
    assert model.training
    assert "eval mode" in codes(model, workload)["SL120"].message
    trainer = types.SimpleNamespace(model=model, args=types.SimpleNamespace(gradient_checkpointing=True))
    assert "SL120" not in codes(model, workload, trainer=trainer)
    assert not model.get_base_model().training


class Detached(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, labels=labels, **kwargs)
        out.loss = out.loss.detach().requires_grad_()
        return out


class Hoarder(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, labels=labels, **kwargs)
        KEPT.append(out.logits)
        return out


KEPT: list[Any] = []


def test_dtypes_of_a_config_that_does_not_name_one_or_writes_it_as_text() -> None:
    for dtype in (None, "bfloat16", "torch.bfloat16"):
        model = adapted(base().to(torch.bfloat16))
        model.get_base_model().config.dtype = dtype
        assert "SL108" not in codes(model)
        norm = model.get_base_model().model.norm.weight
        norm.data = norm.data.float()
        found = codes(model)["SL108"]
        assert (found.bytes, found.where) == (SIZES["hidden_size"] * 2, "base_model.model.model.norm.weight")
    model = adapted()
    model.get_base_model().config.dtype = None
    trainer = types.SimpleNamespace(model=model, args=types.SimpleNamespace(bf16=True))
    assert codes(model, trainer=trainer)["SL108"].severity == "warning"


def test_adapters_that_are_off() -> None:
    model = adapted()
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    model.base_model.disable_adapter_layers()
    for parameter in model.parameters():  # disabling them freezes them too
        parameter.requires_grad_(parameter.shape[0] == 2 or parameter.shape[-1] == 2)
    found = codes(model, STEP)["SL127"]
    assert "disabled in 6 of 6" in found.message
    assert found.bytes == trained
    exec(found.fix.partition(" before")[0], {"model": model})
    assert "SL127" not in codes(model, STEP)
    model.merge_adapter()
    found = codes(model, STEP)["SL127"]
    assert "merged in 6 of 6" in found.message
    exec(found.fix.partition(" before")[0], {"model": model})
    assert "SL127" not in codes(model, STEP)


def test_a_step_that_trains_nothing_is_mended_by_what_trains() -> None:
    model = adapted()
    model.requires_grad_(requires_grad=False)
    found = codes(model, STEP)["SL126"]
    assert "Nothing is trained" in found.message
    assert "inputs=" not in found.fix
    assert "is_trainable=True, enable its layers" in found.fix
    exec("model.base_model.enable_adapter_layers()", {"model": model})
    assert "SL126" not in codes(model, STEP)
    model.requires_grad_(requires_grad=False)
    model.lm_head.requires_grad_()
    assert "SL126" not in codes(model, STEP)


class LostHead(torch.nn.Module):
    """A head beside a frozen model, whose output the loss leaves out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.used = model.requires_grad_(requires_grad=False), False
        self.head = torch.nn.Linear(SIZES["hidden_size"], 1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        out = self.model(input_ids, attention_mask, labels=labels, output_hidden_states=True)
        score = self.head(out.hidden_states[-1]).mean()
        out.loss = out.loss + score if self.used else out.loss
        return out


def test_a_loss_without_what_is_trained_is_mended_by_it() -> None:
    model = LostHead(base())
    found = codes(model, STEP)["SL126"]
    assert "the loss depends on no parameter that has requires_grad" in found.message
    assert found.fix.startswith("compute the loss from what is trained, head.bias, head.weight; or")
    model.used = True
    assert "SL126" not in codes(model, STEP)


def test_tokens_that_were_added_to_frozen_embeddings(tiny_llama: Path) -> None:
    def grown(rows: int = SIZES["vocab_size"] + 2, multiple: int | None = None, **lora: Any) -> Any:
        llama = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
        llama.resize_token_embeddings(rows, pad_to_multiple_of=multiple)
        return adapted(llama, **lora)

    found = codes(grown())["SL128"]
    assert "2 tokens" in found.message
    assert found.severity == "warning"
    assert found.bytes == 2 * SIZES["hidden_size"] * 2
    for multiple in (8, 64, 128):
        assert codes(grown(SIZES["vocab_size"], multiple))["SL128"].severity == "info"
        new = types.SimpleNamespace(args=None, processing_class=range(SIZES["vocab_size"] + 1))
        assert codes(grown(SIZES["vocab_size"] + 1, multiple), trainer=new)["SL128"].severity == "warning"
    lora = eval(found.fix.partition(", or")[0].replace("LoraConfig(..., ", "dict("))
    assert "SL128" not in codes(grown(**lora))
    assert "SL128" not in codes(grown(modules_to_save=["embed_tokens"]))
    assert "SL128" not in codes(adapted(LlamaForCausalLM.from_pretrained(tiny_llama)))
    padded = types.SimpleNamespace(args=None, processing_class=range(SIZES["vocab_size"]))  # rows for speed alone
    assert "SL128" not in codes(grown(), trainer=padded)


def test_float16_weights_that_the_scaler_refuses() -> None:
    model = adapted()
    arguments = types.SimpleNamespace(fp16=True)
    trainer = types.SimpleNamespace(model=model, args=arguments)
    assert "SL129" not in codes(model, trainer=trainer)
    model.half()
    found = codes(model, trainer=trainer)["SL129"]
    assert found.bytes == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    by_arguments = types.SimpleNamespace(model=model, args=types.SimpleNamespace(fp16=True, deepspeed="config.json"))
    by_launch = types.SimpleNamespace(model=model, args=arguments, is_deepspeed_enabled=True)
    assert all("SL129" not in codes(model, trainer=each) for each in (by_arguments, by_launch))
    exec(found.fix.removeprefix("cast them: ").partition(";")[0], {"model": model})
    assert "SL129" not in codes(model, trainer=trainer)


def test_outputs_that_nobody_reads() -> None:
    model = adapted()
    plain = peak_of_step(model)
    assert "SL130" not in codes(model, BIG)
    model.config.output_hidden_states = True
    found = codes(model, BIG)["SL130"]
    assert found.bytes == peak_of_step(model) - plain
    assert "config.output_hidden_states is on" in found.message
    assert model.config.output_hidden_states is True
    exec(found.fix.partition(",")[0], {"model": model})
    assert "SL130" not in codes(model, BIG)


def test_attention_that_keeps_its_scores() -> None:
    # in float32 no fused kernel takes grouped heads, so that there "sdpa" costs what "eager" does
    assert "SL131" not in codes(adapted(base(attn_implementation="eager")), BIG)
    model = adapted(base(attn_implementation="eager", num_key_value_heads=4))
    found = codes(model, BIG)["SL131"]
    slow = peak_of_step(model)
    assert model.config._attn_implementation == "eager"
    exec(found.fix.partition(",")[0], {"model": model.get_base_model()})
    assert found.bytes == slow - peak_of_step(model) > 0
    assert "SL131" not in codes(model, BIG)


BIG = Workload.train(2, 64)


def peak_of_step(model: Any) -> int:
    with cuda_paths((8, 0)):
        return peak_of(trace_step(model, BIG.replace(optimizer="none")))


def test_what_one_step_shows() -> None:
    model = base()
    assert {"SL121", "SL122"}.isdisjoint(codes(model, STEP))
    model.__class__ = Detached
    assert codes(model, STEP)["SL121"].severity == "error"
    model.__class__ = Hoarder
    for step in (STEP, STEP.replace(gradient_accumulation_steps=2)):
        found = codes(model, step)["SL122"]
        KEPT.clear()
        assert found.severity == "error"
        assert found.bytes >= 8 * 101 * 4


def test_layers_of_8_bits_that_keep_16_are_audited_without_a_step() -> None:
    layer: Any = pytest.importorskip("bitsandbytes").nn.Linear8bitLt  # which keeps them by its default
    model = base()
    model.model.layers[0].self_attn.o_proj = layer(SIZES["hidden_size"], SIZES["hidden_size"], bias=False)
    report = audit_model(model, STEP)
    assert any("bitsandbytes keeps these weights in 16 bits" in reason for reason in report.skipped)


def test_the_head_with_an_adapter() -> None:
    assert "SL115" not in codes(adapted(target_modules="all-linear"))
    assert "tied" not in codes(adapted(target_modules=["q_proj", "lm_head"]))["SL115"].message
    # as peft's example of additional tokens has it
    assert "SL115" not in codes(adapted(target_modules=["q_proj", "embed_tokens", "lm_head"]))
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    tied = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert "merging it would change the embeddings, which are tied to it" in codes(tied)["SL115"].message


def test_parameters_of_a_wrapper_that_nothing_saves() -> None:
    wrapped = Wrapper(adapted())
    assert "SL104" not in codes(wrapped)
    wrapped.head = nn.Linear(4, 1)
    found = codes(wrapped)["SL104"]
    assert "head.weight" in found.where
    assert (found.severity, found.bytes) == ("error", 5 * 4)
    assert "save_pretrained of the PeftModelForCausalLM does not write" in found.message


def test_parameters_of_a_wrapper_that_the_trainer_saves(tmp_path: Path) -> None:
    wrapped = Wrapper(adapted())
    wrapped.head = nn.Linear(4, 1)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, gradient_checkpointing=True)
    row = torch.ones(4, dtype=torch.long)
    trainer = Trainer(wrapped, arguments, train_dataset=[{"input_ids": row, "labels": row}])
    found = codes(wrapped, trainer=trainer)["SL104"]
    assert (found.severity, "state dict that fits a Wrapper only" in found.message) == ("warning", True)
    trainer._save(str(tmp_path))
    assert "head.weight" in load_file(tmp_path / "model.safetensors")
    assert "train() raises AttributeError" in codes(wrapped, trainer=trainer)["SL101"].message
    with pytest.raises(AttributeError, match="gradient_checkpointing_enable"):
        trainer.train()


def test_an_optimizer_with_other_parameters() -> None:
    model = adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert "SL118" not in codes(model, optimizer=torch.optim.AdamW(trained))
    replaced = nn.Parameter(torch.zeros_like(model.get_base_model().model.norm.weight))
    found = codes(model, optimizer=torch.optim.AdamW([replaced, *trained]))["SL118"]
    assert found.bytes == replaced.nbytes
    assert "no longer" in found.message
    assert "never change" in codes(model, optimizer=torch.optim.AdamW(trained[:2]))["SL118"].message


def test_a_trainer_with_a_reference_and_a_teacher(tmp_path: Path) -> None:
    model = adapted()
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments)
    assert {"SL113", "SL114", "SL112"}.isdisjoint(codes(model, trainer=trainer))
    trainer.ref_model = copy.deepcopy(model.get_base_model()).requires_grad_(False)
    found = codes(model, trainer=trainer)
    assert found["SL113"].where == "trainer.ref_model"
    assert found["SL113"].bytes > 0
    assert "SL114" not in found
    trainer.ref_model = None
    trainer.teacher = base()
    found = codes(model, trainer=trainer)["SL114"]
    assert "no_grad" in found.fix
    assert found.bytes == sum(p.nbytes for p in trainer.teacher.parameters())
    trainer.teacher.requires_grad_(False)
    assert "SL114" not in codes(model, trainer=trainer)


def test_a_context_elsewhere() -> None:
    model = adapted()
    with mock.patch("safe_loading._memory.audit.device_checks.contexts", return_value=frozenset({1})):
        assert codes(model)["SL116"].where == "cuda:1"
    assert "SL116" not in codes(model)


def test_one_unit_of_fsdp(one_rank: None) -> None:
    whole, layered = adapted(), adapted()
    size = sum(p.nbytes for p in whole.parameters())
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(whole, mesh=mesh)
    assert codes(whole)["SL117"].bytes == size
    for layer in layered.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layered, mesh=mesh)
    assert {"SL117", "SL148"}.isdisjoint(codes(layered))
    units = fsdp_units(layered)
    assert len(units) == 4
    assert sum(units.values()) == size


def test_the_model_is_not_changed() -> None:
    model = adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    audit_model(model, STEP)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_what_cannot_be_traced_is_said() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x: Any) -> Any:
            raise ValueError("no data")

    report = audit_model(Odd(), STEP)
    assert report.skipped
    assert not report.ok
    assert "step" not in report.checked
    assert report.forecast is None


def test_a_folder_and_an_adapter(tiny_llama: Path, tiny_adapter: Path) -> None:
    assert audit_model(tiny_llama).ok
    report = audit_model(tiny_adapter, Workload.train(1, 16))
    assert report.ok, str(report)
    assert report.forecast is not None
    assert report.forecast.components["adapters"] > 0
    page = report._repr_html_()
    assert "<svg" in page
    assert "<style>" not in page, "a part of a page has the page's colors"


def test_the_formats() -> None:
    report = audit_model(Wrapper(adapted()), STEP, forecast=False)
    assert "SL101 error" in str(report)
    assert "<table>" in report._repr_html_()
    assert json.loads(report.to_json())["ok"] is False
    lines = report.to_github().splitlines()
    assert len(lines) == len(report.findings)
    assert all(line.startswith(("::error title=SL", "::warning title=SL")) for line in lines)
    sarif = json.loads(report.to_sarif())
    schema = json.loads((Path(__file__).parent / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
    assert sarif["$schema"] == schema["id"]
    assert sarif["version"] == "2.1.0"
    validator = pytest.importorskip("jsonschema", reason="pip install jsonschema").Draft4Validator(schema)
    assert list(validator.iter_errors(sarif)) == []
    sarif["runs"][0]["results"][0]["level"] = "fatal"
    assert len(list(validator.iter_errors(sarif))) == 1  # it can fail
    assert [r["ruleId"] for r in sarif["runs"][0]["results"]] == [f.code for f in report.findings]
    severities = [f.severity for f in report.findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)


def test_the_command(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tiny_llama), "--train", "1x16"]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["audit", str(tiny_llama), "--train", "1x16", "--format", "sarif"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]
    for words in (["--json"], ["--format", "json"]):
        assert main(["audit", str(tiny_llama), *words]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == 1
        assert main(["audit", str(tmp_path / "absent"), *words]) == 2
        said = capsys.readouterr()
        assert json.loads(said.out)["message"] in said.err
    for form in ("text", "sarif", "github"):
        assert main(["audit", str(tmp_path / "absent"), "--format", form]) == 2
        assert capsys.readouterr().out == ""
    assert main(["audit", str(tiny_llama), "--train", "many"]) == 2
    assert main(["audit", str(tiny_llama), "--gradient-checkpointing", "--adapter", "a"]) == 2
    for severity, status in (("error", 1), ("warning", 1), ("info", 0)):
        report = types.SimpleNamespace(findings=(Finding("SL000", severity, "", "", ""),), skipped=())
        with mock.patch("safe_loading._memory.audit_model.audit_model", return_value=report):
            assert main(["audit", str(tiny_llama)]) == status


def test_what_is_no_model() -> None:
    with pytest.raises(ArgumentError):
        audit_model(LlamaConfig(quantization_config={"quant_method": "quark"}))
