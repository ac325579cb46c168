"""Adapters on bases in GGUF files, which transformers decodes while it loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import SIZES, save_adapter, save_llama
from peft import PeftModel
from transformers import AutoModelForCausalLM

from safe_loading import CheckpointNotFound, audit_model, load_peft_on_rank, merge_lora_inplace

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

TOKENS = torch.arange(24).view(2, 12) % 101
_NAMES = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def save_gguf(folder: Path, plain: Path) -> Path:
    """Save a Llama as llama.cpp has it: matrices in codes of 8 bits, the rows of queries and keys in pairs."""
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(SIZES["vocab_size"])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(SIZES["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in _NAMES.items()}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in AutoModelForCausalLM.from_pretrained(plain).state_dict().items():
        module, values = name.removesuffix(".weight"), tensor.numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(module.rpartition(".")[2])
        if heads is not None:
            values = values.reshape(SIZES[heads], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if module.endswith("_proj"):
            codes = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(f"{names[module]}.weight", codes, raw_dtype=kind)
        else:
            writer.add_tensor(f"{names[module]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def test_a_base_in_a_gguf_file_takes_an_adapter_is_audited_and_saved_merged(tmp_path: Path) -> None:
    plain = save_llama(tmp_path / "plain")
    base, adapter = save_gguf(tmp_path / "base", plain), save_adapter(tmp_path / "adapter", plain)
    with pytest.raises(
        CheckpointNotFound, match=r"load_peft_on_rank decodes it with base_kwargs=\{'gguf_file': 'model"
    ):
        load_peft_on_rank(base, adapter)
    options = {"gguf_file": "model.gguf"}
    ours = load_peft_on_rank(base, adapter, base_kwargs=options)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **options), adapter)
    expected = dict(theirs.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in ours.named_parameters())
    assert torch.equal(logits(ours), logits(theirs))
    # not as far from the plain model as another one would be
    torch.testing.assert_close(logits(ours), logits(load_peft_on_rank(plain, adapter)), rtol=0, atol=0.05)
    # its config says that it is quantized, and its weights are decoded
    assert not [finding for finding in audit_model(ours).findings if finding.code == "SL107"]
    merged = merge_lora_inplace(ours)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(merged))
