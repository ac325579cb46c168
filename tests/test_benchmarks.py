"""The runner of the benchmarks; their figures are not tested."""

from __future__ import annotations

import importlib.util
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
        assert "options(__doc__, " in (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"), name


def test_an_unknown_benchmark_is_refused(runner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["speed"])
    assert "no such benchmark: speed" in capsys.readouterr().err
