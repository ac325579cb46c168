"""The documentation is true: its examples run, it builds without a warning, and it leaves nothing out."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from faults.adapters import edited
from models import save_adapter, save_llama, save_tokenizer
from pages import DOCS, ROOT, examples
from rank_server import RankServer

import safe_loading

PACKAGE = Path(safe_loading.__file__).parent
if not DOCS.is_dir():
    pytest.skip("the tests run without the project's docs", allow_module_level=True)
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
MOST_NOT_RUN = 6

CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*|SL[0-9]{3}")

# Which page has the table of a part's findings; loading.md where none is named.
PAGE_OF = {  # the page whose tables list a file's findings; the longest start of its path wins
    "_checkpoint/": "checkpoints.md",
    "_loading/check_checkpoint.py": "checkpoints.md",
    "_loading/adapter_findings.py": "checkpoints.md",
    "_loading/folder_findings.py": "checkpoints.md",
    "_loading/check_as_load.py": "checkpoints.md",
    "_model/layout/": "checkpoints.md",
    "_model/layout/ties.py": "loading.md",
    "_model/model_config.py": "planning.md",
    "_model/weights_dtype.py": "planning.md",
    "_merging/": "merging.md",
    "_merging/disk/": "merge_checkpoint.md",
    "_merging/merge_lora_checkpoint.py": "merge_checkpoint.md",
    "_output/": "merge_checkpoint.md",
    "_merging/disk/compare_": "verify_merge.md",
    "_sharding/": "fsdp.md",
    "_memory/plan": "planning.md",
    "_model/formats": "planning.md",
    "_model/formats/four_bit.py": "loading.md",
    "_model/formats/packed_on_disk.py": "checkpoints.md",
    "_model/layout/packed_modules.py": "loading.md",
    "_model/meta_model.py": "planning.md",
    "_model/positions.py": "planning.md",
    "_model/quantized": "planning.md",
    "_memory/forecast/": "memory.md",
    "_memory/predict_memory.py": "memory.md",
    "_memory/audit": "audit.md",
    "_wrapping/": "wrapping.md",
    "_doctor/": "doctor.md",
    "": "loading.md",
}
ALSO_ON = {  # what several verbs find stands on the page of each
    "_checkpoint/adapter_patterns.py": ("loading.md",),
    "_checkpoint/tokenizer_ids.py": ("loading.md",),
    "_checkpoint/trained_beside.py": ("loading.md", "merge_checkpoint.md"),
    "_loading/choose_class.py": ("merge_checkpoint.md",),
    "_loading/sources.py": ("checkpoints.md", "merge_checkpoint.md"),
    "_merging/weights/loss_findings.py": ("merge_checkpoint.md",),
    "_merging/weights/packed_base.py": ("merge_checkpoint.md",),
    "_model/formats/four_bit.py": ("merging.md",),
    "_model/layout/packed_modules.py": ("planning.md",),
    "_model/positions.py": ("memory.md",),
    "_model/layout/ties.py": ("merge_checkpoint.md", "planning.md"),
}


NEEDED = {"sft.md": "trl"}  # what a page needs beside the package
LAUNCHED = {"torchrun.md"}  # its commands start torchrun itself; those of other pages, what launchers would start

EXAMPLES = {page: examples(page, page.read_text(encoding="utf-8")) for page in PAGES}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name: a base, three adapters (one does not fit), a model and its tokenizer."""
    folder = tmp_path_factory.mktemp("docs")
    with _working_in(folder):
        save_llama("base", torch.bfloat16)
        save_adapter("adapter", "base")
        save_adapter("second", "base", seed=2, lora_alpha=3)
        targets = ["q_proj", "v_proj"]
        edited(Path("adapter"), Path("broken"), config=lambda config: config.update(target_modules=targets))
        save_tokenizer(save_llama("chat"))
    return folder


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("page", [page for page in PAGES if EXAMPLES[page]], ids=lambda page: page.name)
def test_the_examples_of_a_page_run_in_order(
    page: Path, prepared: Path, rank_server: RankServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = None if page.name in LAUNCHED else rank_server
    if page.name in NEEDED:
        pytest.importorskip(NEEDED[page.name], reason=f"pip install {NEEDED[page.name]}")
    # what a page writes is not there for the next
    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "page"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with mock.patch.dict(os.environ):
        for example in EXAMPLES[page]:
            if example.not_run is None:
                example.run(namespace, server)


def test_few_examples_are_not_run_and_each_says_why() -> None:
    left_out = [example for found in EXAMPLES.values() for example in found if example.not_run is not None]
    assert all((example.not_run or "").strip() for example in left_out)
    assert len(left_out) <= MOST_NOT_RUN, [f"{e.page.name}:{e.line}:{e.not_run}" for e in left_out]


def test_examples_are_found_and_can_fail() -> None:
    page = "x\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n\n<!-- not-run: no -->\n```python\n1 / 0\n```\n"
    first, second = examples(Path("page.md"), page)
    assert (first.line, first.code, first.expected, first.not_run) == (3, "print(1)\n", "2\n", None)
    assert (second.expected, second.not_run) == (None, " no ")
    with pytest.raises(AssertionError, match=r"page.md:3 shows"):
        first.run({})
    with pytest.raises(ZeroDivisionError):
        second.run({})


def test_files_and_commands_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script, command = (
        "<!-- file: say.py -->\n```python\nprint(3)\n```\n",
        "<!-- run: python say.py -->\n```bash\nsay\n```\n",
    )
    page = f"{script}\n{command}\nIt says\n\n"
    said = examples(Path("page.md"), page + "```text\n3\n```\n")
    shown = examples(Path("page.md"), page + "```text\n4\n```\n")
    assert (said[0].file, said[1].command, said[1].expected, shown[1].expected) == (
        "say.py",
        "python say.py",
        "3\n",
        "4\n",
    )
    for example in said:
        example.run({})
    with pytest.raises(AssertionError, match=r"and it prints\n3"):
        shown[1].run({})
    (tmp_path / "say.py").write_text("1 / 0")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        said[1].run({})


def test_an_example_behind_a_directive_is_found() -> None:
    page = "```{eval-rst}\n.. autoexception:: E\n```\n\n```python\nprint(1)\n```\n"
    assert [example.code for example in examples(Path("page.md"), page)] == ["print(1)\n"]


def test_every_block_says_what_it_is() -> None:
    # A python block under another name would not be run.
    allowed = {"python", "text", "bash"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^[ >]*(?:```|~~~|:::)(.*)$", text, re.MULTILINE)
        opening = fences[::2]
        assert {fence for fence in opening if not fence.startswith("{")} <= allowed, page
        assert {fence.split("}")[0] for fence in opening if fence.startswith("{")} <= {"{toctree", "{eval-rst"}, page


def test_every_row_belongs_to_a_table() -> None:
    row = re.compile(r"^\|.*\|$")
    for page in PAGES:
        lines = ["", *page.read_text(encoding="utf-8").splitlines(), ""]
        for before, first, second in zip(lines, lines[1:], lines[2:], strict=False):
            if row.match(first) and not row.match(before):
                assert re.fullmatch(r"(\| :?-+:? )+\|", second), f"{page.name}: no table begins with {first[:80]}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.relative_to(DOCS).with_suffix("") for page in PAGES[1:]}
    assert pages <= {page.relative_to(tmp_path).with_suffix("") for page in tmp_path.rglob("*.html")}
    summary = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in public_functions():
        assert f'href="api/{name}.html#safe_loading.{name}"' in summary
    signature = (tmp_path / "api" / "predict_memory.html").read_text(encoding="utf-8")
    assert "factory" not in signature, "Sphinx shows it on one line, with the paths of modules"
    errors = (tmp_path / "errors.html").read_text(encoding="utf-8")
    begin = r'highlight-text [^>]*><div class="highlight"><pre><span></span>'
    assert re.search(f'<div class="prose {begin}The model has', errors)
    loading = (tmp_path / "loading.html").read_text(encoding="utf-8")
    assert re.search(f'<div class="{begin}rank 0 of 1 on cpu', loading), "a table keeps its columns"
    assert ".prose pre { white-space: pre-wrap; }" in (tmp_path / "_static" / "tables.css").read_text(encoding="utf-8")
    assert "<h1>check_<wbr>checkpoint<" in (tmp_path / "api" / "check_checkpoint.html").read_text(encoding="utf-8")
    methods = (tmp_path / "methods.html").read_text(encoding="utf-8")
    assert '<span class="option">--merge</span>' in methods, "or the line ends behind the hyphens"
    for page in (tmp_path / "api").glob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert " -- " not in re.sub("<[^>]*>", "", html), f"{page.name}: a line can end between the hyphens"
        assert not re.search(">(Return t|T)ype<", html), f"{page.name}: a sentence before a colon is taken for a type"
    for page in DOCS.glob("*.md"):
        html = (tmp_path / page.with_suffix(".html").name).read_text(encoding="utf-8")
        for code in table_codes(page.name):  # a link leads to the row
            assert html.count(f'id="{code}"') == 1, f"{page.name}#{code}"


# ---------------------------------------------------------------------------------------------- nothing is left out


def public_functions() -> list[str]:
    return [name for name in safe_loading.__all__ if inspect.isfunction(getattr(safe_loading, name))]


def table_codes(page: str) -> list[str]:
    """The first cell of each row of the page's tables of codes: those whose first column is headed so."""
    codes, inside = [], False
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cell = line.split("|")[1].strip() if line.startswith("|") else None
        inside = cell == "code" or (inside and cell is not None)
        if inside and cell is not None and cell.startswith("`"):
            codes.append(cell.strip("`"))
    return codes


def makers_of_findings(trees: list[ast.Module]) -> dict[str, int]:
    """The functions with a parameter `code`, and its place among the arguments."""
    places = {"Finding": 0}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.args]
                if "code" in names:
                    places[node.name] = names.index("code")
    return places


def codes_in(tree: ast.Module, makers: dict[str, int]) -> set[str]:
    """The codes of findings that a module makes: given as text, or returned as the first of a pair."""
    found = set()
    for node in ast.walk(tree):
        code: ast.expr | None = None
        if isinstance(node, ast.Call):
            called = node.func
            name = (
                called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            )
            if name in makers:
                keywords = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                code = (keywords or node.args[makers[name] : makers[name] + 1] or [None])[0]
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            code = node.value.elts[0]
        if isinstance(code, ast.Constant) and isinstance(code.value, str) and CODE.fullmatch(code.value):
            found.add(code.value)
    return found


def test_every_finding_stands_in_a_table_and_no_other() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    makers = makers_of_findings(list(trees.values()))
    assert {"Finding", "fault", "note"} <= makers.keys()
    made: dict[str, set[str]] = {page.relative_to(DOCS).as_posix(): set() for page in PAGES[1:]}
    for path, tree in trees.items():
        codes = codes_in(tree, makers)
        if codes:
            inside = path.relative_to(PACKAGE).as_posix()
            made[PAGE_OF[max((start for start in PAGE_OF if inside.startswith(start)), key=len)]] |= codes
            for also in ALSO_ON.get(inside, ()):
                made[also] |= codes
    for page, codes in made.items():
        rows = table_codes(page)
        assert len(rows) == len(set(rows)), f"{page}: a code stands twice"
        assert sorted(rows) == sorted(codes), f"{page}: its tables (left) against the source (right)"


def test_codes_are_found_in_every_form() -> None:
    source = """
Finding("a-one", "error"); module.fault("b-two", 1); note("warning", "c-three"); _error(code="d-four")
def f(): return "e-five", "text"
def _error(code): return other("not-this")
"""
    tree = ast.parse(source)
    makers = {**makers_of_findings([tree]), "fault": 0, "note": 1}
    assert codes_in(tree, makers) == {"a-one", "b-two", "c-three", "d-four", "e-five"}


def test_every_public_name_stands_in_the_api() -> None:
    summary = (DOCS / "api.md").read_text(encoding="utf-8")
    exceptions = set(re.findall(r"\{py:exc\}`~safe_loading\.(\w+)`", summary))
    listed = re.findall(r"^   (\w+)$", summary, re.MULTILINE)
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md")}
    described_once = re.findall(r"auto(?:function|class):: (\w+)$", "\n".join(pages.values()), re.MULTILINE)
    assert sorted(listed) == sorted(described_once) == sorted(set(safe_loading.__all__) - exceptions)
    for name in public_functions():
        assert f".. autofunction:: {name}\n" in pages[name], "each function has a page of its own"
    named = set(listed) | exceptions
    described = set(
        re.findall(r"autoexception:: (\w+)$", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert described == {name for name in named if is_exception(name)}


def test_the_readme_runs_every_public_function() -> None:
    code = "".join(example.code for example in EXAMPLES[ROOT / "README.md"])
    lacking = {name for name in public_functions() if name not in code}
    assert lacking == {"limit_device_memory"}, "it caps the whole process, which the tests run in"


def test_the_readme_and_the_landing_page_say_the_same() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    landing = (DOCS / "index.md").read_text(encoding="utf-8")
    shared = readme[: readme.index("The rest of them in use:")]
    assert landing.startswith(shared), "from the first line to the table of functions the two pages are the same"
    headings = re.findall(r'^### "(.+)"$', shared, re.MULTILINE)
    assert len(headings) >= 5
    for section in shared.split("\n### ")[1:]:
        assert section.count("```python") == 1, section.splitlines()[0]
        assert re.search(r"\]\([a-z_]+\.md(#[a-z0-9-]+)?\)", section), section.splitlines()[0]


def test_the_lines_that_ci_takes_from_the_readme_are_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    patterns = re.findall(r"\$\(line '(.+)'\)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert len(patterns) == 2
    for pattern in patterns:
        (line,) = (line for line in readme if re.search(pattern, line))
        assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt "), line


def test_the_pictures_are_drawn_by_the_project_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    with mock.patch.dict(os.environ):  # one of them sets the environment of its ranks
        contexts, over_time = importlib.import_module("contexts"), importlib.import_module("memory_over_time")
        mistakes, load_bars = importlib.import_module("mistakes"), importlib.import_module("_load_bars")
    facts = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.json")}
    plan = safe_loading.DeviceMapPlan.from_json(facts["plan"])
    assert plan.verified
    forecast = json.loads(facts["forecast"])
    for name in ("total_bytes", "modules"):
        del forecast[name]
    forecast["workload"] = safe_loading.Workload.from_facts(forecast["workload"])
    drawn = {
        "plan.svg": plan._repr_svg_() + "\n",
        "forecast.svg": safe_loading.MemoryForecast(**forecast, modules=())._repr_svg_() + "\n",
        "contexts.svg": contexts.draw(json.loads(facts["contexts"])["contexts"]),
        **over_time.pictures(json.loads(facts["over_time"])),
        **mistakes.pictures(json.loads(facts["mistakes"])),
        **load_bars.pictures(json.loads(facts["load_base"])),
    }
    for name, svg in drawn.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == svg, name
    others = {path.name for path in (DOCS / "pictures").glob("*.svg")} - drawn.keys()
    assert others == {"planning_seconds.svg"}, "drawn by benchmarks/plan_device_map.py, which keeps no figures"


def test_every_picture_stands_on_a_page_and_says_what_it_shows() -> None:
    shown = re.findall(
        r"!\[(.*)\]\(.*pictures/(\w+\.svg)\)", "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    )
    assert {name for _, name in shown} == {path.name for path in (DOCS / "pictures").glob("*.svg")}
    assert all(len(says.split()) > 6 for says, _ in shown)


def test_every_exception_has_an_example_and_its_fix() -> None:
    sections = (DOCS / "errors.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert {section.splitlines()[0] for section in sections} == {n for n in safe_loading.__all__ if is_exception(n)}
    for section in sections:
        name = section.splitlines()[0]
        if name not in {"SafeLoadingError", "EngineError"}:  # the root; and what pip mends, not a line of Python
            assert section.count("```python") + section.count("<!-- run:") >= 2, f"{name}: an example and its fix"


def is_exception(name: str) -> bool:
    value = getattr(safe_loading, name)
    return isinstance(value, type) and issubclass(value, Exception)


def test_every_promise_names_tests_that_are_there() -> None:
    rows = (DOCS / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", rows)
    assert len(named) > 20
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"\ndef {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"
    attacks = (ROOT / "attacks" / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"`(tests/[\w/]+\.py)`", attacks):
        assert (ROOT / path).is_file(), path


def test_the_version_to_cite_is_the_version() -> None:
    assert f"\nversion: {safe_loading.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_benchmark_has_a_heading() -> None:
    folder = ROOT / "benchmarks"
    scripts = {path.name for path in folder.glob("*.py") if not path.name.startswith("_")}
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert scripts == set(re.findall(r"^python benchmarks/(\w+\.py)", text, re.MULTILINE))
