"""The two ends of a model, whatever the model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import SIZES
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_config
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig, LlamaConfig, LlamaForCausalLM

from safe_loading import audit_model, load_peft_on_rank, merge_lora_inplace
from safe_loading._model.embeddings_and_head import embeddings_and_head_of, tied_ends_of


def clip() -> CLIPModel:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = CLIPTextConfig(**small, vocab_size=50), CLIPVisionConfig(**small, image_size=16, patch_size=8)
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))


def test_the_weights_are_those_of_the_layers_that_tuners_wrap() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert embeddings_and_head_of(model) == (model.model.embed_tokens, model.lm_head)
    get_peft_model(model, LoraConfig(target_modules=["lm_head", "embed_tokens"]))
    first, second = embeddings_and_head_of(model).weights
    assert first is embeddings
    assert second is head


def test_a_model_without_ends_and_an_object_that_is_none_have_none() -> None:
    model = clip()
    assert embeddings_and_head_of(model).head is None
    assert embeddings_and_head_of(model).weights[1] is None
    assert embeddings_and_head_of(torch.nn.Linear(2, 2)) == embeddings_and_head_of(None) == (None, None)
    audit_model(model)  # does not raise


TIED_TO = {
    "LlamaForCausalLM": "",
    "T5ForConditionalGeneration": "shared",
    "BertForMaskedLM": "bert.embeddings.word_embeddings",
    "T5GemmaForConditionalGeneration": "model.decoder.embed_tokens",
}


@pytest.mark.parametrize("name", TIED_TO)
def test_the_head_is_tied_to_the_embeddings_that_its_class_names(name: str) -> None:
    model: Any = getattr(transformers, name)(tiny_config(name))
    ends = tied_ends_of(model)
    if not TIED_TO[name]:
        assert ends is None
        return
    assert ends is not None
    assert ends.embeddings is model.get_submodule(TIED_TO[name])
    first, second = ends.weights
    assert first is second is not None


def test_the_encoders_embeddings_untie_no_head_of_a_decoder(tmp_path: Path) -> None:
    """The two ends of T5Gemma are the encoder's embeddings and the head, which no class ties."""
    kind = transformers.T5GemmaForConditionalGeneration
    model: Any = kind(tiny_config("T5GemmaForConditionalGeneration"))
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    loaded = load_peft_on_rank(tmp_path / "base", tmp_path / "adapter", device="cpu")
    assert loaded.load_report.findings == ()
    assert "SL111" not in {finding.code for finding in audit_model(loaded.train()).findings}
    merged: Any = merge_lora_inplace(loaded)
    assert merged.merge_report.findings == ()
    assert merged.lm_head.out_proj.weight is merged.model.decoder.embed_tokens.weight
    assert merged.config.tie_word_embeddings is True
