"""Chapter one: real ranks load a base and its adapter, and compare with the plain two steps bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from safe_loading._demo import checkpoints
from safe_loading._progress import engine_bars
from safe_loading._report import format_bytes, text_table
from safe_loading.errors import SafeLoadingError

TIMEOUT_SECONDS = 300
_HEADER = ("rank", "device", "base", "adapter", "dtypes of the adapter", "seconds", "logits", "other devices")


def chapter(folder: Path) -> str:
    """Make the checkpoints, start the ranks, and return the table of what each loaded where."""
    with engine_bars(local_rank=1):  # any rank but 0: the table is the output
        base = checkpoints.make_llama(folder / "base")
        checkpoints.make_adapter(folder / "adapter", base)
    shards = sorted(base.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards)
    devices = torch.accelerator.device_count()
    ranks = 1 if devices == 1 else 2
    found = run_ranks(folder, ranks)
    rows = [_row(rank, facts) for rank, facts in enumerate(found)]
    wrong = [f"rank {rank}: {facts}" for rank, facts in enumerate(found) if not facts["equal"] or facts["stray"]]
    if wrong:
        raise SafeLoadingError("The demo's load is not what it promises:", wrong)
    where = "the CPU (no accelerator here)" if devices == 0 else f"{devices} accelerator(s)"
    return "\n".join(
        [
            "load_peft_on_rank: a base and its adapter on exactly one device, on every rank",
            f"  made {len(shards)} shards ({format_bytes(size)}) and an adapter in {folder}",
            f"  {ranks} rank(s) of torchrun (gloo) on {where}; 'logits' compares with the plain two-step load",
            "",
            text_table(_HEADER, rows),
        ]
    )


def run_ranks(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Start the ranks with torchrun and return what each wrote.

    Raises:
        SafeLoadingError: They failed, or did not end in time.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "safe_loading._demo.rank", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SafeLoadingError(f"The ranks of the demo did not end within {TIMEOUT_SECONDS} s.") from error
    if done.returncode != 0:
        raise SafeLoadingError(f"The ranks of the demo failed:\n{done.stderr[-3000:]}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _row(rank: int, facts: dict[str, Any]) -> tuple[str, ...]:
    base, adapter = facts["parts"]
    return (
        str(rank),
        facts["device"],
        format_bytes(base["bytes"]),
        format_bytes(adapter["bytes"]),
        ", ".join(adapter["dtypes"]),
        f"{base['seconds'] + adapter['seconds']:.2f}",
        "equal" if facts["equal"] else "DIFFERENT",
        f"context on {facts['stray']}" if facts["stray"] else "untouched",
    )
