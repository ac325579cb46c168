"""The table of docs/compatibility.md is what tests/compatibility.py made of runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from compatibility import ENGINES, HEADER, row, with_row

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
REPORT = '<testsuites><testsuite tests="12" failures="1" errors="2" skipped="3"/></testsuites>'


def versions(python: str) -> list[str]:
    return [python, *(f"{n}.0" for n in range(len(ENGINES)))]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    return path


def test_a_row_says_how_the_tests_ended(report: Path) -> None:
    assert row(report, versions("3.11.7"), "2026-11-23").endswith("| 6 | 3 | 3 | 2026-11-23 |")


def test_a_row_takes_the_place_of_the_same_versions(report: Path) -> None:
    page = f"Text\n\n{HEADER}\n{'| --- ' * HEADER.count(' | ')}| --- |\n\nMore\n"
    first = with_row(page, row(report, versions("3.10.1"), "2026-01-01"))
    second = with_row(first, row(report, versions("3.11.1"), "2026-01-02"))
    third = with_row(second, row(report, versions("3.10.1"), "2026-01-03"))
    assert [line[-14:-2] for line in third.splitlines() if line.startswith("| 3.")] == ["| 2026-01-02", "| 2026-01-03"]
    assert third.endswith("|\n\nMore\n")


def test_no_row_of_the_page_has_failures() -> None:
    if not PAGE.is_file():
        pytest.skip("the tests run on an installed wheel, without the project's files")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 3.")]
    assert HEADER in lines
    assert len(rows) >= 3
    assert [each for each in rows if each[len(ENGINES) + 2] != "0"] == []
