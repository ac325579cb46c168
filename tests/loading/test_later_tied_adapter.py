"""A later adapter with ensure_weight_tying: peft ties for the first one alone, and ours says so instead of a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_methods import Method, save_trained
from loaded_models import logits, state, two_steps
from models import save_adapter, save_llama
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from safe_loading import AdapterError, load_adapter_on_rank, load_peft_on_rank, merge_lora_inplace


@pytest.mark.parametrize(
    "config", [{"target_modules": ["q_proj", "embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_it_is_refused_and_loads_onto_a_base_of_its_own(tmp_path: Path, config: dict[str, Any]) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    options = {"target_modules": ["q_proj"], "ensure_weight_tying": True, **config}
    first = save_adapter(tmp_path / "first", base, **options)
    second = save_adapter(tmp_path / "second", base, seed=1, **options)
    with_peft = two_steps(first, base)
    with_peft.load_adapter(str(second), "second", autocast_adapter_dtype=False)
    with_peft.set_adapter("second")
    truth = logits(two_steps(second, base))
    assert not torch.equal(logits(with_peft), truth), "peft can: load it too"
    model = load_peft_on_rank(base, first)
    before = state(model)
    with pytest.raises(AdapterError, match=r"ties 'lm_head' for the first adapter of a model alone") as refused:
        load_adapter_on_rank(model, second, "second")
    assert all("load it onto a base of its own" in problem for problem in refused.value.problems)
    assert state(model) == before
    assert torch.equal(logits(load_peft_on_rank(base, second)), truth)  # the advice


def test_tokens_that_a_later_adapter_trains_reach_the_tied_head(tmp_path: Path) -> None:
    """peft wraps the head once more for each, and then computes nothing: "wraps an unknown layer type"."""
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    method = Method("TrainableTokensConfig", {"token_indices": [1, 5]})
    folders = [save_trained(method, base, tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    truths = [logits(two_steps(folder, base)) for folder in folders]
    model = load_peft_on_rank(base, folders[0])
    for name, folder in zip("bc", folders[1:], strict=True):
        load_adapter_on_rank(model, folder, name)
        assert torch.equal(logits(model), truths[0])
    for name, truth in zip(("b", "c", "default", "b"), (*truths[1:], truths[0], truths[1]), strict=True):
        model.set_adapter(name)
        assert torch.equal(logits(model), truth)
    assert torch.allclose(logits(merge_lora_inplace(model)), truths[1], atol=1e-5)


def test_other_tokens_in_the_head_than_in_the_embeddings_need_a_head_of_their_own(tmp_path: Path) -> None:
    """The first adapter decides whether the two are tied, and peft puts the tokens of the second over one another."""
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    options: dict[str, Any] = {"target_modules": ["q_proj"]}
    rows = {"same": {"embed_tokens": [1, 2], "lm_head": [1, 2]}, "apart": {"embed_tokens": [3, 4], "lm_head": [5, 6]}}
    folders = {
        name: save_trained(Method("LoraConfig", {**options, "trainable_token_indices": each}), base, tmp_path / name)
        for name, each in rows.items()
    }
    for first, second in (("same", "apart"), ("apart", "same")):
        model = load_peft_on_rank(base, folders[first])
        before = state(model)
        with pytest.raises(AdapterError, match="load it onto a base of its own"):
            load_adapter_on_rank(model, folders[second], "second")
        assert state(model) == before
        truth = logits(two_steps(folders[second], base))
        assert torch.equal(logits(load_peft_on_rank(base, folders[second])), truth)  # the advice


def test_values_for_the_base_that_would_change_other_adapters_are_refused(tmp_path: Path) -> None:
    """T5's embeddings of encoder and decoder are tied to saved ones, and peft writes them over the base's."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 40}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path / "base")
    options = {"target_modules": ["q"], "modules_to_save": ["shared"], "task_type": "SEQ_2_SEQ_LM"}
    first, second = (
        save_adapter(
            tmp_path / name,
            tmp_path / "base",
            seed=seed,
            auto_class=AutoModelForSeq2SeqLM,
            ensure_weight_tying=True,
            **{**options, "modules_to_save": ["lm_head"]},
        )
        for seed, name in enumerate(("first", "second"))
    )
    model = load_peft_on_rank(tmp_path / "base", first)
    inputs = {"input_ids": torch.tensor([[1, 5, 7]]), "decoder_input_ids": torch.tensor([[0, 5]])}
    before, expected = state(model), model(**inputs).logits
    with pytest.raises(AdapterError, match=r"\['default'\] run.*load it onto a base of its own"):
        load_adapter_on_rank(model, second, "second")
    assert state(model) == before
    assert torch.equal(model(**inputs).logits, expected)
    assert load_peft_on_rank(tmp_path / "base", second).load_report.ok  # the advice
    load_adapter_on_rank(model, first, "again")  # with the same values
    assert torch.equal(model(**inputs).logits, expected)
    with pytest.raises(AdapterError, match="base-changed-again"):
        load_peft_on_rank(tmp_path / "base", {"one": first, "two": second})
