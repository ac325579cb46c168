"""Each layout of LoRAs of experts over each family of mixtures, against updates added by hand to the base's files."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import needs
from faults import adapters as faults
from models import save_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)

pytestmark = [needs("peft", "0.20"), needs("transformers", "5.10")]

EXPERTS, RANK, ALPHA = 3, 2, 5
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 20}
DEEPSEEK = {"n_routed_experts": EXPERTS, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_shared_experts": 1}
GROUPS = {"n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ERNIE = {"moe_num_experts": EXPERTS, "moe_intermediate_size": 20, "moe_k": 2, "moe_num_shared_experts": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 28, "mlp_only_layers": [0]},
    "qwen3_moe": {**QWEN, "mlp_only_layers": [0]},
    "olmoe": {"num_experts": EXPERTS},
    "deepseek_v3": {**DEEPSEEK, **GROUPS, **LATENT, "num_key_value_heads": 4},
    "glm4_moe": {**DEEPSEEK, **GROUPS},
    "qwen3_next": {
        **QWEN,
        "shared_expert_intermediate_size": 28,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "minimax_m2": {"num_local_experts": EXPERTS},
    "dots1": {**DEEPSEEK, **GROUPS},
    "ernie4_5_moe": {**ERNIE, "moe_layer_start_index": 1},
    "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": 2},
    "flex_olmo": {"num_experts": EXPERTS},
}
LAYOUTS = ("targets", "pattern", "fused", "fused by peft 0.17", "fused by unsloth", "grouped", "stacked")
CELLS = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
SAMPLE = random.Random(32).sample(CELLS, 8)
Tensors = dict[str, torch.Tensor]


class Adapter(NamedTuple):
    """An adapter, and the weights of its base with what it adds, worked out by hand."""

    folder: Path
    truth: Tensors


def save_base(folder: Path, family: str, **sizes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def leaves_of(weights: Mapping[str, torch.Tensor]) -> tuple[str, str, str]:
    """The names of an expert's gate, up and down."""
    old = any(".experts.0.w1." in name for name in weights)
    return ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")


def factors(weights: Tensors, select: Callable[[str], bool]) -> Tensors:
    """The factors of a LoRA for each selected module, by peft's keys."""
    made = {}
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if weight.dim() == 2 and select(path):
            made[f"base_model.model.{path}.lora_A.weight"] = torch.randn(RANK, weight.shape[1]) / 8
            made[f"base_model.model.{path}.lora_B.weight"] = torch.randn(weight.shape[0], RANK) / 8
    return made


def add(weights: Tensors, name: str, delta: torch.Tensor) -> None:
    weights[name] = (weights[name].double() + ALPHA / RANK * delta).float()


def with_fused(weights: Tensors, layout: str) -> tuple[Tensors, Tensors]:
    """Factors of fused experts in a layout, and the weights with what they add."""
    gate, up, down = leaves_of(weights)
    tensors, truth = {}, dict(weights)
    owners = [match[1] for name in weights if (match := re.fullmatch(r"(.*\.experts)\.0\.\w+\.weight", name))]
    for owner in dict.fromkeys(owners):
        for name, leaves in (("lora_gate_and_up", (gate, up)), ("lora_down", (down,))):
            rows = sum(weights[f"{owner}.0.{leaf}.weight"].shape[0] for leaf in leaves)
            columns = weights[f"{owner}.0.{leaves[0]}.weight"].shape[1]
            a, b = torch.randn(EXPERTS, RANK, columns) / 8, torch.randn(EXPERTS, rows, RANK) / 8
            for expert in range(EXPERTS):
                parts = (b[expert].double() @ a[expert].double()).chunk(len(leaves))
                for leaf, part in zip(leaves, parts, strict=True):
                    add(truth, f"{owner}.{expert}.{leaf}.weight", part)
            key = f"base_model.model.{owner}".replace("block_sparse_moe", "mlp")  # the name in the model
            if layout == "grouped":
                tensors |= {f"{key}.{name}_A": a.transpose(1, 2), f"{key}.{name}_B": b.transpose(1, 2)}
                continue
            if layout == "stacked":  # by Megatron-Bridge, under the parameter's name (SkyRL#1852)
                parameter = "gate_up_proj" if leaves == (gate, up) else "down_proj"
                tensors |= {f"{key}.{parameter}.lora_A.weight": a, f"{key}.{parameter}.lora_B.weight": b}
                continue
            if "peft 0.17" in layout:  # einsum("o r e, e r i -> e i o")
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            key += ".base_layer" if leaves == (gate, up) else ""
            tensors[f"{key}.lora_A.weight"] = a.reshape(-1, a.shape[2])
            # of one expert next to each other, or of all experts for each rank
            order = (1, 0, 2) if "unsloth" in layout else (1, 2, 0)
            tensors[f"{key}.lora_B.weight"] = b.permute(order).reshape(b.shape[1], -1)
    return {key: value.contiguous() for key, value in tensors.items()}, truth


def save_expert_adapter(folder: Path, base: Path, layout: str) -> Adapter:
    weights = load_file(base / "model.safetensors")
    leaves = leaves_of(weights)
    attention = "q_b_proj" if any("q_b_proj" in name for name in weights) else "q_proj"
    torch.manual_seed(1)
    config: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "peft_version": "0.19.1"}
    if layout == "targets":
        config |= {"target_modules": [attention, *leaves], "peft_version": "0.14.0"}
        tensors = factors(weights, lambda path: path.rpartition(".")[2] in (attention, *leaves))
    elif layout == "pattern":
        pattern = rf".*\.experts\.\d+\.({'|'.join(leaves)})|.*\.self_attn\.{attention}"
        config |= {"target_modules": pattern, "peft_version": "0.14.0"}
        tensors = factors(weights, lambda path: re.fullmatch(pattern, path) is not None)
    else:
        tensors = factors(weights, lambda path: path.endswith(f".self_attn.{attention}"))
    truth = dict(weights)
    for key in [key for key in tensors if ".lora_A." in key]:
        b, a = tensors[key.replace(".lora_A.", ".lora_B.")], tensors[key]
        name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
        add(truth, name, b.double() @ a.double())
    if layout not in ("targets", "pattern"):
        fused, truth = with_fused(truth, layout)
        tensors |= fused
        whole = {"grouped": ["experts"], "stacked": ["experts.gate_up_proj", "experts.down_proj"]}.get(layout)
        config |= {"target_modules": [attention, *(whole or ())]}
        config |= {} if whole else {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        config |= {"peft_version": "0.17.1"} if "peft 0.17" in layout else {}
        if "unsloth" in layout:
            config |= {"auto_mapping": {"unsloth_fixed": True}, "lora_B_layout": "grouped_by_expert"}
    plain = save_adapter(folder / "plain", base, target_modules=[attention], r=RANK)

    def replace(old: faults.Tensors) -> None:
        old.clear()
        old.update(tensors)

    return Adapter(faults.edited(plain, folder / "adapter", tensors=replace, config=lambda c: c.update(config)), truth)


def off(found: Tensors, adapter: Adapter) -> float:
    assert found.keys() == adapter.truth.keys()
    return max(float((found[name] - value).abs().max()) for name, value in adapter.truth.items())


def weights_in(folder: Path) -> Tensors:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(1, 25).reshape(2, 12)).logits
    return found


def ways(base: Path, adapter: Adapter, folder: Path) -> dict[str, str]:
    """How each way to use an adapter comes out: "right", "WRONG", or why it is refused."""
    found = {}
    true_base = folder / "truth"
    true_base.mkdir(parents=True)
    save_file(adapter.truth, true_base / "model.safetensors", metadata={"format": "pt"})
    (true_base / "config.json").write_text((base / "config.json").read_text())
    wanted = logits(AutoModelForCausalLM.from_pretrained(true_base))

    def disk() -> bool:
        merge_lora_checkpoint(base, adapter.folder, folder / "merged")
        return off(weights_in(folder / "merged"), adapter) < 1e-6

    def load() -> bool:
        return torch.allclose(logits(load_peft_on_rank(base, adapter.folder)), wanted, atol=1e-5)

    def later() -> bool:
        model = load_peft_on_rank(adapter.folder, base)
        load_adapter_on_rank(model, adapter.folder, "later")
        model.set_adapter("later")
        return torch.allclose(logits(model), wanted, atol=1e-5)

    def memory() -> bool:
        merge_lora_inplace(load_peft_on_rank(base, adapter.folder)).save_pretrained(folder / "in memory")
        return off(weights_in(folder / "in memory"), adapter) < 1e-6

    for way in (disk, load, later, memory):
        try:
            found[way.__name__] = "right" if way() else "WRONG"
        except AdapterError as error:
            found[way.__name__] = f"refused: {error}"
    return found


def assert_right(tmp_path: Path, family: str, layout: str) -> None:
    base = save_base(tmp_path / "base", family)
    adapter = save_expert_adapter(tmp_path, base, layout)
    assert ways(base, adapter, tmp_path) == dict.fromkeys(("disk", "load", "later", "memory"), "right")


@pytest.mark.parametrize(("family", "layout"), SAMPLE)
def test_a_sample_of_families_and_layouts(tmp_path: Path, family: str, layout: str) -> None:
    assert_right(tmp_path, family, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [cell for cell in CELLS if cell not in SAMPLE])
def test_all_other_families_and_layouts(tmp_path: Path, family: str, layout: str) -> None:
    assert_right(tmp_path, family, layout)


def test_the_page_has_a_row_for_each_layout_and_no_cell_that_is_not_right() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    table = page.partition("<!-- layouts -->")[2].partition("<!-- end of layouts -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert len(rows) == len(LAYOUTS)
    assert {cell for row in rows for cell in row[1:5]} == {f"{len(FAMILIES)} of {len(FAMILIES)}"}
    assert all(family in page for family in FAMILIES)


SQUARE = {"hidden_size": 32, "moe_intermediate_size": 32, "intermediate_size": 32}


@pytest.mark.parametrize("layout", ["fused", "fused by peft 0.17"])
def test_the_layout_of_square_experts_is_told_by_the_version(tmp_path: Path, layout: str) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe", **SQUARE)
    adapter = save_expert_adapter(tmp_path, base, layout)
    assert set(ways(base, adapter, tmp_path).values()) == {"right"}


def test_square_experts_without_a_version_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe", **SQUARE)
    adapter = save_expert_adapter(tmp_path, base, "fused by peft 0.17")
    nameless = faults.edited(adapter.folder, tmp_path / "nameless", config=lambda c: c.pop("peft_version"))
    with pytest.raises(AdapterError, match=r"write the peft_version that it was trained with into adapter_config"):
        load_peft_on_rank(base, nameless)
    with pytest.raises(AdapterError, match=r"fused-layout-unknown"):  # half of the guesses would be wrong
        load_peft_on_rank(base, nameless, strict=False)
    with pytest.raises(AdapterError, match=r"down_proj is \[3, 32, 32\].*has no peft_version"):
        merge_lora_checkpoint(base, nameless, tmp_path / "merged")
    mended = faults.edited(nameless, tmp_path / "mended", config=lambda c: c.update(peft_version="0.17.1"))
    merge_lora_checkpoint(base, mended, tmp_path / "merged")
    assert off(weights_in(tmp_path / "merged"), adapter) < 1e-6


@pytest.mark.parametrize("older", [False, True])
def test_the_order_in_which_unsloth_packed_experts_is_asked_for(tmp_path: Path, older: bool) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    adapter = save_expert_adapter(tmp_path, base, "fused by unsloth" if older else "fused")

    def unmarked(config: dict[str, Any]) -> None:
        config.pop("lora_B_layout", None)
        config["auto_mapping"] = {"unsloth_fixed": True}

    silent = adapter._replace(folder=faults.edited(adapter.folder, tmp_path / "silent", config=unmarked))
    report = merge_lora_checkpoint(base, silent.folder, tmp_path / "guessed")
    (told,) = [finding for finding in report.findings if finding.code == "expert-packing-unknown"]
    assert told.severity == "warning"
    assert (off(weights_in(tmp_path / "guessed"), silent) < 1e-6) is not older  # as peft takes it
    assert any(f.code == "expert-packing-unknown" for f in load_peft_on_rank(base, silent.folder).load_report.findings)
    field = "grouped_by_expert" if older else "rank_major"
    assert f'"{field}"' in told.fix
    marked = faults.edited(silent.folder, tmp_path / "marked", config=lambda c: c.update(lora_B_layout=field))
    found = ways(base, silent._replace(folder=marked), tmp_path / "marked ways")
    assert set(found.values()) == {"right"}
    model = load_peft_on_rank(base, marked)
    assert model.load_report.findings == ()
    model.save_pretrained(tmp_path / "again")  # in peft's order, and without unsloth's mark
    again = load_peft_on_rank(base, tmp_path / "again")
    assert again.load_report.findings == ()
    assert torch.equal(logits(again), logits(model))


def test_experts_of_unsloth_over_an_older_peft_are_right(tmp_path: Path) -> None:
    assert_right(tmp_path, "qwen3_moe", "fused by unsloth over peft 0.17")


def test_a_packing_that_nobody_knows_is_an_unknown_field(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    adapter = save_expert_adapter(tmp_path, base, "fused by unsloth").folder
    other = faults.edited(adapter, tmp_path / "other", config=lambda c: c.update(lora_B_layout="by_colour"))
    with pytest.raises(AdapterError, match=r"field 'lora_B_layout' = 'by_colour' does not exist"):
        load_peft_on_rank(base, other)


def test_later_adapters_in_other_layouts(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2_moe")
    adapters = [save_expert_adapter(tmp_path / layout, base, layout) for layout in LAYOUTS]
    model = load_peft_on_rank(base, adapters[0].folder)
    for layout, adapter in zip(LAYOUTS[1:], adapters[1:], strict=True):
        name = layout.replace(".", "_")
        load_adapter_on_rank(model, adapter.folder, name)
        model.set_adapter(name)
        reference = logits(load_peft_on_rank(base, adapter.folder))
        assert torch.allclose(logits(model), reference, atol=1e-6), layout


@pytest.mark.parametrize("layout", ["targets", "pattern", "grouped", "stacked"])
def test_an_adapter_saved_again_is_the_same(tmp_path: Path, layout: str) -> None:
    base = save_base(tmp_path / "base", "qwen2_moe")
    model = load_peft_on_rank(base, save_expert_adapter(tmp_path, base, layout).folder)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load_peft_on_rank(base, tmp_path / "again")), logits(model))


def test_a_dense_layer_that_the_file_lacks_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    adapter = save_expert_adapter(tmp_path, base, "targets").folder
    cut = faults.edited(adapter, tmp_path / "cut", tensors=faults.without("layers.0.mlp.gate_proj"))
    with pytest.raises(AdapterError, match=r"layers\.0\.mlp\.gate_proj\.lora_A"):
        load_peft_on_rank(base, cut)


@pytest.mark.parametrize("layout", ["targets", "grouped", "stacked"])
def test_a_base_of_other_sizes_is_refused_and_the_right_one_taken(tmp_path: Path, layout: str) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    other = save_base(tmp_path / "other", "qwen3_moe", moe_intermediate_size=24)
    adapter = save_expert_adapter(tmp_path, base, layout).folder
    with pytest.raises(AdapterError, match="pass the base that the adapter was trained on as base_model"):
        load_peft_on_rank(other, adapter)
    load_peft_on_rank(adapter, base_model=base)


@pytest.mark.parametrize("layout", ["grouped", "stacked"])
def test_a_rank_of_all_experts_that_the_config_contradicts_is_refused(tmp_path: Path, layout: str) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    adapter = save_expert_adapter(tmp_path, base, layout)
    wrong = faults.edited(adapter.folder, tmp_path / "wrong", config=lambda c: c.update(r=RANK + 1))
    with pytest.raises(AdapterError, match=r"or correct r in adapter_config\.json"):
        merge_lora_checkpoint(base, wrong, tmp_path / "merged")
    corrected = faults.edited(wrong, tmp_path / "corrected", config=lambda c: c.update(r=RANK))
    merge_lora_checkpoint(base, corrected, tmp_path / "merged")
    assert off(weights_in(tmp_path / "merged"), adapter) < 1e-6


def test_dora_of_experts_is_refused_with_the_transformers_that_has_it(tmp_path: Path) -> None:
    """unsloth-zoo#828: it was trained on a module for each expert, and peft has none for a parameter of all of them."""
    base = save_base(tmp_path / "base", "qwen3_moe")

    def with_magnitudes(tensors: faults.Tensors) -> None:
        for key in [key for key in tensors if ".lora_B." in key]:
            tensors[key.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(len(tensors[key]))

    plain = save_expert_adapter(tmp_path, base, "targets").folder
    adapter = faults.edited(plain, tmp_path / "dora", tensors=with_magnitudes, config=lambda c: c.update(use_dora=True))
    with pytest.raises(AdapterError, match=r"experts of a layer in one parameter .*with transformers 4, which has"):
        load_peft_on_rank(base, adapter)
    with pytest.raises(AdapterError, match="with transformers 4, which has"):
        merge_lora_checkpoint(base, adapter, tmp_path / "merged")
