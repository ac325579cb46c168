"""The demo: one chapter for each capability, on checkpoints that it makes itself. Chapters return text, never print."""

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
    """Run the chapters in order and yield the text of each; the checkpoints are made in ``folder``.

    A chapter that finds a promise of this package broken raises SafeLoadingError.
    """
    for chapter in _CHAPTERS:
        with _engines_silenced():
            text = chapter(folder)
        yield text.strip() + "\n"


@contextmanager
def _engines_silenced() -> Iterator[None]:
    """Keep bars, warnings and logs of the engines off the screen, so that only the tables are seen."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with engine_bars(local_rank=1), warnings.catch_warnings():  # a rank other than 0 shows no bar
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
