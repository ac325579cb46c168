"""A model that accelerate dispatched is forecast and planned as it is without the hooks, which it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from wrapped_models import llama, peft_llama

from safe_loading import Workload, audit_model, plan_device_map, predict_memory

STEPS = [Workload.generate(2, 16), Workload.train(2, 16)]
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb")


def on_the_host(model: Any, _: Path) -> Any:
    return dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)


def in_part_on_the_disk(model: Any, folder: Path) -> Any:
    places = {**dict.fromkeys(PARTS, "cpu"), "model.layers.1": "disk", "lm_head": "cpu"}
    return dispatch_model(model, places, offload_dir=str(folder), force_hooks=True, main_device="cpu")


def offloaded(model: Any, _: Path) -> Any:
    return cpu_offload(model, execution_device=torch.device("cpu"))


WAYS = [on_the_host, in_part_on_the_disk, offloaded]


@pytest.mark.each_value
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.kind)
@pytest.mark.parametrize("way", WAYS)
def test_its_forecast_is_that_of_the_model_on_one_card(way: Any, step: Workload, tmp_path: Path) -> None:
    plain = predict_memory(llama(), step)
    model = way(llama(), tmp_path)
    forwards = {path: vars(module).get("forward") for path, module in model.named_modules()}
    forecast = predict_memory(model, step)
    assert (forecast.allocated_peak_bytes, forecast.components) == (plain.allocated_peak_bytes, plain.components)
    assert "those of each device are in plan_device_map(...).devices" in str(forecast)
    assert "plan_device_map" not in str(plain)
    assert {path: vars(module).get("forward") for path, module in model.named_modules()} == forwards


@pytest.mark.parametrize("way", WAYS)
def test_its_plan_is_that_of_the_model(way: Any, tmp_path: Path) -> None:
    limits = {0: "190KB", 1: "190KB"}
    plan = plan_device_map(way(llama(), tmp_path), limits, workload=STEPS[0])
    expected = plan_device_map(llama(), limits, workload=STEPS[0])
    assert (dict(plan), plan.devices, plan.verified) == (dict(expected), expected.devices, True)


def test_an_audit_has_its_forecast() -> None:
    model = peft_llama(on_the_host(llama(), Path()))
    assert audit_model(model, STEPS[1]).forecast is not None
