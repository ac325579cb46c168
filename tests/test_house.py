"""The rules of the house that a reader cannot see in one file: who imports whom, who prints, what is public."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from house import ARCHITECTURE, LEVEL, VERBS, House, circles, drawn

import safe_loading
from safe_loading import errors

PACKAGE = Path(safe_loading.__file__).parent
HOUSE = House(PACKAGE)
TORCH_FREE_FOLDERS = {"_core", "_checkpoint", "_output", "_commands"}
TORCH_FREE = {
    "__init__.py",
    "__main__.py",
    "errors.py",
    "_loading/check_checkpoint.py",
    "_loading/adapter_findings.py",
    "_loading/folder_findings.py",
    "_loading/key_names.py",
    "_loading/report.py",
    "_memory/audit/report.py",
    "_memory/forecast/report.py",
    "_memory/plan/device_map_plan.py",
    "_merging/disk/report.py",
    "_merging/report.py",
    "_sharding/report.py",
    "_wrapping/report.py",
}
FORMAT_NAMES = re.compile(r"nf4|gptq|awq|mxfp4|torchao|hqq|compressed.tensors|bitsandbytes|fbgemm", re.IGNORECASE)
NAME_A_FORMAT = 24  # files of the package, by a word anywhere in them; this number may only go down
# files under a verb, itself included; these numbers may only go down
STANDS_ON = {
    "load_peft_on_rank": 138,
    "merge_lora_inplace": 87,
    "merge_lora_checkpoint": 155,
    "wrap_fsdp_meta_safe": 132,
    "wrap_transparent": 17,
    "plan_device_map": 169,
}
ENGINES = {"torch", "transformers", "peft", "accelerate", "safetensors", "numpy"}


def test_every_folder_has_its_place() -> None:
    assert {HOUSE.room(name) for name in HOUSE.files} == set(LEVEL)


def test_imports_run_downwards() -> None:
    names = [name for name in HOUSE.files if HOUSE.room(name) != "__init__"]
    assert {name: upward for name in names if (upward := HOUSE.upward(name))} == {}


def test_a_verb_stands_on_no_more_files_than_before() -> None:
    found = {verb.rpartition(".")[2]: len(HOUSE.stands_on(verb)) for verb in VERBS}
    assert found.keys() == STANDS_ON.keys()
    assert {verb: count for verb, count in found.items() if count > STANDS_ON[verb]} == {}


def test_no_two_files_import_one_another() -> None:
    assert HOUSE.circles() == []


def test_the_check_of_imports_can_fail() -> None:
    name = "safe_loading._checkpoint.header"
    up = "safe_loading._loading.load_peft_on_rank"
    for source in (f"from {up} import x", "from .._loading import load_peft_on_rank", f"import {up}"):
        assert HOUSE.upward(name, ast.parse(source)) == {up}
    assert HOUSE.upward(name, ast.parse("from safe_loading import errors\nfrom . import index")) == set()
    assert HOUSE.upward(name, ast.parse("from safe_loading import load_peft_on_rank")) == {"safe_loading"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_class_name_means_two_things() -> None:
    assert HOUSE.twice() == {}


def test_the_architecture_draws_the_house_as_it_is() -> None:
    if not ARCHITECTURE.is_file():
        pytest.skip("the tests run on an installed wheel, without the project's files")
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert text == drawn(text, HOUSE), "run: python -m tests.house --write"


def test_the_architecture_names_what_is_there() -> None:
    if not ARCHITECTURE.is_file():
        pytest.skip("the tests run on an installed wheel, without the project's files")
    named = re.findall(r"`(_\w+(?:/\w+)+)\.(?!py)(\w+)`", ARCHITECTURE.read_text(encoding="utf-8"))
    assert len(named) > 20
    for path, name in named:
        tree = HOUSE.trees[f"safe_loading.{path.replace('/', '.')}"]
        assert name in {node.name for node in tree.body if hasattr(node, "name")}, f"{path}.{name}"


def inside(name: str) -> str:
    """Return the path of a module in the package."""
    return HOUSE.files[name].relative_to(PACKAGE).as_posix()


def test_what_must_not_import_an_engine_does_not() -> None:
    names = [
        name
        for name in HOUSE.files
        if HOUSE.files[name].parent.name in TORCH_FREE_FOLDERS or inside(name) in TORCH_FREE
    ]
    assert {inside(name) for name in names} >= TORCH_FREE, "a file of TORCH_FREE is not there any more"
    assert {inside(name): engines for name in names if (engines := engines_of(HOUSE.trees[name]))} == {}


def engines_of(tree: ast.Module) -> set[str]:
    """Return the engines that a module imports when it is imported itself."""
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in top if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.split(".")[0] for name in names} & ENGINES


def test_only_the_command_line_prints_and_nobody_asserts() -> None:
    found = {inside(name): prints_and_asserts(tree) for name, tree in HOUSE.trees.items()}
    printing = {file for file, (prints, _) in found.items() if prints}
    assert [file for file in printing if Path(file).name != "__main__.py"] == []
    assert {file: asserts for file, (_, asserts) in found.items() if asserts} == {}


def prints_and_asserts(tree: ast.AST) -> tuple[list[int], list[int]]:
    """Return the lines of a module that call print, and those that assert."""
    prints, asserts = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            prints.append(node.lineno)
        elif isinstance(node, ast.Assert):
            asserts.append(node.lineno)
    return prints, asserts


def test_the_checks_of_every_file_can_fail() -> None:
    assert engines_of(ast.parse("import os, torch.nn\nfrom peft import x\nfrom . import numpy")) == {"torch", "peft"}
    assert prints_and_asserts(ast.parse("x.print()\nprint(1)\nassert x")) == ([2], [3])


def test_modules_and_functions_stay_small() -> None:
    assert {name: n for name, source in HOUSE.sources.items() if (n := source.count("\n")) > 450} == {}
    assert [found for found in HOUSE.functions() if found[0] > 45] == []


def test_first_lines_of_docstrings_have_found_their_noun() -> None:
    """Where "what" stands, a noun was not found. The limit only goes down."""
    nodes = (node for tree in HOUSE.trees.values() for node in ast.walk(tree))
    documented = [node for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    lines = [text.split("\n")[0] for node in documented if (text := ast.get_docstring(node)) is not None]
    vague = [line for line in lines if re.search(r"\bwhat(ever)?\b", line, re.IGNORECASE)]
    assert len(vague) <= 2, vague


def test_the_files_that_name_a_quantization_format_become_fewer() -> None:
    named = [name for name, source in HOUSE.sources.items() if FORMAT_NAMES.search(source)]
    assert len(named) <= NAME_A_FORMAT, named


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


def test_the_workflows_call_what_is_there() -> None:
    root = PACKAGE.parent
    if not (root / ".github").is_dir():
        pytest.skip("the tests run on an installed wheel, without the project's files")
    yaml = pytest.importorskip("yaml")
    pages = sorted([*root.glob(".github/**/*.yml"), root / ".pre-commit-config.yaml"])
    assert len(pages) >= 6
    for page in pages:
        parsed = yaml.safe_load(page.read_text(encoding="utf-8"))
        steps = [step for job in parsed.get("jobs", {}).values() for step in job.get("steps", ())]
        named = re.findall(r"\.ci/\w+|\bdocs\b|constraints\.txt", " ".join(step.get("run", "") for step in steps))
        assert all((root / path).exists() for path in named), page
    tests = yaml.safe_load((root / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    assert tests["jobs"]["ci"]["steps"][-1] == {"run": "bash .ci/run"}
