"""The files beside the weights that a merged folder has with other contents than the merge would write.

An engine writes its own form of them: other versions, defaults written out or left out, other orders. Held against one
another are the entries that both have, and those of the generation config as its class reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import GenerationConfig

from safe_loading._checkpoint.files import try_open
from safe_loading._checkpoint.model_folder import GENERATION_CONFIG
from safe_loading._checkpoint.tokenizer_ids import SETTINGS, TEMPLATES, parsed, template_of
from safe_loading._checkpoint.trained_beside import MODULE_WEIGHTS, MODULES, folders_named_in, of_modules
from safe_loading._core.log import quiet
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

from .compare_tokenizers import NAMES, special_words, word_findings
from .sources import is_processor

# Entries that say where a file came from or how a batch is made, and not what the model is asked or answers.
_NO_MATTER = frozenset({
    "auto_map", "cache_implementation", "max_length", "name_or_path", "output_attentions", "output_hidden_states",
    "pad_token_id", "processor_class", "return_dict_in_generate", "transformers_version", "use_cache",
})  # fmt: skip


def changed_files(expected: Mapping[str, bytes], folder: Path) -> Iterator[Finding]:
    """Yield the findings of files with other contents than ``expected``, by the entries and the words that differ."""
    own = {name: content for name in NAMES if (content := content_here(folder / name)) is not None}
    found = [
        *_generation(expected, folder),
        *_templates(expected, folder),
        *_processors(expected, folder),
        *_modules(expected, folder),
        *special_words(expected, own),
    ]
    yield from word_findings(expected, own, folder)
    if found:
        fix = "copy the files of the base or the adapter; none, if the change was meant"
        yield Finding("merged-files-changed", "warning", str(folder), "; ".join(found) + ".", f"{fix}.")


def content_here(path: Path) -> bytes | None:
    """Return the bytes of a file; None where there is none that may be read."""
    file = try_open(path)
    if isinstance(file, Finding):
        return None
    with file:
        return file.read()


def _generation(expected: Mapping[str, bytes], folder: Path) -> Iterator[str]:
    documents = [
        parsed(content, GENERATION_CONFIG)
        for content in (expected.get(GENERATION_CONFIG), content_here(folder / GENERATION_CONFIG))
    ]
    right, own = documents
    if right is None or own is None:
        return
    try:
        with quiet():
            right, own = (GenerationConfig.from_dict(dict(each)).to_dict() for each in (right, own))
    except Exception:  # entries that no class takes
        return
    yield from (f"{GENERATION_CONFIG}: {text}" for text in _differences(right, own, ""))


def _templates(expected: Mapping[str, bytes], folder: Path) -> Iterator[str]:
    """Yield the chat template where it is another one; transformers keeps it in any of three files."""
    right = template_of(expected)
    own = template_of({name: content_here(folder / name) for name in (*TEMPLATES, SETTINGS)})
    if right is not None and own is not None and right != own:
        yield "the chat template is another one"


def _modules(expected: Mapping[str, bytes], folder: Path) -> Iterator[str]:
    """Yield the modules of sentence-transformers where their weights or their list are others."""
    for name in of_modules(expected, folders_named_in(expected.get(MODULES, b""))):
        own = content_here(folder / name)
        if own is None or own == expected[name]:
            continue
        if name.endswith(MODULE_WEIGHTS):
            yield f"{name}: the weights are others"
        elif name == MODULES and folders_named_in(own) != folders_named_in(expected[name]):
            yield f"{name}: the modules are others"


def _processors(expected: Mapping[str, bytes], folder: Path) -> Iterator[str]:
    for name in sorted(filter(is_processor, expected)):
        right, own = parsed(expected[name], name), parsed(content_here(folder / name), name)
        if right is not None and own is not None:
            yield from (f"{name}: {text}" for text in _differences(right, own, ""))


def _differences(right: JsonObject, own: JsonObject, outer: str) -> Iterator[str]:
    for key in sorted(right.keys() & own.keys() - _NO_MATTER):
        value, other = right[key], own[key]
        if key.endswith("_token_id"):  # of one id, or of several
            value, other = _listed(value), _listed(other)
        if value == other or key.startswith("_") or key.endswith("_type"):  # a class in Python or the fast one
            continue
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _differences(value, other, f"{outer}{key}.")
        elif type(value) is type(other) or (_is_number(value) and _is_number(other)) or None in (value, other):
            yield f"{outer}{key} is {other!r:.60} and should be {value!r:.60}"


def _listed(ids: object) -> object:
    return sorted(ids, key=str) if isinstance(ids, list) else [ids]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
