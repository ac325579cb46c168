"""A process in which DeepSpeed's ZeRO-3 is on, which splits each weight of a model that is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import Made
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from zero3_stand_in import gathered, zero3_is_on

from safe_loading import (
    AdapterError,
    ArgumentError,
    Workload,
    audit_model,
    check_checkpoint,
    load_adapter_on_rank,
    load_at_prepare,
    load_peft_on_rank,
    merge_lora_checkpoint,
    meta_model,
    plan_device_map,
    predict_memory,
    verify_merge,
    wrap_fsdp_meta_safe,
)

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Simulated

TRAINED = Workload.train(1, 8)
FIGURES: dict[str, Callable[..., object]] = {
    "plan_device_map": lambda model: dict(plan_device_map(model, {0: "1GiB"})),
    "predict_memory": lambda model: predict_memory(model, TRAINED).allocated_peak_bytes,
    "audit_model": lambda model: audit_model(model).findings,
}


@pytest.mark.usefixtures("one_rank")
def test_models_on_meta_are_built_whole(made: Made, tmp_path: Path) -> None:
    base = made.llama()
    adapter = made.adapter(base)
    expected = {name: each.shape for name, each in meta_model(base).named_parameters()}
    wanted = merge_lora_checkpoint(base, adapter, tmp_path / "wanted").tensors
    with zero3_is_on():
        assert {name: each.shape for name, each in meta_model(base).named_parameters()} == expected
        assert merge_lora_checkpoint(base, adapter, tmp_path / "merged").tensors == wanted
        assert verify_merge(base, adapter, tmp_path / "merged").ok
        assert "headers alone" not in str(check_checkpoint(base))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("verb", FIGURES)
def test_no_figure_is_made_of_weights_that_are_split(made: Made, verb: str) -> None:
    base, figure = made.llama(), FIGURES[verb]
    wanted = figure(meta_model(base))
    with zero3_is_on():
        model = AutoModelForCausalLM.from_pretrained(base)
        with pytest.raises(ArgumentError, match=r"ZeRO-3 has split 30 weights of it (.|\n)* Pass the folder"):
            figure(model)
        assert figure(meta_model(base)) == wanted


@pytest.mark.usefixtures("one_rank")
def test_weights_that_are_split_are_not_sharded(made: Made) -> None:
    base = made.llama()
    one = AutoModelForCausalLM.from_pretrained(base)
    with zero3_is_on():
        split = AutoModelForCausalLM.from_pretrained(base)
        with pytest.raises(ArgumentError, match="Make it with meta_model, which ZeRO-3 does not split") as caught:
            wrap_fsdp_meta_safe(split)
        assert "FSDP2 cannot shard this LlamaForCausalLM" in str(caught.value)
        model = wrap_fsdp_meta_safe(meta_model(base), base)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), one.get_parameter(name))


@pytest.mark.usefixtures("one_rank")
def test_a_model_of_the_block_is_refused(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    base = made.llama()
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    with zero3_is_on():
        with load_at_prepare(), pytest.raises(ArgumentError, match=r"is for FSDP\. Make this call outside of"):
            AutoModelForCausalLM.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base)
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())


@pytest.mark.usefixtures("one_rank")
def test_a_base_is_split_as_it_is_loaded(made: Made) -> None:
    base = made.llama()
    adapter = made.adapter(base)
    one = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with zero3_is_on():
        model = load_peft_on_rank(base, adapter, device="cpu")
        assert all(p.numel() == 0 for n, p in model.named_parameters() if "lora_" not in n)
        with gathered(model.parameters()):
            assert {n for n, p in one.named_parameters() if not torch.equal(p, model.get_parameter(n))} == set()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=["copy", "DoRA"])
def test_an_adapter_that_takes_weights_of_a_split_base_is_left_to_peft(made: Made, options: dict[str, Any]) -> None:
    base = made.llama()
    plain, adapter = made.adapter(base), made.adapter(base, **options)
    one = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with zero3_is_on():
        with pytest.raises(AdapterError, match=r"ZeRO-3 has split its weights\. Load it with PeftModel"):
            load_peft_on_rank(base, adapter, device="cpu")
        model = load_peft_on_rank(base, plain, device="cpu")
        with pytest.raises(AdapterError, match="takes more of LlamaForCausalLM than plain LoRA does"):
            load_adapter_on_rank(model, adapter, "second")
        assert list(model.peft_config) == ["default"]
        road = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        with gathered(road.parameters()):
            assert {n for n, p in one.named_parameters() if not torch.equal(p, road.get_parameter(n))} == set()


@pytest.mark.usefixtures("one_rank")
def test_rows_of_a_split_base_are_checked_on_meta_as_ever(made: Made) -> None:
    """peft itself takes them from a CUDA device, which the check has none of."""
    base = made.llama()
    adapter = made.adapter(base, trainable_token_indices=[1, 2])
    with zero3_is_on():
        assert "headers alone" not in str(check_checkpoint(adapter))
        with pytest.raises(AdapterError, match=r"ZeRO-3 has split its weights\. Load it with PeftModel"):
            load_peft_on_rank(base, adapter, device="cpu")


ON_DEVICE = """
    import sys, torch, torch_npu
    import torch.distributed as dist
    from safe_loading import load_peft_on_rank
    from zero3_stand_in import gathered, zero3_is_on

    base, adapter = sys.argv[1:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = load_peft_on_rank(base, adapter, device="cpu")
    with zero3_is_on("npu:0"):
        try:
            load_peft_on_rank(base, adapter, device_map={"model": 0, "lm_head": 1})
        except ValueError as error:
            report({"spread": str(error)})
        model = load_peft_on_rank(base, adapter, device="npu:0")
        with gathered(model.parameters()):
            unequal = [n for n, p in one.named_parameters() if not torch.equal(p, model.get_parameter(n).cpu())]
            report({"unequal": unequal, "devices": sorted({str(p.device) for p in model.parameters()})})
"""


def test_onto_an_accelerator_no_device_map_is_asked_for(simulated: Simulated, made: Made) -> None:
    base = made.llama()
    facts = simulated.run_forked(ON_DEVICE, args=[base, made.adapter(base)])
    assert (facts["unequal"], facts["devices"]) == ([], ["npu:0"])
    assert "leave device_map= out" in facts["spread"]
