"""The table of ways to wrap in docs/wrapping.md is what the tests find."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrapper_matrix import matrix, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "wrapping.md"


def test_the_table_in_the_docs_is_what_is_found() -> None:
    if not PAGE.is_file():
        pytest.skip("the tests run without the project's docs")
    results = matrix()
    assert all(row["`wrap_transparent`"] for row in results.values())
    assert table(results) in PAGE.read_text(encoding="utf-8"), f"write it anew:\n{table(results)}"
