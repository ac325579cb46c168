"""Configs changed at random, in every field that the installed peft and transformers declare, do nothing they must not.

A child loads them under limits of time and memory, with an audit hook for what it opens, imports and connects to.
Seeded: ``python tests/faults/config_fuzz.py FOLDER SEED SEED+1`` repeats one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "faults" / "config_fuzz.py"
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 60), *(pytest.param(at, at + 500, marks=pytest.mark.slow) for at in range(1000, 11_000, 500))],
    ids=lambda value: str(value),
)
def test_no_config_hangs_opens_fetches_imports_or_fills_the_memory(tmp_path: Path, first: int, last: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(tmp_path), str(first), str(last)]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3000, check=False)
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    assert not lines, "\n".join(lines[:20])
    assert child.stdout.splitlines()[-1:] == ["done"], child.stderr[-3000:]
