"""``merge_lora_checkpoint`` with a fault at each call that changes a file; run with the library of `system_calls`."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.system_calls import FAULTS, Calls, Ended, Fault, in_child
from safe_loading import merge_lora_checkpoint

if TYPE_CHECKING:
    from rank_server import RankServer

TARGETS = {
    # what is there before, and whether two folders can be exchanged in one step
    "new": (False, True),
    "replaced": (True, True),
    "replaced in two steps": (True, False),
}
Files = dict[str, bytes]

SCRIPT = """
import json, sys
from pathlib import Path
from faults.merge_sweep import sweep
root, *how = json.loads(sys.argv[1])
report(**sweep(Path(root), *how))
"""


def files(folder: Path) -> Files | None:
    """Return what a folder holds; None where there is none."""
    if not folder.exists():
        return None
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Sweep:
    """Merges one pair again and again, each time to a place of its own.

    Args:
        root: Holds ``base``, ``adapter`` and ``old``, the merge of another adapter: what is replaced.
        target: A key of `TARGETS`.
    """

    def __init__(self, root: Path, target: str) -> None:
        self.root, self.target = root, target
        self.replaces, self.exchange = TARGETS[target]
        self.old = files(root / "old") if self.replaces else None
        place = self.place("counted")
        counted = self.faulted(place, 0, Fault(0))
        assert counted.value is not None, counted
        self.names: list[str] = counted.value
        self.new = files(place / "out")
        self.resumed = 0
        self.problems: list[Any] = []

    def place(self, name: str) -> Path:
        """Make a folder with what is there before."""
        place = self.root / self.target / name
        place.mkdir(parents=True)
        if self.replaces:
            shutil.copytree(self.root / "old", place / "out")
        return place

    def merge(self, place: Path) -> int:
        """Merge, and return how many files an earlier call had left."""
        report = merge_lora_checkpoint(
            self.root / "base", self.root / "adapter", place / "out", threads=1, overwrite=True
        )
        return len(report.resumed)

    def faulted(self, place: Path, at: int, fault: Fault) -> Ended:
        """Merge in a forked process, with a fault; return how that ended, its value being the calls."""

        def work() -> list[str]:
            calls = Calls(place)
            calls.arm(at, fault, exchange=self.exchange)
            self.merge(place)
            return calls.names()

        return in_child(work)

    def run(self, at: int, kind: str, again: int | None) -> None:
        """One fault, or two, and a call that completes the work."""
        place = self.place(f"{at} {kind}")
        for number, turn in ((at, kind), *([] if again is None else [(again, f"{kind}, after {at}")])):
            before = files(place / "out")
            self.check(place, before, self.faulted(place, number, FAULTS[kind]), number, turn)
        completed = in_child(lambda: self.merge(place))
        self.resumed += completed.value or 0
        if completed.value is None:
            self.problems.append((at, kind, "the last call failed", completed.text))
        if files(place / "out") != self.new:
            self.problems.append((at, kind, "not the result"))
        if [path.name for path in place.iterdir()] != ["out"]:
            self.problems.append((at, kind, "left behind", [path.name for path in place.iterdir()]))
        shutil.rmtree(place)

    def check(self, place: Path, before: Files | None, ended: Ended, at: int, kind: str) -> None:
        """What is there is the old or the new, whole, and what was said about it is true."""
        now, staged = files(place / "out"), place / ".out.staged"
        is_old, is_new = now == self.old, now == self.new
        if not self.exchange and now is None:
            is_old = files(staged / "before") == self.old  # the moment between two renames

        def wrong(*what: object) -> None:
            self.problems.append((at, kind, *what, ended.text[-1500:]))

        if ended.status not in (0, -9):
            wrong("no answer, or a crash", ended.status)
        if not is_old and not is_new:
            wrong("neither the old nor the new", sorted(now or ()))
        if ended.status:
            return
        if ended.value is not None:
            if not is_new:
                wrong("it returned, and the new is not there")
            if kind.startswith("killed") and len(ended.value) >= at:
                wrong("not killed")
            return
        if "OutputError" not in ended.error or ended.code not in (fault.code for fault in FAULTS.values()):
            wrong("another error", ended.error[:1], ended.code)
        elif now != (self.new if "is whole" in ended.text else before) and self.exchange:
            wrong("what it says is there is not")
        if not kind.startswith("disk gone") and not is_new and staged.exists():
            wrong("left its stage", [str(path) for path in staged.rglob("*")])


def warm(root: Path) -> None:
    """Import what a merge imports, and no more: a process that has computed in threads is not safe to fork (MKL)."""

    def work() -> list[str]:
        merge_lora_checkpoint(root / "base", root / "adapter", root / "warm")
        return list(sys.modules)

    for name in in_child(work).value:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def sweep(root: Path, sample: int, seed: int, targets: Sequence[str] = ()) -> dict[str, Any]:
    """Sweep targets (all, when none is named) and faults: at every call, or with `sample`, at so many for each.

    Returns:
        For each target the calls, how many files second calls found whole, and what went wrong, which is nothing.
    """
    warm(root)
    found = {}
    for target in targets or TARGETS:
        merges, dice = Sweep(root, target), random.Random(f"{seed} {target}")
        every = range(1, len(merges.names) + 1)
        for kind in FAULTS:
            # The last calls are the commit and what is tidied up after it.
            chosen = every if not sample else {*dice.sample(every, sample - 1), dice.choice(every[-20:])}
            for at in sorted(chosen):
                merges.run(at, kind, dice.choice(every) if dice.random() < 0.3 else None)
        found[target] = {"calls": merges.names, "resumed": merges.resumed, "problems": merges.problems}
    return found


def swept(
    server: RankServer, root: Path, sample: int, seed: int, targets: Sequence[str] = (), *, timeout: float = 7200
) -> dict[str, Any]:
    """The same in a process of the fixture `faulting_server`."""
    arguments = json.dumps([str(root), sample, seed, list(targets)])
    found: dict[str, Any] = server.run_alone(SCRIPT, args=[arguments], timeout=timeout).found[0]
    return found
