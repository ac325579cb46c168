"""The level of the package's logger."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator

import pytest

import safe_loading._core.log


@pytest.fixture
def unset() -> Iterator[logging.Logger]:
    logger = logging.getLogger("safe_loading")
    before = logger.level
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(before)


@pytest.mark.parametrize(
    ("said", "level"),
    [("error", logging.ERROR), ("INFO", logging.INFO), ("", logging.NOTSET), ("loud", logging.NOTSET)],
)
def test_the_level_is_that_of_transformers(
    said: str, level: int, unset: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", said)
    importlib.reload(safe_loading._core.log)
    assert unset.level == level


def test_what_the_program_has_set_stays(unset: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    unset.setLevel(logging.INFO)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    importlib.reload(safe_loading._core.log)
    assert unset.level == logging.INFO
