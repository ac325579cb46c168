"""A merged folder with a tokenizer of other ids is named, and one in another form is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from test_verify_merge import codes
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from safe_loading import merge_lora_checkpoint, verify_merge

FAST, SETTINGS = "tokenizer.json", "tokenizer_config.json"
END = "<|im_end|>"


def save_words(folder: Path) -> None:
    """Save a tokenizer with two merges and a word that was added."""
    letters = {letter: number for number, letter in enumerate("abcd")}
    words = {"<s>": 4, "</s>": 5, "<unk>": 6, **letters, "ab": 7, "abc": 8}
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "additional_special_tokens": [END]}
    inner = Tokenizer(BPE(words, [("a", "b"), ("ab", "c")], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, an adapter, and their merge."""
    folder = tmp_path_factory.mktemp("words")
    base = save_llama(folder / "base", torch.bfloat16, num_hidden_layers=1)
    save_words(base)
    merge_lora_checkpoint(base, save_adapter(folder / "adapter", base), folder / "merged")
    return folder


def edited(folder: Path, file: str, change: Callable[[dict[str, Any]], object], **form: Any) -> None:
    document = json.loads((folder / file).read_text())
    change(document)
    (folder / file).write_text(json.dumps(document, **form))


def swap(document: dict[str, Any]) -> None:
    words = document["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


Change = Callable[[dict[str, Any]], object]
OTHERS: dict[str, tuple[Change, str]] = {
    "two words swapped": (swap, "2 words of another id ('a' is 1 and should be 0, 'b' is 0 and should be 1)"),
    "a word that was added is lost": (lambda d: d["added_tokens"].pop(), f"1 word missing: '{END}' (9)"),
    "other merges": (lambda d: d["model"]["merges"].reverse(), "its words are built by other merges"),
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_ids_are_named(right: Path, tmp_path: Path, change: str) -> None:
    make, said = OTHERS[change]
    merged = Path(shutil.copytree(right / "merged", tmp_path / "merged"))
    edited(merged, FAST, make)
    edited(merged, SETTINGS, lambda document: document.pop("added_tokens_decoder", None))
    check = verify_merge(right / "base", right / "adapter", merged)
    assert codes(check) == {"merged-tokenizer-ids"}, str(check)
    assert said in check.findings[0].message
    assert check.ok
    shutil.copy(right / "base" / FAST, merged / FAST)
    assert not codes(verify_merge(right / "base", right / "adapter", merged))


def test_the_tokenizer_of_the_adapter_counts(right: Path, tmp_path: Path) -> None:
    """Saved anew, the base's tokenizer has other bytes than it has in the base."""
    adapter, merged = (Path(shutil.copytree(right / name, tmp_path / name)) for name in ("adapter", "merged"))
    AutoTokenizer.from_pretrained(right / "base").save_pretrained(merged)
    edited(merged, FAST, lambda document: None, indent=1)
    tokenizer = AutoTokenizer.from_pretrained(right / "base")
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(adapter)
    check = verify_merge(right / "base", adapter, merged)
    assert "merged-tokenizer-ids" in codes(check), str(check)
    assert "1 word missing: '<think>' (10)" in str(check)
    assert not codes(verify_merge(right / "base", adapter, merged, tokenizer="base"))


def test_another_form_of_the_same_tokenizer_is_none(right: Path, tmp_path: Path) -> None:
    merged = Path(shutil.copytree(right / "merged", tmp_path / "merged"))
    AutoTokenizer.from_pretrained(merged).save_pretrained(merged)
    edited(merged, FAST, lambda document: document["model"].update(merges=["a b", "ab c"]), indent=3, sort_keys=True)
    assert (merged / FAST).read_bytes() != (right / "base" / FAST).read_bytes()
    words = json.loads((merged / FAST).read_text())["model"]["vocab"]
    assert not codes(verify_merge(right / "base", right / "adapter", merged))
    (merged / FAST).unlink()  # as the classes in Python save it
    (merged / "vocab.json").write_text(json.dumps(words))
    (merged / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    (merged / "added_tokens.json").write_text(json.dumps({END: 9}))
    assert not codes(verify_merge(right / "base", right / "adapter", merged))


def test_another_word_that_ends_an_answer_is_named(right: Path, tmp_path: Path) -> None:
    merged = Path(shutil.copytree(right / "merged", tmp_path / "merged"))
    edited(merged, SETTINGS, lambda document: document.update(eos_token={"content": "</s>"}, pad_token="<unk>"))
    assert not codes(verify_merge(right / "base", right / "adapter", merged))
    edited(merged, SETTINGS, lambda document: document.update(eos_token=END))
    check = verify_merge(right / "base", right / "adapter", merged)
    assert codes(check) == {"merged-files-changed"}
    assert f"eos_token is '{END}' and should be '</s>'" in check.findings[0].message
