"""The files of a folder as a mapping: read, written, and one file against its recorded hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def held(folder: Path) -> dict[str, bytes] | None:
    if not folder.exists():
        return None
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fill(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def same(path: Path, facts: Any) -> bool:
    return hashlib.sha256(path.read_bytes()).hexdigest() == facts["sha256"]
