"""The notebooks run, and show what is stored in them: tables and pictures, no error, nothing of somebody's machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
KernelManager = pytest.importorskip("jupyter_client.manager").KernelManager

BEFORE = "%reset -f\nimport os\nos.chdir({folder!r})\ndel os"
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
if not NOTEBOOKS:
    pytest.skip("the tests run without the project's docs", allow_module_level=True)


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def shown(notebook: Any) -> list[list[str]]:
    """The kinds of what each code cell shows; what goes to stderr is not counted."""
    kinds = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            kinds.append([kind for each in outputs for kind in sorted(each.get("data", {"stream": None}))])
    return kinds


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One kernel for all notebooks: each import of the engines takes seconds. `BEFORE` gives each a fresh namespace."""
    manager = KernelManager()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("PYTHONWARNINGS", "ignore")):
            environment.setenv(name, value)
        manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(path: Path, tmp_path: Path, kernel: Any) -> None:
    stored, run = read(path), read(path)
    for cell in run.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    run.cells.insert(0, nbformat.v4.new_code_cell(BEFORE.format(folder=str(tmp_path))))
    nbclient.NotebookClient(run, km=kernel, timeout=240).execute()
    assert shown(run)[1:] == shown(stored)


def test_every_notebook_shows_a_table_and_stands_in_the_index() -> None:
    index = (FOLDER.parent / "index.md").read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        kinds = [kind for cell in shown(read(path)) for kind in cell]
        assert "text/html" in kinds, path.name
        assert f"(notebooks/{path.name})" in index


def test_a_terminal_shows_the_table_too() -> None:
    for path in NOTEBOOKS:
        for cell in read(path).cells:
            for data in [output.get("data", {}) for output in cell.get("outputs", ())]:
                if "text/html" in data:
                    assert not re.match(r"\w+\(", data["text/plain"]), f"{path.name}: a repr of one long line"


def test_no_notebook_holds_a_path_of_a_machine() -> None:
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(tmp|home|root|work|Users)/", text), path.name
