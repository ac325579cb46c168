"""The demo: a chapter per capability, on checkpoints that it makes itself. Chapters return text; they print nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from safe_loading._demo.load import chapter as load
from safe_loading._demo.merge import chapter as merge

Chapter = Callable[[Path], str]
_CHAPTERS: tuple[Chapter, ...] = (load, merge)


def chapters(folder: Path) -> Iterator[str]:
    """Run the chapters one after the other and yield the text of each.

    Args:
        folder: Where the checkpoints are made.

    Raises:
        SafeLoadingError: A chapter found that something is not as promised.
    """
    for chapter in _CHAPTERS:
        yield chapter(folder)
