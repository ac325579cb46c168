"""The level of the package's logger, and silence in one thread."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import safe_loading._core.log
from safe_loading._core.log import quiet, without_records


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


def test_only_the_thread_inside_is_quiet_and_only_as_long() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quiet(), ThreadPoolExecutor(1) as pool:
            warnings.warn("here", stacklevel=1)
            pool.submit(warnings.warn, "there").result()
            warnings.simplefilter("error")  # by somebody else, before ours
            with quiet():
                warnings.warn("in a block inside", stacklevel=1)
            warnings.warn("still inside", stacklevel=1)
        with pytest.raises(UserWarning, match="after"):
            warnings.warn("after", stacklevel=1)
    assert [str(each.message) for each in seen] == ["there"]


def test_a_quiet_block_may_be_for_one_category() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quiet(FutureWarning):
            warnings.warn("future", FutureWarning, stacklevel=1)
            with quiet():
                warnings.warn("any", stacklevel=1)
            warnings.warn("user", stacklevel=1)
    assert [str(each.message) for each in seen] == ["user"]


def test_blocks_of_two_threads_may_overlap() -> None:
    """With ``catch_warnings`` the one that ended last would leave the process silent."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first, second = ExitStack(), ExitStack()
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
            one.submit(first.enter_context, quiet()).result()
            two.submit(second.enter_context, quiet()).result()
            one.submit(first.close).result()
            one.submit(warnings.warn, "one has left").result()
            two.submit(warnings.warn, "two has not").result()
            two.submit(second.close).result()
            two.submit(warnings.warn, "both have left").result()
    assert [str(each.message) for each in seen] == ["one has left", "both have left"]


def test_what_an_engine_logs_is_dropped_in_one_thread(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), without_records("engine"), ThreadPoolExecutor(1) as pool:
        logging.getLogger("engine.part").warning("dropped")
        logging.getLogger("engine.part").error("an error")
        logging.getLogger("engines").info("another's")
        pool.submit(logging.getLogger("engine.part").info, "there").result()
    logging.getLogger("engine").warning("afterwards")
    assert caplog.messages == ["an error", "another's", "there", "afterwards"]
