"""Why a case of peft's tests differs with our calls: patterns of its id or its error, and the reason.

docs/methods.md lists the same reasons.
"""

from __future__ import annotations

import re

# (pattern of the case's id, pattern of its error, reason); the first that matches both is the reason.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "test_load_resized_embedding_ignore_mismatched_sizes",
        "AdapterError",
        "a shape that does not fit is an AdapterError, for which the test expects torch's RuntimeError",
    ),
)


def reason_for(case: str, error: str) -> str:
    """Return why a case differs; empty when nothing says so."""
    return next((reason for ids, errors, reason in _REASONS if re.search(ids, case) and re.search(errors, error)), "")
