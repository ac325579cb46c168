"""Which of the ranks' processes on this machine have ended. Imports no torch.

A rank that is killed tells nobody. The ranks that wait for it see by its process id that it is gone, and need not wait
for the limit. They can see the processes of their own kernel and PID namespace only, so each of these writes its ranks
under one key of the store; the neighbors of a dead rank tell all the others.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def neighborhood() -> str | None:
    """Return what the processes that can see one another have in common; ``None`` where the system cannot say."""
    try:
        place = f"{_BOOT_ID.read_text().strip()} {_NAMESPACE.stat().st_ino}"
    except OSError:  # not Linux, or /proc is hidden
        return None
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def entry(rank: int) -> str:
    """Return what this rank writes for its neighbors: the rank, its process id, and when that process began."""
    pid = os.getpid()
    return f"{rank}:{pid}:{_began(pid)};"


def ended(entries: str, ranks: Collection[int]) -> dict[int, int]:
    """Return the ranks whose process is gone, with its id.

    Args:
        entries: What :func:`entry` returned on each rank of this neighborhood, one after the other.
        ranks: The ranks that are asked for.
    """
    gone = {}
    for text in entries.split(";"):
        if text:
            rank, pid, began = text.split(":")
            if int(rank) in ranks and _began(int(pid)) != began:
                gone[int(rank)] = int(pid)
    return gone


def _began(pid: int) -> str:
    """Return the start of a process in clock ticks; empty when it has ended, also when nobody has waited for it yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in front, in brackets, may hold anything; the state is the first field after it, the start the 20th.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
