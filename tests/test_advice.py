"""Every advice of the package is taken by a test, or has a reason why not."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import advice as table
import pytest
from advice.reasons import OPEN, REASONS

TESTS = Path(__file__).parent
NOT_TAKEN_YET = 0  # the rows that say OPEN; this number may only go down


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_advice_has_its_row() -> None:
    missing = [
        f"{found.file}:{found.line}: {found.words}"
        for found in table.advices()
        if not any(found.words.startswith(words) for words in table.TAKEN.get(found.file, ()))
    ]
    assert not missing, "add a test that takes it, and its row in tests/advice:\n" + "\n".join(missing)


def test_no_row_is_left_over() -> None:
    found = list(table.advices())
    for file, rows in table.TAKEN.items():
        for words in rows:
            assert any(advice.file == file and advice.words.startswith(words) for advice in found), (file, words)


@pytest.mark.parametrize("file", table.TAKEN)
def test_the_tests_that_are_named_exist(file: str) -> None:
    for words, test in table.TAKEN[file].items():
        if test not in REASONS:
            folder, _, name = test.partition("::")
            name, _, page = name.partition("[")
            assert name in names_in(folder), (words, test)
            assert not page or (TESTS.parent / "docs" / page.rstrip("]")).is_file(), (words, test)


def test_what_no_test_takes_becomes_less() -> None:
    left = [(file, words) for file, rows in table.TAKEN.items() for words in rows if rows[words] == OPEN]
    assert len(left) == NOT_TAKEN_YET, left


def test_a_new_advice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_loading").mkdir()
    text = 'def f(name):\n    """Load it."""\n    raise ValueError(f"{name} is odd. Call even({name}) first.")\n'
    (tmp_path / "_loading" / "new.py").write_text(text)
    monkeypatch.setattr(table, "PACKAGE", tmp_path)
    assert [found.words for found in table.advices(("_loading",))] == ["Call even({}) first."]
