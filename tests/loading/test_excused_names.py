"""Names that a checkpoint may lack by the word of a class: that class may speak of its own part of a model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter
from safetensors.torch import load_file, save_file
from transformers import BartConfig, BartForConditionalGeneration, SeamlessM4Tv2Config, SeamlessM4Tv2ForTextToSpeech

from safe_loading import CheckpointError, check_checkpoint, load_peft_on_rank, merge_lora_checkpoint

# Its converter of text to units excuses "text_encoder", which it has none of, and transformers reads that of the whole.
SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "t2u_vocab_size", "char_vocab_size", "unit_hifi_gan_vocab_size"], 60),
    **dict.fromkeys(["max_position_embeddings", "t2u_max_position_embeddings"], 32),
    **dict.fromkeys(["hidden_size", "variance_predictor_embed_dim", "variance_predictor_hidden_dim"], 16),
    **{
        f"{part}{name}": value
        for part in ("", "t2u_")
        for side in ("encoder", "decoder")
        for name, value in ((f"{side}_layers", 1), (f"{side}_ffn_dim", 24), (f"{side}_attention_heads", 2))
    },
    "upsample_initial_channel": 16,
    "upsample_rates": [2],
    "upsample_kernel_sizes": [4],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1]],
    **dict.fromkeys(["unit_embed_dim", "lang_embed_dim", "spkr_embed_dim"], 8),
    **dict.fromkeys(["vocoder_num_langs", "vocoder_num_spkrs"], 4),
}


def without(folder: Path, name: str) -> None:
    """Take a tensor out of a folder with one weight file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_part_excuses_no_weight_of_another_part(tmp_path: Path) -> None:
    kind, base = SeamlessM4Tv2ForTextToSpeech, tmp_path / "base"
    kind(SeamlessM4Tv2Config(**SIZES)).save_pretrained(base)
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=kind, target_modules=["q_proj"], task_type=None)
    assert load_peft_on_rank(base, adapter, auto_class=kind).load_report.ok
    gone = "text_encoder.layers.0.self_attn.out_proj.weight"
    without(base, gone)
    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match=gone.replace(".", r"\.") + ".*would start at random"):
        load_peft_on_rank(base, adapter, auto_class=kind)
    with pytest.raises(CheckpointError, match=gone.replace(".", r"\.")):
        merge_lora_checkpoint(base, adapter, tmp_path / "merged", auto_class=kind)
    report = check_checkpoint(base)
    assert not report.ok
    assert gone in str(report)


def test_what_a_class_computes_itself_may_be_missing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    sizes = dict.fromkeys(["encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"], 1)
    config = BartConfig(vocab_size=60, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, **sizes)
    BartForConditionalGeneration(config).save_pretrained(base)
    kind = BartForConditionalGeneration
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=kind, task_type=None)
    without(base, "final_logits_bias")
    model = load_peft_on_rank(base, adapter, auto_class=kind)
    assert model.load_report.ok
    assert not model.get_base_model().final_logits_bias.any()
