"""Tiny models with random weights in the place of those that peft's tests take from the hub, in a cache of the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

COMMIT = "0" * 40
# The id on the hub and the class that is saved under it.
MODELS = {
    "peft-internal-testing/opt-125m": "OPTForCausalLM",
    "peft-internal-testing/tiny-random-OPTForCausalLM": "OPTForCausalLM",
    "facebook/opt-125m": "OPTForCausalLM",
    "facebook/opt-350m": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "openai-community/gpt2": "GPT2LMHeadModel",
    "hf-internal-testing/tiny-random-gpt2": "GPT2LMHeadModel",
    "peft-internal-testing/tiny-random-gpt2": "GPT2LMHeadModel",
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": "GPT2LMHeadModel",
    "peft-internal-testing/tiny-random-GPTJForCausalLM": "GPTJForCausalLM",
    "peft-internal-testing/tiny-random-BloomForCausalLM": "BloomForCausalLM",
    "trl-internal-testing/tiny-random-LlamaForCausalLM": "LlamaForCausalLM",
    "hf-internal-testing/tiny-random-LlamaForCausalLM": "LlamaForCausalLM",
    "peft-internal-testing/tiny-random-LlamaForCausalLM": "LlamaForCausalLM",
    "hf-internal-testing/tiny-random-MistralForCausalLM": "MistralForCausalLM",
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": "Gemma3ForCausalLM",
    "peft-internal-testing/tiny-dummy-qwen2": "Qwen2ForCausalLM",
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": "Qwen3MoeForCausalLM",
    "trl-internal-testing/tiny-GptOssForCausalLM": "GptOssForCausalLM",
    "trl-internal-testing/tiny-Llama4ForCausalLM": "Llama4ForCausalLM",
    "hf-internal-testing/Mixtral-tiny": "MixtralForCausalLM",
    "peft-internal-testing/tiny-random-t5": "T5ForConditionalGeneration",
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": "T5ForConditionalGeneration",
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": "T5ForConditionalGeneration",
    "google/flan-t5-small": "T5ForConditionalGeneration",
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": "BartForConditionalGeneration",
    "bert-base-uncased": "BertForMaskedLM",
    "peft-internal-testing/tiny-random-BertModel": "BertModel",
    "peft-internal-testing/tiny-random-RobertaModel": "RobertaModel",
    "peft-internal-testing/tiny-random-DebertaModel": "DebertaModel",
    "peft-internal-testing/tiny-random-DebertaV2Model": "DebertaV2Model",
    "peft-internal-testing/tiny-random-BertForSequenceClassification": "BertForSequenceClassification",
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": "RobertaForSequenceClassification",
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": "LlamaForSequenceClassification",
    "peft-internal-testing/tiny-random-ResNetForImageClassification": "ResNetForImageClassification",
}
# The tests' tokens reach into the vocabulary of the models that they name, and their ranks need some width.
_SIZES = {"vocab_size": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def save_all(home: Path) -> None:
    """Save every stand-in where ``HF_HOME=home`` looks for the model of that id."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    for repo, name in MODELS.items():
        root = home / "hub" / f"models--{repo.replace('/', '--')}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text(COMMIT)
        folder = root / "snapshots" / COMMIT
        _save(name, folder)


def _save(name: str, folder: Path) -> None:
    import transformers
    from models import save_tokenizer
    from tiny_models import tiny_config

    config: Any = tiny_config(name)
    for field, value in _SIZES.items():
        if hasattr(config, field):
            setattr(config, field, value)
    if re.search("ForSequenceClassification", name):
        config.num_labels = 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, name)(config)
    model.save_pretrained(folder)
    if hasattr(config, "vocab_size"):
        save_tokenizer(folder)
