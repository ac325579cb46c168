"""Types that several rooms share: parsed JSON, and what this package uses of the engines' objects. Imports no torch."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
"""A parsed JSON object. What its values are is checked where they are read, hence the ``Any``."""
