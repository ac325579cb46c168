"""Audits, plans and forecasts of models that compressed-tensors has loaded: as codes, and decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed import compress, load, logits, save_compressed
from test_plan_sizes import counted, stored
from tiny_models import tiny_config
from transformers import LlamaForCausalLM

from safe_loading import ArgumentError, Workload, audit_model, plan_device_map, predict_memory

STEP = Workload.generate(1, 16)


@pytest.fixture(scope="module", params=["W4A16", "FP8_DYNAMIC"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base that is packed, or whose weights are codes."""
    return save_compressed(tmp_path_factory.mktemp(request.param), request.param)[0]


def test_a_model_is_no_plain_one_that_only_its_config_calls_quantized(base: Path) -> None:
    model = load(base)
    assert not audit_model(model).findings
    logits(model)
    assert not audit_model(model).findings


@pytest.mark.parametrize(
    "verb", [lambda model: plan_device_map(model, {0: "1GB"}), lambda model: predict_memory(model, STEP)]
)
def test_codes_of_now_are_not_the_memory_of_a_model_and_the_advice_works(base: Path, verb: Any) -> None:
    model = load(base)
    with pytest.raises(ArgumentError, match=r"before its first forward pass, which decodes 14 layers"):
        verb(model)
    verb(base)
    logits(model)
    verb(model)


def test_a_decoded_model_is_forecast_as_its_folder(base: Path) -> None:
    model = load(base)
    before = logits(model)
    ran, folder = predict_memory(model, STEP), predict_memory(base, STEP)
    if any("to round the layers' inputs" in note for note in folder.notes):
        assert ran.allocated_peak_bytes > folder.allocated_peak_bytes
    else:
        assert ran.allocated_peak_bytes == folder.allocated_peak_bytes
    assert torch.equal(logits(model), before)


def test_a_head_in_codes_is_counted_beside_the_embedding_that_the_config_ties_it_to(tmp_path: Path) -> None:
    config = tiny_config("LlamaForCausalLM")
    config.tie_word_embeddings = True
    compress(LlamaForCausalLM(config).to(torch.bfloat16), "W8A8", [], tmp_path)
    model = load(tmp_path)
    logits(model)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    plan = plan_device_map(tmp_path, {0: "1GB"})
    assert counted(plan) == sum(stored(model).values())
    assert "base-untied" in {finding.code for finding in plan.findings}
