"""Experts in fp8, apart in the base and fused in the merged folder, as transformers saves them when it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_merge_lora_checkpoint_codes import SCALE, quantize
from test_verify_merge import Tensors, codes, rewritten, tensors_of, verdicts
from test_verify_merge_layouts import EXPERTS, Moe, apart, moe  # noqa: F401  # a fixture

from safe_loading import MergeError, merge_lora_checkpoint, verify_merge

BLOCK, PARTS = [16, 16], ("gate", "up", "down")


def in_fp8(folder: Path, target: Path) -> Path:
    """A base with every projection in fp8."""
    tensors: Tensors = {}
    for name, weight in tensors_of(folder).items():
        tensors[name] = weight
        if "_proj" in name:
            each = [quantize(one, BLOCK, "float") for one in weight.view(-1, *weight.shape[-2:])]
            found, scales = (torch.stack(parts) for parts in zip(*each, strict=True))
            is_fused = weight.dim() > 2
            tensors |= {name: found if is_fused else found[0], name + SCALE: scales if is_fused else scales[0]}
    rewritten(folder, target, tensors)
    config = json.loads((target / "config.json").read_text())
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return target


def fused(tensors: Tensors) -> Tensors:
    """The same with the experts of a layer in one tensor, and their scales in another."""
    out = dict(tensors)
    for layer in range(2):
        for suffix in ("", SCALE):
            experts: list[list[torch.Tensor]] = []
            for expert in range(4):
                own = [out.pop(apart(layer, expert, part) + suffix) for part in PARTS]
                experts.append([one if suffix else one.view(torch.uint8) for one in own])
            both = torch.stack([torch.cat(own[:2]) for own in experts]), torch.stack([own[2] for own in experts])
            for name, tensor in zip(EXPERTS, both, strict=True):
                whole = tensor if suffix else tensor.view(torch.float8_e4m3fn)
                out[f"model.layers.{layer}.{name}{suffix}"] = whole
    return out


def of_expert(tensors: Tensors, number: int) -> Tensors:
    return {
        apart(1, number, part) + suffix: tensors[apart(1, number, part) + suffix]
        for part in PARTS
        for suffix in ("", SCALE)
    }


class Fp8Moe:
    """A base in fp8 with its experts apart, and its merge."""

    def __init__(self, of: Moe, folder: Path) -> None:
        self.folder, self.adapter = folder, of.adapter
        self.base = in_fp8(of.folder / "apart", folder / "base")
        merge_lora_checkpoint(self.base, self.adapter, folder / "right")
        self.right, self.before = tensors_of(folder / "right"), tensors_of(self.base)

    def check(self, tensors: Tensors) -> Any:
        return verify_merge(self.base, self.adapter, rewritten(self.folder / "right", self.folder / "fused", tensors))


@pytest.fixture
def fp8(moe: Moe, tmp_path: Path) -> Fp8Moe:  # noqa: F811
    return Fp8Moe(moe, tmp_path)


def test_codes_apart_are_found_in_fused_ones(fp8: Fp8Moe) -> None:
    check = fp8.check(fused(fp8.right))
    assert check.ok, str(check)
    assert not codes(check)
    assert verdicts(check) == {"exact"}
    assert {tensor.name for tensor in check.tensors} == fp8.right.keys()
    assert next(t for t in check.tensors if t.name == apart(1, 2, "up")).within == (f"model.layers.1.{EXPERTS[0]}",)


def test_an_expert_without_its_update_is_named(fp8: Fp8Moe) -> None:
    check = fp8.check(fused({**fp8.right, **of_expert(fp8.before, 2)}))
    assert codes(check) == {"update-absent"}, str(check)
    assert {tensor.name for tensor in check.of("base")} == of_expert(fp8.before, 2).keys()


def test_wrong_scales_and_wrong_codes_are_named(fp8: Fp8Moe) -> None:
    name = apart(0, 3, "up")
    check = fp8.check(fused({**fp8.right, name + SCALE: fp8.right[name + SCALE] * 1.5}))
    assert codes(check) == {"values-differ"}, str(check)
    assert {tensor.name for tensor in check.of("other")} == {name, name + SCALE}


def test_fused_codes_without_their_scales_are_not_ok(fp8: Fp8Moe) -> None:
    tensors = fused(fp8.right)
    del tensors[f"model.layers.1.{EXPERTS[1]}{SCALE}"]
    check = fp8.check(tensors)
    assert not check.ok
    assert {tensor.name for tensor in check.of("missing")} == {
        apart(1, expert, "down") + suffix for expert in range(4) for suffix in ("", SCALE)
    }


def test_a_base_of_fused_codes_is_refused_by_name(fp8: Fp8Moe, moe: Moe) -> None:  # noqa: F811
    base = in_fp8(moe.folder / "fused", fp8.folder / "of fused")
    with pytest.raises(MergeError, match="merge into the base that it was made from") as refused:
        verify_merge(base, fp8.adapter, fp8.folder / "right")
    assert f"model.layers.1.{EXPERTS[0]}" in str(refused.value)
