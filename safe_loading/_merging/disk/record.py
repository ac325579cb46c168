"""What is written down of a merge: the job that a second call goes on with, ``merge_report.json``, and the report."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_loading._core.report import Finding

from .output_plan import FilePlan
from .report import MergedTensor, MergeReport
from .sources import MergeSources
from .stream import Facts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was written, and from what.

    Attributes:
        sources: What was merged.
        plans: Every weight file of the output.
        facts: What is known of the tensors of each file.
        fresh: The files that this call wrote.
        small: The names of the other files.
        dropped: The tensors that were left behind.
        findings: What is worth knowing.
    """

    sources: MergeSources
    plans: Sequence[FilePlan]
    facts: Mapping[str, Facts]
    fresh: Sequence[FilePlan]
    small: Sequence[str]
    dropped: Sequence[str]
    findings: Sequence[Finding]


def job(sources: MergeSources, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the bytes of the output: a second call goes on only with the same."""
    files = {}
    for name, path in {**{n: h.path for n, h in sources.checkpoint.headers.items()}, **sources.carried}.items():
        facts = path.stat()
        files[name] = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
    return {
        "versions": versions(),
        "base": str(sources.base.folder.resolve()),
        "files": files,
        "adapters": dict(sources.digests),
        "options": dict(options),
    }


def report_file(sources: MergeSources, plans: Sequence[FilePlan], facts: Mapping[str, Facts]) -> bytes:
    """Return ``merge_report.json``: nothing in it but what follows from the inputs, so that a repeat is the same."""
    document = {
        "base": {"source": sources.base.source, "commit": sources.base.commit},
        "adapters": _adapters(sources),
        "versions": versions(),
        "tensors": {
            tensor.target.name: {
                "file": plan.name,
                "action": tensor.action,
                "max_delta": facts[plan.name][tensor.target.name].largest,
                "sha256": facts[plan.name][tensor.target.name].sha256,
            }
            for plan in plans
            for tensor in plan.tensors
        },
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def versions() -> dict[str, str]:
    """Return the versions that decide the bytes, and the names of tensors."""
    found = {}
    for name in ("safe-loading", "torch", "transformers", "peft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from its folder, without an installation
            found[name] = "unknown"
    return found


def report(target: Path, outcome: Outcome, seconds: float) -> MergeReport:
    """Return the report of a call."""
    sources, fresh = outcome.sources, outcome.fresh
    tensors = []
    for plan in outcome.plans:
        for tensor in plan.tensors:
            info, known = tensor.target, outcome.facts[plan.name][tensor.target.name]
            tensors.append(
                MergedTensor(
                    info.name,
                    plan.name,
                    tensor.action,
                    info.dtype,
                    info.nbytes,
                    known.seconds,
                    known.largest,
                    known.sha256,
                )
            )
    read = [t.source.nbytes for plan in fresh for t in plan.tensors if t.source is not None and t.value is None]
    return MergeReport(
        output=str(target),
        base={"source": sources.base.source, "commit": sources.base.commit},
        adapters=tuple(_adapters(sources)),
        tensors=tuple(tensors),
        dropped=tuple(sorted(outcome.dropped)),
        carried=tuple(sorted(outcome.small)),
        left_out=sources.left_out,
        bytes_read=sum(read),
        bytes_written=sum(plan.nbytes for plan in fresh),
        resumed=tuple(plan.name for plan in outcome.plans if plan not in fresh),
        seconds=seconds,
        findings=tuple(outcome.findings),
    )


def _adapters(sources: MergeSources) -> list[dict[str, str | None]]:
    return [
        {"source": facts.source, "commit": facts.commit, "sha256": sources.digests[name]}
        for name, facts in sources.adapters.items()
    ]
