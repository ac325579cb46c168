"""Merges that bitsandbytes holds in codes are judged by codes: right ones by several roads, and seeded mistakes."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed
import pytest
import torch
from models import save_adapter
from packed import Tensors
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_verify_merge import codes, verdicts
from transformers import AutoModelForCausalLM, GPT2Config

from safe_loading import (
    CheckpointError,
    MergeCheck,
    MergeError,
    merge_lora_checkpoint,
    merge_lora_inplace,
    verify_merge,
)

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
KINDS = ["nf4", "nf4 nested", "int8"]
ROADS = ["peft", "this package", "quantized after"]
ALL: dict[str, Any] = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}
SHARE = 0.1  # of the size of the weights: what a training adds, or more


def times(folder: Path, target: Path, factor: float, layers: str = "") -> Path:
    """An adapter that adds a multiple of what another one adds, in some layers."""
    shutil.copytree(folder, target)
    file = target / "adapter_model.safetensors"
    tensors = {n: t * factor if "lora_B" in n and layers in n else t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def merged(base: Path, adapter: Path, target: Path, *, ours: bool = False, kind: str | None = None) -> Path:
    """Merge into the codes of a base, or into those that a plain base gets while it is loaded, and save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(packed.load(base, kind), adapter)
        own = merge_lora_inplace(model) if ours else model.merge_and_unload()
        own.save_pretrained(target, save_original_format=False)  # type: ignore[operator]  # engines before 5.23 fail
    return target


class Setting:
    """A plain base, its adapter, and what is made of them in codes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plain = folder, packed.save_plain(folder / "plain")
        whole = save_adapter(folder / "whole", self.plain, **ALL)
        factors = load_file(whole / "adapter_model.safetensors")
        one, other = (factors[f"base_model.model.{Q.replace('weight', f'lora_{side}.weight')}"] for side in "AB")
        self.adapter = times(whole, folder / "adapter", SHARE * 0.02 / float((2 * other @ one).std()))
        merge_lora_checkpoint(self.plain, self.adapter, folder / "merged plain")

    def base(self, kind: str) -> Path:
        folder = self.folder / f"base {kind}"
        return folder if folder.exists() else packed.save_packed(self.plain, folder, kind)

    def right(self, kind: str, road: str = "peft") -> Path:
        folder = self.folder / f"{road} {kind}"
        if folder.exists():
            return folder
        if road == "quantized after":
            return packed.save_packed(self.folder / "merged plain", folder, kind)
        return merged(self.base(kind), self.adapter, folder, ours=road == "this package")


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("blocks"))


@pytest.mark.each_value
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", [*KINDS, "fp4", "nf4 as bfloat16"])
def test_right_merges_are_right(of: Setting, kind: str, road: str) -> None:
    folder = of.right(kind, road)
    for base in (of.plain,) if road == "quantized after" else (of.plain, of.base(kind)):
        check = verify_merge(base, of.adapter, folder)
        assert check.ok, str(check)
        assert not codes(check), str(check)
        assert verdicts(check) <= {"exact", "rounding"}
        assert {tensor.name for tensor in check.tensors} == load_file(folder / "model.safetensors").keys()


def test_the_report_says_which_base_was_merged_into(of: Setting) -> None:
    check = verify_merge(of.plain, of.adapter, of.right("nf4"))
    assert {tensor.detail for tensor in check.tensors if tensor.name == Q} == {"merged into the base's codes"}
    check = verify_merge(of.plain, of.adapter, of.right("nf4", "quantized after"))
    assert {tensor.detail for tensor in check.tensors} == {""}


def transposed(of: Setting, kind: str, target: Path) -> Path:
    """A merge that adds the update of square layers turned around."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = PeftModel.from_pretrained(packed.load(of.base(kind)), of.adapter)
        layer = model.get_submodule(f"base_model.model.{Q.removesuffix('.weight')}")
        right = layer.get_delta_weight
        layer.get_delta_weight = lambda name: right(name).T
        model.merge_and_unload().save_pretrained(target, save_original_format=False)
    return target


def of_another_run(of: Setting, kind: str, target: Path) -> Path:
    other = save_adapter(target.parent / "other", of.plain, seed=3, **ALL)
    return merged(of.base(kind), times(other, target.parent / "other small", 0.04), target)


def by(factor: float, layers: str = "") -> Callable[[Setting, str, Path], Path]:
    """A merge of a multiple of the update."""
    return lambda of, kind, target: merged(
        of.base(kind), times(of.adapter, target.parent / "times", factor, layers), target
    )


Make = Callable[[Setting, str, Path], Path]
WRONG: dict[str, tuple[str, str, Make]] = {
    "the base": ("update-absent", "base", lambda of, kind, target: Path(shutil.copytree(of.base(kind), target))),
    "without the update": ("update-absent", "base", by(0)),
    "without one layer's": ("update-absent", "base", by(0, "layers.1.self_attn.q_proj")),
    "twice": ("update-twice", "twice", by(2)),
    "the wrong sign": ("update-scaled", "scaled", by(-1)),
    "without alpha over r": ("update-scaled", "scaled", by(0.5)),
    "alpha over the root of r": ("update-scaled", "scaled", by(2**0.5)),
    "transposed": ("update-transposed", "transposed", transposed),
    "another adapter": ("values-differ", "other", of_another_run),
}


@pytest.mark.each_value
@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_are_named(of: Setting, tmp_path: Path, kind: str, mistake: str) -> None:
    code, verdict, make = WRONG[mistake]
    folder = make(of, kind, tmp_path / "wrong")
    for base in (of.base(kind), of.plain):
        check = verify_merge(base, of.adapter, folder)
        assert codes(check) == {code}, str(check)
        found = [tensor.verdict for tensor in check.tensors if tensor.name == Q]
        assert found == [verdict], str(check)


def edited(of: Setting, kind: str, target: Path, change: Callable[[Tensors], object]) -> MergeCheck:
    """The check of a right merge of which some tensors are changed."""
    shutil.copytree(of.right(kind), target)
    packed.edit(target, change)
    return verify_merge(of.base(kind), of.adapter, target)


def test_one_wrong_code_is_told_with_its_distance_and_place(of: Setting, tmp_path: Path) -> None:
    def flip(tensors: Tensors) -> None:
        tensors[Q].view(-1)[3 * 64 + 5] ^= 0x30  # row 3, and the columns 10 and 11

    check = edited(of, "nf4", tmp_path / "wrong", flip)
    (tensor,) = [tensor for tensor in check.of("other") if tensor.name == Q]
    assert tensor.wrong == 1
    assert "off the nearest" in tensor.detail
    assert "[3, 10]" in tensor.detail


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_others_are_wrong(of: Setting, tmp_path: Path, kind: str) -> None:
    name = Q.replace("weight", "SCB") if kind == "int8" else f"{Q}.{'nested_' * ('nested' in kind)}absmax"
    check = edited(of, kind, tmp_path / "wrong", lambda tensors: tensors[name].mul_(1.1))
    assert codes(check) == {"values-differ"}, str(check)
    assert {Q, name} <= {tensor.name for tensor in check.of("other")}


def test_rows_that_were_swapped_are_told(of: Setting, tmp_path: Path) -> None:
    def swap(tensors: Tensors) -> None:
        for name, per_row in ((Q, 64), (f"{Q}.absmax", 2)):  # of 128 columns
            rows = tensors[name].view(-1, per_row)
            rows[[3, 9]] = rows[[9, 3]].clone()

    assert codes(edited(of, "nf4", tmp_path / "wrong", swap)) == {"values-swapped"}


def test_codes_without_their_statistics_are_refused_by_name(of: Setting, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"lacks {Q}.absmax"):
        edited(of, "nf4", tmp_path / "wrong", lambda tensors: tensors.pop(f"{Q}.absmax"))


def test_a_row_may_end_within_a_block(tmp_path: Path) -> None:
    plain = packed.save_plain(tmp_path / "plain", width=104, intermediate_size=78)
    adapter = save_adapter(tmp_path / "adapter", plain, **ALL)
    right = merged(plain, adapter, tmp_path / "right", kind="nf4 nested")
    assert verify_merge(plain, adapter, right).ok
    shutil.copytree(right, tmp_path / "wrong")
    packed.edit(tmp_path / "wrong", lambda tensors: tensors[UP].view(-1)[-1:].bitwise_xor_(1))  # the last of all
    (tensor,) = [tensor for tensor in verify_merge(plain, adapter, tmp_path / "wrong").of("other") if tensor.name == UP]
    assert "[77, 103]" in tensor.detail


def test_dora(of: Setting, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "dora", of.plain, **ALL, use_dora=True)
    right = merged(of.base("nf4"), adapter, tmp_path / "right")
    for base in (of.plain, of.base("nf4")):
        assert verify_merge(base, adapter, right).ok
        check = verify_merge(base, adapter, of.right("nf4"))
        assert not check.ok
        assert Q in {tensor.name for tensor in check.of("other")}


def test_what_cannot_be_judged_is_refused_with_a_road(of: Setting, tmp_path: Path) -> None:
    road = "Pass the folder that it was made from, before it is quantized"
    with pytest.raises(MergeError, match=f"several adapters are rounded to codes one after the other. {road}"):
        verify_merge(of.plain, [of.adapter, of.folder / "whole"], of.right("nf4"))
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=101, n_embd=64, n_layer=1, n_head=4, n_positions=32))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "gpt2", target_modules=["c_attn"])
    packed.save_packed(tmp_path / "gpt2", tmp_path / "codes", "nf4")
    with pytest.raises(MergeError, match=rf"transposed weights \(Conv1D\). {road}"):
        verify_merge(tmp_path / "gpt2", adapter, tmp_path / "codes")


def test_an_update_as_small_as_the_distance_of_16_bits_is_no_mistake(tmp_path: Path) -> None:
    """Added in bfloat16, seven tenths of that distance are a whole one: 43 % more of the update than is right."""
    model = packed.load(packed.save_plain(tmp_path / "model", 256))
    drawn = torch.rand(2, 256, 256, generator=torch.Generator().manual_seed(0))
    values = 0.8 * drawn[0] - 0.4
    values[:, ::64] = 0.5 + 0.45 * drawn[1, :, ::64]  # the largest one of each block
    model.get_parameter(Q).data = values.bfloat16()
    model.save_pretrained(tmp_path / "plain")
    plain = tmp_path / "plain"
    adapter = save_adapter(tmp_path / "adapter", plain, r=1, lora_alpha=1, target_modules=["q_proj"])
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    fill = {"A": 0.7 * 2**-8, "B": 1.0}
    save_file({n: torch.full_like(t, fill[n.split("lora_")[1][0]]) for n, t in factors.items()}, file)
    merge_lora_checkpoint(plain, adapter, tmp_path / "merged")
    for kind in ("nf4", "nf4 nested"):
        check = verify_merge(plain, adapter, packed.save_packed(tmp_path / "merged", tmp_path / kind, kind))
        assert check.ok, str(check)
