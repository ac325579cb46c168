"""Saved modules (modules_to_save) in another dtype than their base: they compute in the dtype of what they replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import logits
from models import save_adapter, save_llama
from peft import PeftModel
from transformers import AutoModelForCausalLM

from safe_loading import load_adapter_on_rank, load_peft_on_rank

SAVED = ["embed_tokens", "norm", "lm_head"]
OTHER = [(torch.float32, torch.bfloat16, "info"), (torch.bfloat16, torch.float32, "warning")]


@pytest.fixture(params=OTHER, ids=["wider base", "narrower base"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, torch.dtype, str]:
    of_base, of_adapter, severity = request.param
    base = save_llama(tmp_path / "base", of_base)
    adapter = save_adapter(
        tmp_path / "adapter", base, dtype=of_adapter, modules_to_save=SAVED, target_modules=["q_proj"]
    )
    return base, adapter, of_base, severity


@pytest.mark.parametrize("options", [{}, {"adapter_dtype": torch.float32}, {"adapter_dtype": torch.bfloat16}])
@pytest.mark.parametrize("as_object", [False, True])
def test_it_computes_in_the_dtype_of_the_base(
    parts: tuple[Path, Path, torch.dtype, str], options: dict[str, Any], as_object: bool
) -> None:
    base, adapter, of_base, severity = parts
    source = AutoModelForCausalLM.from_pretrained(base) if as_object else base
    model = load_peft_on_rank(source, adapter, **options)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(adapter), autocast_adapter_dtype=False
    )
    for name in SAVED:
        path = f"base_model.model.{'lm_head' if name == 'lm_head' else f'model.{name}'}.modules_to_save.default.weight"
        ours = model.get_parameter(path)
        assert ours.dtype == of_base
        assert torch.equal(ours, plain.get_parameter(path))
    findings = [finding for finding in model.load_report.findings if finding.code == "saved-module-dtype"]
    assert {finding.severity for finding in findings} == {severity}
    if options.get("adapter_dtype") == of_base:
        assert torch.equal(logits(model), logits(plain))
    assert torch.isfinite(logits(model)).all()


def test_it_trains_and_is_swapped(parts: tuple[Path, Path, torch.dtype, str]) -> None:
    base, adapter, of_base, severity = parts
    model = load_peft_on_rank(base, adapter, is_trainable=True)
    outputs = logits(model.eval())
    tokens = torch.arange(1, 13)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    assert not torch.equal(logits(model), outputs)
    report = load_adapter_on_rank(model, adapter, "default", hotswap=True)
    assert {(finding.code, finding.severity) for finding in report.findings} == {("saved-module-dtype", severity)}
    assert torch.equal(logits(model), outputs)
    load_adapter_on_rank(model, adapter, "second")
    model.set_adapter("second")
    assert torch.equal(logits(model), outputs)
    assert model.base_model.model.lm_head.modules_to_save["second"].weight.dtype == of_base


def test_the_advice_keeps_it_as_it_is(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, modules_to_save=["lm_head"])
    rounded = load_peft_on_rank(base, adapter)
    (finding,) = [finding for finding in rounded.load_report.findings if finding.code == "saved-module-dtype"]
    assert "load the base with dtype=torch.float32" in finding.fix
    model = load_peft_on_rank(base, adapter, dtype=torch.float32)
    assert model.load_report.findings == ()
    assert model.base_model.model.lm_head.modules_to_save["default"].weight.dtype == torch.float32
