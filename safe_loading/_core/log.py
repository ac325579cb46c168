"""The package's logger. Its level is that of TRANSFORMERS_VERBOSITY, unless the program has set one."""

from __future__ import annotations

import logging
import os

_LEVELS = {
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
