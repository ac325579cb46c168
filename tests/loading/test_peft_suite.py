"""The runner of peft's own tests (tests/peft_suite): what it replaces, that it sees a case that differs, its record."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from peft_suite import record
from peft_suite.__main__ import slices
from peft_suite.expected import reasons

TESTS = Path(__file__).resolve().parents[1]

CASES = """
    import pytest, torch
    from peft import LoraConfig, PeftModel, get_peft_model

    def saved(folder):
        model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
        model.save_pretrained(folder)
        return folder

    def test_both(tmp_path):
        model = PeftModel.from_pretrained(torch.nn.Sequential(torch.nn.Linear(4, 4)), saved(tmp_path))
        assert model.load_adapter(str(tmp_path), "second").missing_keys == []

    def test_only_with_peft(tmp_path):
        model = PeftModel.from_pretrained(torch.nn.Sequential(torch.nn.Linear(4, 4)), saved(tmp_path))
        assert not hasattr(model, "load_report")

    def test_neither(tmp_path):
        assert PeftModel.from_pretrained(torch.nn.Sequential(torch.nn.Linear(4, 4)), saved(tmp_path)) is None

    def test_another_matter():
        raise AssertionError("is not run")
"""


def test_a_case_that_passes_with_peft_alone_is_found(tmp_path: Path) -> None:
    package = tmp_path / "peft_tests"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "testing_utils.py").touch()
    (package / "test_cases.py").write_text("\n".join(line[4:] for line in CASES.splitlines()))
    script = """
        import sys
        from pathlib import Path
        from peft_suite.__main__ import compare

        found = compare(Path(sys.argv[1]), ["load"], ["peft_tests/test_cases.py"])
        assert list(found.differ) == ["peft_tests/test_cases.py::test_only_with_peft"], found
        assert found.called == {"passed": 1, "failed": 2} and found.ran == 3 and not found.cut_off, found
    """
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "script.py").write_text("\n".join(line[8:] for line in script.splitlines()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 cases ran; 3 called what is replaced: {'passed': 1, 'failed': 2}" in done.stdout


def test_the_page_has_what_was_recorded() -> None:
    found = record.read_record()
    assert set(found) == {"load", "merge"}
    assert record.written() == record.draw(found)
    for facts in found.values():
        assert set(facts["differ"]) <= reasons()
        counted = facts["passed"] + facts["skipped"] + facts.get(record.ALIKE_WITH_PEFT, 0)
        assert facts["called"] == counted + sum(facts["differ"].values())


def test_counts_are_added_up_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- peft's tests -->\nold\n<!-- end of peft's tests -->\nafter\n")
    monkeypatch.setattr(record, "PAGE", page)
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.json")
    warns = {"a.py::test_missing_keys_warning": "Failed: DID NOT WARN"}
    found = record.Comparison(5, Counter(passed=2, failed=2), warns)
    found += record.Comparison(1, Counter(failed=1), {"a.py::test_other": "ValueError: odd"}, cut_off=1)
    assert found.ran == 6
    assert found.unexplained() == {"a.py::test_other": "ValueError: odd"}
    record.write_record("load", found, 0.05, "seed")
    facts: dict[str, Any] = record.read_record()["load"]
    assert (facts["called"], facts["passed"], facts[record.ALIKE_WITH_PEFT]) == (5, 2, 1)
    assert facts["differ"] == {"a tensor that the file lacks is refused, where peft warns": 1, "NO REASON": 1}
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| `--load` | 1 | differ: NO REASON |" in lines
    assert "| `--load` | 1 | parts of the run that were cut off, so that less than the share ran |" in lines
    assert any("5% of the cases, seed seed" in line for line in lines)


@pytest.mark.parametrize(("share", "count"), [(1, 20), (0.05, 1), (0.3, 6), (0.12, 3)])
def test_a_share_is_cut_into_slices(share: float, count: int) -> None:
    ends = [tuple(map(float, part.split(","))) for part in slices(share)]
    assert len(ends) == count
    assert (ends[0][0], ends[-1][1]) == (0, share)
    assert all(one[1] == other[0] for one, other in pairwise(ends))
