from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import safe_loading


def imported_by(statement: str) -> set[str]:
    """Return the top-level modules outside the standard library that a statement imports in a new process."""
    code = (
        f"import sys; before = set(sys.modules); {statement}\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(result.stdout.split())


def test_importing_the_package_imports_nothing_else():
    assert imported_by("import safe_loading") == {"safe_loading"}


def test_a_process_that_a_test_starts_elsewhere_has_the_package_that_is_tested(tmp_path: Path):
    command = [sys.executable, "-c", "import safe_loading; print(safe_loading.__file__)"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == safe_loading.__file__


@pytest.mark.parametrize(
    "name", ["check_checkpoint", "CheckpointReport", "Finding", "Workload", "CheckpointError", "PickleRefused"]
)
def test_what_needs_no_torch_imports_nothing_else(name):
    assert imported_by(f"from safe_loading import {name}") == {"safe_loading"}


def test_the_test_above_can_fail():
    assert "numpy" in imported_by("import safe_loading, numpy")
    assert "pytest" in imported_by("import safe_loading; import pytest")


def test_every_public_name_is_written_down_alike_in_all_three_places():
    """`__all__` is what programs read, the imports what type checkers read, and the table what finds the modules."""
    tree = ast.parse(Path(safe_loading.__file__).read_text(encoding="utf-8"))
    eager = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == safe_loading._HOME
    assert sorted({*typed, *eager} - {"annotations", "TYPE_CHECKING"}) == safe_loading.__all__
    assert set(dir(safe_loading)) == {*safe_loading.__all__, "__version__"}
    for name in safe_loading.__all__:
        assert getattr(safe_loading, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'safe_loading' has no attribute 'nothing'"):
        safe_loading.nothing  # noqa: B018
