"""Faults that people described in threads of the trackers, made on tiny models, and named by `verify_merge`."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from models import save_adapter, save_llama, save_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from test_verify_merge import EMBED, HEAD, codes, rewritten, tensors_of, verdicts
from test_verify_merge_roads import sized
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from safe_loading import load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace, verify_merge


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A tied base with a tokenizer, and an adapter that was trained with three more words, both ends apart."""
    base = save_llama(tmp_path / "base", torch.bfloat16, tie_word_embeddings=True, num_hidden_layers=1)
    save_tokenizer(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * (0.2 if "lm_head" in name else 0.1))
    peft.save_pretrained(str(tmp_path / "adapter"))
    tokenizer.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merge_lora_checkpoint(base, tmp_path / "adapter", tmp_path / "right")
    assert not codes(verify_merge(base, tmp_path / "adapter", tmp_path / "right"))
    return tmp_path


def test_a_base_that_has_a_tied_weight_under_the_name_of_its_head(tmp_path: Path) -> None:
    """accelerate#3870: transformers saves it under the name of the embeddings, as it does after a merge in memory."""
    saved = save_llama(tmp_path / "saved", torch.bfloat16, tie_word_embeddings=True, num_hidden_layers=1)
    tensors = tensors_of(saved)
    base = rewritten(saved, tmp_path / "base", {HEAD: tensors.pop(EMBED), **tensors})
    adapter = save_adapter(tmp_path / "adapter", base)
    merged = merge_lora_inplace(load_peft_on_rank(base, adapter, device="cpu"))
    merged.save_pretrained(tmp_path / "merged")
    right = tensors_of(tmp_path / "merged")
    assert EMBED in right
    assert HEAD not in right
    check = verify_merge(base, adapter, tmp_path / "merged")
    assert check.ok, str(check)
    wrong = rewritten(tmp_path / "merged", tmp_path / "wrong", {**right, EMBED: right[EMBED] * 2})
    assert [tensor.name for tensor in verify_merge(base, adapter, wrong).of("other")] == [EMBED]
    del right[EMBED]
    without = rewritten(tmp_path / "merged", tmp_path / "without", right)
    assert [tensor.name for tensor in verify_merge(base, adapter, without).of("missing")] == [HEAD]


def test_ends_that_were_trained_apart_and_are_tied_again(extended: Path) -> None:
    """transformers#45127: the flag stays, so the head that was trained is dropped, or never read."""
    right = tensors_of(extended / "right")
    for number, without in enumerate((set(), {HEAD})):
        kept = {name: tensor for name, tensor in right.items() if name not in without}
        wrong = rewritten(extended / "right", extended / f"wrong {number}", kept)
        config = json.loads((wrong / "config.json").read_text())
        (wrong / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        check = verify_merge(extended / "base", extended / "adapter", wrong)
        assert not check.ok
        assert "merged-config" in codes(check)
        assert str(check).count("tie_word_embeddings is True and should be False") == 1


def test_words_that_were_added_and_are_not_in_the_merge(extended: Path) -> None:
    """unsloth#3444: the adapter answers with the words that were added, and the merge does not know them."""
    right, before = tensors_of(extended / "right"), tensors_of(extended / "base")
    ends = {name: right[name].clone() for name in (EMBED, HEAD)}
    for tensor in ends.values():
        tensor[: len(before[EMBED])] = before[EMBED]
    check = verify_merge(
        extended / "base",
        extended / "adapter",
        rewritten(extended / "right", extended / "without", {**right, **ends}),
    )
    assert not check.ok
    assert {EMBED, HEAD} <= {tensor.name for tensor in check.tensors if tensor.verdict not in ("exact", "rounding")}
    AutoTokenizer.from_pretrained(extended / "base").save_pretrained(extended / "right")
    (extended / "right" / "tokenizer.json").write_text(
        json.dumps(json.loads((extended / "right" / "tokenizer.json").read_text()), indent=1)
    )
    check = verify_merge(extended / "base", extended / "adapter", extended / "right")
    assert codes(check) & {"merged-tokenizer-ids", "merged-tokenizer-of-base"}, str(check)


def test_a_head_that_was_drawn_again(tmp_path: Path) -> None:
    """peft#1836: a classifier whose head is that of `from_pretrained`, and not the one that was trained."""
    base = save_llama(tmp_path / "base", torch.float32, num_hidden_layers=1, pad_token_id=0)
    kind: Any = AutoModelForSequenceClassification
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=kind, task_type="SEQ_CLS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merge_lora_checkpoint(base, adapter, tmp_path / "right")
    assert verify_merge(base, adapter, tmp_path / "right").ok
    right = tensors_of(tmp_path / "right")
    (head,) = (name for name in right if name.startswith("score"))
    wrong = rewritten(tmp_path / "right", tmp_path / "wrong", {**right, head: torch.randn_like(right[head]) * 0.02})
    check = verify_merge(base, adapter, wrong)
    assert not check.ok
    assert head in {tensor.name for tensor in check.of("other")}


def test_factors_of_another_type_of_16_bits_are_no_fault(tmp_path: Path) -> None:
    """ChatTS#28 loads the base in bfloat16 and the adapter in float16, and asks whether that is wrong."""
    base = save_llama(tmp_path / "base", torch.bfloat16, num_hidden_layers=1)
    for share in (1.0, 0.01):
        adapter = sized(save_adapter(tmp_path / f"adapter {share}", base), share)
        model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.half()
        model.merge_and_unload().save_pretrained(tmp_path / f"merged {share}")
        check = verify_merge(base, adapter, tmp_path / f"merged {share}")
        assert check.ok, str(check)
        assert verdicts(check) <= {"exact", "rounding"}


def test_a_merge_that_was_saved_without_being_merged(tmp_path: Path) -> None:
    """peft#918 and trl#386: the base is saved under the name of the merge, with the adapter beside it."""
    base = save_llama(tmp_path / "base", torch.bfloat16, num_hidden_layers=1)
    adapter = save_adapter(tmp_path / "adapter", base)
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    wrong = Path(shutil.copytree(base, tmp_path / "wrong"))
    model.base_model.model.save_pretrained(wrong)  # with names as peft's wrappers have them
    check = verify_merge(base, adapter, wrong)
    assert not check.ok
    assert codes(check) & {"update-absent", "merged-missing"}, str(check)


EMBEDDINGS = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}


@needs("transformers", "5.17")
@needs("peft", "0.21")
@pytest.mark.parametrize(
    ("trained", "left_out", "missing"),
    [
        (["lm_head"], EMBEDDINGS, set()),
        # the model ties those that are absent to the new values
        (["shared"], set(), EMBEDDINGS),
        (["lm_head", "shared"], set(), {"decoder.embed_tokens.weight"}),
    ],
    ids=["head", "embeddings", "both"],
)
def test_ties_that_stay_whatever_the_config_says(
    trained: list[str], left_out: set[str], missing: set[str], tmp_path: Path
) -> None:
    # peft writes tie_word_embeddings=False, and T5 ties the embeddings of encoder and decoder all the same
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(base)
    config = LoraConfig(target_modules=["q"], modules_to_save=trained, task_type="SEQ_2_SEQ_LM")
    peft: Any = get_peft_model(T5ForConditionalGeneration.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    peft.save_pretrained(adapter)
    tokens = torch.ones(1, 4, dtype=torch.long)
    expected = peft.eval()(input_ids=tokens, labels=tokens).logits
    peft.merge_and_unload().save_pretrained(merged)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False
    loaded: Any = T5ForConditionalGeneration.from_pretrained(merged)
    is_right = torch.allclose(loaded(input_ids=tokens, labels=tokens).logits, expected, atol=1e-4)
    check = verify_merge(base, adapter, merged)
    assert check.ok is is_right is (not missing), str(check)
    assert {tensor.name for tensor in check.of("left out")} == left_out
    assert {tensor.name for tensor in check.of("missing")} == missing
    # what nothing stands for is missing all the same
    tensors = tensors_of(merged)
    del tensors["lm_head.weight"]
    check = verify_merge(base, adapter, rewritten(merged, tmp_path / "without", tensors))
    assert "lm_head.weight" in {tensor.name for tensor in check.of("missing")}


def test_what_the_class_does_not_read_and_a_save_has_lost(tmp_path: Path) -> None:
    """2U1/Qwen-VL-Series-Finetune#259: the layers for multi-token prediction, which other engines read."""
    saved = save_llama(tmp_path / "saved", num_hidden_layers=1)
    beyond = {"mtp.fc.weight": torch.randn(4, 4), "mtp.norm.weight": torch.randn(4)}
    base = rewritten(saved, tmp_path / "base", {**tensors_of(saved), **beyond})
    adapter = save_adapter(tmp_path / "adapter", base)
    peft: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    check = verify_merge(base, adapter, tmp_path / "merged")
    assert check.ok
    assert [(f.code, f.severity, f.where) for f in check.findings] == [("merged-left-out", "info", ", ".join(beyond))]
    merge_lora_checkpoint(base, adapter, tmp_path / "merged", overwrite=True)  # as it says
    assert not verify_merge(base, adapter, tmp_path / "merged").findings
