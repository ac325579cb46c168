"""Tied weights in memory: an adapter of one end takes them apart, and what is saved computes the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, get_peft_model
from test_merge_lora_inplace import TOKENS, bits, peft_model, randomized, tied_llama
from torch import nn

from safe_loading import MergeError, merge_lora_inplace
from safe_loading._merging.weights import shared_weights

T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {**BERT, "tie_word_embeddings": True}),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
    "Bert": ("BertForMaskedLM", BERT),
    "Bart": ("BartForConditionalGeneration", BART),
    "T5": ("T5ForConditionalGeneration", T5),
    "MT5": ("MT5ForConditionalGeneration", T5),
    # These compute by the flag: they scale what they hand to the head when it is true.
    "UMT5": ("UMT5ForConditionalGeneration", T5),
    "SwitchTransformers": ("SwitchTransformersForConditionalGeneration", {**T5, "num_experts": 2}),
}
# Which of the tied weights an adapter changes, and how.
ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama embedding": ("Llama", {"target_modules": ["embed_tokens"]}),
    "Llama head": ("Llama", {"target_modules": ["lm_head"]}),
    "Llama both": ("Llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "Llama DoRA": ("Llama", {"target_modules": ["lm_head"], "use_dora": True}),
    "Llama by peft": ("Llama", {"ia3": True, "target_modules": ["lm_head"], "feedforward_modules": []}),
    "GPT2 head": ("GPT2", {"target_modules": ["lm_head"]}),
    "Bert head": ("Bert", {"target_modules": ["cls.predictions.decoder"]}),
    "Bart head": ("Bart", {"target_modules": ["lm_head"]}),
    "Bart encoder": ("Bart", {"target_modules": ["encoder.embed_tokens"]}),
    "Bart shared": ("Bart", {"target_modules": ["shared"]}),
    "T5 both embeddings": ("T5", {"target_modules": ["embed_tokens"]}),
    "T5 head saved": ("T5", {"target_modules": ["q"], "modules_to_save": ["lm_head"]}),
    "MT5 head": ("MT5", {"target_modules": ["lm_head"]}),
    "UMT5 head": ("UMT5", {"target_modules": ["lm_head"]}),
    "UMT5 encoder": ("UMT5", {"target_modules": ["encoder.embed_tokens"]}),
    "UMT5 head saved": ("UMT5", {"target_modules": ["q"], "modules_to_save": ["lm_head"]}),
    "Switch head saved": ("SwitchTransformers", {"target_modules": ["q"], "modules_to_save": ["lm_head"]}),
    "Switch shared": ("SwitchTransformers", {"target_modules": ["shared"]}),
}


def family(name: str) -> Any:
    kind, sizes = FAMILIES[name]
    tokens = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**tokens, **sizes)
    return getattr(transformers, kind)(config).eval()


def adapted(base: Any, config: dict[str, Any]) -> Any:
    """A PeftModel whose every trained tensor is random."""
    kind: Any = IA3Config if config.pop("ia3", False) else LoraConfig
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, kind(**config)).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def logits(model: Any) -> torch.Tensor:
    inputs = {"decoder_input_ids": TOKENS[:, :5]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, **inputs).logits


@pytest.mark.parametrize("end", ENDS)
def test_an_adapter_of_one_end_takes_tied_weights_apart(tmp_path: Path, end: str) -> None:
    name, config = ENDS[end]
    model = adapted(family(name), dict(config))
    expected = logits(model)
    merged: Any = merge_lora_inplace(model)
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    assert "no-longer-tied" in {finding.code for finding in merged.merge_report.findings}
    merged.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, info = type(merged).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.allclose(logits(again), expected, atol=1e-5)


@pytest.mark.parametrize("end", ["Llama both", "Bart encoder", "Llama by peft"])
def test_with_the_adapters_left_they_are_apart_too(end: str) -> None:
    name, config = ENDS[end]
    base = family(name)
    before, model = logits(base), adapted(base, dict(config))
    expected = logits(model)
    merge_lora_inplace(model, unload=False)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert model.config.tie_word_embeddings is False
    model.unmerge_adapter()
    assert torch.allclose(logits(model.unload()), before, atol=1e-5)


def test_the_finding_says_what_changed_and_what_it_took() -> None:
    model = tied_llama(target_modules=["embed_tokens"])
    head = model.get_base_model().lm_head.weight
    merged = merge_lora_inplace(model)
    assert merged.lm_head.weight is head  # what the adapter leaves alone keeps the memory
    (finding,) = merged.merge_report.findings
    assert (finding.code, finding.bytes) == ("no-longer-tied", head.nbytes)
    assert finding.where == "lm_head.weight, model.embed_tokens.weight"
    assert "the adapter changes model.embed_tokens.weight alone" in finding.message


def in_two_layers(*targets: str) -> Any:
    torch.manual_seed(0)
    base = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
    base["b"].weight = base["a"].weight
    return peft_model(base, LoraConfig(target_modules=[*targets, "c"]))


@pytest.mark.parametrize("targets", [["a"], ["a", "b"]])
def test_a_parameter_in_two_layers_becomes_two(targets: list[str]) -> None:
    model, x = in_two_layers(*targets), torch.randn(3, 8)
    with torch.no_grad():
        expected = [model.base_model.model[name](x) for name in "abc"]
        merged: Any = merge_lora_inplace(model)
        assert all(torch.allclose(merged[n](x), y, atol=1e-5) for n, y in zip("abc", expected, strict=True))
    assert merged["a"].weight is not merged["b"].weight


def test_views_that_overlap_become_two() -> None:
    base = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    rows = torch.randn(12, 8)
    base["a"].weight.data, base["b"].weight.data = rows[:8], rows[4:]
    model, x = peft_model(base, LoraConfig(target_modules=["a", "b"])), torch.randn(3, 8)
    with torch.no_grad():
        expected = [model.base_model.model[name](x) for name in "ab"]
        merged: Any = merge_lora_inplace(model)
        assert all(torch.allclose(merged[n](x), y, atol=1e-5) for n, y in zip("ab", expected, strict=True))


def test_a_layer_that_peft_cannot_merge_leaves_them_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.ia3.layer import Linear

    model = adapted(family("Llama"), dict(ENDS["Llama by peft"][1]))
    before = bits(model)

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(Linear, "merge", fail)
    with pytest.raises(MergeError, match="everything is as it was"):
        merge_lora_inplace(model)
    assert bits(model) == before
    assert model.config.tie_word_embeddings is True


def test_memory_that_runs_out_leaves_them_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_two_layers("a", "b")
    before = bits(model)

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(shared_weights.torch, "empty_strided", fail)
    with pytest.raises(MergeError, match=r"b\.weight: it needs memory of its own, 256 B"):
        merge_lora_inplace(model)
    assert bits(model) == before


def test_the_attention_of_torch_gets_weights_of_its_own() -> None:
    torch.manual_seed(0)
    base = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.MultiheadAttention(8, 2)})
    base["b"].in_proj_weight = base["a"].in_proj_weight
    model: Any = randomized(get_peft_model(base, LoraConfig(target_modules=["a"])))
    x = torch.randn(3, 2, 8)
    with torch.no_grad():
        expected = [model.base_model.model[name](x, x, x)[0] for name in "ab"]
        merged: Any = merge_lora_inplace(model)
        assert all(torch.allclose(merged[n](x, x, x)[0], y, atol=1e-5) for n, y in zip("ab", expected, strict=True))
