"""The runner of the benchmarks; their figures are not tested."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the tests run without the project's benchmarks", allow_module_level=True)


@pytest.fixture(scope="module")
def runner() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_runner", ROOT / "benchmarks" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_benchmark_prints_is_recorded_under_its_heading(runner: Any) -> None:
    page = (
        "## A\n\n```bash\npython benchmarks/a.py\n```\n\nSays a.\n\n## B\n\n```bash\npython benchmarks/b.py --x\n```\n"
    )
    once = runner.recorded(page, "a", "one\n")
    assert once == page.replace("Says a.\n", "Says a.\n\n```text\none\n```\n")
    both = runner.recorded(once, "b", "two")
    assert both == once + "\n```text\ntwo\n```\n"
    assert runner.recorded(both, "a", "1\n2") == both.replace("```text\none\n```", "```text\n1\n2\n```")
    with pytest.raises(ValueError, match="not found"):
        runner.recorded(page, "c", "three")


def test_every_benchmark_can_be_recorded_and_takes_the_options_of_the_runner(runner: Any) -> None:
    page = runner.PAGE.read_text(encoding="utf-8")
    for name in runner.SCRIPTS:
        assert runner.recorded(page, name, "new") != page
        script = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        assert re.search(r"\b(options|over_rows)\(__doc__, ", script), name  # the second calls the first


def test_a_quick_run_judges_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    common, load = importlib.import_module("_common"), importlib.import_module("load_peft")
    assert [common.promise(kept) for kept in (True, False)] == ["kept", "MISSED"]
    assert [common.promise(kept, quick=True) for kept in (True, False)] == ["not judged at this size"] * 2
    for quick, word in ((False, "MISSED"), (True, "not judged at this size")):
        line = load.verdict("attach", 2.0, 1.0, "ms", quick=quick)
        assert line == f"promise for safe_loading: attach <= 1 ms; 2.00: {word}"
    # and no script judges by itself
    judges = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "MISSED" in path.read_text(encoding="utf-8")]
    assert judges == ["_common"]


def test_an_unknown_benchmark_is_refused(runner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["speed"])
    assert "no such benchmark: speed" in capsys.readouterr().err
