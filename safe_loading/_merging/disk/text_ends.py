"""The word with which a text ends: an adapter's tokenizer against the ids at which ``generate`` stops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safe_loading._checkpoint.model_folder import CONFIG, GENERATION_CONFIG
from safe_loading._checkpoint.tokenizer_ids import WITH_IDS, words_of
from safe_loading._core.report import Finding

from .compare_tokenizers import parsed
from .tokenizer_forms import SETTINGS, SPECIAL_MAP


def end_findings(ours: Mapping[str, bytes], files: Mapping[str, bytes], settings: Path) -> list[Finding]:
    """Return the finding of an adapter's tokenizer with another last word than the base's, at which nothing stops.

    ``ours`` is what the base's tokenizer says, ``files`` the small files of the output, and ``settings`` the adapter's.
    Trainers set the generation config of the model that they train, and save an adapter without it.
    """
    word = _last_word(files)
    if word is None or word == _last_word(ours):
        return []
    number = dict(pair for name in (*WITH_IDS, SETTINGS) for pair in words_of(files.get(name))).get(word)
    entries = (
        (name, (parsed(files.get(name), name) or {}).get("eos_token_id")) for name in (GENERATION_CONFIG, CONFIG)
    )
    stop, ends = next(((name, ids) for name, ids in entries if ids is not None), (CONFIG, None))
    if number is None or ends is None or number in (ends if isinstance(ends, list) else [ends]):
        return []
    message = (
        f"the adapter's tokenizer ends a text with {word!r:.60} (id {number}), and {stop} stops at {ends!r:.60}: "
        f"generate goes on after what the adapter was trained to end with."
    )
    fix = f"add {number} to eos_token_id in {stop} of the output; or pass eos_token_id to generate."
    return [Finding("stops-elsewhere", "warning", str(settings.parent), message, fix)]


def _last_word(contents: Mapping[str, bytes]) -> str | None:
    """Return the last word of a text as a tokenizer's settings say it."""
    entries = [(parsed(contents.get(name), name) or {}).get("eos_token") for name in (SETTINGS, SPECIAL_MAP)]
    words = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return next((word for word in words if isinstance(word, str)), None)
