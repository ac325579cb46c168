"""Every cell of the table on packed bases, with rows of two blocks; with rows of four, one packing of each engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

import packed_table
from packed import PACKINGS

if not packed_table.PAGE.is_file():
    pytest.skip("the tests run without the project's docs", allow_module_level=True)


WIDE = ("nf4 nested", "int8")  # with rows of four blocks too; the others' in the slow set


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("kind", "width"),
    [
        *((kind, 128) for kind in PACKINGS),
        *(pytest.param(kind, 256, marks=[] if kind in WIDE else pytest.mark.slow) for kind in PACKINGS),
    ],
)
def test_the_row_of_a_packing_is_that_of_the_page(tmp_path: Path, kind: str, width: int) -> None:
    assert packed_table.row(tmp_path, kind, width) == packed_table.in_page()[kind], (
        "run PYTHONPATH=tests python -m tests.packed_table --write"
    )


def test_the_page_has_no_other_rows() -> None:
    assert packed_table.in_page().keys() == PACKINGS.keys()
