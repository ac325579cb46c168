"""fp8 weights under block scales: what a block of any height is rounded under, whichever road merges it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_merge_lora_inplace_quantized import exact, fp8_model, fp8_values

from safe_loading import merge_lora_inplace
from safe_loading._merging.weights.rounding_loss import LossMeter


def merged_layer(model: Any) -> Any:
    merged: Any = merge_lora_inplace(model)
    return merged[0]


@pytest.mark.parametrize("height", [12, 5])
def test_blocks_of_any_height_are_rounded_under_one_scale(height: int) -> None:
    """A block is stored at once, though sums are taken in groups of eight rows, which do not divide it."""
    model = fp8_model(torch.float8_e4m3fn, torch.float32, (height, 16))
    with torch.no_grad():
        layer = model.base_model.model[0]
        layer.lora_A["default"].weight.zero_()[0, 3] = 5
        layer.lora_B["default"].weight.zero_()[17, 0] = 5
    wanted, merged = exact(layer), merged_layer(model)
    first, last = 17 // height * height, min(17 // height * height + height, 20)
    assert merged.weight_scale_inv[17 // height, 0] > 2**-9
    step = float(merged.weight_scale_inv[17 // height, 0]) * 32  # the widest, at 448
    assert bool(((fp8_values(merged) - wanted)[first:last, :16].abs() <= step / 2).all())
    assert bool(((fp8_values(merged) - wanted)[:, 16:].abs() <= 2**-9 * 16).all())


@pytest.mark.parametrize("scales", [None, torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("alpha", [8, 0.02])
def test_the_report_says_what_rounding_to_codes_lost(scales: torch.dtype | None, alpha: float) -> None:
    model = fp8_model(torch.float8_e4m3fn, scales, (8, 16), lora_alpha=alpha)
    layers = list(model.base_model.model)
    before, wanted = [fp8_values(layer.base_layer) for layer in layers], [exact(layer) for layer in layers]
    result: Any = merge_lora_inplace(model)
    report = result.merge_report
    for weight, layer, was, truth in zip(report.weights, result, before, wanted, strict=True):
        written, delta = fp8_values(layer), truth - was
        kept = float(((written - was) * delta).sum() / delta.square().sum())
        assert weight.rounding.error == pytest.approx(float((written - truth).norm() / truth.norm()), rel=1e-5)
        assert weight.rounding.update_kept == pytest.approx(kept, rel=1e-4, abs=1e-6)
        assert 0.01 < weight.rounding.base_error < 0.05  # three bits after the point
    codes = {finding.code: finding for finding in report.findings}
    assert ("update-lost" in codes) == (alpha < 1)
    assert codes["requantized"].where.startswith("2 weights, for example ")
    assert codes["requantized"].bytes == report.bytes


def test_what_is_lost_of_an_update_is_not_counted_twice_when_a_step_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = merged_layer_report(fp8_model(torch.float8_e4m3fn, torch.float32))
    add, calls = LossMeter.add, []

    def failing(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:  # within the second rows of eight
            raise MemoryError("no more memory")
        add(*arguments)

    monkeypatch.setattr(LossMeter, "add", failing)
    assert merged_layer_report(fp8_model(torch.float8_e4m3fn, torch.float32)) == wanted


def merged_layer_report(model: Any) -> list[Any]:
    merged: Any = merge_lora_inplace(model)
    return [weight.rounding for weight in merged.merge_report.weights]
