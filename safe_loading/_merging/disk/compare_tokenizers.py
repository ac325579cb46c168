"""The words of a merged folder's tokenizer against those of the tokenizer that the merge would write.

A tokenizer is saved in several forms: in one file or in several, merges as pairs or as text, added words here or there.
What a model sees of it are the ids of words and the order in which words are built: those are held against one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from safe_loading._checkpoint.tokenizer_ids import (
    FAST,
    SETTINGS,
    SPECIAL_MAP,
    WITH_IDS,
    Contents,
    all_words_of,
    merges_of,
    parsed,
)
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, counted

_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # of sentencepiece; nothing here reads them
_WHOLE = (FAST, "vocab.json")  # hold all words; the others only those that were added
# Whose other value makes another text of the same words; padding is no part of a text.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "add_bos_token", "add_eos_token")
_NAMED = 3

NAMES = (*WITH_IDS, SETTINGS, SPECIAL_MAP, *_MODELS)


def word_findings(right: Contents, own: Contents, folder: Path) -> Iterator[Finding]:
    """Yield the finding of words that have other ids in a folder than they should, or none; contents are by name."""
    found = [] if all(right.get(name) == own.get(name) for name in NAMES) else [*_differences(right, own)]
    if found:
        message = f"the tokenizer is another one than that of the base or the adapter: {'; '.join(found)}."
        fix = "copy the tokenizer of the base or the adapter; none, if the weights were made for this one"
        yield Finding("merged-tokenizer-ids", "warning", str(folder), message, f"{fix}.")


def special_words(right: Contents, own: Contents) -> Iterator[str]:
    """Yield the words with a task of their own that are others, as both contents say."""
    settings, found = _settings_of(right), _settings_of(own)
    for key in _SPECIAL:
        one, other = settings.get(key), found.get(key)
        if one is not None and other is not None and one != other:
            yield f"{SETTINGS}: {key} is {other!r:.60} and should be {one!r:.60}"


def _differences(right: Contents, own: Contents) -> Iterator[str]:
    words, found = all_words_of(right), all_words_of(own)
    moved = [word for word, number in words.items() if found.get(word, number) != number]
    is_whole = [any(name in contents for name in _WHOLE) for contents in (right, own)]
    lost = [word for word in words if word not in found] if all(is_whole) else []
    if moved:
        named = [f"{word!r:.60} is {found[word]} and should be {words[word]}" for word in moved[:_NAMED]]
        yield f"{counted(len(moved), 'word')} of another id ({_listed(named, len(moved))})"
    if lost:
        named = [f"{word!r:.60} ({words[word]})" for word in lost[:_NAMED]]
        yield f"{counted(len(lost), 'word')} missing: {_listed(named, len(lost))}"
    merges, others = _merges_of(right), _merges_of(own)
    if merges is not None and others is not None and merges != others:
        yield "its words are built by other merges"
    if not all(is_whole):
        yield from (
            f"{name} is another one" for name in _MODELS if name in own and right.get(name, own[name]) != own[name]
        )


def _listed(named: Sequence[str], count: int) -> str:
    return ", ".join(named) + (f" and {count - len(named)} more" if count > len(named) else "")


def _merges_of(contents: Contents) -> list[str] | None:
    return merges_of((parsed(contents.get(FAST), FAST) or {}).get("model"))


def _settings_of(contents: Contents) -> JsonObject:
    documents = [parsed(contents.get(name), name) or {} for name in (SPECIAL_MAP, SETTINGS)]
    every = [pair for document in documents for pair in document.items()]
    return {key: value.get("content") if isinstance(value, dict) else value for key, value in every}
