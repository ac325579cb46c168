"""The small files of the output: config, index, tokenizer and all that comes along."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safe_loading._checkpoint.files import open_regular
from safe_loading._core.report import Finding
from safe_loading._loading.adapter_facts import AdapterFacts

from .changes import Changes
from .output_config import config_bytes
from .output_plan import FilePlan, plan_index
from .sources import MergeSources, is_template, is_tokenizer


def small_files(
    sources: MergeSources, changes: Changes, plans: Sequence[FilePlan], *, resharded: bool
) -> tuple[dict[str, bytes], list[Finding]]:
    """Return the files by their name in the output, and whose tokenizer they are when there was a choice."""
    chosen, findings = _with_tokenizer(sources, changes)
    files = {}
    for name, path in chosen.items():
        if name == "config.json":
            files[name] = config_bytes(path, changes.config)
        else:
            with open_regular(path) as file:
                files[name] = file.read()
    index = plan_index(sources, plans, resharded=resharded)
    return {**files, **dict([index] if index else [])}, findings


def _with_tokenizer(sources: MergeSources, changes: Changes) -> tuple[dict[str, Path], list[Finding]]:
    """Choose between the base's tokenizer and an adapter's.

    An adapter's is taken whole when the adapter resized the vocabulary or the base has none; a chat template of the
    base stays when the adapter has none. Otherwise the base's stays, and only a chat template comes along, if the base
    has no template at all.
    """
    ours = dict(sources.carried)
    theirs, adapter = {}, None
    for facts in sources.adapters.values():
        found = _tokenizer_of(facts)
        if found:
            theirs, adapter = found, facts
    if adapter is None:
        return ours, []
    resized = any(name.rpartition(".")[2] == "vocab_size" for name in changes.config)
    whole = "tokenizer_config.json" in theirs or "tokenizer.json" in theirs
    if whole and (resized or not any(is_tokenizer(name) and not is_template(name) for name in ours)):
        why = "the vocabulary is the adapter's" if resized else "the base has none"
        own = _has_template(theirs)
        kept = {n: path for n, path in ours.items() if not is_tokenizer(n) or (is_template(n) and not own)}
        return {**kept, **theirs}, [_note("tokenizer-of-adapter", adapter, sorted(theirs), why)]
    templates = {name: path for name, path in theirs.items() if is_template(name)}
    findings = []
    if templates and not _has_template(ours):
        ours |= templates
        findings.append(_note("tokenizer-of-adapter", adapter, sorted(templates), "the base has no chat template"))
    differ = [n for n, path in theirs.items() if n not in ours or ours[n].read_bytes() != path.read_bytes()]
    if differ:
        findings.append(
            Finding(
                "tokenizer-of-base",
                "info",
                str(adapter.folder),
                f"its {', '.join(sorted(differ))} differ; the vocabulary is the base's, so the base's stay.",
                "copy the adapter's into the output if the model was trained with them.",
            )
        )
    return ours, findings


def _note(code: str, adapter: AdapterFacts, names: Sequence[str], why: str) -> Finding:
    return Finding(code, "info", str(adapter.folder), f"{', '.join(names)} are the adapter's: {why}.", "none.")


def _tokenizer_of(adapter: AdapterFacts) -> dict[str, Path]:
    names = {path.relative_to(adapter.folder).as_posix(): path for path in sorted(adapter.folder.rglob("*"))}
    return {name: path for name, path in names.items() if is_tokenizer(name) and path.is_file()}


def _has_template(files: dict[str, Path]) -> bool:
    if any(is_template(name) for name in files):
        return True
    held = files.get("tokenizer_config.json")
    return held is not None and b'"chat_template"' in held.read_bytes()
