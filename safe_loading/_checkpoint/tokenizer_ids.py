"""The words of a tokenizer against the rows of the embeddings that it is used with. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from safe_loading._core.report import Finding

from .faults import fault, note
from .files import try_open
from .header import TensorInfo
from .strict_json import try_json_bytes

WITH_IDS = ("tokenizer.json", "added_tokens.json", "vocab.json")
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared)\.weight$")
# What a processor puts in the place of images and sounds, which no embedding is looked up for (Gemma 3 1B has one).
_PLACEHOLDER = re.compile(r"image|video|audio|vision|speech", re.IGNORECASE)
_ADDED = ("added_tokens.json", "tokenizer_config.json", "tokenizer.json")  # the first that names any has all
_MOST_DIGITS = 20  # of an id; Python refuses to read thousands of them
_MOST_BYTES = 1 << 27  # several times the largest published tokenizer.json


def rows_of(tensors: Mapping[str, TensorInfo]) -> int:
    """Return how many rows the embeddings of some tensors have; 0 where none of them are embeddings."""
    return max((info.shape[0] for name, info in tensors.items() if _EMBEDDINGS.search(name) and info.shape), default=0)


def words_of(content: bytes | None) -> Iterator[tuple[str, int]]:
    """Yield the words of a tokenizer's file with their ids; of one that is no such JSON, none."""
    try:
        document = json.loads(content or b"")
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict):
        return
    model, decoder = document.get("model"), document.get("added_tokens_decoder")
    plain = document if all(type(number) is int for number in document.values()) else {}
    vocabulary = model.get("vocab") if isinstance(model, dict) else plain
    every: list[tuple[object, object]]
    if isinstance(vocabulary, list):  # of Unigram, in the order of the ids
        every = [(entry[0], number) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
    else:
        every = [*vocabulary.items()] if isinstance(vocabulary, dict) else []
    added = document.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    every += [(entry.get("content"), entry.get("id")) for entry in entries]
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if len(number) < _MOST_DIGITS and number.isdecimal() and isinstance(entry, dict):
            every.append((entry.get("content"), int(number)))
    yield from ((word, number) for word, number in every if isinstance(word, str) and type(number) is int)


def words_in(folder: Path) -> dict[str, int]:
    """Return the words of the tokenizer in a folder with their ids; files that cannot be read have none."""
    words: dict[str, int] = {}
    for name in (*WITH_IDS, "tokenizer_config.json"):
        file = try_open(folder / name)
        if not isinstance(file, Finding):
            with file:
                words.update(words_of(file.read(_MOST_BYTES)))
    return words


def tokenizer_findings(folder: Path, rows: int, known: Container[str] = ()) -> list[Finding]:
    """Return the finding of a tokenizer with words beyond the rows of the embeddings; the ``known`` ones are not told.

    Placeholders of images and sounds may be there without a row.
    """
    words = words_in(folder) if rows else {}
    farthest = _farthest({word: n for word, n in words.items() if not _PLACEHOLDER.search(word)}, rows, known)
    if farthest is None:
        return []
    word, number = farthest
    message = (
        f"the tokenizer has {word!r:.80} with the id {number}, and the embeddings have {rows} rows: the model fails at "
        f"the first such word"
    )
    fix = (
        "put the tokenizer here that the weights were trained with; or call resize_token_embeddings, train the new "
        "rows, and save both again"
    )
    return [fault("tokenizer-ids", folder, message, fix)]


def warning_of_added_words(folder: Path, rows: int, base: Path | None) -> list[Finding]:
    """Return the warning of a load: the tokenizer beside an adapter adds words for which the model has no rows.

    Words that the tokenizer in the folder of the base has, too, are the publisher's.
    """
    words = _added_words(folder)
    farthest = _farthest(words, rows)
    if farthest is not None and base is not None:
        farthest = _farthest(words, rows, _added_words(base))
    if farthest is None:
        return []
    word, number = farthest
    message = (
        f"its tokenizer has {word!r:.80} with the id {number}, and the embeddings have {rows} rows: the model would "
        f"fail at the first such word"
    )
    fix = (
        "take the base's tokenizer; or train with modules_to_save=['embed_tokens', 'lm_head'] after "
        "resize_token_embeddings"
    )
    return [note("warning", "tokenizer-beyond-rows", folder, message, fix)]


def _farthest(words: Mapping[str, int], rows: int, known: Container[str] = ()) -> tuple[str, int] | None:
    """Return the word with the largest id of those beyond the rows, with that id; the ``known`` ones do not count."""
    beyond = ((word, number) for word, number in words.items() if number >= rows and word not in known)
    return max(beyond, key=lambda pair: pair[1], default=None)


def _added_words(folder: Path) -> dict[str, int]:
    for name in _ADDED:
        content = try_json_bytes(folder / name)
        found = {} if isinstance(content, Finding) else dict(words_of(content))
        if found:
            return found
    return {}
