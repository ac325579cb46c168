"""Adapters of a vocabulary that was resized before it was trained, on the base as it is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults import adapters as faults
from loaded_models import logits
from models import save_adapter, save_llama
from peft import PeftModel
from transformers import AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "saved modules": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved embeddings": {},
    "a LoRA of the embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "trained tokens": {"trainable_token_indices": [3, 80]},
}


def resized(base: Path, rows: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, **options)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def save_resized(folder: Path, base: Path, rows: int, layout: str, *, tied: bool, alpha: int = 8) -> Path:
    larger = SimpleNamespace(from_pretrained=lambda path, **options: resized(path, rows, **options))
    config = dict(LAYOUTS[layout])
    if tied and "modules_to_save" in config:
        config |= {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    options: Any = {"auto_class": larger, **config}
    return save_adapter(folder, base, lora_alpha=alpha, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [110, 90])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_base_gets_the_vocabulary_of_its_adapter(tmp_path: Path, layout: str, tied: bool, rows: int) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    adapter = save_resized(tmp_path / "adapter", base, rows, layout, tied=tied)
    if (layout, tied, rows) == ("a LoRA of the embeddings", False, 110):  # the new rows of the head are in no file
        with pytest.raises(AdapterError, match=r"call base\.resize_token_embeddings\(110\)"):
            load_peft_on_rank(adapter, base)
        return
    expected = logits(PeftModel.from_pretrained(resized(base, rows), str(adapter)))
    before = torch.get_rng_state()
    model = load_peft_on_rank(adapter, base)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(model), expected)
    assert "vocabulary-of-adapter" in {finding.code for finding in model.load_report.findings}
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (
        merged.config.vocab_size == json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == rows
    )
    assert torch.allclose(logits(merged), expected, atol=1e-5)


def test_a_trained_row_that_the_base_lacks_is_told(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, trainable_token_indices=[3, 9])
    beyond = faults.edited(adapter, tmp_path / "beyond", config=lambda c: c.update(trainable_token_indices=[3, 128]))
    with pytest.raises(AdapterError, match=r"trains row 128 .* has 101 rows.*call resize_token_embeddings\(129\)"):
        load_peft_on_rank(beyond, tiny_llama)
    load_peft_on_rank(beyond, resized(tiny_llama, 129))


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_tokenizer_with_words_beyond_the_rows_is_told(tmp_path: Path, name: str) -> None:
    base = save_llama(tmp_path / "base")
    plain = save_adapter(tmp_path / "plain", base)
    model = load_peft_on_rank(plain, base)

    def codes(adapter: Path, rows: int = 0) -> set[str]:
        of_load = load_peft_on_rank(adapter, resized(base, rows) if rows else base).load_report.findings
        later = load_adapter_on_rank(model, adapter, f"at_{rows}").findings
        model.delete_adapter(f"at_{rows}")
        return {finding.code for finding in (*of_load, *([] if rows else later))}

    word = {"content": "<tool>", "id": 104}
    files: dict[str, Any] = {
        "added_tokens.json": {"<tool>": 104},
        "tokenizer_config.json": {"added_tokens_decoder": {"104": {"content": "<tool>"}}},
        "tokenizer.json": {"added_tokens": [word], "model": {"vocab": {"a": 3}}},
    }
    adapter = faults.edited(plain, tmp_path / "adapter")
    (adapter / name).write_text(json.dumps(files[name]))
    assert codes(plain) == set()
    assert codes(adapter) == {"tokenizer-beyond-rows"}
    assert codes(adapter, 105) == set()
    (base / name).write_text(json.dumps(files[name]))  # the publisher's own words
    assert codes(adapter) == set()
    saved = save_adapter(tmp_path / "saved", base, modules_to_save=["embed_tokens"])
    assert "tokenizer-ids" not in {finding.code for finding in check_checkpoint(saved).findings}
    (saved / name).write_text(json.dumps(files[name]))
    assert "tokenizer-ids" in {finding.code for finding in check_checkpoint(saved).findings}


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [110, 90])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_adapter_of_another_vocabulary_is_refused_with_a_road(
    tmp_path: Path, layout: str, tied: bool, rows: int
) -> None:
    """The base has the vocabulary of the adapter that is there, which a later one cannot change."""
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    first = save_adapter(tmp_path / "first", base, seed=1)
    later = save_resized(tmp_path / "later", base, rows, layout, tied=tied)
    model: Any = load_peft_on_rank(first, base)
    before = logits(model)
    with pytest.raises(AdapterError, match=rf"call base\.resize_token_embeddings\({rows}\)"):
        load_adapter_on_rank(model, later, "later")
    assert torch.equal(logits(model), before)
    # the road, with the new rows of its own file
    expected = logits(PeftModel.from_pretrained(resized(base, rows), str(later)))
    model = load_peft_on_rank(first, resized(base, rows))
    load_adapter_on_rank(model, later, "later")
    model.set_adapter("later")
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_adapter_of_the_first_ones_vocabulary_is_loaded(tmp_path: Path, layout: str) -> None:
    tied = layout == "a LoRA of the embeddings"  # whose file lacks the new rows of a head of its own
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    first = save_resized(tmp_path / "first", base, 110, layout, tied=tied)
    later = save_resized(tmp_path / "later", base, 110, layout, tied=tied, alpha=32)
    expected = [logits(PeftModel.from_pretrained(resized(base, 110), str(adapter))) for adapter in (first, later)]
    assert not torch.equal(*expected)
    model: Any = load_peft_on_rank(first, base)
    load_adapter_on_rank(model, later, "later")
    assert torch.equal(logits(model), expected[0])
    model.set_adapter("later")
    assert torch.equal(logits(model), expected[1])


@pytest.mark.parametrize(
    "document",
    [
        {"model": {"type": "BPE", "vocab": "vocab.txt"}},
        {"model": {"vocab": 7}},
        {"model": {"type": "Unigram", "vocab": [[["a"], 0.0]]}},
        {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}},
    ],
    ids=["a path", "a number", "a list for a word", "a huge id"],
)
def test_a_tokenizer_of_another_form_has_no_words(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, document: dict[str, Any]
) -> None:
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter")
    (adapter / "tokenizer.json").write_text(json.dumps(document))
    assert check_checkpoint(adapter, base_model=tiny_llama).ok
    load_peft_on_rank(adapter, tiny_llama)
