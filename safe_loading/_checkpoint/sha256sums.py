"""``SHA256SUMS``: the hashes of a folder's files, in the form that ``sha256sum -c`` reads. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from safe_loading._core.report import Finding

from .faults import fault
from .files import not_contained, try_open

SUMS = "SHA256SUMS"
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


def sums_text(digests: Mapping[str, str]) -> str:
    """Return the list of hashes, by the files' names in their folder."""
    return "".join(_line(name, digest) for name, digest in sorted(digests.items()))


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
