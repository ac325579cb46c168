"""Merges in 16 bits on every road that programs take are right, and a factor that none of them gives is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import load_file, save_file
from test_verify_merge import codes, rewritten, tensors_of, verdicts
from test_verify_merge_attacks import Setting, noisy

from safe_loading import merge_lora_checkpoint, verify_merge

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 32}
HALF = [torch.bfloat16, torch.float16]
Q = "model.layers.0.self_attn.q_proj.weight"

Road = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
# From a weight in 16 bits, the factors A and B in float32, and the scaling, to the merged weight in 16 bits.
ROADS: dict[str, Road] = {
    "a float32 sum": lambda w, a, b, s: (w.float() + s * (b @ a)).to(w.dtype),
    "a float32 product, added in 16 bits": lambda w, a, b, s: w + (s * (b @ a)).to(w.dtype),
    "factors in 16 bits, a float32 sum": lambda w, a, b, s: (w.float() + s * (_16(b, w) @ _16(a, w))).to(w.dtype),
    "factors in 16 bits, a float32 product": lambda w, a, b, s: w + (s * (_16(b, w) @ _16(a, w))).to(w.dtype),
    "all in 16 bits": lambda w, a, b, s: w + s * (_16(b, w) @ _16(a, w)).to(w.dtype),
    "all in 16 bits, B scaled first": lambda w, a, b, s: w + (_16(s * _16(b, w), w) @ _16(a, w)).to(w.dtype),
    "all in 16 bits, A scaled first": lambda w, a, b, s: w + (_16(b, w) @ _16(s * _16(a, w), w)).to(w.dtype),
}


def _16(factor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A factor rounded to 16 bits; its products are summed in float32 as kernels do."""
    return factor.to(like.dtype).float()


def sized(adapter: Path, size: float, *, constant: bool = False) -> Path:
    """An adapter with a smaller update, or with one number in all of each factor."""
    file = adapter / "adapter_model.safetensors"
    tensors = {n: t * size if "lora_B" in n else t for n, t in load_file(file).items()}
    if constant:
        tensors = {n: torch.full_like(t, 0.1234 * (size if "lora_B" in n else 1)) for n, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return adapter


def on_a_road(
    base: Path, adapters: list[Path], target: Path, road: Road, dtype: torch.dtype, factor: float = 1.0
) -> Path:
    """The merge of adapters into a base that is loaded in 16 bits, one after the other."""
    merged = {name: tensor.to(dtype) for name, tensor in tensors_of(base).items()}
    for adapter in adapters:
        config = json.loads((adapter / "adapter_config.json").read_text())
        factors, scaling = load_file(adapter / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
        for name in merged:
            module = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{module}A.weight" in factors:
                a, b = factors[f"{module}A.weight"], factors[f"{module}B.weight"]
                merged[name] = road(merged[name], a, b, scaling * factor)
    return rewritten(base, target, merged)


@pytest.mark.each_value
@pytest.mark.parametrize("alpha", [8, 6])  # a scaling of 2 rounds nothing, and one of 1.5 does
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("stored", [None, torch.float32], ids=["stored as loaded", "stored in float32"])
def test_merges_on_every_road_are_right(
    tmp_path: Path, stored: torch.dtype | None, dtype: torch.dtype, alpha: int
) -> None:
    base = save_llama(tmp_path / "base", stored or dtype, **SIZES)
    for size, constant, count in ((1.0, False, 1), (0.03, False, 2), (0.003, False, 1), (0.1, True, 1)):
        adapters = [
            save_adapter(tmp_path / f"{size}{number}", base, seed=number, lora_alpha=alpha) for number in range(count)
        ]
        for adapter in adapters:
            sized(adapter, size, constant=constant)
        for number, (name, road) in enumerate(ROADS.items()):
            merged = on_a_road(base, adapters, tmp_path / f"{size}{constant}{number}", road, dtype)
            check = verify_merge(base, adapters, merged)
            assert check.ok, (name, size, constant, str(check))
            assert verdicts(check) <= {"exact", "rounding"}, (name, str(check))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_factor_that_no_rounding_gives_is_told(tmp_path: Path, dtype: torch.dtype, factor: float) -> None:
    base = save_llama(tmp_path / "base", dtype, **SIZES)
    adapter = sized(save_adapter(tmp_path / "adapter", base), 0.1)
    for number, road in enumerate(("a float32 sum", "all in 16 bits")):
        merged = on_a_road(base, [adapter], tmp_path / str(number), ROADS[road], dtype, factor)
        check = verify_merge(base, adapter, merged)
        assert "update-scaled" in codes(check), str(check)
        (tensor,) = (tensor for tensor in check.of("scaled") if tensor.name == Q)
        assert tensor.scale == pytest.approx(factor, abs=0.002)


def test_a_small_tensor_does_not_tell_a_factor(tmp_path: Path) -> None:
    """Of a hundred elements, those that a factor of 0.995 moves are as few as those that rounding decides."""
    base = save_llama(tmp_path / "base", torch.bfloat16, **{**SIZES, "hidden_size": 16, "intermediate_size": 16})
    adapter = sized(save_adapter(tmp_path / "adapter", base), 0.001)
    merged = on_a_road(base, [adapter], tmp_path / "merged", ROADS["a float32 sum"], torch.bfloat16, 0.995)
    assert verdicts(verify_merge(base, adapter, merged)) == {"exact", "rounding"}


def test_an_update_that_a_base_loses_when_it_is_loaded_in_16_bits_is_no_mistake(tmp_path: Path) -> None:
    """Of a base in float32, a small update moves some numbers; of that base in 16 bits, hardly any."""
    base = save_llama(tmp_path / "base", **{**SIZES, "hidden_size": 256, "intermediate_size": 512})
    adapter = sized(save_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "down_proj"]), 0.0005)
    for number, road in enumerate(("a float32 sum", "all in 16 bits")):
        merged = on_a_road(base, [adapter], tmp_path / str(number), ROADS[road], torch.bfloat16)
        check = verify_merge(base, adapter, merged)
        assert check.ok, str(check)
        assert verdicts(check) <= {"exact", "rounding"}
    without = rewritten(base, tmp_path / "without", {n: t.bfloat16() for n, t in tensors_of(base).items()})
    assert not verify_merge(base, adapter, without).ok


def test_noise_in_a_row_of_a_large_dora_is_found(tmp_path: Path) -> None:
    """Where an update is many times its weight, so is the product of the norms of its factors."""
    of = Setting(tmp_path, "llama", target_modules="all-linear", use_dora=True)
    sized(of.adapter, 10.0)
    merge_lora_checkpoint(of.base, of.adapter, tmp_path / "large")
    right = tensors_of(tmp_path / "large")
    name = "model.layers.1.self_attn.o_proj.weight"
    check = verify_merge(
        of.base, of.adapter, rewritten(tmp_path / "large", tmp_path / "w", {**right, name: noisy(right[name], 0.03)})
    )
    assert [tensor.name for tensor in check.of("other")] == [name], str(check)
    assert "row 3" in check.of("other")[0].detail
