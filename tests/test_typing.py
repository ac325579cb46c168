"""The types that users get: what they may write checks, and what is wrong is an error, for mypy and for pyright."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parent / "typing" / "public_api.py"
COMMANDS = {
    "mypy": ["--config-file", "mypy.ini", "--no-error-summary", "--no-incremental", "--cache-dir=/dev/null"],
    "pyright": ["--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", COMMANDS)
def test_what_type_checkers_see(checker: str) -> None:
    wrong = {n for n, line in enumerate(SAMPLE.read_text().splitlines(), 1) if "expect-error" in line}
    assert len(wrong) >= 3
    command = [sys.executable, "-m", checker, *COMMANDS[checker], str(SAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=SAMPLE.parent)
    found = {int(number) for number in re.findall(r"public_api\.py:(\d+)(?::\d+)?[: -]+(?:error|.*error)", done.stdout)}
    assert found == wrong, done.stdout
