"""What an interrupted call left: whether a file of it is what the plan says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .output_plan import FilePlan, TensorPlan
from .stream import Facts, Written

_BLOCK_BYTES = 1 << 20


def facts_of(facts: Mapping[str, Any]) -> Facts:
    """Return what the journal says about the tensors of a file."""
    return {name: Written(sha256, largest) for name, (sha256, largest) in facts["tensors"].items()}


def is_whole(plan: FilePlan, path: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether a file is what a plan says: its header byte for byte, its tensors by their hashes."""
    known = facts_of(facts)
    if facts.get("bytes") != plan.nbytes or known.keys() != {tensor.target.name for tensor in plan.tensors}:
        return False
    if not _is_header(path, plan.head, plan.nbytes):
        return False
    with path.open("rb") as file:
        return all(_is_written(tensor, file, known[tensor.target.name].sha256) for tensor in plan.tensors)


def _is_written(plan: TensorPlan, file: Any, sha256: str | None) -> bool:
    """Return whether an open file holds the tensor that a hash tells of."""
    digest = hashlib.sha256()
    file.seek(plan.target.start)
    left = plan.target.nbytes
    while left and (data := file.read(min(left, _BLOCK_BYTES))):
        digest.update(data)
        left -= len(data)
    return not left and digest.hexdigest() == sha256


def _is_header(path: Path, head: bytes, size: int) -> bool:
    """Return whether a file has that size and begins with that header."""
    if path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return file.read(len(head)) == head
