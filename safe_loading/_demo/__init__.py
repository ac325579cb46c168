"""The demo: a chapter per capability, on checkpoints that it makes itself. Chapters return text; they print nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safe_loading._core.progress import engine_bars

from .fsdp import chapter as fsdp
from .load import chapter as load
from .memory import chapter as memory
from .merge import chapter as merge
from .plan import chapter as plan
from .wrap import chapter as wrap

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
        with _hushed():
            text = chapter(folder)
        yield text.strip() + "\n"


@contextmanager
def _hushed() -> Iterator[None]:
    """Leave the tables alone on the screen: no bars, no warnings, no logs of the engines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with engine_bars(local_rank=1), warnings.catch_warnings():  # any rank but 0 shows no bar
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
