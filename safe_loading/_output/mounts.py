"""Which kind of file system a folder lies on. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

# File systems of several machines. A lock may hold on one of them only, and mapped files are slow there.
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "afs"})


def kind_of(folder: Path) -> str:
    """Return the kind of a file system by the longest mount point above the folder, as Linux lists them.

    Returns:
        Such as ``"ext4"``; empty where the system does not say.
    """
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real, best, kind = str(folder.resolve()), "", ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two mounts at one point the later one is seen
            best, kind = point, source.split(" ")[0]
    return kind


def is_shared(kind: str) -> bool:
    """Return whether several machines can write to a file system of this kind."""
    return kind in _NETWORK
