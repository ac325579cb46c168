"""Starts real ranks for the chapters that need them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading.errors import SafeLoadingError

TIMEOUT_SECONDS = 300


def run_ranks(module: str, folder: Path, ranks: int, written: str) -> list[JsonObject]:
    """Start the ranks with torchrun and return the facts that each one wrote.

    ``module`` is run as a rank, with the folder as its argument, and writes its facts there: ``{written}{rank}.json``.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", module, str(folder)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise SafeLoadingError(f"The ranks of the demo did not finish within {TIMEOUT_SECONDS} s.") from error
    if done.returncode != 0:
        raise SafeLoadingError(f"The ranks of the demo failed:\n{done.stderr[-3000:]}")
    return [json.loads((folder / f"{written}{rank}.json").read_text()) for rank in range(ranks)]
