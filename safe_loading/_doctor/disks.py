"""The folders that loading and merging use: free space, file system, and its capabilities. Imports no torch."""

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
    """A folder that is read or written. For one that does not exist yet, its nearest existing parent is examined."""

    what: str
    path: str
    kind: str  # of its file system, such as "ext4"; "" if unknown
    total: int  # the bytes of the file system
    free: int  # the bytes that a user can still write
    exchanges: bool | None = None  # whether two folders can be exchanged atomically there; None if not tried
    refusal: str = ""  # what the system said when a folder was to be made there


def read_places(output: Path) -> tuple[Place, ...]:
    """Return the hub cache, the folder for output, the temporary folder and the shared memory.

    In the folder for output two empty folders are made and removed, to try an exchange.
    """
    places = [
        _place("hub cache", _hub_cache()),
        _place("output", output, try_exchange=True),
        _place("temporary files", Path(tempfile.gettempdir())),
    ]
    shared = Path("/dev/shm")  # noqa: S108 - only its size is read
    return (*places, _place("shared memory", shared)) if shared.is_dir() else tuple(places)


def judge_places(places: tuple[Place, ...]) -> list[Finding]:
    """Return findings about failures that a place may cause later."""
    findings = []
    for place in places:
        if place.refusal:
            message = f"the {place.what} cannot be written: {place.refusal}."
            fix = "name a folder that this user may write to."
            findings.append(Finding("not-writable", "warning", place.path, message, fix))
        if place.exchanges is False:
            message = f"this file system cannot exchange two folders atomically ({place.kind or 'unknown'})."
            fix = (
                "nothing to do for new folders; replacing an existing checkpoint takes two steps there instead of one."
            )
            findings.append(Finding("no-exchange", "warning", place.path, message, fix))
        if is_network(place.kind) and place.what != "shared memory":
            message = f"the {place.what} lies on a network file system ({place.kind})."
            fix = "load from a local disk if you can: mapped files are read page by page over the network."
            findings.append(Finding("network-disk", "info", place.path, message, fix))
        if place.what != "shared memory" and place.free < _LEAST_FREE:
            message = f"the {place.what} has {format_bytes(place.free)} free of {format_bytes(place.total)}."
            fix = "free some space; a merge checks how much it needs before it writes anything."
            findings.append(Finding("little-room", "warning", place.path, message, fix, place.free))
        if place.what == "shared memory" and place.total < _LEAST_SHARED:
            message = f"shared memory has only {format_bytes(place.total)}; NCCL and data loaders pass data through it."
            fix = "in a container: docker run --ipc=host, or --shm-size=16g."
            findings.append(Finding("small-shared-memory", "warning", place.path, message, fix, place.total))
    return findings


def _hub_cache() -> Path:
    """Return the cache folder that huggingface_hub would use; the package itself may not be installed."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home) / "hub"


def _place(what: str, path: Path, *, try_exchange: bool = False) -> Place:
    absolute = path.expanduser().absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if is_there(parent))
    usage = shutil.disk_usage(existing)
    exchanges, refusal = _try_exchange(existing) if try_exchange else (None, "")
    return Place(what, str(absolute), file_system_of(existing), usage.total, usage.free, exchanges, refusal)


def _try_exchange(folder: Path) -> tuple[bool | None, str]:
    # Only trying tells: the kernel, the C library and the file system must all have it.
    try:
        with tempfile.TemporaryDirectory(prefix=".safe_loading-doctor-", dir=folder) as work:
            one, other = Path(work) / "one", Path(work) / "other"
            one.mkdir()
            other.mkdir()
            return exchange(one, other), ""
    except OSError as error:
        return None, error.strerror or str(error)
