"""Each promise of SECURITY.md names tests that are there, and that try the fields of its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line.strip("|").split("|") for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
LINES = {fields.strip(): shown.strip() for fields, _, shown in ROWS[2:]}


@pytest.mark.parametrize("fields", LINES)
def test_each_line_has_its_test(fields: str) -> None:
    tests = re.findall(r"`(tests/[^`]+\.py)`", LINES[fields])
    assert tests
    text = "".join((ROOT / name).read_text() for name in tests)
    names = [re.split(r"[:.]", name)[0].strip("*_") for name in re.findall(r"`([^`]+)`", fields)]
    assert [name for name in names if name not in text] == []


def test_every_attack_names_what_builds_it() -> None:
    rows = [line for line in (ROOT / "attacks/README.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 40
    for row in rows:
        built_by = re.findall(r"`(tests/[^`]+)`", row.rstrip("|").rpartition("|")[2])
        assert built_by, row
        assert all((ROOT / name).is_file() for name in built_by), row
