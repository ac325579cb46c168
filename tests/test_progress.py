from __future__ import annotations

import sys

import huggingface_hub.utils as hub
import pytest
from transformers.utils import logging as engine

from safe_loading import _progress


class Terminal:
    def __init__(self, tty: bool) -> None:
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("local_rank", "tty", "variable", "wanted"),
    [
        (0, True, "", True),
        (1, True, "", False),
        (0, False, "", False),
        (0, True, "1", False),
        (0, True, "true", False),
        (0, True, "0", True),
    ],
)
def test_a_bar_is_for_local_rank_0_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, tty: bool, variable: str, wanted: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(tty))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", variable)
    assert _progress.wanted(local_rank) is wanted


@pytest.mark.parametrize("before", [True, False])
def test_the_engines_bars_are_off_inside_and_as_before_after(before: bool) -> None:
    was = engine.is_progress_bar_enabled(), hub.are_progress_bars_disabled()
    (engine.enable_progress_bar if before else engine.disable_progress_bar)()
    (hub.enable_progress_bars if before else hub.disable_progress_bars)()
    try:
        with pytest.raises(KeyError), _progress.engine_bars(local_rank=1):  # noqa: PT012 - the block is the subject
            assert not engine.is_progress_bar_enabled()
            assert hub.are_progress_bars_disabled()
            raise KeyError
        assert engine.is_progress_bar_enabled() is before
        assert hub.are_progress_bars_disabled() is not before
    finally:
        (engine.enable_progress_bar if was[0] else engine.disable_progress_bar)()
        (hub.disable_progress_bars if was[1] else hub.enable_progress_bars)()
