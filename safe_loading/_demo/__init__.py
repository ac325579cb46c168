"""The demo: a chapter per capability, on checkpoints that it makes itself. Chapters return text; they print nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from safe_loading._demo.fsdp import chapter as fsdp
from safe_loading._demo.load import chapter as load
from safe_loading._demo.memory import chapter as memory
from safe_loading._demo.merge import chapter as merge
from safe_loading._demo.plan import chapter as plan
from safe_loading._demo.wrap import chapter as wrap

Chapter = Callable[[Path], str]
_CHAPTERS: tuple[Chapter, ...] = (load, merge, fsdp, wrap, plan, memory)


def chapters(folder: Path) -> Iterator[str]:
    """Run the chapters one after the other and yield the text of each.

    Args:
        folder: Where the checkpoints are made.

    Raises:
        SafeLoadingError: A chapter found that something is not as promised.
    """
    for chapter in _CHAPTERS:
        yield chapter(folder).rstrip() + "\n"
