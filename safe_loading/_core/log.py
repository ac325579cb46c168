"""The package's logger, by default at the level of TRANSFORMERS_VERBOSITY, and a way to silence engines' warnings."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LEVELS = {  # transformers' names (transformers.utils.logging.log_levels)
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

logger = logging.getLogger("safe_loading")
if logger.level == logging.NOTSET:
    logger.setLevel(_LEVELS.get(os.environ.get("TRANSFORMERS_VERBOSITY", "").lower(), logging.NOTSET))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the engines' warnings: what they would warn of is a finding or an error of this package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
