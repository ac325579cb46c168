"""What accelerate was told, and a wrap by hand does not do, is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import llama, reference, save

from safe_loading import meta_model, wrap_fsdp_meta_safe
from safe_loading._sharding.accelerate_findings import accelerate_findings

LAUNCHED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "no"}
BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.parametrize(
    ("environment", "version", "computes_in", "codes"),
    [
        ({}, 1, None, []),
        (LAUNCHED, 2, None, []),
        (LAUNCHED, 1, None, ["accelerate-other-version"]),
        ({**LAUNCHED, "ACCELERATE_USE_FSDP": "false"}, 1, None, []),
        (BF16, 2, None, ["accelerate-precision-ignored"]),
        (BF16, 2, torch.bfloat16, []),
        ({**LAUNCHED, **BF16}, 1, None, ["accelerate-other-version", "accelerate-precision-ignored"]),
    ],
)
def test_what_accelerate_was_told_is_compared(
    environment: dict[str, str], version: int, computes_in: torch.dtype | None, codes: list[str]
) -> None:
    assert [finding.code for finding in accelerate_findings(version, computes_in, environment)] == codes


def test_the_environment_that_accelerate_launch_makes_is_the_one_that_is_read(tmp_path: Path) -> None:
    script = tmp_path / "says.py"
    script.write_text(
        "import os\nprint([os.environ[name] for name in "
        "('ACCELERATE_USE_FSDP', 'FSDP_VERSION', 'ACCELERATE_MIXED_PRECISION')])\n"
    )
    command = ["--use_fsdp", "--fsdp_version", "1", "--mixed_precision", "bf16", "--num_processes", "1"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *command, "--num_machines", "1", str(script)]
    said = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "['true', '1', 'bf16']" in said


def test_a_report_has_what_is_found_and_the_fix_is_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    folder = save(reference(lambda: llama(num_hidden_layers=1)), tmp_path)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        found = wrap_fsdp_meta_safe(meta_model(folder), folder).fsdp_report.findings
        mended = wrap_fsdp_meta_safe(meta_model(folder), folder, mp_policy=torch.bfloat16)
        with torch.no_grad():
            computed = mended(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.dtype
    finally:
        dist.destroy_process_group()
    assert [finding.code for finding in found] == ["accelerate-precision-ignored"]
    assert "mp_policy=torch.bfloat16" in found[0].fix
    assert mended.fsdp_report.findings == ()
    assert computed == torch.bfloat16
