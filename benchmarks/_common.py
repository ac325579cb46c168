"""What the benchmarks share: options, tables, JSON, the line of versions and hardware, processes, private memory."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
GIB = 1 << 30
CANNOT_RUN = 75  # the status that benchmarks.__main__ takes for "this machine lacks what it needs"

# Nothing downloads, nothing reports, and no progress bar costs time that another method does not pay.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


class ChildFailed(RuntimeError):
    """A process of a benchmark failed; the text holds the end of what it said."""


def options(description: str | None, quick: str, repeats: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of ``--quick`` and ``--json``, which every benchmark has, and of ``--repeats`` where it is given.

    Args:
        description: What the benchmark measures: its ``__doc__``.
        quick: What ``--quick`` runs.
        repeats: How often each method is measured by default; None where that is not one number.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"of each method; {repeats} by default")
    return parser


def with_published(parser: argparse.ArgumentParser, metavar: str, published: str) -> argparse.Namespace:
    """Return the arguments, with the path of published data as ``published``; without one say so, and end the process.

    Args:
        parser: The other arguments.
        metavar: The name of the path in the help.
        published: The data, and the place where they can be had.
    """
    parser.add_argument("published", type=Path, nargs="?", metavar=metavar, help=published)
    arguments = parser.parse_args()
    if arguments.published is None:
        print(f"name {published}", file=sys.stderr)
        sys.exit(CANNOT_RUN)
    return arguments


def headline(extra: Iterable[str] = ()) -> str:
    """Return one line: date, hardware, system, versions."""
    names = ("torch", "transformers", "peft", "accelerate", "safetensors")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = (
        datetime.date.today().isoformat(),
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        *versions,
        *extra,
    )
    return "; ".join(parts)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = ()) -> str:
    """Return a table as text: the first column to the left, the others to the right, notes under it."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        padded[0] = row[0].ljust(widths[0])
        lines.append("  ".join(padded))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(["", title, *lines, *(f"  {note}" for note in notes)])


def mib(size: float) -> str:
    """Return a number of bytes in MiB, with two digits after the point."""
    return f"{size / MIB:.2f}"


def ratio(value: float, unit: float) -> str:
    """Return how many times ``unit`` a value is."""
    return "n/a" if unit <= 0 else f"{value / unit:.2f}x"


def promise(kept: bool, *, quick: bool = False) -> str:
    """Return whether a promise was kept; a quick run shows that a benchmark works and no more.

    Args:
        kept: Whether what was measured is within it.
        quick: Whether it was measured at tiny sizes or a few times.
    """
    return "not judged at this size" if quick else "kept" if kept else "MISSED"


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def write_json(path: str | None, facts: Mapping[str, Any]) -> None:
    """Write the facts of a run to a file, when one was asked for."""
    if path:
        Path(path).write_text(json.dumps(facts, indent=2) + "\n")


def spawn(command: Sequence[str], specs: Sequence[Mapping[str, Any]], env: Mapping[str, str], timeout: float) -> Any:
    """Run one process for each of ``specs``, all at once, and return what each wrote as JSON to its result file.

    The command is a Python script and its arguments; the specification comes last, as JSON.

    Raises:
        ChildFailed: One of them failed, or was not done in time. The others are ended.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        children: list[tuple[subprocess.Popen[bytes], Path, Path]] = []
        try:
            for number, spec in enumerate(specs):
                output, result = Path(folder) / f"{number}.txt", Path(folder) / f"{number}.json"
                arguments = json.dumps({**spec, "result": str(result), "meeting": f"{folder}/meeting"})
                with output.open("wb") as file:
                    child = subprocess.Popen(
                        [sys.executable, *command, arguments],
                        env={**os.environ, **ENVIRONMENT, **env},
                        stdout=file,
                        stderr=file,
                    )
                children.append((child, output, result))
            _wait(children, timeout)
            return [json.loads(result.read_text()) for _, _, result in children]
        finally:
            for child, _, _ in children:
                child.kill()
                child.wait()


def _wait(children: Sequence[tuple[subprocess.Popen[bytes], Path, Path]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    waiting = list(children)
    while waiting:
        for entry in list(waiting):
            child, output, _ = entry
            if child.poll() is None:
                continue
            if child.returncode:
                raise ChildFailed(f"a process ended with {child.returncode}:\n{output.read_text()[-3000:]}")
            waiting.remove(entry)
        if time.monotonic() > deadline:
            raise ChildFailed(f"not done after {timeout} s:\n{waiting[0][1].read_text()[-3000:]}")
        time.sleep(0.02)


def private_bytes() -> tuple[int, int]:
    """Return the private memory of this process, and the dirty part of it, in bytes.

    Private_Clean + Private_Dirty of /proc/self/smaps_rollup: the pages that no other process maps now. The clean ones
    are pages of files (a checkpoint that only this process has mapped at the moment, a library); the kernel can drop
    them, so only the dirty ones are memory that this process alone takes.
    """
    clean = dirty = 0
    with Path("/proc/self/smaps_rollup").open() as file:
        for line in file:
            if line.startswith("Private_Clean:"):
                clean = int(line.split()[1]) << 10
            elif line.startswith("Private_Dirty:"):
                dirty = int(line.split()[1]) << 10
    return clean + dirty, dirty


def anonymous_bytes() -> int:
    """Return the resident memory of this process that is no file's, in bytes: one line of /proc, no walk over pages."""
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))


class PeakSampler:
    """Context manager: the most private dirty memory beyond the device's bytes, sampled by a thread meanwhile.

    Each sample reads the device's living bytes before and after the kernel walked the page tables, and subtracts the
    larger number: a block that was made during the walk is not taken for host memory. So a sample is never too high,
    and too low by at most what came to or left the device during one walk (a few ms), which ``slack`` says.
    A walk takes a good part of a core; where seconds are measured too, ``memory`` is :func:`anonymous_bytes`.
    """

    def __init__(
        self,
        device_bytes: Callable[[], int],
        interval: float = 0.002,
        memory: Callable[[], int] = lambda: private_bytes()[1],
    ) -> None:
        self._device_bytes, self._memory = device_bytes, memory
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = 0
        self.slack = 0
        self.samples = 0

    def __enter__(self) -> PeakSampler:
        """Start sampling."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, after one last sample."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        done = False
        while not done:
            done = self._stop.is_set()
            before = self._device_bytes()
            dirty = self._memory()
            after = self._device_bytes()
            value = dirty - max(before, after)
            if value > self.peak:
                self.peak, self.slack = value, abs(after - before)
            self.samples += 1
            # the walk holds the lock that page faults take, so it must not fill the time
            self._stop.wait(self._interval)
