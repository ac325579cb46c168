"""pytest's side of the run: calls of peft are replaced, and the outcome of each test is written to a file, as it ends.

It runs in the process that runs peft's tests, and replaces before these import peft's names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The module of each switch. It has replace(note_call), which is called once, and WORDS, a pattern of what a test's
# source has when it may call what is replaced.
SWITCHES = {"load": "peft_suite.our_load", "merge": "peft_suite.our_merge"}
_calls = 0
_facts: dict[str, Any] = {}  # of the test that runs


def _switches() -> list[Any]:
    names = filter(None, os.environ["PEFT_SUITE_REPLACED"].split(","))
    return [importlib.import_module(SWITCHES[name]) for name in names]


def note_call() -> None:
    """Count a call that a replacement answers."""
    global _calls
    _calls += 1


def pytest_configure() -> None:
    """Put our calls in the place of peft's."""
    for switch in _switches():
        switch.replace(note_call)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that cannot call what is replaced, and of the others those that are not of the slice."""
    words = "|".join(switch.WORDS for switch in _switches())
    first, end = map(float, os.environ.get("PEFT_SUITE_SLICE", "0,1").split(","))
    seed = os.environ.get("PEFT_SUITE_SEED", "")

    def is_kept(item: pytest.Item) -> bool:
        chosen = first <= zlib.crc32((seed + item.nodeid).encode()) / 2**32 < end
        return not words or (chosen and isinstance(item, pytest.Function) and _mentions(item.function, item.cls, words))

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = [item for item in items if is_kept(item)]


@functools.cache
def _mentions(function: Callable[..., object], owner: type | None, words: str) -> bool:
    """Return whether a test, or a helper of its class or module that it calls, mentions one of the words."""
    source = inspect.getsource(function)
    if re.search(words, source):
        return True
    scope = getattr(function, "__globals__", {})
    for name in set(re.findall(r"\b(?:self\.)?(\w+)\(", source)):
        helper = getattr(owner, name, None) or scope.get(name)
        own = getattr(helper, "__module__", "").startswith("peft_tests") and inspect.isfunction(helper)
        if own and helper is not function and re.search(words, inspect.getsource(helper)):
            return True
    return False


@pytest.fixture(autouse=True, scope="session")
def _without_hub() -> None:
    """Keep peft's helper from turning the offline mode of the hub off."""
    from peft_tests import testing_utils

    class Seen(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            return True

        def __missing__(self, key: str) -> int:
            return 0

    testing_utils._HUB_MODEL_ACCESSES = Seen()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write how a test ended, and whether a replacement was called in it: a run that is cut off keeps the others."""
    before = _calls
    _facts.clear()
    _facts.update(case=item.nodeid, outcome="passed", error="")
    result = yield
    _facts["called"] = _calls > before
    with Path(os.environ["PEFT_SUITE_RESULTS"]).open("a") as results:
        results.write(json.dumps(_facts) + "\n")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note the outcome, and the error in one line."""
    report: pytest.TestReport = yield
    if report.outcome != "passed" and _facts["outcome"] != "failed":
        _facts["outcome"] = report.outcome
        if call.excinfo is not None:
            error = call.excinfo.value
            _facts["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    return report
