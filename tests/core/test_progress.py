from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.utils as hub
import pytest
from models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as engine

from safe_loading import Workload, predict_memory
from safe_loading.__main__ import main
from safe_loading._commands.answer import INFEASIBLE
from safe_loading._core import progress as _progress
from safe_loading._memory.trace.trace_step import trace_step


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


def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend to be in a terminal; return what is written to it."""
    terminal, written = Terminal(tty=True), []
    monkeypatch.setattr(terminal, "write", lambda text: written.append(text) or len(text))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    return written


def test_a_bar_says_what_is_done_and_how_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written = shown(monkeypatch)
    with _progress.Bar("merging", 3_000_000, shown=True) as bar:
        bar.advance(1_500_000)
    assert "merging:  50%" in written[-2]
    assert "1.50M/3.00M" in "".join(written)
    written.clear()
    with _progress.Bar("merging", 3, shown=False) as bar:
        bar.advance()
    assert written == []


def test_of_ranks_side_by_side_the_first_shows_a_bar_once_it_has_taken_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = shown(monkeypatch)
    for local_rank in (0, 1):
        with _progress.bar_of_a_rank("reading", 2, local_rank) as bar:
            assert bar.shown is (local_rank == 0)
            bar.advance()
    assert written == []  # both took less
    given: list[Any] = []
    monkeypatch.setattr(_progress, "Bar", lambda *args, **more: given.append((args, more)))
    _progress.bar_of_a_rank("reading", 2, 0)
    _progress.bar_of_a_rank("tracing", None, 1, unit=" modules")
    assert given == [
        (("reading", 2), {"unit": "B", "after": 1.0, "shown": True}),
        (("tracing", None), {"unit": " modules", "after": 1.0, "shown": False}),
    ]


@pytest.mark.parametrize("in_json", [False, True])
def test_a_search_for_changes_counts_their_kinds_and_shows_no_bar_of_a_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_json: bool
) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    step = predict_memory(tmp_path, Workload.train(16, 256), capability=(9, 0))
    too_little = step.context_bytes + step.allocated_peak_bytes - 1
    written, bar = shown(monkeypatch), _progress.Bar
    given: list[str] = []

    def at_once(what: str, *more: Any, shown: bool, **options: Any) -> _progress.Bar:
        given.extend([what] if shown else [])
        return bar(what, *more, shown=shown, **{**options, "after": 0.0})

    monkeypatch.setattr(_progress, "Bar", at_once)
    words = ["predict", str(tmp_path), "--train", "16x256", "--limit", str(too_little), "--card", "h100"]
    assert main([*words, *(["--json"] if in_json else [])]) == INFEASIBLE
    assert ("suggestions" if in_json else "Changes that take less") in capsys.readouterr().out
    assert given == ([] if in_json else ["tracing", "suggesting"])
    assert ("suggesting: 100%" in "".join(written)) is not in_json


def test_a_long_trace_counts_the_modules_that_run_and_a_short_one_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    model, workload = LlamaForCausalLM(LlamaConfig(**SIZES)), Workload.generate(1, 8)
    modules = len([*model.modules()])
    written, bar = shown(monkeypatch), _progress.Bar
    # longer and shorter than any trace takes, whatever the machine does beside it
    for instead in (3600.0, 0.0):
        assert written == []

        def changed(*given: Any, instead: float = instead, **more: Any) -> _progress.Bar:
            assert more["after"] == 1.0
            return bar(*given, **{**more, "after": instead})

        monkeypatch.setattr(_progress, "Bar", changed)
        trace_step(model, workload)
    counted = int(re.findall(r"tracing: (\d+) modules", "".join(written))[-1])
    assert modules <= counted <= 3 * modules
    assert not any(module._forward_pre_hooks for module in model.modules())
