"""The free memory of each device, read without making a context anywhere, and a cap of this process on each."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from safe_loading._core.gpus import query_nvidia_smi
from safe_loading._core.parse_size import Device, Limits, parse_limits, parse_size
from safe_loading._core.report import MiB
from safe_loading._memory.trace.timeline import workspaces_of
from safe_loading._ranks.launcher import read_visible_devices
from safe_loading.errors import ArgumentError, DeviceError

CUDA_CONTEXT = 600 * MiB
"""An estimate, not a measurement, of what a CUDA context with the kernels of torch takes. It differs from card to card
and from driver to driver; ``overhead=`` of ``plan_device_map`` replaces it."""

ROUNDING = 22 * MiB
"""What the allocator of CUDA reserves beyond what is asked for, at the least: a segment of 2 MiB (kSmallBuffer) and one
of 20 MiB (kLargeBuffer) in torch's c10/core/AllocatorConfig.h. Fragmentation may take more."""

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_GROUPS = (  # the limit, the use and the statistics of this process's control group, in either version, if it has one
    (_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat"),
    (_V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat"),
)


def accelerator() -> str:
    """Return the type of this machine's accelerator, "cpu" when there is none. Makes no context."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def free_now() -> dict[Device, int]:
    """Return the bytes that are free on each visible accelerator, or on the host ("cpu") when there is none.

    Raises `ArgumentError` where the free memory of accelerators cannot be read without making a context.
    """
    kind = accelerator()
    if kind == "cpu":
        return {"cpu": free_host()}
    count = torch.accelerator.device_count()
    rows = query_nvidia_smi("gpu", ("index", "uuid", "memory.free")) if kind == "cuda" else None
    free = None if rows is None else in_process_order(rows, os.environ, count)
    if free is not None:
        return dict(enumerate(free))
    sizes: dict[Device, int] = {}
    for index in range(count):
        size = _total(kind, index)
        if size is None:
            raise ArgumentError(
                f"The free memory of {kind}:{index} cannot be read without making a context on it. Pass the limits: "
                f"max_memory={{{index}: ...}}."
            )
        sizes[index] = size
    return sizes


def capability_here() -> tuple[int, int] | None:
    """Return the least compute capability of this machine's NVIDIA GPUs; None where there is none, or none to ask."""
    rows = query_nvidia_smi("gpu", ("compute_cap",)) if accelerator() == "cuda" else None
    found = [tuple(int(part) for part in cell.split(".")) for (cell,) in rows or () if re.fullmatch(r"\d+\.\d+", cell)]
    return min(((pair[0], pair[1]) for pair in found), default=None)


def free_host() -> int:
    """Return the bytes of host memory that this process can have without swapping, and within its container's limit."""
    left = [_free_in_group(*files) for files in _GROUPS]
    return min([_free_of_machine(), *(size for size in left if size is not None)])


def _free_in_group(limit: Path, used: Path, statistics: Path) -> int | None:
    """Return the bytes that a control group may still take; pages that the kernel takes back count as free."""
    try:
        most = limit.read_text().strip()
        if not most.isdigit():  # "max"
            return None
        pages = re.search(r"^(?:total_)?inactive_file (\d+)$", statistics.read_text(), re.MULTILINE)
        return max(0, int(most) - int(used.read_text()) + (int(pages[1]) if pages else 0))
    except (OSError, ValueError):
        return None


def _free_of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def in_process_order(rows: Sequence[tuple[str, ...]], environ: Mapping[str, str], count: int) -> list[int] | None:
    """Return the free bytes of each GPU in the order in which this process counts them; None if they cannot be matched.

    The rows are index, UUID and free MiB of each GPU, as nvidia-smi prints them; `count` is how many devices this
    process sees.
    """
    if any(not free.isdigit() for _, _, free in rows):
        return None
    free_of: dict[str, int] = {}
    for index, uuid, free in rows:
        free_of[index] = free_of[uuid] = int(free) * MiB
    visible = [variable.entries for variable in read_visible_devices(environ, "cuda")]
    entries: Sequence[str] = min(visible, key=len) if visible else [index for index, _, _ in rows]
    sizes = []
    for entry in entries[:count]:
        is_uuid = entry.startswith("GPU-")  # the beginning of a UUID is enough for the driver
        matches = [free for name, free in free_of.items() if name == entry or (is_uuid and name.startswith(entry))]
        if not matches:
            return None
        sizes.append(matches[0])
    return sizes if len(sizes) == count else None


def _total(kind: str, index: int) -> int | None:
    """Return the total memory of a device, where its free memory cannot be read; None when that is unknown, too."""
    properties = getattr(getattr(torch, kind, None), "get_device_properties", None)
    if properties is None:
        return None
    try:
        return int(properties(index).total_memory)
    except (AttributeError, RuntimeError, TypeError):
        return None


def unplanned(index: int, *, training: bool) -> int:
    """Return the bytes that may be reserved beyond a plan's tensors: a segment of each kind, and cuBLAS's scratch.

    Makes no context.
    """
    if accelerator() != "cuda" or torch.version.cuda is None:
        return ROUNDING
    return ROUNDING + sum(workspaces_of(torch.cuda.get_device_capability(index), training=training))


def cap_devices(max_memory: Limits, overhead: object = 0) -> dict[int, float]:
    """Set the caps that ``limit_device_memory`` describes; see there."""
    limits = parse_limits(max_memory)
    extra = parse_size(overhead, "overhead")
    kind = accelerator()
    caps = {index: size + extra for index, size in limits.items() if isinstance(index, int)}
    if kind == "cpu":
        raise DeviceError(
            "This machine has no accelerator whose memory could be capped. The host's memory is capped from outside: "
            "`ulimit -v`, or the memory limit of the container."
        )
    backend = getattr(torch, kind, None)
    set_fraction = getattr(backend, "set_per_process_memory_fraction", None)
    properties = getattr(backend, "get_device_properties", None)
    if set_fraction is None or properties is None:
        raise DeviceError(f"torch.{kind} has no set_per_process_memory_fraction, so nothing can be capped there.")
    count = torch.accelerator.device_count()
    absent = [index for index in caps if index >= count]
    if absent:
        raise DeviceError(f"max_memory names {absent}, and this process sees {count} devices of type {kind}.")
    # all fractions first: a device that cannot be read leaves the others uncapped
    fractions = {index: min(size / properties(index).total_memory, 1.0) for index, size in caps.items()}
    for index, fraction in fractions.items():
        set_fraction(fraction, index)
    return fractions
