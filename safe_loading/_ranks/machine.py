"""The identity of this machine, and which of the ranks' processes on it have ended. Imports no torch.

A rank that is killed cannot tell the others. The ranks that wait for it see that its process id is gone, and need not
wait for the timeout. A process sees only the processes of its own kernel and PID namespace, so each such neighborhood
lists its ranks under one key of the store, and the neighbors of a dead rank tell all the others.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Collection
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


def host_identity() -> str:
    """Return the name of this node, which no other node has: its host name and its boot id.

    Ranks of one node hand paths to one another, so a node is whatever sees the same files. Containers on one machine
    share its boot id, but have host names and file systems of their own. Machines that share a host name
    ("localhost", or pods of one template) have boot ids of their own. The mount namespace would split too much:
    Apptainer gives each task its own, over the same files.
    """
    return f"{socket.gethostname()} {_boot_id() or ''}".strip()


def neighborhood() -> str | None:
    """Return a name for the set of processes that this one can see; ``None`` where the system does not tell."""
    boot_id = _boot_id()
    if boot_id is None:
        return None
    try:
        namespace = _PID_NAMESPACE.stat().st_ino
    except OSError:
        return None
    return hashlib.sha256(f"{boot_id} {namespace}".encode()).hexdigest()[:16]


def process_entry(rank: int) -> str:
    """Return this rank's entry for its neighbors: the rank, its process id, and when that process started."""
    pid = os.getpid()
    return f"{rank}:{pid}:{_start_time(pid)};"


def ended_processes(entries: str, ranks: Collection[int]) -> dict[int, int]:
    """Return the process ids of the ranks that have ended; ``entries`` joins every rank's :func:`process_entry`."""
    ended = {}
    for entry in entries.split(";"):
        if entry:
            rank, pid, start_time = entry.split(":")
            # The start time tells a rank from a later process that was given the same id.
            if int(rank) in ranks and _start_time(int(pid)) != start_time:
                ended[int(rank)] = int(pid)
    return ended


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux, or /proc is hidden
        return None


def _start_time(pid: int) -> str:
    """Return when a process started, in clock ticks; empty when it has ended, even if nobody has waited for it yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # proc(5): "pid (name) state ... starttime". The name may hold spaces and brackets, so count from the last ")":
    # the state is the first field after it and the start time the 20th.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
