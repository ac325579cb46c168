"""The places that a load or a merge writes to: their room, their file system, and what it can do. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

from safe_loading._core.paths import is_there
from safe_loading._core.report import Finding, GiB, format_bytes
from safe_loading._output.stage import exchange
from safe_loading._output.stage_folders import file_system_of, is_network

_LEAST_SHARED = GiB
_LEAST_FREE = GiB


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder that is read or written.

    Attributes:
        what: What it is for.
        path: Where it is; a folder that is not there yet stands for the nearest one that is.
        kind: The kind of its file system, such as ``"ext4"``; ``""`` where the system does not say.
        total: The size of the file system in bytes.
        free: What a user may still write, in bytes.
        exchanges: Whether two folders can be exchanged at once there; ``None`` when it was not tried.
    """

    what: str
    path: str
    kind: str
    total: int
    free: int
    exchanges: bool | None = None


def read_places(output: Path) -> tuple[Place, ...]:
    """Return the hub cache, the folder for output, the temporary folder and the shared memory.

    Args:
        output: Where checkpoints will be written. Two empty folders are made and removed in it, to try the exchange.
    """
    found = [
        _place("hub cache", _hub_cache()),
        _place("output", output, try_exchange=True),
        _place("temporary files", Path(tempfile.gettempdir())),
    ]
    shared = Path("/dev/shm")  # noqa: S108 - nothing is written there; its size is asked for
    return (*found, _place("shared memory", shared)) if shared.is_dir() else tuple(found)


def judge_places(places: tuple[Place, ...]) -> list[Finding]:
    """Return what may fail later because of a place.

    Args:
        places: What :func:`read_places` returned.
    """
    findings = []
    for place in places:
        if place.exchanges is False:
            message = f"two folders cannot be exchanged at once on this file system ({place.kind or 'unknown'})."
            fix = "replacing a checkpoint takes two steps there; a new folder is whole or absent in any case."
            findings.append(Finding("no-exchange", "warning", place.path, message, fix))
        if is_network(place.kind) and place.what != "shared memory":
            message = f"the {place.what} lies on a network file system ({place.kind})."
            fix = "load from a local disk where you can; mapped files are read page by page over the network."
            findings.append(Finding("network-disk", "info", place.path, message, fix))
        if place.what != "shared memory" and place.free < _LEAST_FREE:
            message = f"{format_bytes(place.free)} are free for the {place.what}, of {format_bytes(place.total)}."
            fix = "free some; a merge says before its first byte how much it needs."
            findings.append(Finding("little-room", "warning", place.path, message, fix, place.free))
        if place.what == "shared memory" and place.total < _LEAST_SHARED:
            message = f"shared memory is {format_bytes(place.total)}; NCCL and data loaders use it between processes."
            fix = "in a container: docker run --ipc=host, or --shm-size=16g."
            findings.append(Finding("small-shared-memory", "warning", place.path, message, fix, place.total))
    return findings


def _hub_cache() -> Path:
    """Return the folder that huggingface_hub takes, which may not be installed."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home) / "hub"


def _place(what: str, path: Path, *, try_exchange: bool = False) -> Place:
    wanted = path.expanduser().absolute()
    there = next(parent for parent in (wanted, *wanted.parents) if is_there(parent))
    usage = shutil.disk_usage(there)
    exchanges = _try_exchange(there) if try_exchange else None
    return Place(what, str(wanted), file_system_of(there), usage.total, usage.free, exchanges)


def _try_exchange(folder: Path) -> bool | None:
    try:
        with tempfile.TemporaryDirectory(prefix=".safe_loading-doctor-", dir=folder) as work:
            one, other = Path(work) / "one", Path(work) / "other"
            one.mkdir()
            other.mkdir()
            return exchange(one, other)
    except OSError:  # not writable: nothing will be exchanged there
        return None
