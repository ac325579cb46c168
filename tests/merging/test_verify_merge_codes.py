"""Merges that keep the codes of their base are judged by codes: right ones, and seeded mistakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from models import save_adapter, save_llama
from test_merge_lora_checkpoint_codes import SCALE, adapter_of, quantize, save_fp8, spread
from test_merge_lora_checkpoint_expert_codes import adapter_of as adapter_of_experts
from test_merge_lora_checkpoint_expert_codes import decoded
from test_merge_lora_checkpoint_quantized import gpt_oss
from test_verify_merge import Tensors, codes, rewritten, tensors_of, verdicts

from safe_loading import MergeError, merge_lora_checkpoint, verify_merge
from safe_loading._model.formats.mxfp4 import pack_mxfp4, requantize_mxfp4

Q = "model.layers.1.self_attn.q_proj.weight"
BLOCK = [16, 16]
LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]}
Values = dict[str, torch.Tensor]


def values_of(tensors: Tensors, block: list[int] | None = None) -> Values:
    """What the fp8 codes stand for, in float64."""
    return {
        name: tensor.float().double() * spread(tensors[name + SCALE], block or BLOCK, tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float8_e4m3fn
    }


def encoded(values: Values, names: set[str]) -> Tensors:
    """Codes and scales as who quantizes anew makes them."""
    out: Tensors = {}
    for name in names:
        out[name], out[name + SCALE] = quantize(values[name], BLOCK, "float")
    return out


class Fp8:
    """A base in fp8, an adapter, their merge, and its exact values."""

    def __init__(self, folder: Path) -> None:
        self.base = save_fp8(folder / "base", BLOCK)
        self.adapter = adapter_of(folder, **LORA)
        merge_lora_checkpoint(self.base, self.adapter, folder / "right")
        merge_lora_checkpoint(self.base, self.adapter, folder / "exact", dequantize=True, dtype="float64")
        self.right, self.before = tensors_of(folder / "right"), tensors_of(self.base)
        self.exact = tensors_of(folder / "exact")
        self.values = values_of(self.before)
        self.changed = {name for name in self.values if not torch.equal(self.values[name], self.exact[name])}
        self.folder = folder

    def check(self, tensors: Tensors) -> Any:
        wrong = rewritten(self.folder / "right", self.folder / "wrong", {**self.right, **tensors})
        return verify_merge(self.base, self.adapter, wrong)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Fp8:
    return Fp8(tmp_path_factory.mktemp("fp8"))


@pytest.fixture(autouse=True)
def without_the_wrong_folder(request: pytest.FixtureRequest) -> Any:
    yield
    if "fp8" in request.fixturenames:
        shutil.rmtree(request.getfixturevalue("fp8").folder / "wrong", ignore_errors=True)


def test_the_merge_of_this_package_is_exact(fp8: Fp8) -> None:
    check = verify_merge(fp8.base, fp8.adapter, fp8.folder / "right")
    assert check.ok
    assert not codes(check)
    assert verdicts(check) == {"exact"}
    assert len(check.tensors) == len(fp8.right)


def in_bfloat16(fp8: Fp8) -> Values:
    """Decoded to bfloat16, added to in bfloat16: what is encoded by who merges a dequantized base."""
    return {n: (v.bfloat16() + (fp8.exact[n] - v).bfloat16()).double() for n, v in fp8.values.items()}


@pytest.mark.parametrize("of", ["exact sums", "sums in bfloat16"])
def test_codes_under_scales_of_another_program_are_right(fp8: Fp8, of: str) -> None:
    values = {**fp8.values, **(fp8.exact if of == "exact sums" else in_bfloat16(fp8))}
    check = fp8.check(encoded(values, set(fp8.values)))  # unchanged weights too
    assert check.ok, str(check)
    assert not codes(check), str(check)
    assert verdicts(check) == {"exact", "rounding"}


def coarse(tensors: Tensors, exact: Values) -> Tensors:
    """The nearest codes under scales that are thousands of times too large."""
    scale = tensors[Q + SCALE] * 2**13
    return {Q: (exact[Q] / spread(scale, BLOCK, exact[Q].shape)).to(torch.float8_e4m3fn), Q + SCALE: scale}


def one_code_off(tensors: Tensors, exact: Values) -> Tensors:
    found = tensors[Q].clone().view(torch.uint8)
    found[3, 5] ^= 2
    return {Q: found.view(torch.float8_e4m3fn)}


Wrong = Callable[[Fp8], Tensors]
WRONG: dict[str, tuple[str, str, Wrong]] = {
    "base": ("update-absent", "base", lambda of: {n: t for n, t in of.before.items() if n.removesuffix(SCALE) == Q}),
    "all of the base": ("update-absent", "base", lambda of: of.before),
    "twice": (
        "update-twice",
        "twice",
        lambda of: encoded({n: 2 * of.exact[n] - of.values[n] for n in of.changed}, of.changed),
    ),
    "transposed": (
        "update-transposed",
        "transposed",
        lambda of: encoded({Q: of.values[Q] + (of.exact[Q] - of.values[Q]).T}, {Q}),
    ),
    "negated": ("update-scaled", "scaled", lambda of: encoded({Q: 2 * of.values[Q] - of.exact[Q]}, {Q})),
    "without alpha over r": (
        "update-scaled",
        "scaled",
        lambda of: encoded({Q: (of.exact[Q] + of.values[Q]) / 2}, {Q}),
    ),
    "scales too large": ("values-differ", "other", lambda of: coarse(of.right, of.exact)),
    "one code off": ("values-differ", "other", lambda of: one_code_off(of.right, of.exact)),
    "scales of the base": ("values-differ", "other", lambda of: {Q + SCALE: of.before[Q + SCALE] * 1.5}),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_codes_are_named(fp8: Fp8, mistake: str) -> None:
    code, verdict, make = WRONG[mistake]
    check = fp8.check(make(fp8))
    assert not check.ok
    assert codes(check) == {code}, str(check)
    assert Q in {tensor.name for tensor in check.of(verdict)}


def test_how_many_codes_off_is_said(fp8: Fp8) -> None:
    check = fp8.check(one_code_off(fp8.right, fp8.exact))
    (tensor,) = check.of("other")
    assert "up to 2 codes off the nearest" in tensor.detail
    assert "[3, 5]" in tensor.detail


def test_codes_without_their_scales_are_unchecked_and_not_ok(fp8: Fp8) -> None:
    right = {name: tensor for name, tensor in fp8.right.items() if name != Q + SCALE}
    check = verify_merge(fp8.base, fp8.adapter, rewritten(fp8.folder / "right", fp8.folder / "wrong", right))
    assert [tensor.name for tensor in check.of("unchecked")] == [Q]
    assert [tensor.name for tensor in check.of("missing")] == [Q + SCALE]
    assert codes(check) >= {"merged-unchecked", "merged-missing"}
    assert not check.ok
    shutil.rmtree(fp8.folder / "wrong")
    right = {name: tensor for name, tensor in fp8.right.items() if name != Q}
    check = verify_merge(fp8.base, fp8.adapter, rewritten(fp8.folder / "right", fp8.folder / "wrong", right))
    assert [tensor.name for tensor in check.of("unchecked")] == [Q + SCALE]
    assert [tensor.name for tensor in check.of("missing")] == [Q]
    shutil.rmtree(fp8.folder / "wrong")
    check = fp8.check({Q + SCALE: fp8.right[Q + SCALE].bfloat16()})
    assert codes(check) == {"merged-unchecked", "merged-shape"}


@needs("transformers", "5.10")  # which converts these by an operation of its own before
def test_mxfp4(tmp_path: Path) -> None:
    base, plain = gpt_oss(tmp_path)
    adapter = adapter_of_experts(tmp_path / "adapter", plain, lora_alpha=8)
    merge_lora_checkpoint(base, adapter, tmp_path / "right")
    merge_lora_checkpoint(base, adapter, tmp_path / "exact", dequantize=True, dtype="float64")
    right, before, exact = (tensors_of(folder) for folder in (tmp_path / "right", base, tmp_path / "exact"))
    check = verify_merge(base, adapter, tmp_path / "right")
    assert check.ok
    assert verdicts(check) == {"exact"}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = f"{name}_blocks", f"{name}_scales"

    def encoded(values: torch.Tensor) -> Tensors:
        experts, columns, rows = values.shape
        flat, was = values.transpose(1, 2).reshape(-1, columns), before[scales].reshape(experts * rows, -1)
        codes, exponents = requantize_mxfp4(flat.contiguous(), was)
        return {blocks: pack_mxfp4(codes).view(before[blocks].shape), scales: exponents.view(before[scales].shape)}

    plain_values = decoded(before[blocks], before[scales]).flatten(-2).transpose(1, 2)
    wide, update = exact[name], exact[name] - plain_values
    one_expert = right[blocks].clone(), right[scales].clone()
    one_expert[0][1], one_expert[1][1] = before[blocks][1], before[scales][1]
    wrong = {
        "rounding": encoded(wide.bfloat16().double()),
        "base": {blocks: before[blocks], scales: before[scales]},
        "twice": encoded(plain_values + 2 * update),
        "scaled": encoded(plain_values - update),
        "swapped": {blocks: right[blocks][[1, 0, 2]], scales: right[scales][[1, 0, 2]]},
    }
    for number, (verdict, tensors) in enumerate(wrong.items()):
        folder = rewritten(tmp_path / "right", tmp_path / str(number), {**right, **tensors})
        check = verify_merge(base, adapter, folder)
        assert check.ok == (verdict == "rounding")
        assert {t.verdict for t in check.tensors if t.name == blocks} <= {verdict, "exact"}, (verdict, str(check))
    folder = rewritten(tmp_path / "right", tmp_path / "one", {**right, blocks: one_expert[0], scales: one_expert[1]})
    check = verify_merge(base, adapter, folder)
    assert [tensor.name for tensor in check.of("base")] == [blocks, scales]
    assert "1 of its 3 updates" in check.of("base")[0].detail


def test_a_folder_in_another_format_than_its_base_is_refused(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    for method, dtype in (("bitsandbytes", torch.uint8), ("fp8", torch.float8_e4m3fn)):
        folder = rewritten(tmp_path / "merged", tmp_path / method, {**tensors, Q: tensors[Q].to(dtype)})
        config = json.loads((folder / "config.json").read_text())
        settings = {"quant_method": method, "load_in_4bit": method == "bitsandbytes"}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        with pytest.raises(MergeError, match="Pass the folder that it was made from, before it is quantized"):
            verify_merge(base, adapter, folder)
    plain = {**config, "quantization_config": {"quant_method": "bitsandbytes"}}  # of neither 4 nor 8 bits
    (tmp_path / "bitsandbytes" / "config.json").write_text(json.dumps(plain))
    assert not verify_merge(base, adapter, tmp_path / "bitsandbytes").ok  # whose codes are values, for transformers
    assert verify_merge(base, adapter, tmp_path / "merged").ok  # the folder that they were made from
