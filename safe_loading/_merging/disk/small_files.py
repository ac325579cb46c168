"""The small files of the output: config, index of the weight files, tokenizer and all that comes along."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._checkpoint.strict_json import try_parse_file
from safe_loading._checkpoint.tokenizer_ids import (
    OF_THE_PLACE,
    SETTINGS,
    has_same_words,
    inline_template,
    is_of_newer_form,
    parsed,
    says_the_same,
)
from safe_loading._checkpoint.trained_beside import MODULES, in_modules, module_folders, modules_in
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError, CheckpointError

from .base import MergeBase
from .changes import Changes
from .output_model import config_bytes
from .output_plan import FilePlan
from .sources import MergeSources, is_processor, is_template, is_tokenizer, is_vocabulary

_INDEX = "model.safetensors.index.json"


def small_files(
    sources: MergeSources,
    changes: Changes,
    plans: Sequence[FilePlan],
    *,
    resharded: bool,
    tokenizer: Literal["adapter", "base"] | None,
) -> tuple[dict[str, bytes], list[Finding]]:
    """Return the files by their name in the output, and whose tokenizer they are when there was a choice."""
    base = sources.base
    chosen, findings = _choose_tokenizer(sources, changes, tokenizer)
    chosen, of_processor = _choose_processor(sources, chosen, tokenizer)
    findings += of_processor
    chosen, of_modules = _choose_modules(sources, chosen)
    findings += of_modules
    files = {name: _checked_content(base.opened, path) for name, path in chosen.items()}
    settings = chosen.get(SETTINGS)
    before = sources.carried.get(SETTINGS)
    if settings is not None and before is not None and settings != before and not _has_template(chosen):
        files |= _with_template(files, content_of(before))
    _refuse_template_paths(chosen, files)
    if CONFIG in files and changes.config:
        files[CONFIG] = config_bytes(base.config, changes.config)
    return {**files, **_index_of(base, plans, resharded=resharded)}, findings


def _checked_content(opened: ModelFolder, path: Path) -> bytes:
    """Return the bytes of a file: those that were checked, where the file was read before."""
    content = opened.files.content(path)
    return content_of(path) if content is None else content


def content_of(path: Path) -> bytes:
    """Return the bytes of a regular file."""
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
            return {name: _checked_content(base.opened, index.path)}
        document = copy.deepcopy(base.opened.files.read(index.path) or {})
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
    for each in sources.adapters.values():
        tokenizer = _tokenizer_of(each.facts)
        if tokenizer:
            theirs, adapter = tokenizer, each.facts
    if adapter is None:
        if choice == "adapter":
            raise ArgumentError('tokenizer="adapter": no adapter brings a tokenizer or a chat template.')
        return ours, []
    differ = sorted(name for name, path in theirs.items() if name not in ours or _differs(ours[name], path))
    if choice == "base" or not differ:
        return ours, [_left(adapter, differ)] if differ else []
    own, other = _contents(ours), _contents(theirs)
    same_words = has_same_words(own, other)
    if choice is None and same_words and says_the_same(own, other):
        return ours, []
    why = "they differ from the base's, and the adapter was trained with them"
    if not any(is_tokenizer(name) for name in ours):
        why = "the base has none"
    elif any(name.rpartition(".")[2] == "vocab_size" for name in changes.config):
        why = "the vocabulary is the adapter's"
    if any(map(is_tokenizer, ours)) and is_of_newer_form(own, other):
        why += "; transformers 5 wrote them, in a form that programs with transformers 4 cannot read"
    kept = dict(ours)
    if any(not is_template(name) for name in theirs):
        own_template = _has_template(theirs)
        # other files with the same words, which programs read that do not know tokenizer.json, stay true
        own_words = any(map(is_vocabulary, theirs)) and not same_words
        kept = {
            name: path
            for name, path in ours.items()
            if not is_tokenizer(name)
            or name == SETTINGS
            or (is_template(name) and not own_template)
            or (is_vocabulary(name) and not own_words)
        }
    return {**kept, **theirs}, [_taken(adapter, differ, why)]


def _contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the bytes of a tokenizer's files by their names."""
    return {name: content_of(path) for name, path in files.items() if is_tokenizer(name)}


def _with_template(files: Mapping[str, bytes], before: bytes | None) -> dict[str, bytes]:
    """Return the settings of an adapter's tokenizer with the templates of the base's, where these have any."""
    template, settings = inline_template(before), parsed(files[SETTINGS], SETTINGS)
    if template is None or settings is None:
        return {}
    settings["chat_template"] = template
    return {SETTINGS: json.dumps(settings, indent=2, ensure_ascii=False).encode() + b"\n"}


def _choose_processor(
    sources: MergeSources, files: dict[str, Path], choice: Literal["adapter", "base"] | None
) -> tuple[dict[str, Path], list[Finding]]:
    """Put an adapter's configs of its processors in the place of the base's where they differ, as for its tokenizer."""
    findings = []
    for each in sources.adapters.values():
        folder = each.facts.path
        own = {path.name: path for path in sorted(folder.iterdir()) if is_processor(path.name) and path.is_file()}
        differ = [name for name, path in own.items() if name not in files or _differs(files[name], path)]
        if differ and choice == "base":
            findings.append(_left(each.facts, differ))
        elif differ:
            files = {**files, **{name: own[name] for name in differ}}
            findings.append(_taken(each.facts, differ, "they differ from the base's, and were saved with the adapter"))
    return files, findings


def _choose_modules(sources: MergeSources, files: dict[str, Path]) -> tuple[dict[str, Path], list[Finding]]:
    """Put the modules that sentence-transformers saved with an adapter in the place of the base's: they ran with it."""
    findings = []
    for each in sources.adapters.values():
        folder = each.facts.path
        own = modules_in(folder)
        differ = [name for name, path in own.items() if name not in files or _differs(files[name], path)]
        if not differ:
            continue
        before = module_folders(files[MODULES]) if MODULES in files else frozenset()
        files = {**{name: path for name, path in files.items() if not in_modules(name, before)}, **own}
        message = f"{', '.join(differ)} are the adapter's: sentence-transformers saved them with it."
        fix = "none; these are the trained ones."
        findings.append(Finding("modules-of-adapter", "info", str(folder), message, fix))
    return files, findings


def _refuse_template_paths(paths: Mapping[str, Path], files: Mapping[str, bytes]) -> None:
    """Refuse chat templates under names that are paths: who saves such a tokenizer writes where they lead."""
    for file in ("tokenizer_config.json", "chat_template.json"):
        document = try_parse_file(files[file], paths[file]) if file in files else {}
        if isinstance(document, Finding):  # no JSON, which a tokenizer of code may have
            continue
        entries = document.get("chat_template")
        named = [entry.get("name") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        wrong = [name for name in named if not isinstance(name, str) or not re.fullmatch(r"\w[\w. -]*", name)]
        if wrong:
            raise CheckpointError(
                f"{paths[file]}: a chat template is named {wrong[0]!r:.80}, which is a path: transformers before 5.10 "
                f"writes a file there when it saves the tokenizer. Do not trust the folder; or give the template a "
                f"name of letters and digits."
            )


def _differs(one: Path, other: Path) -> bool:
    """Return whether two files of a tokenizer differ in more than where they were read from."""
    before, after = content_of(one), content_of(other)
    if before == after:
        return False
    documents = [try_parse_file(content, path) for content, path in ((before, one), (after, other))]
    said = [{k: v for k, v in each.items() if k not in OF_THE_PLACE} for each in documents if isinstance(each, dict)]
    return len(said) < 2 or said[0] != said[1]  # or one of them is no JSON


def _left(adapter: AdapterFolder, names: Iterable[str]) -> Finding:
    why = f"its {', '.join(names)} differ from the base's, which stay as tokenizer='base' asks."
    fix = "none; tokenizer='adapter' takes the adapter's."
    return Finding("tokenizer-of-base", "info", str(adapter.path), why, fix)


def _taken(adapter: AdapterFolder, names: Iterable[str], why: str) -> Finding:
    message = f"{', '.join(sorted(names))} are the adapter's: {why}."
    fix = "none; tokenizer='base' keeps the base's."
    return Finding("tokenizer-of-adapter", "info", str(adapter.path), message, fix)


def _tokenizer_of(adapter: AdapterFolder) -> dict[str, Path]:
    names = {path.relative_to(adapter.path).as_posix(): path for path in sorted(adapter.path.rglob("*"))}
    return {name: path for name, path in names.items() if is_tokenizer(name) and path.is_file()}


def _has_template(files: Mapping[str, Path]) -> bool:
    if any(is_template(name) for name in files):
        return True
    settings = files.get(SETTINGS)
    return settings is not None and inline_template(content_of(settings)) is not None
