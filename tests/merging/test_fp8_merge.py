"""fp8 weights under block scales: what a block of any height is rounded under, whichever road merges it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_merge_lora_inplace_quantized import exact, fp8_model, fp8_values

from safe_loading import merge_lora_inplace


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
