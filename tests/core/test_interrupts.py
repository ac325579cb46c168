"""Undoing that nothing interrupts: by a signal, or by what another thread raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from interrupts import interrupted_at

from safe_loading._core import interrupts
from safe_loading._core.interrupts import finish, signals_held, undone, undone_on_error

SOURCE = (interrupts.__file__,)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])
    assert after == before


def test_a_signal_waits_for_the_end_or_for_the_next_delivery() -> None:
    def twice() -> None:
        with signals_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("to the end")

    def nested() -> None:
        with signals_held():
            finish(lambda: signal.raise_signal(signal.SIGINT))
            done.append("the outer block decides")

    done: list[str] = []
    for block in (twice, nested):
        with pytest.raises(KeyboardInterrupt):
            block()
    with signals_held() as held:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.deliver()
        done.append("delivered")
    assert len(done) == 3


def test_the_handler_of_a_trainer_runs_after_the_block() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with signals_held():
            signal.raise_signal(signal.SIGTERM)
            assert not heard
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_has_no_signals_to_hold() -> None:
    def work() -> None:
        with signals_held() as held:
            seen.append(held.handlers)

    seen: list[Any] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{}]


def test_a_step_that_was_interrupted_runs_again_and_one_that_failed_does_not() -> None:
    runs: list[type[BaseException]] = []

    def step(error: type[BaseException]) -> None:
        runs.append(error)
        if runs.count(error) == 1:
            raise error

    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error):
            finish(lambda error=error: step(error))
    assert runs == [KeyboardInterrupt, KeyboardInterrupt, ValueError]


@pytest.mark.parametrize("block", [undone, undone_on_error])
@pytest.mark.parametrize("failing", [True, False])
@pytest.mark.parametrize("signalled", [True, False])
def test_at_every_line_of_the_undoing_the_state_is_put_back(block: Any, failing: bool, signalled: bool) -> None:
    def run() -> None:
        with block(lambda: state.update(value="before")):
            state["value"] = "changed"
            if failing:
                raise ValueError

    state = {"value": "before"}
    number, interrupted = 0, True
    while interrupted:
        number += 1
        state["value"], interrupted = "before", False
        try:
            with interrupted_at(number, signalled=signalled, within=SOURCE) as lines:
                run()
        except KeyboardInterrupt:
            interrupted = True
        except ValueError:
            pass
        if lines.place or failing or block is undone:
            assert state["value"] == "before", (number, lines.place)
        interrupted = interrupted or bool(lines.place)
    assert number > 4
