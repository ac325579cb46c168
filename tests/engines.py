"""What tests skip where a supported engine is too old to have it."""

from __future__ import annotations

import pytest

from safe_loading._core.engines import is_older


def needs(engine: str, version: str) -> pytest.MarkDecorator:
    """Mark a test of what an engine has since a version."""
    return pytest.mark.skipif(is_older(engine, version), reason=f"needs {engine} >= {version}")
