"""Wrappers in the way of the engines, which the audit finds at any depth; and those of the engines, which are none."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SIZES
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from test_audit_model import Wrapper, adapted, base
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import safe_loading
from safe_loading import Transparent, Workload, audit_model, predict_memory
from safe_loading._core.report import Finding
from safe_loading._memory.trace.cuda_paths import cuda_paths
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.quantized.stand_ins import with_stand_ins

STEP = Workload.train(4, 64)
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


class ModelWrap(Wrapper):
    """The wrapper of the founding mistake."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.scale = 1.0


class Forwarding(Wrapper):
    """A wrapper that passes on what it does not have, as some write it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class Mixin(Transparent):
    """The same code in its right place."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def plain_lora(model: nn.Module) -> Any:
    return get_peft_model(model, LoraConfig(**LORA)).train()  # type: ignore[arg-type]


def around(model: nn.Module, **options: Any) -> list[Finding]:
    report = audit_model(model, options.pop("workload", STEP), forecast=False, **options)
    return [finding for finding in report.findings if finding.code in ("SL101", "SL102")]


def peak(model: Any, workload: Workload) -> int:
    with with_stand_ins(model), cuda_paths((8, 0)):
        trace = trace_step(model, workload.replace(optimizer="none"))
    return next(iter(trace.devices.values())).peak_bytes


def carried_out(finding: Finding, **names: Any) -> Any:
    """Run the lines that a fix names, in which the user's names stand."""
    lines = [line.strip() for line in finding.fix.splitlines() if line.startswith("    ")]
    scope = {**vars(safe_loading), "get_peft_model": get_peft_model, "config": LoraConfig(**LORA), "Mixin": Mixin}
    scope |= {"wrap_transparent": safe_loading.wrap_transparent, "attach_head": safe_loading.attach_head, **names}
    exec("\n".join(lines), scope)
    return scope["model"]


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_wrapper_around_the_base_of_a_peft_model(bits: int, prepared: bool, tiny_llama: Path) -> None:
    """The mistake that the project was founded on: nothing in the PeftModel itself looks wrong."""

    def loaded() -> Any:
        quantized = BitsAndBytesConfig(load_in_8bit=True) if bits else None
        return LlamaForCausalLM.from_pretrained(tiny_llama, quantization_config=quantized, device_map={"": "cpu"})

    wrapper = ModelWrap(loaded())
    naive = plain_lora(prepare_model_for_kbit_training(wrapper) if prepared else wrapper)
    (finding,) = around(naive)
    assert (finding.code, finding.severity) == ("SL101", "error")
    assert finding.where == "base_model.model (ModelWrap)"
    assert "get_peft_model gets a ModelWrap with the LlamaForCausalLM inside it" in finding.message
    for name in ("gradient_checkpointing_enable", "_no_split_modules", "config", "enable_input_require_grads"):
        assert f"{name} from" in finding.message
    assert ("is_loaded_in_8bit from" in finding.message) == bool(bits)
    right = loaded()
    right = carried_out(finding, base=right, prepare_model_for_kbit_training=prepare_model_for_kbit_training)
    assert isinstance(right, PeftModel)
    assert around(right) == []
    if prepared == bool(bits):  # else one of the two is in float32 and the other is not
        right = right.train()
        assert finding.bytes == peak(naive, STEP) - peak(right, STEP.replace(gradient_checkpointing=True)) > 0


def in_sequential() -> nn.Module:
    return nn.Sequential(adapted())


def around_both() -> nn.Module:
    return Wrapper(plain_lora(ModelWrap(base())))


PLACES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "around the base": (lambda: plain_lora(ModelWrap(base())), ["base_model.model (ModelWrap)"]),
    "around the PeftModel": (lambda: Wrapper(adapted()), ["Wrapper"]),
    "around both": (around_both, ["Wrapper", "model.base_model.model (ModelWrap)"]),
    "in a Sequential": (in_sequential, ["Sequential"]),
    "in a Sequential in a wrapper": (lambda: Wrapper(nn.Sequential(Wrapper(adapted()))), ["Wrapper"]),
    "around a base without an adapter": (lambda: ModelWrap(base()), ["ModelWrap"]),
    "in DistributedDataParallel": (
        lambda: nn.parallel.DistributedDataParallel(Wrapper(adapted())),
        ["module (Wrapper)"],
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_one_finding_for_each_wrapper_at_any_depth(place: str, one_rank: None) -> None:
    make, where = PLACES[place]
    model = make()
    found = around(model)
    assert [finding.where for finding in found] == where
    assert all(finding.code == "SL101" and finding.bytes > 0 for finding in found)
    assert all("checkpointing it takes" in finding.message for finding in found)
    wrapper = next(module for module in model.modules() if type(module).__name__ in found[0].where)
    inside = next(module for module in model.modules() if isinstance(module, LlamaForCausalLM))
    right = carried_out(found[-1] if place == "around both" else found[0], wrapper=wrapper, base=inside)
    assert around(right) == []


def test_without_a_workload_the_weights_are_what_it_costs() -> None:
    model = Wrapper(adapted())
    (finding,) = [f for f in audit_model(model).findings if f.code == "SL101"]
    assert finding.bytes == sum(p.nbytes for p in model.parameters())
    assert "The step takes" not in finding.message


def test_a_head_of_the_wrapper_is_attached_by_the_fix() -> None:
    wrapper = Wrapper(adapted())
    wrapper.value_head = nn.Linear(SIZES["hidden_size"], 1)
    (finding,) = around(wrapper)
    model = carried_out(finding, wrapper=wrapper)
    assert model.get_base_model().value_head is not None


def test_lists_of_heads_over_a_frozen_base_are_attached_by_the_fix_without_an_adapter() -> None:
    wrapper = Wrapper(base().requires_grad_(requires_grad=False))  # Medusa's heads, or the probes of some layers
    wrapper.heads = nn.ModuleList(nn.Linear(SIZES["hidden_size"], 4) for _ in range(2))
    wrapper.probes = nn.ModuleDict({"mean": nn.Linear(SIZES["hidden_size"], 4)})
    wrapper.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])
    (finding,) = around(wrapper)
    model = carried_out(finding, wrapper=wrapper)
    assert isinstance(model, LlamaForCausalLM)
    trained = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"heads_0", "heads_1", "probes_mean", "scales_0"}
    assert around(model) == []


def test_a_wrapper_that_passes_attributes_on_is_told_for_what_is_left() -> None:
    for model in (Forwarding(adapted()), plain_lora(Forwarding(base()))):
        (finding,) = around(model)
        assert (finding.code, finding.bytes) == ("SL102", 0)
        assert "Every key begins with 'model.'" in finding.message


def test_a_trainer_gets_the_same_finding(tmp_path: Path) -> None:
    model = plain_lora(ModelWrap(base()))
    trainer = Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True))
    (finding,) = around(model, trainer=trainer)
    assert finding.bytes > 0


def test_the_cause_of_missing_checkpointing_is_the_wrapper() -> None:
    workload = STEP.replace(gradient_checkpointing=True)
    for model, name in ((plain_lora(ModelWrap(base())), "ModelWrap"), (Wrapper(adapted()), "Wrapper")):
        found = {f.code: f for f in audit_model(model, workload, forecast=False).findings}
        assert f"{name} hides gradient_checkpointing_enable" in found["SL120"].message
        assert found["SL120"].bytes == found["SL101"].bytes > 0
    switched_on = base()
    switched_on.gradient_checkpointing_enable()
    switched_on.enable_input_require_grads()
    found = {f.code: f for f in audit_model(plain_lora(ModelWrap(switched_on)), workload, forecast=False).findings}
    assert "SL120" not in found  # switched on before it was wrapped
    assert found["SL101"].bytes == 0


def test_the_base_inside_a_wrapper_is_looked_at_too() -> None:
    llama = base()
    llama.config.tie_word_embeddings = True
    assert "SL111" in {f.code for f in audit_model(plain_lora(ModelWrap(llama))).findings}


@pytest.mark.parametrize("engine", ["ddp", "compile", "compiled ddp"])
def test_what_engines_put_around_a_model_is_no_fault(engine: str, one_rank: None) -> None:
    model: Any = adapted()
    if "ddp" in engine:
        model = nn.parallel.DistributedDataParallel(model)
    if "compile" in engine:
        model = torch.compile(model)
    report = audit_model(model, STEP, forecast=False)
    assert report.ok
    assert not report.skipped
    assert [(f.code, f.severity) for f in report.findings] == [("SL106", "info")]  # keys of model.state_dict()
    trainer = types.SimpleNamespace(model=model, args=None)
    assert audit_model(model, STEP, trainer=trainer, forecast=False).findings == ()


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
def test_a_step_of_fsdp2_is_run(policy: MixedPrecisionPolicy | None, one_rank: None) -> None:
    def sharded(train: bool) -> Any:
        model = adapted()
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        options = {} if policy is None else {"mp_policy": policy}
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return model.train(train)

    model = sharded(True)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = {name: list(module._forward_pre_hooks) for name, module in model.named_modules()}
    report = audit_model(model, STEP, forecast=False)
    assert report.findings == ()
    assert "step" in report.checked
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert {name: list(module._forward_pre_hooks) for name, module in model.named_modules()} == hooks
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()  # its hooks work
    (finding,) = audit_model(sharded(False), STEP, forecast=False).findings
    assert finding.code == "SL120"


@pytest.mark.parametrize("original_parameters", [True, False])
@pytest.mark.parametrize("policy", [None, MixedPrecision(param_dtype=torch.bfloat16)])
def test_a_model_of_fsdp1_is_looked_at_as_it_was(
    original_parameters: bool, policy: MixedPrecision | None, one_rank: None
) -> None:
    def sharded(train: bool) -> Any:
        model = adapted() if original_parameters else base()  # without them a unit is trained as a whole or not at all
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        wrap = ModuleWrapPolicy({LlamaDecoderLayer})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own deprecation
            return FullyShardedDataParallel(
                model.train(train),
                auto_wrap_policy=wrap,
                use_orig_params=original_parameters,
                mixed_precision=policy,
                device_id=torch.device("cpu"),
            )

    def state(model: nn.Module) -> dict[str, Any]:
        return {
            name: (set(vars(module)), list(map(id, module.parameters(recurse=False))), list(module._modules))
            for name, module in model.named_modules()
        }

    model = sharded(True)
    before = state(model)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    trainer = types.SimpleNamespace(model=model.module, model_wrapped=model, args=None, optimizer=optimizer)
    report = audit_model(model, STEP, trainer=trainer)
    assert report.findings == ()
    assert "step" in report.checked
    assert state(model) == before
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    assert audit_model(model, STEP, trainer=trainer).findings == ()  # as it is between two steps
    (finding,) = audit_model(sharded(False), STEP, forecast=False).findings
    assert finding.code == "SL120"


def test_a_sharded_model_has_no_forecast_of_its_own(one_rank: None) -> None:
    model = base()
    fully_shard(model)
    report = audit_model(model, Workload.weights_only())
    assert report.forecast is None
    assert "spread=Spread.fsdp2(ranks)" in report.skipped[0]


def test_a_step_that_cannot_be_run_is_not_ok() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x: Any) -> Any:
            return (self.weight * x).sum()

    report = audit_model(Odd(), STEP, forecast=False)
    assert not report.ok
    assert [f.code for f in report.findings] == ["SL126"]
    assert "inputs={'x'" in str(report.findings[0].fix)
    assert "SL126" in report.to_sarif()
    assert audit_model(Odd(), STEP, inputs={"x": torch.empty(2, device="meta")}).ok  # as the finding says


def test_the_forecast_and_the_audit_see_the_same_step() -> None:
    naive, right = plain_lora(ModelWrap(base())), plain_lora(base())
    (finding,) = around(naive)
    step = STEP.replace(optimizer="none")
    jump = [predict_memory(m, w) for m, w in ((naive, step), (right, step.replace(gradient_checkpointing=True)))]
    difference = jump[0].allocated_peak_bytes - jump[1].allocated_peak_bytes
    assert difference == pytest.approx(finding.bytes, rel=0.02)  # the forecast rounds to blocks
