"""``SHA256SUMS``: the hashes of a folder's files, in the form that ``sha256sum -c`` reads. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safe_loading._core.report import Finding

from .faults import fault
from .files import not_contained, open_regular, try_open
from .signing_manifest import MANIFEST

SUMS = "SHA256SUMS"
GIT = "git-sha1"  # of a small file in a hub's cache, for `digests_of`
_CHUNK = 1 << 20
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_MOST_BYTES = 1 << 26  # a line for each of some hundred thousand files
_AGAIN = f"write it again with `sha256sum`, or remove {SUMS}"


def read_sums(folder: Path) -> Mapping[str, str] | Finding:
    """Return the SHA-256 of each file that a folder lists; none without a list, a finding for one of another form."""
    path = folder / SUMS
    if not os.path.lexists(path):
        return {}
    file = try_open(path)
    if isinstance(file, Finding):
        return file
    with file:
        content = file.read(_MOST_BYTES)
    try:
        return dict(_entries(folder, content.decode()))
    except ValueError as error:
        return fault("manifest", path, f"is no list of SHA-256 as sha256sum writes it: {error}", _AGAIN)


def sums_of(folder: Path) -> str:
    """Return the list of the SHA-256 of all files of a folder, for its ``SHA256SUMS``; each file is read once."""
    digests = dict[str, str]()
    for name in files_in(folder):
        with open_regular(folder / name) as file:
            digests |= {name: digests_of(file, ["sha256"])["sha256"]}
    return "".join(_line(name, digest) for name, digest in sorted(digests.items()))


def files_in(folder: Path) -> Iterator[str]:
    """Yield the names of the files in a folder and those in it, without hidden folders and the lists of hashes."""
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(root).relative_to(folder)
        yield from ((inside / name).as_posix() for name in files if name not in (MANIFEST, SUMS))


def digests_of(file: BinaryIO, algorithms: Iterable[str]) -> dict[str, str]:
    """Return the hashes of a file in hexadecimal digits, by the algorithm's name; the file is read once."""
    size = os.fstat(file.fileno()).st_size
    hashes: dict[str, Any] = {}
    for algorithm in algorithms:
        if algorithm == GIT:  # what git hashes is the kind and the size, and then the bytes
            hashes[algorithm] = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        else:
            hashes[algorithm] = hashlib.new(algorithm)
    chunk = memoryview(bytearray(_CHUNK))
    while count := file.readinto(chunk):  # type: ignore[attr-defined]  # a file opened by os.fdopen has it
        for each in hashes.values():
            each.update(chunk[:count])
    return {algorithm: each.hexdigest() for algorithm, each in hashes.items()}


def _line(name: str, digest: str) -> str:
    escaped = name.replace("\\", r"\\").replace("\n", r"\n")  # sha256sum marks such a line by a backslash before it
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"


def _entries(folder: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.split("\n")[: -1 if text.endswith("\n") else None], 1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number} is {line!r:.100}")
        escaped, digest, name = found.groups()
        if escaped:
            name = re.sub(r"\\(.)", lambda each: "\n" if each[1] == "n" else each[1], name)
        name = name.removeprefix("./")
        if reason := not_contained(folder, name):
            raise ValueError(reason)
        yield name, digest.lower()
