"""Merge a LoRA adapter into its base from disk to disk, in little memory, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _progress
from ._checkpoint.commit import Stage
from ._checkpoint.files import open_regular
from ._checkpoint.output import check_apart, output_path
from ._checkpoint.strict_json import read_json_object
from ._merge_checkpoint.attached import find_changes
from ._merge_checkpoint.plan import FilePlan, plan_file
from ._merge_checkpoint.report import MergedTensor, MergeReport
from ._merge_checkpoint.sources import REPORT, Source, Sources, find
from ._merge_checkpoint.stream import is_whole, stream
from .errors import ArgumentError

logger = logging.getLogger("safe_loading")


def merge_lora_checkpoint(
    base_model: Source,
    adapter: Source | Sequence[Source],
    output: Source,
    *,
    overwrite: bool = False,
    resume: bool = True,
    verify: bool = True,
    threads: int | None = None,
    progress: bool | None = None,
) -> MergeReport:
    """Write the base with the adapter merged into it, never holding more than a few blocks of a weight in memory.

    The output has the base's files, names, layout and dtypes; a file in which nothing changes is copied by the
    kernel. Every merged element is the exact sum, rounded once, the same bits as :func:`merge_lora_inplace` makes.

    Args:
        base_model: Folder or hub id of the base, with safetensors weights.
        adapter: Folder or hub id of a LoRA adapter, or several, which are summed before the one rounding.
        output: The folder to write. It appears whole, by one rename, when everything is on disk.
        overwrite: Whether a folder that is there is replaced, as a whole.
        resume: Whether to go on with what an interrupted call (``kill -9``, a power cut, Ctrl-C) left.
        verify: Whether to hash every tensor on the way. The hashes go to ``merge_report.json``, and without them what
            an interrupted call left is written again.
        threads: How many threads read, compute and write; by default one for each core, four at the most.
        progress: Whether to show a bar; by default in a terminal.

    Returns:
        What was done with each tensor.

    Raises:
        MergeError: The adapter cannot be merged on disk (its kind, its start, a tie), or a merged value overflows.
        AdapterError: The adapter does not fit the base.
        CheckpointError: A file is missing or damaged, or (:class:`PickleRefused`) a pickle.
        OutputError: The output is or holds what is read, is there already, another process writes it, or the disk has
            too little room.
        ArgumentError: An argument cannot be honoured.
    """
    begin = time.perf_counter()
    if threads is not None and threads < 1:
        raise ArgumentError(f"threads={threads}; pass at least 1, or None for one for each core.")
    target = output_path(output)
    with _progress.engine_bars(0):
        sources = find(base_model, adapter)
        check_apart(target, sources.folders)
        changes = find_changes(sources)
    headers = sources.checkpoint.headers
    plans = [plan_file(name, header, changes.merges, changes.values) for name, header in headers.items()]
    small = _small_files(sources, plans)
    needed = sum(plan.nbytes for plan in plans) + sum(map(len, small.values())) + 512 * len(sources.checkpoint.tensors)
    with Stage(target, _job(sources, verify), needed=needed, overwrite=overwrite, resume=resume) as stage:
        if stage.finished is None:
            hashes, fresh = _write_weights(plans, stage, verify, threads or min(4, _cores()), progress)
            report_file = _report_file(sources, plans, hashes)
            for name, data in {**small, REPORT: report_file}.items():
                stage.write(name, data)
            summary = {"hashes": hashes}
            stage.commit(summary)
        else:
            hashes, fresh = stage.finished["hashes"], []
    report = _report(target, sources, plans, hashes, fresh, small, time.perf_counter() - begin)
    logger.info("%s", report)
    return report


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _job(sources: Sources, verify: bool) -> dict[str, Any]:
    """Return what decides the bytes of the output: a second call goes on only with the same."""
    files = {}
    for name, path in {**{n: h.path for n, h in sources.checkpoint.headers.items()}, **sources.carried}.items():
        facts = path.stat()
        files[name] = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
    return {
        "versions": _versions(),
        "base": str(sources.base.folder.resolve()),
        "files": files,
        "adapters": dict(sources.digests),
        "verify": verify,
    }


def _small_files(sources: Sources, plans: Sequence[FilePlan]) -> dict[str, bytes]:
    """Return the other files of the output: the base's, and the index with its total brought up to date."""
    small = {}
    for name, path in sources.carried.items():
        with open_regular(path) as file:
            small[name] = file.read()
    index = sources.checkpoint.index
    if index is not None:
        name = index.path.relative_to(sources.base.folder).as_posix()
        small[name] = index.path.read_bytes()
        grown = sum(tensor.target.nbytes - tensor.source.nbytes for plan in plans for tensor in plan.tensors)
        if grown and index.total_size is not None:
            document = read_json_object(index.path)
            document["metadata"]["total_size"] = index.total_size + grown
            small[name] = json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
    return small


def _write_weights(
    plans: Sequence[FilePlan], stage: Stage, verify: bool, threads: int, progress: bool | None
) -> tuple[dict[str, dict[str, str]], list[FilePlan]]:
    """Write the weight files that an interrupted call has not left whole; return the hashes of all, and those."""
    hashes: dict[str, dict[str, str]] = {}
    left = []
    for plan in plans:
        facts = stage.held(plan.name, lambda path, facts, plan=plan: is_whole(plan, path, facts))  # type: ignore[misc]
        if facts is None:
            left.append(plan)
        else:
            hashes[plan.name] = facts["sha256"]
    guard = threading.Lock()

    def done(plan: FilePlan, own: Mapping[str, str]) -> None:
        with guard:
            hashes[plan.name] = dict(own)

    shown = _progress.wanted(0) if progress is None else progress
    with _Bar(sum(plan.nbytes for plan in left), shown) as bar:
        stream(left, stage, threads=threads, hashes=verify, done=done, advance=bar.advance)
    return {plan.name: hashes[plan.name] for plan in plans}, left


class _Bar:
    """Context manager: a bar of bytes, moved from any thread."""

    def __init__(self, total: int, shown: bool) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]  # no stubs

        self._bar: Any = tqdm(total=total, unit="B", unit_scale=True, desc="merging", disable=not shown)
        self._guard = threading.Lock()

    def __enter__(self) -> _Bar:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the bar."""
        self._bar.close()

    def advance(self, count: int) -> None:
        """Add a number of bytes."""
        with self._guard:
            self._bar.update(count)


def _report_file(sources: Sources, plans: Sequence[FilePlan], hashes: Mapping[str, Mapping[str, str]]) -> bytes:
    """Return ``merge_report.json``: nothing in it but what follows from the inputs, so that a repeat is the same."""
    document = {
        "base": {"source": sources.base.source, "commit": sources.base.commit},
        "adapters": _adapters(sources),
        "versions": _versions(),
        "tensors": {
            tensor.source.name: {
                "file": plan.name,
                "action": tensor.action,
                "sha256": hashes[plan.name].get(tensor.source.name),
            }
            for plan in plans
            for tensor in plan.tensors
        },
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _versions() -> dict[str, str]:
    """Return the versions that decide the bytes, and the names of tensors."""
    versions = {}
    for name in ("safe-loading", "torch", "transformers", "peft"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from its folder, without an installation
            versions[name] = "unknown"
    return versions


def _adapters(sources: Sources) -> list[dict[str, str | None]]:
    return [
        {"source": facts.source, "commit": facts.commit, "sha256": sources.digests[name]}
        for name, facts in sources.adapters.items()
    ]


def _report(
    target: Path,
    sources: Sources,
    plans: Sequence[FilePlan],
    hashes: Mapping[str, Mapping[str, str]],
    fresh: Sequence[FilePlan],
    small: Mapping[str, bytes],
    seconds: float,
) -> MergeReport:
    tensors = tuple(
        MergedTensor(t.source.name, plan.name, t.action, t.target.nbytes, hashes[plan.name].get(t.source.name))
        for plan in plans
        for t in plan.tensors
    )
    return MergeReport(
        output=str(target),
        base={"source": sources.base.source, "commit": sources.base.commit},
        adapters=tuple(_adapters(sources)),
        tensors=tensors,
        carried=tuple(sorted(small)),
        left_out=sources.left_out,
        bytes_read=sum(t.source.nbytes for plan in fresh for t in plan.tensors if t.action != "replace"),
        bytes_written=sum(plan.nbytes for plan in fresh),
        resumed=tuple(plan.name for plan in plans if plan not in fresh),
        seconds=seconds,
    )
