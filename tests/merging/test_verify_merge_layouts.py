"""Merged folders whose tensors have other names or parts than the base's: fused experts, renamed and turned trees."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import save_adapter
from test_merge_lora_checkpoint_codes import adapter_of, save_fp8
from test_verify_merge import Tensors, codes, rewritten, tensors_of, verdicts
from tiny_models import saved, skip_unless_buildable, tiny_config

from safe_loading import merge_lora_checkpoint, verify_merge

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GATE_UP, DOWN = (f"model.layers.1.{name}" for name in EXPERTS)


class Moe:
    """A mixture of experts in both layouts, an adapter on its experts, and the merge in both layouts."""

    def __init__(self, folder: Path) -> None:
        self.folder, kind = folder, transformers.Qwen3MoeForCausalLM
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved("Qwen3MoeForCausalLM", folder / "float32")
            kind.from_pretrained(folder / "float32", dtype=torch.bfloat16).save_pretrained(folder / "apart")
            kind.from_pretrained(folder / "apart").save_pretrained(folder / "fused", save_original_format=False)
            options: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "task_type": None}
            self.adapter = save_adapter(folder / "adapter", folder / "apart", auto_class=kind, **options)
        self.merged = {}
        for layout in ("apart", "fused"):
            merge_lora_checkpoint(folder / layout, self.adapter, folder / f"{layout}, merged")
            self.merged[layout] = tensors_of(folder / f"{layout}, merged")
        self.base = {layout: tensors_of(folder / layout) for layout in ("apart", "fused")}

    def check(self, base: str, layout: str, target: Path, changed: Tensors, *without: str) -> Any:
        """Judge the merge in a layout, with some other tensors, by the base in a layout."""
        tensors = {name: t for name, t in {**self.merged[layout], **changed}.items() if name not in without}
        folder = rewritten(self.folder / f"{layout}, merged", target, tensors)
        return verify_merge(self.folder / base, self.adapter, folder)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Moe:
    return Moe(tmp_path_factory.mktemp("moe"))


def apart(layer: int, expert: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


def test_experts_apart_are_found_in_a_fused_folder(moe: Moe, tmp_path: Path) -> None:
    check = moe.check("apart", "fused", tmp_path / "folder", {})
    assert check.ok, str(check)
    assert not codes(check)
    assert verdicts(check) == {"exact"}
    assert {tensor.name for tensor in check.tensors} == moe.merged["apart"].keys()  # a verdict for each expert
    assert {name for tensor in check.tensors for name in tensor.within} <= moe.merged["fused"].keys()
    assert next(t for t in check.tensors if t.name == apart(1, 2, "up")).within == (GATE_UP,)


def test_fused_experts_are_found_in_a_folder_that_has_them_apart(moe: Moe, tmp_path: Path) -> None:
    check = moe.check("fused", "apart", tmp_path / "folder", {})
    assert check.ok, str(check)
    assert not codes(check)
    assert verdicts(check) == {"exact"}
    assert {tensor.name for tensor in check.tensors} == moe.merged["apart"].keys()
    assert not any(tensor.within for tensor in check.tensors)


def of_expert(moe: Moe, tensors: Tensors, expert: int) -> Tensors:
    """The merge with the tensors of one expert exchanged, in both layouts."""
    out = {}
    for name in (GATE_UP, DOWN):
        out[name] = moe.merged["fused"][name].clone()
        out[name][expert] = tensors[name][expert]
    return out


@pytest.mark.parametrize("base", ["apart", "fused"])
def test_an_expert_without_its_update_is_named(moe: Moe, tmp_path: Path, base: str) -> None:
    names = {apart(1, 2, part) for part in ("gate", "up", "down")}
    found = moe.check(base, "fused", tmp_path / "fused", of_expert(moe, moe.base["fused"], 2))
    assert codes(found) == {"update-absent"}
    own = {tensor.name: tensor.detail for tensor in found.of("base")}
    if base == "apart":
        assert own.keys() == names
    else:
        assert own.keys() == {GATE_UP, DOWN}
        assert all("1 of its 4 updates" in detail for detail in own.values())
    found = moe.check(base, "apart", tmp_path / "apart", {name: moe.base["apart"][name] for name in names})
    assert codes(found) == {"update-absent"}
    assert {tensor.name for tensor in found.of("base")} == names


@pytest.mark.parametrize("base", ["apart", "fused"])
def test_permuted_experts_are_named(moe: Moe, tmp_path: Path, base: str) -> None:
    changed = {name: moe.merged["fused"][name][[0, 2, 1, 3]] for name in (GATE_UP, DOWN)}
    check = moe.check(base, "fused", tmp_path / "fused", changed)
    assert codes(check) == {"values-swapped"}, str(check)
    changed = {
        apart(1, expert, part): moe.merged["apart"][apart(1, 3 - expert, part)]
        for expert in (1, 2)
        for part in ("gate", "up", "down")
    }
    check = moe.check(base, "apart", tmp_path / "apart", changed)
    assert codes(check) == {"values-swapped"}, str(check)
    assert {tensor.name for tensor in check.of("swapped")} == changed.keys()
    detail = next(t.detail for t in check.of("swapped") if t.name == apart(1, 1, "up"))
    assert f"row 0 holds what row 0 of {apart(1, 2, 'up')} should hold" in detail


@pytest.mark.parametrize("base", ["apart", "fused"])
def test_gate_and_up_of_experts_that_are_swapped_are_named(moe: Moe, tmp_path: Path, base: str) -> None:
    whole = moe.merged["fused"][GATE_UP]
    check = moe.check(base, "fused", tmp_path / "fused", {GATE_UP: whole.roll(whole.shape[1] // 2, 1)})
    assert codes(check) == {"values-swapped"}, str(check)
    one, other = (moe.merged["apart"][apart(0, 3, part)] for part in ("gate", "up"))
    check = moe.check(base, "apart", tmp_path / "apart", {apart(0, 3, "gate"): other, apart(0, 3, "up"): one})
    assert codes(check) == {"values-swapped"}, str(check)
    assert {tensor.name for tensor in check.of("swapped")} == {apart(0, 3, "gate"), apart(0, 3, "up")}


@pytest.mark.parametrize("base", ["apart", "fused"])
@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_missing_expert_is_named_once_for_its_layer(moe: Moe, tmp_path: Path, base: str, number: int) -> None:
    names = {apart(1, number, part) for part in ("gate", "up", "down")}
    check = moe.check(base, "apart", tmp_path / "apart", {}, *names)
    assert codes(check) == {"merged-missing"}, str(check)
    assert {tensor.name for tensor in check.of("missing")} == names
    assert len(check.of("exact")) == len(moe.merged["apart"]) - len(names)  # the other experts are judged
    (finding,) = (finding for finding in check.findings if finding.code == "merged-missing")
    assert f"3 tensors are missing: expert {number} of model.layers.1.mlp.experts." in finding.message
    assert not check.ok


@pytest.mark.parametrize("base", ["apart", "fused"])
def test_a_part_of_an_expert_that_is_missing_is_named(moe: Moe, tmp_path: Path, base: str) -> None:
    check = moe.check(base, "apart", tmp_path / "apart", {}, apart(0, 1, "up"))
    assert codes(check) == {"merged-missing"}, str(check)
    assert [tensor.name for tensor in check.of("missing")] == [apart(0, 1, "up")]
    wrong = {apart(1, 2, "up"): moe.base["apart"][apart(1, 2, "up")]}
    check = moe.check(base, "apart", tmp_path / "two", wrong, apart(1, 0, "up"))
    assert [tensor.name for tensor in check.of("missing")] == [apart(1, 0, "up")]
    assert [tensor.name for tensor in check.of("base")] == [*wrong]


@pytest.mark.parametrize("base", ["apart", "fused"])
def test_a_fused_tensor_that_lacks_an_expert_is_named_once(moe: Moe, tmp_path: Path, base: str) -> None:
    cut = {name: moe.merged["fused"][name][[0, 1, 3]] for name in (GATE_UP, DOWN)}
    check = moe.check(base, "fused", tmp_path / "fused", cut)
    assert codes(check) == {"merged-shape"}, str(check)
    assert {tensor.name for tensor in check.of("shape")} == {GATE_UP, DOWN}
    assert all("3 of 4 experts" in tensor.detail for tensor in check.of("shape"))
    assert not check.ok


@pytest.mark.parametrize("base", ["apart", "fused"])
@pytest.mark.parametrize("kept", [[0, 1, 3], [3, 2]])
def test_the_experts_that_a_fused_tensor_lacks_are_named(moe: Moe, tmp_path: Path, base: str, kept: list[int]) -> None:
    update = moe.merged["fused"][GATE_UP].double() - moe.base["fused"][GATE_UP].double()
    small = (moe.base["fused"][GATE_UP].double() + 0.05 * update).to(moe.base["fused"][GATE_UP].dtype)
    (tensor,) = moe.check(base, "fused", tmp_path / "fused", {GATE_UP: small[kept]}).of("shape")
    lacking = ", ".join(str(number) for number in range(4) if number not in kept)
    assert tensor.detail.endswith(f"{len(kept)} of 4 experts, without {lacking}")
    same = moe.base["fused"][GATE_UP][[0, 0, 1]]  # which of the others is lacking cannot be said of a double one
    (tensor,) = moe.check(base, "fused", tmp_path / "double", {GATE_UP: same}).of("shape")
    assert tensor.detail.endswith("3 of 4 experts")


def test_all_experts_of_a_layer_that_are_missing(moe: Moe, tmp_path: Path) -> None:
    every = {apart(1, number, part) for number in range(4) for part in ("gate", "up", "down")}
    check = moe.check("apart", "apart", tmp_path / "apart", {}, *every)
    assert {tensor.name for tensor in check.of("missing")} == every
    check = moe.check("fused", "apart", tmp_path / "other", {}, *every)
    assert {tensor.name for tensor in check.of("missing")} == {GATE_UP, DOWN}
    check = moe.check("apart", "fused", tmp_path / "fused", {}, GATE_UP, DOWN)
    assert {tensor.name for tensor in check.of("missing")} == every


def test_other_layouts_in_another_dtype(moe: Moe, tmp_path: Path) -> None:
    for base, layout in (("apart", "fused"), ("fused", "apart")):
        merge_lora_checkpoint(moe.folder / layout, moe.adapter, tmp_path / layout, dtype=torch.float32)
        check = verify_merge(moe.folder / base, moe.adapter, tmp_path / layout)
        assert check.ok, str(check)
        assert verdicts(check) == {"exact"}
        assert "merged-dtype" in {finding.code for finding in check.findings}


RENAMED = ["LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "MixtralForCausalLM"]


@pytest.mark.parametrize("name", RENAMED)
def test_a_tree_that_was_renamed_is_followed(tmp_path: Path, name: str) -> None:
    skip_unless_buildable(name)
    kind: Any = getattr(transformers, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved(name, tmp_path / "float32")
        kind.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16).save_pretrained(tmp_path / "old")
        kind.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new", save_original_format=False)
        adapter = save_adapter(
            tmp_path / "adapter", tmp_path / "old", auto_class=kind, target_modules=["q_proj", "v_proj"], task_type=None
        )
    for manner in ("old", "new"):
        merge_lora_checkpoint(tmp_path / manner, adapter, tmp_path / f"{manner}, merged")
    old, new = (tensors_of(tmp_path / f"{manner}, merged") for manner in ("old", "new"))
    assert old.keys() != new.keys()
    for base, other in (("old", "new, merged"), ("new", "old, merged")):
        check = verify_merge(tmp_path / base, adapter, tmp_path / other)
        assert check.ok, str(check)
        assert not codes(check), str(check)
        assert verdicts(check) == {"exact"}
    before = tensors_of(tmp_path / "new")
    q = next(key for key in new if "layers.1.self_attn.q_proj.weight" in key and "vision" not in key)
    folder = rewritten(tmp_path / "new, merged", tmp_path / "wrong", {**new, q: before[q]})
    check = verify_merge(tmp_path / "old", adapter, folder)
    assert codes(check) == {"update-absent"}
    assert [tensor.name for tensor in check.of("base")] == [q]
    folder = rewritten(tmp_path / "new, merged", tmp_path / "less", {key: t for key, t in new.items() if key != q})
    assert len(verify_merge(tmp_path / "old", adapter, folder).of("missing")) == 1


def test_a_tied_head_of_a_renamed_tree(tmp_path: Path) -> None:
    name = "LlavaForConditionalGeneration"
    config = tiny_config(name)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    kind: Any = transformers.LlavaForConditionalGeneration
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind(config).to(torch.bfloat16).save_pretrained(tmp_path / "old")
        kind.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new", save_original_format=False)
        adapter = save_adapter(
            tmp_path / "adapter", tmp_path / "old", auto_class=kind, target_modules=["q_proj"], task_type=None
        )
    merge_lora_checkpoint(tmp_path / "new", adapter, tmp_path / "merged")
    merged = tensors_of(tmp_path / "merged")
    assert "lm_head.weight" not in merged
    head = {"lm_head.weight": merged["model.language_model.embed_tokens.weight"].clone()}
    both = rewritten(tmp_path / "merged", tmp_path / "both", {**merged, **head})
    for folder in (tmp_path / "merged", both):
        check = verify_merge(tmp_path / "old", adapter, folder)
        assert check.ok, str(check)
        assert not codes(check), str(check)


def test_experts_that_are_stored_transposed(tmp_path: Path) -> None:
    """As transformers 4 saved Qwen3-VL's: rows and columns of each expert exchanged."""
    name = "Qwen3VLMoeForConditionalGeneration"
    skip_unless_buildable(name)
    kind: Any = getattr(transformers, name)
    config = tiny_config(name)
    config.text_config.moe_intermediate_size = 24
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind(config).to(torch.bfloat16).save_pretrained(tmp_path / "new", save_original_format=False)
        options: dict[str, Any] = {"target_parameters": EXPERTS, "target_modules": ["q_proj"], "task_type": None}
        adapter = save_adapter(tmp_path / "adapter", tmp_path / "new", auto_class=kind, **options)
    tensors = tensors_of(tmp_path / "new")
    turned = {key: t.transpose(1, 2) if key.endswith(tuple(EXPERTS)) else t for key, t in tensors.items()}
    rewritten(tmp_path / "new", tmp_path / "old", turned)
    for manner in ("old", "new"):
        merge_lora_checkpoint(tmp_path / manner, adapter, tmp_path / f"{manner}, merged")
    assert any(t.shape != tensors_of(tmp_path / "old")[key].shape for key, t in tensors.items())
    for base, other in (("old", "new, merged"), ("new", "old, merged")):
        check = verify_merge(tmp_path / base, adapter, tmp_path / other)
        assert check.ok, str(check)
        assert verdicts(check) == {"exact"}
        assert not codes(check)
    merged = tensors_of(tmp_path / "old, merged")
    key = next(key for key in merged if key.endswith(EXPERTS[1]))
    merged[key][2] = turned[key][2]
    folder = rewritten(tmp_path / "old, merged", tmp_path / "wrong", merged)
    (wrong,) = verify_merge(tmp_path / "new", adapter, folder).of("base")
    assert wrong.name == key
    assert "1 of its 4 updates" in wrong.detail


def test_a_renamed_tree_that_keeps_its_codes(tmp_path: Path) -> None:
    base = save_fp8(tmp_path / "base", [16, 16])
    adapter = adapter_of(tmp_path, target_modules=["q_proj", "v_proj"])
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    merged = tensors_of(tmp_path / "merged")
    # Without the level of the base model, as AutoModel saves it.
    inner = {name.removeprefix("model."): tensor for name, tensor in merged.items()}
    folder = rewritten(tmp_path / "merged", tmp_path / "inner", inner)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]
    check = verify_merge(base, adapter, folder)
    assert verdicts(check) == {"exact"}, str(check)
