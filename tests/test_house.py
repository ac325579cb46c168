"""The rules of the house that a reader cannot see in one file: who imports whom, who prints, what is public."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import safe_loading
from safe_loading import errors

PACKAGE = Path(safe_loading.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Lower may not import higher. What stands in one row may import one another.
ORDER = (
    {"errors"},
    {
        "_report",
        "_log",
        "_progress",
    },
    {"_workload"},
    {
        "_arguments",
        "_checkpoint",
        "_distributed",
        "_layout",
        "_load_report",
        "_lora",
        "_merge_report",
        "_wrap_report",
    },
    {"_device_for_rank"},
    {"_adapter"},
    {"_tracing"},
    {"_sharding"},
    {"_transparent"},
    {
        "_assert_optimizer_sharded",
        "_attach_head",
        "_check_checkpoint",
        "_doctor",
        "_load_peft_on_rank",
        "_load_adapter_on_rank",
        "_merge_lora_inplace",
        "_meta_model",
        "_wrap_transparent",
        "_wrap_fsdp_meta_safe",
    },
    {"_planning"},
    {"_limit_device_memory", "_plan_device_map"},
    {"_largest_workload", "_smallest_limits"},
    {"_prepare_and_wrap"},
    {"_merge_checkpoint", "_forecast"},
    {"_predict_memory"},
    {"_largest_micro_batch", "_audit"},
    {"_audit_model"},
    {"_merge_lora_checkpoint", "_memory_guard"},
    {"__init__"},
    {"_demo"},
    {"_commands"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
TORCH_FREE = (
    "errors.py",
    "_report.py",
    "_load_report.py",
    "_merge_report.py",
    "_wrap_report.py",
    "_progress.py",
    "_workload.py",
    "_check_checkpoint.py",
    "__init__.py",
    "__main__.py",
)
TORCH_FREE_FOLDERS = ("_checkpoint", "_commands")
ENGINES = {"torch", "transformers", "peft", "accelerate", "safetensors", "numpy"}


def part_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported_parts(path: Path, source: str) -> set[str]:
    """The parts of the package that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ["safe_loading", *path.relative_to(PACKAGE).parent.parts]
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    parts = {name.split(".")[1] for name in found if name.startswith("safe_loading.")}
    return {part if part in LEVEL else "__init__" for part in parts}


def test_every_part_has_its_place() -> None:
    assert {part_of(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return  # names of all verbs, imported when they are asked for
    higher = {other for other in imported_parts(path, path.read_text()) if LEVEL[other] > LEVEL[part]}
    assert not higher


def test_the_check_of_directions_can_fail() -> None:
    path = PACKAGE / "_checkpoint" / "header.py"
    assert imported_parts(path, "from safe_loading._load_peft_on_rank import x") == {"_load_peft_on_rank"}
    assert imported_parts(path, "from .. import _adapter") == {"_adapter"}
    assert imported_parts(path, "from . import index") == {"_checkpoint"}
    assert imported_parts(path, "from safe_loading import errors, load_peft_on_rank") == {"errors", "__init__"}


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if (p.name in TORCH_FREE and p.parent == PACKAGE) or p.parent.name in TORCH_FREE_FOLDERS],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_what_must_not_import_an_engine_does_not(path: Path) -> None:
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in top if isinstance(node, ast.ImportFrom) and node.level == 0}
    assert not {name.split(".")[0] for name in names} & ENGINES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_prints_and_nobody_asserts(path: Path) -> None:
    tree = ast.parse(path.read_text())
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "print" not in calls or path.name == "__main__.py"
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = len((ast.get_docstring(node, clean=False) or "").splitlines())
            signature = node.body[0].lineno - node.lineno
            length = (node.end_lineno or 0) - node.lineno + 1 - documented - signature
            assert length <= 45, f"{node.name} has {length} lines"


def test_the_public_names_are_sorted_and_all_can_be_imported() -> None:
    assert safe_loading.__all__ == sorted(safe_loading.__all__)
    assert set(safe_loading.__all__) == set(safe_loading._HOME)
    for name in safe_loading.__all__:
        assert getattr(safe_loading, name) is not None
    assert set(dir(safe_loading)) == {*safe_loading.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no_such_name"):
        safe_loading.no_such_name  # noqa: B018 - the access is the test


def test_every_exception_is_public_and_drawn_in_the_tree() -> None:
    classes = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert set(classes) <= set(safe_loading.__all__)
    for name, kind in classes.items():
        assert issubclass(kind, errors.SafeLoadingError)
        line = next(line for line in (errors.__doc__ or "").splitlines() if f" {name} " in f"{line} ")
        builtin = [base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"]
        assert all(f"({base})" in line for base in builtin if name != "SafeLoadingError")


def test_many_problems_are_kept_and_the_text_stays_short() -> None:
    error = errors.AdapterError("Does not fit:", [f"problem {n}" for n in range(100)])
    assert len(error.problems) == 100
    assert "problem 23" in str(error)
    assert "problem 24" not in str(error)
    assert "76 more" in str(error)


def test_the_version_and_the_pins_agree() -> None:
    root = PACKAGE.parent
    if not (root / "pyproject.toml").is_file():
        pytest.skip("the tests run on an installed wheel, without the project's files")
    # read with a pattern: tomllib is not there in Python 3.10
    text = (root / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.M).group(1) == safe_loading.__version__
    declared = re.search(r"^dependencies = \[(.+?)^\]", text, re.M | re.S).group(1)
    pinned = {line.split("==")[0] for line in (root / "constraints.txt").read_text().splitlines() if "==" in line}
    assert set(re.findall(r'"([\w-]+)>=', declared)) <= pinned
