"""The small files of the output: config, index of the weight files, tokenizer and all that comes along."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading._loading.adapter_facts import AdapterFacts
from safe_loading._model.model_config import CONFIG

from .base import MergeBase
from .changes import Changes
from .output_model import config_bytes
from .output_plan import FilePlan
from .sources import MergeSources, is_template, is_tokenizer

_INDEX = "model.safetensors.index.json"


def small_files(
    sources: MergeSources, changes: Changes, plans: Sequence[FilePlan], *, resharded: bool
) -> tuple[dict[str, bytes], list[Finding]]:
    """Return the files by their name in the output, and whose tokenizer they are when there was a choice."""
    chosen, findings = _choose_tokenizer(sources, changes)
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
    checkpoint, index = base.checkpoint, base.checkpoint.index
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


def _choose_tokenizer(sources: MergeSources, changes: Changes) -> tuple[dict[str, Path], list[Finding]]:
    """Choose between the base's tokenizer and an adapter's; return all files of the output but weights and index.

    An adapter's is taken whole when the adapter resized the vocabulary or the base has none; a chat template of the
    base stays when the adapter has none. Otherwise the base's stays, and only a chat template comes along, if the base
    has no template at all. Of several adapters the last one with a tokenizer counts.
    """
    ours = dict(sources.carried)
    theirs, adapter = {}, None
    for facts in sources.adapters.values():
        tokenizer = _tokenizer_of(facts)
        if tokenizer:
            theirs, adapter = tokenizer, facts
    if adapter is None:
        return ours, []
    resized = any(name.rpartition(".")[2] == "vocab_size" for name in changes.config)
    whole = "tokenizer_config.json" in theirs or "tokenizer.json" in theirs
    if whole and (resized or not any(is_tokenizer(name) and not is_template(name) for name in ours)):
        why = "the vocabulary is the adapter's" if resized else "the base has none"
        has_template = _has_template(theirs)
        kept = {n: path for n, path in ours.items() if not is_tokenizer(n) or (is_template(n) and not has_template)}
        return {**kept, **theirs}, [_taken(adapter, theirs, why)]
    templates = {name: path for name, path in theirs.items() if is_template(name)}
    findings = []
    if templates and not _has_template(ours):
        ours |= templates
        findings.append(_taken(adapter, templates, "the base has no chat template"))
    differ = [n for n, path in theirs.items() if n not in ours or _content(ours[n]) != _content(path)]
    if differ:
        why = f"its {', '.join(sorted(differ))} differ; the vocabulary is the base's, so the base's stay."
        fix = "copy the adapter's into the output if the model was trained with them."
        findings.append(Finding("tokenizer-of-base", "info", str(adapter.folder), why, fix))
    return ours, findings


def _taken(adapter: AdapterFacts, names: Iterable[str], why: str) -> Finding:
    message = f"{', '.join(sorted(names))} are the adapter's: {why}."
    return Finding("tokenizer-of-adapter", "info", str(adapter.folder), message, "none.")


def _tokenizer_of(adapter: AdapterFacts) -> dict[str, Path]:
    names = {path.relative_to(adapter.folder).as_posix(): path for path in sorted(adapter.folder.rglob("*"))}
    return {name: path for name, path in names.items() if is_tokenizer(name) and path.is_file()}


def _has_template(files: dict[str, Path]) -> bool:
    if any(is_template(name) for name in files):
        return True
    config = files.get("tokenizer_config.json")
    return config is not None and b'"chat_template"' in _content(config)
