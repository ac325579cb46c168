"""Records of a merge: the journal that a second call goes on with, ``merge_report.json``, and the report."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from safe_loading._checkpoint.files import stamp, try_open
from safe_loading._checkpoint.tensor_hash import KEY, new_hash
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading._merging.weights.loss_findings import ON_DISK, loss_findings

from .output_plan import FilePlan, TensorPlan
from .report import MergedTensor, MergeReport
from .sources import MergeSources
from .write_files import WrittenFile, from_journal

_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a merge: its sources, its plans, and the files written, resumed and left behind."""

    sources: MergeSources
    plans: Sequence[FilePlan]
    written: Mapping[str, WrittenFile]
    resumed: Sequence[str]  # the files that an interrupted call had written
    small_files: Sequence[str]
    dropped: Sequence[str]  # the tensors that were left behind
    findings: Sequence[Finding]


def job_of(sources: MergeSources, options: Mapping[str, object]) -> JsonObject:
    """Return the facts that decide the bytes of the output: a second call goes on only when they are the same."""
    weights = {name: header.path for name, header in sources.base.checkpoint.headers.items()}
    read = sources.base.opened.stamps
    stamps = {name: read.get(path) or stamp(path) for name, path in {**weights, **sources.carried}.items()}
    # A base that was written again is another job, even where its sizes are the same; the number of a device is none of
    # the file's.
    files = {name: list(facts[1:]) for name, facts in stamps.items()}
    return {
        "versions": _versions(),
        "base": str(sources.base.folder.resolve()),
        "files": files,
        "adapters": dict(sources.digests),
        "weights": dict(sources.weights),
        "codes": "kept" if sources.base.keeps_codes else "decoded",
        "options": dict(options),
    }


def is_complete(plan: FilePlan, path: Path, entry: JsonObject) -> bool:
    """Return whether a file of an interrupted call has the planned header, and the hashes of its ``entry``."""
    written = from_journal(entry["tensors"])
    if entry["bytes"] != plan.nbytes or written.keys() != {tensor.target.name for tensor in plan.tensors}:
        return False
    file = try_open(path)
    if isinstance(file, Finding):
        return False
    with file:
        if path.stat().st_size != plan.nbytes or file.read(len(plan.header)) != plan.header:
            return False
        return all(_has_hash(file, tensor, written[tensor.target.name].digest) for tensor in plan.tensors)


def _has_hash(file: BinaryIO, tensor: TensorPlan, recorded: str | None) -> bool:
    digest = new_hash()
    file.seek(tensor.target.start)
    left = tensor.target.nbytes
    while left and (data := file.read(min(left, _BLOCK_BYTES))):
        digest.update(data)
        left -= len(data)
    return not left and digest.hexdigest() == recorded


def report_file(sources: MergeSources, plans: Sequence[FilePlan], written: Mapping[str, WrittenFile]) -> bytes:
    """Return ``merge_report.json``, which depends on the inputs alone, so that a repeat is the same."""
    tensors = {}
    for plan in plans:
        for tensor in plan.tensors:
            known = written[plan.name][tensor.target.name]
            entry: JsonObject = {"file": plan.name, "action": tensor.action, "max_delta": known.largest}
            if known.loss is not None:
                entry["rounding"] = dataclasses.asdict(known.loss)
            tensors[tensor.target.name] = {**entry, KEY: known.digest}
    document = {
        "base": {"source": sources.base.source, "commit": sources.base.commit},
        "adapters": [{**entry, "weight": w} for entry, w in zip(origins_of(sources), weights_of(sources), strict=True)],
        "versions": _versions(),
        "tensors": tensors,
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


@functools.cache  # they do not change in a process, and to look each up reads files
def _versions() -> Mapping[str, str]:
    """Return the versions that decide the bytes, and the names of tensors."""
    versions = {}
    for name in ("safe-loading", "torch", "transformers", "peft"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from its folder, without an installation
            versions[name] = "unknown"
    return versions


def make_report(output: Path, outcome: Outcome, seconds: float) -> MergeReport:
    """Return the report of a call."""
    sources, tensors, bytes_read, bytes_written = outcome.sources, [], 0, 0
    for plan in outcome.plans:
        fresh = plan.name not in outcome.resumed
        bytes_written += plan.nbytes if fresh else 0
        for tensor in plan.tensors:
            info, known = tensor.target, outcome.written[plan.name][tensor.target.name]
            if fresh and tensor.source is not None and tensor.value is None:
                bytes_read += tensor.source.nbytes
            result = (info.nbytes, known.seconds, known.largest, known.digest, known.loss)
            tensors.append(MergedTensor(info.name, plan.name, tensor.action, info.dtype, *result))
    return MergeReport(
        output=str(output),
        base={"source": sources.base.source, "commit": sources.base.commit},
        adapters=tuple(origins_of(sources)),
        tensors=tuple(tensors),
        dropped=tuple(sorted(outcome.dropped)),
        carried=tuple(sorted(outcome.small_files)),
        left_out=sources.left_out,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        resumed=tuple(outcome.resumed),
        seconds=seconds,
        findings=(*outcome.findings, *loss_findings(tensors, ON_DISK)),
        weights=weights_of(sources),
    )


def weights_of(sources: MergeSources) -> tuple[float, ...]:
    """Return the factor of each adapter, in their order."""
    return tuple(sources.weights[name] for name in sources.adapters)


def origins_of(sources: MergeSources) -> list[dict[str, str | None]]:
    """Return for reports where each adapter came from."""
    return [
        {"source": adapter.facts.source, "commit": adapter.facts.commit, "sha256": sources.digests[name]}
        for name, adapter in sources.adapters.items()
    ]
