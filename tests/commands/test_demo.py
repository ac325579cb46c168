"""What the demo leaves on the screen; that its chapters keep what they promise is checked by running it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
from transformers.utils import logging as engine

from safe_loading import _demo
from safe_loading.__main__ import main


def test_the_engines_are_silent_while_a_chapter_runs_and_speak_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bars = []

    def chapter(folder: Path) -> str:
        warnings.warn("from an engine", FutureWarning, stacklevel=1)
        logging.getLogger("bitsandbytes").warning("from an engine")
        bars.append(engine.is_progress_bar_enabled())
        return f"\n{folder.name}\n\n"

    monkeypatch.setattr(_demo, "_CHAPTERS", (chapter, chapter))
    shown = engine.is_progress_bar_enabled()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [*_demo.chapters(tmp_path)] == [f"{tmp_path.name}\n"] * 2
        assert said == []
        assert caplog.records == []
        warnings.warn("again", FutureWarning, stacklevel=1)
        logging.getLogger("bitsandbytes").warning("again")
    assert len(said) == len(caplog.records) == 1
    assert bars == [False, False]
    assert engine.is_progress_bar_enabled() is shown


def test_the_pair_of_the_demo_is_named_by_a_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(_demo, "chapters", lambda folder: map(str, made.append(folder) or ()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert [main(["demo", "--folder", name]) for name in ("try", "~/try")] == [0, 0]
    assert made == [tmp_path / "try", tmp_path / "home" / "try"]
