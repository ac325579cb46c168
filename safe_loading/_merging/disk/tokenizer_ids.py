"""The ids of an adapter's tokenizer against the rows of the output's embeddings, and against its ends of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safe_loading._checkpoint.model_folder import CONFIG, GENERATION_CONFIG
from safe_loading._checkpoint.tokenizer_ids import (
    SETTINGS,
    SPECIAL_MAP,
    WITH_IDS,
    all_words_of,
    parsed,
    rows_of,
    words_of,
)
from safe_loading._core.report import Finding
from safe_loading.errors import AdapterError

from .output_plan import FilePlan
from .small_files import content_of
from .sources import MergeSources, is_vocabulary


def refuse_ids_without_rows(sources: MergeSources, small: Mapping[str, bytes], plans: Sequence[FilePlan]) -> None:
    """Refuse an adapter's tokenizer with words for which the output has no embedding, unless the base's has them, too.

    ``small`` holds the small files of the output. A base may be published with such words (Gemma 3 1B has the one for
    images), which nothing gives to the model.
    """
    with_ids = [name for name in small if is_vocabulary(name) or name in WITH_IDS]
    taken = {name for name in with_ids if small[name] != _of_base(sources, name)}
    rows = rows_of({tensor.target.name: tensor.target for plan in plans for tensor in plan.tensors})
    if not taken or not rows:
        return
    before = {word for name in WITH_IDS for word, _ in words_of(_of_base(sources, name))}
    found = [(word, number) for name in sorted(taken) for word, number in words_of(small[name]) if number >= rows]
    beyond = dict(pair for pair in found if pair[0] not in before)
    if beyond:
        word, number = max(beyond.items(), key=lambda pair: pair[1])
        raise AdapterError(
            f"The adapter's tokenizer has {word!r:.80} with the id {number}, and the embeddings of the output have "
            f"{rows} rows, as the adapter brings none of its own: the model would fail at the first such word. Pass "
            f"tokenizer='base'; or save the adapter with modules_to_save=['embed_tokens', 'lm_head'] after "
            f"resize_token_embeddings."
        )


def _of_base(sources: MergeSources, name: str) -> bytes | None:
    path = sources.carried.get(name)
    return None if path is None else content_of(path)


def end_findings(sources: MergeSources, files: Mapping[str, bytes]) -> list[Finding]:
    """Return the finding of an adapter's tokenizer with another last word than the base's, at which nothing stops.

    ``files`` are the small files of the output. Trainers set the generation config of the model that they train, and
    save an adapter without it.
    """
    word = _last_word(files)
    before = {name: content for name in (SETTINGS, SPECIAL_MAP) if (content := _of_base(sources, name)) is not None}
    if word is None or word == _last_word(before):
        return []
    number = all_words_of(files).get(word)
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
    return [
        Finding(
            "stops-elsewhere",
            "warning",
            ", ".join(str(adapter.facts.path) for adapter in sources.adapters.values()),
            message,
            fix,
        )
    ]


def _last_word(contents: Mapping[str, bytes]) -> str | None:
    """Return the last word of a text as a tokenizer's settings say it."""
    entries = [(parsed(contents.get(name), name) or {}).get("eos_token") for name in (SETTINGS, SPECIAL_MAP)]
    words = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return next((word for word in words if isinstance(word, str)), None)
