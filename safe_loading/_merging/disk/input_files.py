"""The files that several threads read: each is opened for its first use and closed after its last."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safe_loading._checkpoint.files import open_regular


class InputFiles:
    """The files of a folder: a process may have few open at once, and a folder may have hundreds.

    Args:
        uses: The path of each use to come, so that the last one is known.
    """

    def __init__(self, uses: Iterable[Path]) -> None:
        self._guard = threading.Lock()
        self._open: dict[Path, BinaryIO] = {}
        self._uses_left = Counter(uses)

    def __enter__(self) -> InputFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def opened(self, path: Path | None) -> Iterator[int]:
        """Inside, the descriptor of a file may be read; -1 for none."""
        if path is None:
            yield -1
            return
        with self._guard:
            if path not in self._open:
                self._open[path] = open_regular(path)
            descriptor = self._open[path].fileno()
        yield descriptor
        with self._guard:
            self._uses_left[path] -= 1
            if not self._uses_left[path]:
                self._open.pop(path).close()

    def close(self) -> None:
        """Close the files that an error left open."""
        for file in self._open.values():
            file.close()
        self._open.clear()
