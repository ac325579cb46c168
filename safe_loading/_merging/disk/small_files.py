"""The small files of the output: config, index of the weight files, tokenizer and all that comes along."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading._loading.adapter_facts import AdapterFacts
from safe_loading._model.model_config import CONFIG
from safe_loading.errors import ArgumentError, CheckpointError

from .base import MergeBase
from .changes import Changes
from .output_model import config_bytes
from .output_plan import FilePlan
from .sources import MergeSources, is_template, is_tokenizer, is_vocabulary

_INDEX = "model.safetensors.index.json"
# What tokenizer_config.json holds that says where it came from, and nothing of what it does.
_OF_THE_PLACE = frozenset({"is_local", "local_files_only", "name_or_path", "tokenizer_file", "transformers_version"})


def small_files(
    sources: MergeSources,
    changes: Changes,
    plans: Sequence[FilePlan],
    *,
    resharded: bool,
    tokenizer: Literal["adapter", "base"] | None,
) -> tuple[dict[str, bytes], list[Finding]]:
    """Return the files by their name in the output, and whose tokenizer they are when there was a choice."""
    chosen, findings = _choose_tokenizer(sources, changes, tokenizer)
    files = {
        name: config_bytes(sources.base.config, changes.config) if name == CONFIG and changes.config else _content(path)
        for name, path in chosen.items()
    }
    return {**files, **_index_of(sources.base, plans, resharded=resharded)}, findings


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _index_of(base: MergeBase, plans: Sequence[FilePlan], *, resharded: bool) -> dict[str, bytes]:
    """Return the content of the index of the output by its name; nothing when one file has all tensors."""
    checkpoint, index = base.template, base.template.index
    if len(plans) == 1 and (resharded or index is None):
        return {}
    tensors = {tensor.target.name: (tensor.target, plan.name) for plan in plans for tensor in plan.tensors}
    name, document = _INDEX, JsonObject()
    if index is not None:
        name = _INDEX if resharded else index.path.relative_to(checkpoint.folder).as_posix()
        # Byte for byte, where nothing that it says has changed.
        sizes = {info.name: info.nbytes for info in checkpoint.tensors.values()}
        if not resharded and not base.stale_headers and {n: info.nbytes for n, (info, _) in tensors.items()} == sizes:
            return {name: _content(index.path)}
        document = read_json_object(index.path)
    metadata = document.get("metadata")
    document["metadata"] = metadata = metadata if isinstance(metadata, dict) else {}
    metadata["total_size"] = sum(info.nbytes for info, _ in tensors.values())
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(math.prod(info.shape) for info, _ in tensors.values())
    document["weight_map"] = {tensor: file for tensor, (_, file) in sorted(tensors.items())}
    return {name: json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"}


def _choose_tokenizer(
    sources: MergeSources, changes: Changes, choice: Literal["adapter", "base"] | None
) -> tuple[dict[str, Path], list[Finding]]:
    """Choose between the base's tokenizer and an adapter's; return all files of the output but weights and index.

    By default an adapter's is taken where it differs, because the adapter was trained with it. What it lacks (its
    vocabulary, or a chat template) stays that of the base. Of several adapters the last one with a tokenizer counts.
    """
    ours = dict(sources.carried)
    theirs, adapter = {}, None
    for facts in sources.adapters.values():
        tokenizer = _tokenizer_of(facts)
        if tokenizer:
            theirs, adapter = tokenizer, facts
    if adapter is None:
        if choice == "adapter":
            raise ArgumentError('tokenizer="adapter": no adapter brings a tokenizer or a chat template.')
        return ours, []
    differ = sorted(name for name, path in theirs.items() if name not in ours or _differs(ours[name], path))
    if choice == "base" or not differ:
        return ours, [_left(adapter, differ)] if differ else []
    why = "they differ from the base's, and the adapter was trained with them"
    if not any(is_tokenizer(name) for name in ours):
        why = "the base has none"
    elif any(name.rpartition(".")[2] == "vocab_size" for name in changes.config):
        why = "the vocabulary is the adapter's"
    kept = dict(ours)
    if any(not is_template(name) for name in theirs):
        own_template, own_words = _has_template(theirs), any(map(is_vocabulary, theirs))
        kept = {
            name: path
            for name, path in ours.items()
            if not is_tokenizer(name)
            or (is_template(name) and not own_template)
            or (is_vocabulary(name) and not own_words)
        }
    return {**kept, **theirs}, [_taken(adapter, differ, why)]


def _differs(one: Path, other: Path) -> bool:
    """Return whether two files of a tokenizer differ in more than where they were read from."""
    before, after = _content(one), _content(other)
    if before == after:
        return False
    try:
        documents = [read_json_object(path) for path in (one, other)]
    except CheckpointError:  # no JSON
        return True
    first, second = ({k: v for k, v in document.items() if k not in _OF_THE_PLACE} for document in documents)
    return first != second


def _left(adapter: AdapterFacts, names: Iterable[str]) -> Finding:
    why = f"its {', '.join(names)} differ from the base's, which stay as tokenizer='base' asks."
    fix = "none; tokenizer='adapter' takes the adapter's."
    return Finding("tokenizer-of-base", "info", str(adapter.folder), why, fix)


def _taken(adapter: AdapterFacts, names: Iterable[str], why: str) -> Finding:
    message = f"{', '.join(sorted(names))} are the adapter's: {why}."
    fix = "none; tokenizer='base' keeps the base's."
    return Finding("tokenizer-of-adapter", "info", str(adapter.folder), message, fix)


def _tokenizer_of(adapter: AdapterFacts) -> dict[str, Path]:
    names = {path.relative_to(adapter.folder).as_posix(): path for path in sorted(adapter.folder.rglob("*"))}
    return {name: path for name, path in names.items() if is_tokenizer(name) and path.is_file()}


def _has_template(files: dict[str, Path]) -> bool:
    if any(is_template(name) for name in files):
        return True
    config = files.get("tokenizer_config.json")
    return config is not None and b'"chat_template"' in _content(config)
