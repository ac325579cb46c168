"""Conversions of transformers that put rows into another order: the delta goes back to the order of the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter
from test_merge_lora_checkpoint import check_same, loaded, reference
from transformers import AutoModelForImageTextToText

from safe_loading import MergeError, merge_lora_checkpoint
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._merging.disk.changes import Edit, WeightChange
from safe_loading._merging.disk.place_edits import place_edits
from safe_loading._merging.weights.update import Term, Update
from safe_loading._model.layout.disk_blocks import Moved, on_disk
from safe_loading._model.layout.layout import CheckpointLayout


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi K2.5: its vision tower's q, k and v are one tensor on disk, with the rows of q and k by pairs."""
    folder = tmp_path_factory.mktemp("kimi")
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    text = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    rope = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "vocab_size": 103, "max_position_embeddings": 64}
    sizes = {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2, "num_attention_heads": 3}
    vision = {**sizes, "num_hidden_layers": 2, "hidden_size": 60, "intermediate_size": 40}
    tokens = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 98, "vision_end_token_id": 99}
    config = Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **text, **heads, **experts, **rope},
        vision_config=vision,
        projection_hidden_size=60,
        tie_word_embeddings=False,
        **tokens,
    )
    torch.manual_seed(0)
    model = Kimi_K25ForConditionalGeneration(config).to(torch.bfloat16)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("e_score_correction_bias"):  # which from_pretrained keeps in float32
            tensor.data = tensor.data.float()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def inkling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Inkling 2: gate and up of its experts are one tensor, whose rows alternate on disk."""
    folder = tmp_path_factory.mktemp("inkling")
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    swa = {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 16, "d_rel": 4}
    experts = {"moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 103, "unpadded_vocab_size": 103}
    config = Inkling2TextConfig(**sizes, **heads, **swa, **experts, n_layers_per_attn_res_block=1, rel_extent=16)
    torch.manual_seed(0)
    Inkling2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def first_inkling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Inkling: gate and up of the dense layer, and of the shared experts, are rows that alternate on disk."""
    folder = tmp_path_factory.mktemp("first_inkling")
    save_first_inkling(folder)
    return folder


def save_first_inkling(folder: Path) -> None:
    from transformers import InklingConfig, InklingForConditionalGeneration

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    swa = {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 16, "d_rel": 4, "rel_extent": 16}
    experts = {"moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 27, "num_hidden_layers": 2, "vocab_size": 103}
    config = InklingConfig(
        text_config={**heads, **swa, **experts, **sizes, "mlp_layer_types": ["dense", "sparse"]},
        vision_config={"patch_size": 4, "hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2},
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 8},
        image_token_id=100,
        audio_token_id=101,
    )
    torch.manual_seed(0)
    InklingForConditionalGeneration(config).save_pretrained(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear", "r": 5},
        {"target_modules": ["up_proj"], "use_dora": True},
        {"target_modules": "all-linear", "use_dora": True, "use_rslora": True},
        {"target_modules": ["q_proj"], "target_parameters": ["shared_experts.gate_proj", "shared_experts.up_proj"]},
        {"target_modules": ["q_proj"], "target_parameters": ["shared_experts.up_proj", "experts.gate_up_proj"]},
    ],
)
def test_rows_of_two_weights_that_alternate_on_disk_are_merged_there(
    tmp_path: Path, first_inkling: Path, config: dict[str, Any]
) -> None:
    auto = AutoModelForImageTextToText
    adapter = save_adapter(tmp_path / "adapter", first_inkling, auto_class=auto, task_type=None, **config)
    report = check_same(first_inkling, adapter, tmp_path, auto)
    merged = {tensor.name for tensor in report.of("merged")}
    shared = "target_parameters" in config
    assert any(name.endswith("shared_w13_weight" if shared else "mlp.w13_dn.weight") for name in merged)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"], "r": 5},
        {"target_modules": ["q_proj", "k_proj"], "use_dora": True},
        {"target_modules": ["k_proj", "proj", "o_proj"], "r": 20, "use_rslora": True},
    ],
)
def test_rows_that_are_permuted_for_rope_are_merged_in_the_order_of_the_disk(
    tmp_path: Path, kimi: Path, config: dict[str, Any]
) -> None:
    auto = AutoModelForImageTextToText
    adapter = save_adapter(tmp_path / "adapter", kimi, auto_class=auto, task_type=None, **config)
    report = check_same(kimi, adapter, tmp_path, auto)
    assert {t.name for t in report.of("merged")} >= {f"vision_tower.encoder.blocks.{n}.wqkv.weight" for n in range(2)}


@pytest.mark.parametrize("targets", [["mlp.experts.gate_up_proj"], ["experts.down_proj", "experts.gate_up_proj"]])
def test_experts_whose_rows_alternate_on_disk_are_merged_there(
    tmp_path: Path, inkling: Path, targets: list[str]
) -> None:
    adapter = save_adapter(tmp_path / "adapter", inkling, target_modules=["sink_proj"], target_parameters=targets)
    report = check_same(inkling, adapter, tmp_path)
    assert "model.llm.layers.1.mlp.experts.w13_weight" in {tensor.name for tensor in report.of("merged")}


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["proj"], "modules_to_save": ["q_proj"]},
        {"bias": "all"},
        {"init_lora_weights": "pissa", "target_modules": ["q_proj", "v_proj"]},
        {"init_lora_weights": "olora", "target_modules": ["k_proj"]},
    ],
)
def test_what_is_trained_beside_the_factors_of_permuted_rows_is_merged_there_too(
    tmp_path: Path, kimi: Path, config: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"auto_class": AutoModelForImageTextToText, "task_type": None, "dtype": torch.bfloat16}
    check_same(
        kimi, save_adapter(tmp_path / "adapter", kimi, **options, **config), tmp_path, AutoModelForImageTextToText
    )


def test_an_init_of_rows_that_alternate_with_others_is_refused_with_a_way_that_works(
    tmp_path: Path, first_inkling: Path
) -> None:
    auto: Any = AutoModelForImageTextToText
    config = {"init_lora_weights": "pissa", "target_modules": ["gate_proj"], "auto_class": auto, "task_type": None}
    adapter = save_adapter(tmp_path / "adapter", first_inkling, **config)
    with pytest.raises(MergeError, match=r"pissa needs the whole weight.*merge_lora_inplace and save it"):
        merge_lora_checkpoint(first_inkling, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    loaded(reference(first_inkling, adapter, tmp_path / "out", auto_class=auto), auto)


def test_norms_that_would_be_summed_in_another_order_are_refused() -> None:
    columns = Update((4, 6), (Term(torch.ones(4, 2), torch.ones(2, 6), 1.0, torch.ones(6)),), axis=1)
    moved = Moved(on_disk("t", (4, 6)), 0, (2, 0, 3, 1))
    tensors = {"t": TensorInfo("t", "F32", (4, 6), 0, 96)}

    def problems(update: Update, where: Moved) -> list[str]:
        edit = Edit(("w",), (4, 6), {"w": WeightChange(updates={(): update})})
        return place_edits([edit], CheckpointLayout({}, {"w": "why"}, (), moved={"w": where}), tensors).problems

    assert "the norms of its DoRA run along what has another order" in problems(columns, moved)[0]
    assert not problems(columns, moved._replace(dim=1, order=(5, 4, 3, 2, 1, 0)))
    assert not problems(Update((4, 6), columns.terms[:0]), moved)
