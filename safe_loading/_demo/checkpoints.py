"""A small Llama and a LoRA adapter of it, with random weights, saved by transformers and by peft."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SHARD = "2MB"


def make_llama(folder: Path) -> Path:
    """Save a bfloat16 Llama of a few megabytes in several safetensors shards."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4000,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARD)
    return folder


def make_adapter(folder: Path, base: Path) -> Path:
    """Save a float32 LoRA adapter over every linear layer of ``base``, its lora_B random as if trained."""
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(str(folder))
    return folder
