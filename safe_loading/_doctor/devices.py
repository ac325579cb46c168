"""The accelerators that this process sees, its launcher's variables, and the processes with a context on them.

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
    """A device that this process sees."""

    index: int  # in this process, as in max_memory and device_map
    listed_as: str  # its entry in the variable that restricts the visible devices; "" if there is none


@dataclasses.dataclass(frozen=True)
class Context:
    """A process that holds memory on a GPU, as ``nvidia-smi`` reports it."""

    gpu: str  # its UUID
    pid: int
    name: str
    bytes: int  # 0 where the driver does not report it


@dataclasses.dataclass(frozen=True)
class Devices:
    """The facts about the devices that are known without using one."""

    kind: str  # such as "cuda"; "cpu" where there is no accelerator
    seen: tuple[Device, ...]
    variables: tuple[tuple[str, str], ...]  # those that restrict the visible devices, with their values
    launcher: Launcher | None  # None when its variables cannot be read
    contexts: tuple[Context, ...] | None  # None where nvidia-smi cannot be asked


def read_devices() -> tuple[Devices, list[Finding]]:
    """Return the facts about the devices, and findings about problems."""
    findings = []
    launcher = None
    try:
        launcher = read_launcher(os.environ)
    except DeviceError as error:
        findings.append(Finding("launcher", "error", "environment", str(error), ""))
    try:
        kind, count = _count()
    except Exception as error:  # of libraries that torch loads, in their words
        message = f"cannot be imported: {error}."
        findings.append(Finding("engine-broken", "error", "torch", message, "install it again."))
        kind, count = "cpu", 0
    visible = read_visible_devices(os.environ, kind if count else "cuda")
    # ROCm applies ROCR_VISIBLE_DEVICES first, and HIP's variable to what that left: the shortest list is the last.
    entries = min((variable.entries for variable in visible), key=len, default=())
    seen = tuple(Device(n, entries[n] if n < len(entries) else "") for n in range(count))
    variables = tuple((variable.variable, variable.value) for variable in visible)
    devices = Devices(kind, seen, variables, launcher, _contexts())
    return devices, findings + _findings(devices, bool(entries))


def _count() -> tuple[str, int]:
    import torch

    accelerator = torch.accelerator.current_accelerator()  # the kind that torch was built for, with a card or without
    count = torch.accelerator.device_count()
    return (accelerator.type, count) if accelerator is not None and count else ("cpu", 0)


def _findings(devices: Devices, listed: bool) -> list[Finding]:
    findings = []
    count = len(devices.seen)
    if listed and not count:
        variables = ", ".join(f"{name}={value}" for name, value in devices.variables)
        fix = "correct the variable, or install a torch build for this accelerator."
        message = "lists devices, but torch sees none of them."
        findings.append(Finding("devices-hidden", "warning", variables, message, fix))
    ranks = devices.launcher.local_size if devices.launcher is not None else None
    if count > 1 and ranks is not None and ranks > count:
        message = f"{ranks} ranks run on this node, and torch sees {count} devices."
        fix = f"start at most {count} ranks on this node, or make more devices visible."
        findings.append(Finding("too-few-devices", "error", devices.kind, message, fix))
    if any(device.listed_as not in ("", str(device.index)) for device in devices.seen):
        pairs = ", ".join(f"{device.index} is {device.listed_as}" for device in devices.seen)
        message = f"{devices.variables[0][0]} renumbers the devices: {pairs}."
        fix = "in max_memory, device_map and torch.device use the numbers of this process, not those of nvidia-smi."
        # By default CUDA puts the fastest card first, while nvidia-smi goes by the PCI bus.
        if devices.kind == "cuda" and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            fix += " With cards of several kinds also set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that both number them alike."
        findings.append(Finding("devices-renumbered", "info", devices.kind, message, fix))
    return findings + _stray_contexts(devices.contexts or ())


def _stray_contexts(contexts: tuple[Context, ...]) -> list[Finding]:
    """Return a finding for each process with contexts on several GPUs; a rank needs only one."""
    by_process: dict[int, list[Context]] = collections.defaultdict(list)
    for context in contexts:
        by_process[context.pid].append(context)
    findings = []
    for pid, own in by_process.items():
        if len(own) > 1:
            small = min(own, key=lambda context: context.bytes)
            message = f"holds memory on {len(own)} GPUs, the least of it ({small.bytes // MiB} MiB) on {small.gpu}."
            fix = "if it is a rank, load with load_peft_on_rank; a process that spreads one model over GPUs is fine."
            where = f"process {pid} ({own[0].name})"
            findings.append(Finding("stray-context", "warning", where, message, fix, small.bytes))
    return findings


def _contexts() -> tuple[Context, ...] | None:
    rows = query_nvidia_smi("compute-apps", ("gpu_uuid", "pid", "process_name", "used_memory"))
    if rows is None:
        return None
    # Under MIG and on Windows the driver answers "[N/A]": there is a context, of unknown size.
    return tuple(
        Context(gpu, int(pid), name, int(used) * MiB if used.isdigit() else 0)
        for gpu, pid, name, used in rows
        if pid.isdigit()
    )
