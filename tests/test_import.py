from __future__ import annotations

import subprocess
import sys

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


@pytest.mark.parametrize(
    "name", ["check_checkpoint", "CheckpointReport", "Finding", "CheckpointError", "PickleRefused"]
)
def test_what_needs_no_torch_imports_nothing_else(name):
    assert imported_by(f"from safe_loading import {name}") == {"safe_loading"}


def test_the_test_above_can_fail():
    assert "numpy" in imported_by("import safe_loading, numpy")
    assert "pytest" in imported_by("import safe_loading; import pytest")


def test_all_is_sorted_and_every_name_has_a_home():
    assert sorted(safe_loading.__all__) == safe_loading.__all__
    assert set(safe_loading._HOME) == set(safe_loading.__all__)
    assert set(dir(safe_loading)) == {*safe_loading.__all__, "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'safe_loading' has no attribute 'nothing'"):
        safe_loading.nothing  # noqa: B018
