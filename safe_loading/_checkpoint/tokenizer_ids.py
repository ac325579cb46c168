"""The words of a tokenizer against the rows of the embeddings that it is used with, and against another tokenizer's.

Transformers 5 saves other files and entries than 4, and programs with 4 read only theirs. An adapter's folder holds the
tokenizer as the training saved it: where it says the same as the base's, the base's files are the better ones, as every
program that reads the base reads them. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

from .faults import fault, note
from .files import try_open
from .header import TensorInfo
from .strict_json import try_json_bytes, try_parse

WITH_IDS = ("tokenizer.json", "added_tokens.json", "vocab.json")
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared)\.weight$")
# What a processor puts in the place of images and sounds, which no embedding is looked up for (Gemma 3 1B has one).
_PLACEHOLDER = re.compile(r"image|video|audio|vision|speech", re.IGNORECASE)
_ADDED = ("added_tokens.json", "tokenizer_config.json", "tokenizer.json")  # the first that names any has all
_MOST_DIGITS = 20  # of an id; Python refuses to read thousands of them
_MOST_BYTES = 1 << 27  # several times the largest published tokenizer.json
FAST, SETTINGS, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
# What tokenizer_config.json holds that says where it came from, and nothing of what it does.
OF_THE_PLACE = frozenset({"is_local", "local_files_only", "name_or_path", "tokenizer_file", "transformers_version"})
# What it holds that another file or entry says, or that only tells a class from its twin in Python.
_SAID_ELSEWHERE = frozenset({"added_tokens_decoder", "backend", "chat_template", "processor_class", "tokenizer_class"})
_LISTS_OF_WORDS = ("additional_special_tokens", "extra_special_tokens")
# The two of them that add words are said by the post-processor of tokenizer.json as well, which is compared.
_DEFAULTS: Mapping[str, object] = {
    "errors": "replace", "split_special_tokens": False, "add_bos_token": False, "add_eos_token": False,
}  # fmt: skip
_NAMELESS = frozenset({"TokenizersBackend", "PreTrainedTokenizer"})  # classes of any tokenizer.json
# What the last call before the save asked for, which no later call is bound to.
_OF_A_CALL = frozenset({"padding", "truncation", "version"})

Contents = Mapping[str, bytes]


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


def all_words_of(contents: Contents) -> dict[str, int]:
    """Return the words of a tokenizer's files with their ids."""
    return dict(pair for name in (*WITH_IDS, SETTINGS) for pair in words_of(contents.get(name)))


def words_in(folder: Path) -> dict[str, int]:
    """Return the words of the tokenizer in a folder with their ids; files that cannot be read have none."""
    words: dict[str, int] = {}
    for name in (*WITH_IDS, SETTINGS):
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


def parsed(content: bytes | None, name: str) -> JsonObject | None:
    """Return a file's JSON object; None where there is no such file, or no JSON, which check_checkpoint names."""
    document = None if content is None else try_parse(content, name)
    return None if isinstance(document, Finding) else document


def template_of(contents: Mapping[str, bytes | None]) -> str | None:
    """Return the one chat template of a tokenizer, in the order in which transformers looks for it."""
    text = contents.get(TEMPLATES[0])
    if text is not None:
        return text.decode(errors="replace").strip()
    for name in (TEMPLATES[1], SETTINGS):
        template = (parsed(contents.get(name), name) or {}).get("chat_template")
        if isinstance(template, str):
            return template.strip()
    return None


def says_the_same(ours: Contents, theirs: Contents) -> bool:
    """Return whether an adapter's tokenizer, of the base's words, says the same; all that it lacks is the base's."""
    known = {FAST, SETTINGS, SPECIAL_MAP, "added_tokens.json", *TEMPLATES}
    if any(ours.get(name) != content for name, content in theirs.items() if name not in known):
        return False
    if SETTINGS not in theirs or SETTINGS not in ours:
        return False
    template = _template(theirs)
    return _settings(ours) == _settings(theirs) and template in (None, _template(ours)) and _is_of_class(ours, theirs)


def has_same_words(ours: Contents, theirs: Contents) -> bool:
    """Return whether two tokenizers find the same words in a text; False where no tokenizer.json says so."""
    one, other = (_words(contents.get(FAST)) for contents in (ours, theirs))
    return one is not None and one == other


def is_of_newer_form(ours: Contents, theirs: Contents) -> bool:
    """Return whether an adapter's settings are of a form that transformers 4 fails to read, and the base's are not."""
    newer = []
    for contents in (ours, theirs):
        settings = parsed(contents.get(SETTINGS), SETTINGS) or {}
        is_list = isinstance(settings.get("extra_special_tokens"), list)
        newer.append(is_list or settings.get("tokenizer_class") == "TokenizersBackend")
    return newer == [False, True]


def merges_of(model: object) -> list[str] | None:
    """Return the merges of the model in a tokenizer.json, in their order; None where it names none."""
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list):
        return None
    # as pairs since tokenizers 0.20, and as text before
    return [each if isinstance(each, str) else " ".join(map(str, each)) for each in merges]


def inline_template(settings: bytes | None) -> object:
    """Return the chat templates in the settings of a tokenizer; None where there are none."""
    return (parsed(settings, SETTINGS) or {}).get("chat_template")


def _words(content: bytes | None) -> JsonObject | None:
    """Return the content of tokenizer.json, without the entries that its writers write in different ways."""
    document = parsed(content, FAST)
    model = (document or {}).get("model")
    if document is None or not isinstance(model, dict):
        return None
    said = {key: value for key, value in document.items() if key not in _OF_A_CALL}
    # older files lack entries of their model, whose defaults these are; a prefix of no letters is none
    model = {key: value for key, value in model.items() if value is not None and value is not False and value != ""}
    return {**said, "model": {**model, "merges": merges_of(model)}}


def _settings(contents: Contents) -> dict[str, object]:
    documents = [parsed(contents.get(name), name) or {} for name in (SPECIAL_MAP, SETTINGS)]
    entries: dict[str, Any] = {**documents[0], **documents[1]}
    lists = [entries.pop(key) for key in _LISTS_OF_WORDS if isinstance(entries.get(key), list)]
    said = {
        key: _word(value)
        for key, value in entries.items()
        if key not in OF_THE_PLACE | _SAID_ELSEWHERE and value is not None and value != _DEFAULTS.get(key)
    }
    # a list that is empty says nothing
    return {**said, "words": sorted({str(_word(each)) for words in lists for each in words})}


def _word(value: object) -> object:
    return value["content"] if isinstance(value, dict) and isinstance(value.get("content"), str) else value


def _template(contents: Contents) -> object:
    return template_of(contents) or inline_template(contents.get(SETTINGS))


def _is_of_class(ours: Contents, theirs: Contents) -> bool:
    """Return whether the adapter's names the base's class, or none of its own."""
    named = [(parsed(contents[SETTINGS], SETTINGS) or {}).get("tokenizer_class") for contents in (ours, theirs)]
    one, other = (str(name).removesuffix("Fast") for name in named)
    return one == other or other in _NAMELESS
