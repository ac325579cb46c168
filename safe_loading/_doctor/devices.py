"""The accelerators that this process sees, what its launcher says, and who holds a context on them.

Nothing here makes a context: devices are counted, never used, and NVIDIA's own tool is asked for processes.
"""

from __future__ import annotations

import collections
import dataclasses
import os

from safe_loading._core.gpus import query_nvidia_smi
from safe_loading._core.report import Finding, MiB
from safe_loading._ranks.launcher import Launcher, read_launcher, read_visible_devices
from safe_loading.errors import DeviceError


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that this process sees.

    Attributes:
        index: Its index in this process; ``max_memory`` and ``device_map`` count so.
        listed_as: What the variable that narrows the devices calls it; ``""`` where none does.
    """

    index: int
    listed_as: str


@dataclasses.dataclass(frozen=True)
class Context:
    """A process that holds memory on a GPU, as ``nvidia-smi`` tells.

    Attributes:
        gpu: The UUID of the GPU.
        pid: The process.
        name: Its program.
        bytes: The memory that it holds there.
    """

    gpu: str
    pid: int
    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Devices:
    """What is known about devices without using one.

    Attributes:
        kind: The type of the accelerator, such as ``"cuda"``; ``"cpu"`` where there is none.
        seen: The devices of this process.
        variables: The variables that narrow them, with their values.
        launcher: This process's place on its node; ``None`` when its variables cannot be read.
        contexts: Who holds memory on which GPU; ``None`` where that cannot be asked.
    """

    kind: str
    seen: tuple[Device, ...]
    variables: tuple[tuple[str, str], ...]
    launcher: Launcher | None
    contexts: tuple[Context, ...] | None


def read_devices() -> tuple[Devices, list[Finding]]:
    """Return what is known about the devices, and what is wrong with it."""
    findings = []
    launcher = None
    try:
        launcher = read_launcher(os.environ)
    except DeviceError as error:
        findings.append(Finding("launcher", "error", "environment", str(error), ""))
    try:
        kind, count = _count()
    except ImportError as error:
        message = f"cannot be imported: {error}."
        findings.append(Finding("engine-broken", "error", "torch", message, "install it again."))
        kind, count = "cpu", 0
    visible = read_visible_devices(os.environ, kind if count else "cuda")
    entries = min((variable.entries for variable in visible), key=len, default=())
    seen = tuple(Device(n, entries[n] if n < len(entries) else "") for n in range(count))
    variables = tuple((variable.variable, variable.value) for variable in visible)
    devices = Devices(kind, seen, variables, launcher, _contexts())
    return devices, findings + _judge(devices, bool(entries))


def _count() -> tuple[str, int]:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return ("cpu", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())


def _judge(devices: Devices, named: bool) -> list[Finding]:
    findings = []
    count = len(devices.seen)
    if named and not count:
        said = ", ".join(f"{name}={value}" for name, value in devices.variables)
        fix = "correct the variable, or install a torch that was built for this accelerator."
        findings.append(Finding("devices-hidden", "warning", said, "names devices, and torch sees none of them.", fix))
    ranks = devices.launcher.local_size if devices.launcher is not None else None
    if count > 1 and ranks is not None and ranks > count:
        message = f"{ranks} ranks run on this node, and torch sees {count} devices."
        fix = f"start at most {count} ranks on this node, or make more devices visible."
        findings.append(Finding("too-few-devices", "error", devices.kind, message, fix))
    if any(device.listed_as not in ("", str(device.index)) for device in devices.seen):
        pairs = ", ".join(f"{device.index} is {device.listed_as}" for device in devices.seen)
        message = f"devices are renumbered by {devices.variables[0][0]}: {pairs}."
        fix = "max_memory, device_map and torch.device count as this process does, from 0; nvidia-smi does not."
        # CUDA's own order is the fastest card first; nvidia-smi's is that of the bus
        if devices.kind == "cuda" and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            fix += " With cards of several kinds set CUDA_DEVICE_ORDER=PCI_BUS_ID too, or the numbers are not its own."
        findings.append(Finding("devices-renumbered", "info", devices.kind, message, fix))
    return findings + _strays(devices.contexts or ())


def _strays(contexts: tuple[Context, ...]) -> list[Finding]:
    """Name the processes that hold contexts on several GPUs: a rank needs one."""
    held: dict[int, list[Context]] = collections.defaultdict(list)
    for context in contexts:
        held[context.pid].append(context)
    findings = []
    for pid, parts in held.items():
        if len(parts) > 1:
            small = min(parts, key=lambda context: context.bytes)
            message = f"holds memory on {len(parts)} GPUs; the least, {small.bytes // MiB} MiB, on {small.gpu}."
            fix = "if it is a rank, load with load_peft_on_rank; a process that shards over GPUs is meant to."
            where = f"process {pid} ({parts[0].name})"
            findings.append(Finding("stray-context", "warning", where, message, fix, small.bytes))
    return findings


def _contexts() -> tuple[Context, ...] | None:
    rows = query_nvidia_smi("compute-apps", ("gpu_uuid", "pid", "process_name", "used_memory"))
    if rows is None:
        return None
    # "[N/A]" under MIG and on Windows: a context is there, its size is not told.
    return tuple(
        Context(gpu, int(pid), name, int(used) * MiB if used.isdigit() else 0)
        for gpu, pid, name, used in rows
        if pid.isdigit()
    )
