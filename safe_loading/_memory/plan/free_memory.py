"""What is free now, on each visible device and on the host, without making a context anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from safe_loading._core.parse_size import Device
from safe_loading._core.report import MiB
from safe_loading._ranks.launcher import read_visible_devices
from safe_loading.errors import ArgumentError

CUDA_CONTEXT = 600 * MiB
"""An estimate, not a measurement, of what a CUDA context with the kernels of torch takes. It differs from card to card
and from driver to driver; ``overhead=`` of ``plan_device_map`` replaces it."""

_SECONDS = 20


def accelerator() -> str:
    """Return the type of this machine's accelerator, "cpu" when there is none. Makes no context."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def free_now() -> dict[Device, int]:
    """Return the bytes that are free on each visible accelerator, or on the host ("cpu") when there is none.

    Raises:
        ArgumentError: There are accelerators whose free memory cannot be read without making a context.
    """
    kind = accelerator()
    if kind == "cpu":
        return {"cpu": free_host()}
    count = torch.accelerator.device_count()
    free = _nvidia(count) if kind == "cuda" else None
    found: dict[Device, int] = {}
    for index in range(count):
        if free is not None:
            found[index] = free[index]
            continue
        size = _total(kind, index)
        if size is None:
            raise ArgumentError(
                f"The free memory of {kind}:{index} cannot be read without making a context on it. Pass the limits: "
                f"max_memory={{{index}: ...}}."
            )
        found[index] = size
    return found


def free_host() -> int:
    """Return the bytes of host memory that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _nvidia(count: int) -> list[int] | None:
    """Ask the driver, as nvidia-smi does, in the order in which this process counts the devices."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = ["--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([tool, *query], capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return in_process_order(done.stdout, os.environ, count)


def in_process_order(answer: str, environ: Mapping[str, str], count: int) -> list[int] | None:
    """Return the free bytes by this process's numbers from nvidia-smi's answer; None when they cannot be matched."""
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    if any(not row[2].isdigit() for row in rows):
        return None
    by_name: dict[str, int] = {}
    for index, uuid, free in rows:
        by_name[index] = by_name[uuid] = int(free) * MiB
    visible = [variable.entries for variable in read_visible_devices(environ, "cuda")]
    entries: Any = min(visible, key=len) if visible else tuple(row[0] for row in rows)
    found = []
    for entry in entries[:count]:
        short = entry.startswith("GPU-")  # the beginning of a UUID is enough for the driver
        match = [free for name, free in by_name.items() if name == entry or (short and name.startswith(entry))]
        if not match:
            return None
        found.append(match[0])
    return found if len(found) == count else None


def _total(kind: str, index: int) -> int | None:
    """Return the size of a device that nobody else is known to use; properties are read without a context."""
    read: Any = getattr(getattr(torch, kind, None), "get_device_properties", None)
    if read is None:
        return None
    try:
        return int(read(index).total_memory)
    except (AttributeError, RuntimeError, TypeError):
        return None
