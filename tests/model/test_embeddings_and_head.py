"""The two ends of a model, whatever the model is."""

from __future__ import annotations

import torch
from models import SIZES
from peft import LoraConfig, get_peft_model
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig, LlamaConfig, LlamaForCausalLM

from safe_loading import audit_model
from safe_loading._model.embeddings_and_head import embeddings_and_head_of


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
