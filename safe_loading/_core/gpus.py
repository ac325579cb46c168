"""GPUs and their processes as ``nvidia-smi`` reports them, without making a CUDA context. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Literal

_TIMEOUT_SECONDS = 20  # a driver that is being reset can block nvidia-smi for good


def query_nvidia_smi(subject: Literal["gpu", "compute-apps"], fields: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Return a row of text for each GPU or for each process on one; None where nvidia-smi cannot be asked.

    The fields are those of ``nvidia-smi --help-query-gpu`` and ``--help-query-compute-apps``. Sizes come in MiB without
    their unit; what the driver does not tell is ``"[N/A]"``.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-{subject}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_rows(done.stdout, len(fields))


def parse_rows(output: str, columns: int) -> list[tuple[str, ...]]:
    """Return the lines that have this many cells; the rest are messages, such as "No devices were found"."""
    rows = [tuple(cell.strip() for cell in line.split(",")) for line in output.splitlines()]
    return [row for row in rows if len(row) == columns]
