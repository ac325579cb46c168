"""Tokenizers in two forms: transformers 5 saves other files and entries than 4, and programs with 4 read only theirs.

An adapter's folder holds the tokenizer as the training saved it. Where it says what the base's says, the base's files
are the better ones: every program that reads the base reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safe_loading._core.protocols import JsonObject

from .compare_changed_files import TEMPLATES, template_of
from .compare_tokenizers import parsed

FAST, SETTINGS, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
# What tokenizer_config.json holds that says where it came from, and nothing of what it does.
OF_THE_PLACE = frozenset({"is_local", "local_files_only", "name_or_path", "tokenizer_file", "transformers_version"})
# What it holds that another file or entry says, or that only tells a class from its twin in Python.
_SAID_ELSEWHERE = frozenset({"added_tokens_decoder", "backend", "chat_template", "processor_class", "tokenizer_class"})
_LISTS_OF_WORDS = ("additional_special_tokens", "extra_special_tokens")
# The two of them that add words are said by the post-processor of tokenizer.json as well, which is compared.
_DEFAULTS: Mapping[str, object] = {
    "errors": "replace", "split_special_tokens": False, "add_bos_token": False, "add_eos_token": False,
}  # fmt: skip
# Of its model; a prefix of no letters is none.
_UNSAID = (None, False, "")
_NAMELESS = frozenset({"TokenizersBackend", "PreTrainedTokenizer"})  # classes of any tokenizer.json
# What the last call before the save asked for, which no later call is bound to.
_OF_A_CALL = frozenset({"padding", "truncation", "version"})

Contents = Mapping[str, bytes]


def is_same_tokenizer(ours: Contents, theirs: Contents) -> bool:
    """Return whether an adapter's tokenizer says what the base's says; what it does not bring is the base's anyway."""
    known = {FAST, SETTINGS, SPECIAL_MAP, "added_tokens.json", *TEMPLATES}
    if any(ours.get(name) != content for name, content in theirs.items() if name not in known):
        return False
    if not has_same_words(ours, theirs) or SETTINGS not in theirs or SETTINGS not in ours:
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


def inline_template(settings: bytes | None) -> object:
    """Return the chat templates in the settings of a tokenizer; None where there are none."""
    return (parsed(settings, SETTINGS) or {}).get("chat_template")


def _words(content: bytes | None) -> JsonObject | None:
    """Return what tokenizer.json says, without what its writers say in different ways."""
    document = parsed(content, FAST)
    model = (document or {}).get("model")
    if document is None or not isinstance(model, dict):
        return None
    merges = model.get("merges")
    if isinstance(merges, list):  # as pairs since tokenizers 0.20, and as text before
        merges = [each if isinstance(each, str) else " ".join(map(str, each)) for each in merges]
    said = {key: value for key, value in document.items() if key not in _OF_A_CALL}
    model = {key: value for key, value in model.items() if not any(value is each or value == each for each in _UNSAID)}
    return {**said, "model": {**model, "merges": merges}}


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
