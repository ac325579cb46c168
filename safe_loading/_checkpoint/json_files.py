"""JSON files of a folder, each read once and stamped before, so that a later change is seen. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

from .faults import raise_faults
from .files import stamp
from .strict_json import try_json_bytes, try_parse_file


class JsonFiles:
    """The JSON files that were asked for so far, by path. Returned objects are kept: copy one before you change it."""

    def __init__(self) -> None:
        """Begin with none."""
        self._contents: dict[Path, bytes] = {}
        self._documents: dict[Path, JsonObject | Finding] = {}
        self._stamps: dict[Path, tuple[int, ...]] = {}

    @property
    def stamps(self) -> Mapping[Path, tuple[int, ...]]:
        """``files.stamp`` of each file before it was read; empty for one that was not there."""
        return self._stamps

    def try_read(self, path: Path) -> JsonObject | Finding:
        """Return the object of a file, or the finding that says why there is none, as at the first time."""
        if path not in self._documents:
            self._stamps.setdefault(path, stamp(path))
            content = try_json_bytes(path)
            if isinstance(content, Finding):
                self._documents[path] = content
            else:
                self._contents[path] = content
                self._documents[path] = try_parse_file(content, path)
        return self._documents[path]

    def read(self, path: Path) -> JsonObject | None:
        """Return the object of a file, or None if there is no such file; raise its fault if it is damaged."""
        # lexists(), so that a broken link is read and refused, and is not taken for a file that was never there
        if path not in self._documents and not os.path.lexists(path):
            self._stamps.setdefault(path, ())
            return None
        document = self.try_read(path)
        if isinstance(document, Finding):
            raise_faults(path, [document])
        return document

    def content(self, path: Path) -> bytes | None:
        """Return the bytes of a file that was read; None for one that was not."""
        return self._contents.get(path)

    def copy(self) -> JsonFiles:
        """Return the same files apart, to read more that may have to be forgotten."""
        copied = JsonFiles()
        copied.add(self)
        return copied

    def add(self, others: JsonFiles) -> None:
        """Take over the files that ``others`` has read."""
        self._contents |= others._contents
        self._documents |= others._documents
        self._stamps |= others._stamps
