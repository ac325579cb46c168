"""The tokenizer of a merge on disk, where a training saved the base's in another form, in part, or with another end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from safe_loading import MergeReport, merge_lora_checkpoint, verify_merge

TEMPLATE = "{% for message in messages %}<start>{{ message['content'] }}<end>{% endfor %}"
SPECIAL = ("<text>", "<start>", "<end>")
PLAIN = ("vocab.json", "merges.txt", "tokenizer.model")


def publish(folder: Path) -> int:
    """Save a tokenizer in the form in which transformers 4 saved those of Qwen2; return its number of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder, inner.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(["a tiny text of words"] * 9, trainers.BpeTrainer(initial_alphabet=alphabet))
    inner.add_special_tokens([*SPECIAL])
    document = json.loads(inner.to_str())
    merges = document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {word["id"]: {key: word[key] for key in flags} for word in document["added_tokens"]},
        "additional_special_tokens": ["<start>", "<end>"],
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<text>",
        "errors": "replace",
        "model_max_length": 512,
        "pad_token": "<text>",
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<text>",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "vocab.json").write_text(json.dumps(document["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "tokenizer.model").write_bytes(b"the same words for other programs")
    return inner.get_vocab_size()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base with a tokenizer of an older transformers, and an adapter without one."""
    words = publish(tmp_path / "base")
    save_llama(tmp_path / "base", vocab_size=words + 1, eos_token_id=words - 3)
    save_adapter(tmp_path / "adapter", tmp_path / "base")
    return tmp_path / "base", tmp_path / "adapter"


def train(pair: tuple[Path, Path], change: Callable[[Any], object] = lambda tokenizer: None) -> Path:
    """Save the base's tokenizer beside the adapter as a training does that changed it; return the adapter."""
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    change(tokenizer)
    tokenizer.save_pretrained(pair[1])
    return pair[1]


def merge(pair: tuple[Path, Path], **options: Any) -> tuple[MergeReport, Path]:
    output = pair[0].parent / "out"
    return merge_lora_checkpoint(*pair, output, overwrite=True, **options), output


def codes(report: MergeReport) -> list[str]:
    return [finding.code for finding in report.findings]


def test_a_tokenizer_in_the_form_of_another_transformers_stays_the_base_s(pair: tuple[Path, Path]) -> None:
    adapter = train(pair)
    theirs = json.loads((adapter / "tokenizer_config.json").read_text())
    assert isinstance(theirs["extra_special_tokens"], list)  # at which transformers 4 fails, and vLLM with it
    assert not (adapter / "vocab.json").exists()
    report, output = merge(pair)
    assert codes(report) == []
    for name in ("tokenizer.json", "tokenizer_config.json", *PLAIN):
        assert (output / name).read_bytes() == (pair[0] / name).read_bytes()
    assert not (output / "chat_template.jinja").exists()
    found, own = (AutoTokenizer.from_pretrained(folder) for folder in (output, adapter))
    assert found.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
    assert (found.special_tokens_map, found.chat_template) == (own.special_tokens_map, own.chat_template)
    # asked for by name, the adapter's is taken; and a folder with it is as good a merge
    report, output = merge(pair, tokenizer="adapter")
    assert codes(report) == ["tokenizer-of-adapter"]
    assert (output / "tokenizer_config.json").read_bytes() == (adapter / "tokenizer_config.json").read_bytes()
    assert verify_merge(*pair, output).findings == ()


def rewrite(adapter: Path, name: str, change: Callable[[Any], object]) -> None:
    document = json.loads((adapter / name).read_text())
    change(document)
    (adapter / name).write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer_config.json", lambda document: document.update(pad_token="<end>")),
        ("tokenizer_config.json", lambda document: document.update(model_max_length=77)),
        ("tokenizer_config.json", lambda document: document.update(padding_side="left")),
        ("tokenizer_config.json", lambda document: document.update(add_eos_token=True)),
        ("tokenizer_config.json", lambda document: document.update(extra_special_tokens=["<start>"])),
        ("tokenizer_config.json", lambda document: document.update(tokenizer_class="LlamaTokenizer")),
        ("tokenizer_config.json", lambda document: document.pop("unk_token")),
        ("tokenizer.json", lambda document: document["model"]["merges"].reverse()),
        ("tokenizer.json", lambda document: document["model"].update(ignore_merges=True)),
        ("tokenizer.json", lambda document: document["pre_tokenizer"].update(add_prefix_space=True)),
        ("tokenizer.json", lambda document: document.update(normalizer={"type": "NFC"})),
        ("tokenizer.json", lambda document: document["added_tokens"][0].update(lstrip=True)),
    ],
)
def test_a_tokenizer_that_says_anything_else_is_the_adapter_s(
    pair: tuple[Path, Path], name: str, change: Callable[[Any], object]
) -> None:
    adapter = train(pair)
    rewrite(adapter, name, change)
    report, output = merge(pair)
    assert codes(report) == ["tokenizer-of-adapter"]
    assert "programs with transformers 4 cannot read" in report.findings[0].message
    for taken in ("tokenizer.json", "tokenizer_config.json"):
        assert (output / taken).read_bytes() == (adapter / taken).read_bytes()


def test_a_template_that_was_trained_is_the_adapter_s(pair: tuple[Path, Path]) -> None:
    train(pair, lambda tokenizer: setattr(tokenizer, "chat_template", "trained"))
    report, output = merge(pair)
    assert codes(report) == ["tokenizer-of-adapter"]
    assert AutoTokenizer.from_pretrained(output).chat_template == "trained"


@pytest.mark.parametrize("word", [None, "<tool>"])
def test_vocabularies_of_other_programs_stay_while_the_words_are_the_same(
    pair: tuple[Path, Path], word: str | None
) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.pad_token = "<end>"
        if word is not None:
            tokenizer.add_tokens([word])

    train(pair, change)
    report, output = merge(pair)
    assert codes(report) == ["tokenizer-of-adapter"]
    assert [name for name in PLAIN if (output / name).exists()] == ([*PLAIN] if word is None else [])
    found = AutoTokenizer.from_pretrained(output)
    assert (found.pad_token, "<tool>" in found.get_vocab()) == ("<end>", word is not None)
    assert found("a tiny text")["input_ids"] == AutoTokenizer.from_pretrained(pair[1])("a tiny text")["input_ids"]


@pytest.mark.parametrize("named", [False, True])
def test_templates_in_the_base_s_settings_stay_where_the_adapter_brings_none(
    pair: tuple[Path, Path], named: bool
) -> None:
    several = [{"name": "default", "template": TEMPLATE}, {"name": "tools", "template": "x"}]
    template: Any = several if named else TEMPLATE
    rewrite(pair[0], "tokenizer_config.json", lambda document: document.update(chat_template=template))

    def change(tokenizer: Any) -> None:
        tokenizer.pad_token, tokenizer.chat_template = "<end>", None

    train(pair, change)
    _, output = merge(pair)
    found = AutoTokenizer.from_pretrained(output)
    assert found.pad_token == "<end>"
    assert json.loads((pair[1] / "tokenizer_config.json").read_text())["chat_template"] is None
    assert found.chat_template == ({each["name"]: each["template"] for each in several} if named else TEMPLATE)
    assert verify_merge(*pair, output).findings == ()
    rewrite(output, "tokenizer_config.json", lambda document: document.update(chat_template=None))
    (lost,) = verify_merge(*pair, output).findings
    assert lost.code == "merged-files-lost"
    assert "the chat_template in tokenizer_config.json" in lost.message


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer.json"])
def test_settings_that_the_adapter_does_not_bring_stay_the_base_s(pair: tuple[Path, Path], name: str) -> None:
    adapter = train(pair)
    (adapter / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<end>"}))
    rewrite(adapter, "tokenizer.json", lambda document: document.update(normalizer={"type": "NFC"}))
    for path in adapter.iterdir():
        if path.name.startswith(("token", "chat", "special")) and path.name != name:
            path.unlink()
    report, output = merge(pair)
    assert codes(report) == ["tokenizer-of-adapter"]
    assert (output / "tokenizer_config.json").read_bytes() == (pair[0] / "tokenizer_config.json").read_bytes()
    assert AutoTokenizer.from_pretrained(output).chat_template == TEMPLATE


def added(output: Path, end: int) -> list[int]:
    """Return how many words a model generates that says nothing but the end: as it is saved, and with the fix."""
    ids, counts = torch.tensor([[4, 5, 6]]), []
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(output)
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.model.norm.weight.zero_()[0] = 1
            model.model.embed_tokens.weight[:, 0] = 9  # and nothing that a layer adds changes its sign
            model.lm_head.weight[end, 0] = 1
        counts.append(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape[1] - ids.shape[1])
        ends = model.generation_config.eos_token_id
        rewrite(output, "generation_config.json", lambda document, ends=ends: document.update(eos_token_id=[ends, end]))
    return counts


def test_an_end_at_which_nothing_stops_is_told_and_can_be_written(pair: tuple[Path, Path]) -> None:
    train(pair, lambda tokenizer: setattr(tokenizer, "eos_token", "<end>"))
    report, output = merge(pair)
    assert codes(report) == ["tokenizer-of-adapter", "stops-elsewhere"]
    finding = report.findings[1]
    end = AutoTokenizer.from_pretrained(output).eos_token_id
    assert f"with '<end>' (id {end}), and generation_config.json stops at {end - 2}" in finding.message
    assert finding.fix.startswith(f"add {end} to eos_token_id in generation_config.json of the output")
    assert added(output, end) == [4, 1]
    # an end that the base's config stops at, beside others, is none
    rewrite(pair[0], "generation_config.json", lambda document: document.update(eos_token_id=[end - 2, end]))
    assert codes(merge(pair)[0]) == ["tokenizer-of-adapter"]
    # nor is one of the base's own
    rewrite(pair[0], "generation_config.json", lambda document: document.update(eos_token_id=end - 2))
    rewrite(pair[0], "tokenizer_config.json", lambda document: document.update(eos_token="<end>", model_max_length=9))
    assert codes(merge(pair)[0]) == ["tokenizer-of-adapter"]
