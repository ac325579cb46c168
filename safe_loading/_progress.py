"""The engines' progress bars: on local rank 0 of a terminal only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


def wanted(local_rank: int) -> bool:
    """Return whether a bar may be shown: local rank 0, a terminal, HF_HUB_DISABLE_PROGRESS_BARS not set."""
    refused = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in _TRUE
    return local_rank == 0 and not refused and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def engine_bars(local_rank: int) -> Iterator[None]:
    """Inside, the bars of transformers and huggingface_hub are off unless they are wanted; afterwards as before."""
    import huggingface_hub.utils as hub
    from transformers.utils import logging as engine

    if wanted(local_rank):
        yield
        return
    shown = engine.is_progress_bar_enabled()
    hub_shown = not hub.are_progress_bars_disabled()  # type: ignore[attr-defined]  # public, not in its __all__
    engine.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations
    hub.disable_progress_bars()  # type: ignore[attr-defined]  # as above
    try:
        yield
    finally:
        if shown:
            engine.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
        if hub_shown:
            hub.enable_progress_bars()  # type: ignore[attr-defined]  # as above
