"""What tests skip where a supported engine is too old to have it."""

from __future__ import annotations

import pytest

from safe_loading._core.engines import is_older


def needs(engine: str, version: str) -> pytest.MarkDecorator:
    """Mark a test of what an engine has since a version."""
    return pytest.mark.skipif(is_older(engine, version), reason=f"needs {engine} >= {version}")


def skip_unless_transformers_takes_peft() -> None:
    """Skip a test of an adapter that transformers itself adds, where it asks for a newer peft."""
    from transformers.integrations import peft as integration

    least = integration.MIN_PEFT_VERSION
    if is_older("peft", least):
        pytest.skip(f"transformers adds adapters with peft >= {least}")


def before(engine: str, version: str) -> pytest.MarkDecorator:
    """Mark a test of what an engine does no longer since a version."""
    return pytest.mark.skipif(not is_older(engine, version), reason=f"needs {engine} < {version}")
