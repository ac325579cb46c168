"""The runner of peft's own tests (tests/peft_suite): what it replaces, and that it sees a case that differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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

        differ = compare(Path(sys.argv[1]), ["load"], ["peft_tests/test_cases.py"])
        assert list(differ) == ["peft_tests/test_cases.py::test_only_with_peft"], differ
    """
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "script.py").write_text("\n".join(line[8:] for line in script.splitlines()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 cases ran; 3 called what is replaced: {'passed': 1, 'failed': 2}" in done.stdout
