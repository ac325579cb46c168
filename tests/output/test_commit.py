from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.checkpoints import write_model
from faults.operations import broken_disk, disk_full, operations
from folder_contents import fill, held, same
from torchrun import SHARED

from safe_loading import CheckpointError, OutputError
from safe_loading._checkpoint.index import read_checkpoint, require_unchanged
from safe_loading._output import journal, stage_folders
from safe_loading._output import output_folder as output
from safe_loading._output import stage as stage_module
from safe_loading._output.stage import Stage

FILES = {"one.bin": b"1" * 5000, "two.bin": b"2" * 3000, "deep/three.bin": b"3"}
OLD = {"old.txt": b"old", "one.bin": b"0"}
JOB = {"base": "a"}


def save(target: Path, job: Any = JOB, **options: Any) -> tuple[int, Any]:
    """What a verb does, in small: returns the number of files that it wrote, and what an earlier call had finished."""
    written = 0
    with Stage(output.output_path(target), job, **options) as stage:
        if stage.finished is not None:
            return 0, stage.finished
        for name, data in FILES.items():
            if stage.recorded(name, same) is None:
                stage.write(name, data, {"sha256": hashlib.sha256(data).hexdigest()})
                written += 1
        stage.commit()
    return written, None


def test_the_output_appears_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    assert save(tmp_path / "a" / "b" / "out") == (3, None)
    assert held(tmp_path / "a" / "b" / "out") == FILES
    assert list((tmp_path / "a" / "b").iterdir()) == [tmp_path / "a" / "b" / "out"]
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")
    assert held(tmp_path / "empty") == FILES


@pytest.mark.parametrize("atomic", [True, False])
def test_a_folder_is_replaced_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    if not atomic:
        monkeypatch.setattr(stage_module, "exchange", lambda one, other: False)
    folder = fill(tmp_path / "out", OLD)
    with pytest.raises(OutputError, match=r"holds 2 entries \(old.txt, one.bin\).*overwrite=True"):
        save(folder)
    assert held(folder) == OLD
    assert save(folder, overwrite=True) == (3, None)
    assert held(folder) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert held(tmp_path / "real") == FILES


SWEEP = """
import json, os, sys
from pathlib import Path
from faults.operations import disk_full, in_child, kill, operations
from safe_loading import OutputError
import safe_loading._output.stage as stage_module
import test_commit as t
root, replace, atomic = Path(sys.argv[1]), sys.argv[2] == "replace", sys.argv[3] == "atomic"
if not atomic:
    stage_module.exchange = lambda one, other: False
(root / "count").mkdir()
counted = t.fill(root / "count" / "out", t.OLD) if replace else root / "count" / "out"
with operations() as all_of_them:
    t.save(counted, overwrite=replace)
problems, resumed, finished = [], 0, 0
for n in range(1, all_of_them.count + 1):
    place = root / str(n)
    place.mkdir()
    folder = t.fill(place / "out", t.OLD) if replace else place / "out"
    def killed():
        with operations(n):
            t.save(folder, overwrite=replace)
    status = in_child(killed)
    before = t.OLD if replace else None
    gap = (place / ".out.staged" / "before")  # the one moment without an atomic exchange
    if status != -9:
        problems.append((n, "not killed", status))
    now = t.held(folder)
    absent = now is None and not atomic and t.held(gap) == t.OLD
    if now not in (before, t.FILES) and not absent:
        problems.append((n, "neither old nor new", str(now)))
    if n % 3 == 0:  # and once more, at another place
        def again():
            with operations(max(1, n // 2)):
                t.save(folder, overwrite=replace)
        in_child(again)
        if t.held(folder) not in (before, t.FILES) and not (not atomic and t.held(gap) == t.OLD):
            problems.append((n, "neither old nor new the second time"))
    now = t.held(folder)
    staged = (place / ".out.staged" / "journal").exists()
    try:
        written, done = t.save(folder, overwrite=replace)
        resumed += written < 3
        finished += done is not None
    except OutputError as error:
        if staged or now != t.FILES:
            problems.append((n, "refused", str(error)))
    if t.held(folder) != t.FILES:
        problems.append((n, "not the result", str(t.held(folder))))
    left = [p.name for p in place.iterdir()]
    if left != ["out"]:
        problems.append((n, "left behind", left))
print(json.dumps([all_of_them.count, resumed, finished, problems]))
"""


@pytest.mark.parametrize("case", ["new atomic", "replace atomic", "replace aside"])
def test_killed_at_every_operation_the_output_is_old_or_new_and_a_second_call_completes(
    tmp_path: Path, case: str
) -> None:
    run = [sys.executable, "-c", textwrap.dedent(SWEEP), str(tmp_path), *case.split()]
    package = str(Path(stage_module.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *SHARED])}
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    count, resumed, finished, problems = json.loads(done.stdout)
    assert problems == []
    assert count > 25
    assert resumed > 5  # files of the killed call were used
    assert finished >= 1  # a kill after the rename was understood


@pytest.mark.parametrize("fault", [disk_full, broken_disk])
@pytest.mark.parametrize("replace", [False, True])
def test_a_fault_of_the_disk_at_every_operation_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, replace: bool, fault: Callable[[], None]
) -> None:
    with operations() as every:
        save(tmp_path / "count" / "x" / "out")
    failed = 0
    for n in range(1, every.count + 1):
        place = tmp_path / str(n)
        place.mkdir()
        folder = fill(place / "x" / "out", OLD) if replace else place / "x" / "out"
        before = held(folder)
        try:
            with operations(n, fault):
                save(folder, overwrite=replace)
        except OSError:
            failed += 1
        if held(folder) != FILES:  # after the rename, the sync of the folder around it and the tidying can still fail
            assert held(folder) == before
            assert [path.name for path in place.rglob(".*")] == [], (n, every.log[n - 1])
    assert failed > 20


def test_files_are_synced_before_they_are_renamed_and_the_folder_after(tmp_path: Path) -> None:
    with operations() as log:
        save(tmp_path / "out")
    names = [line.split()[0] for line in log.log]
    rename = names.index("rename")
    assert names[rename - 1] == "fsync"
    assert "fsync" in names[rename + 1 : rename + 3]
    # per file: its sync, then the journal's line and its sync; then the folders, then the commit's line
    assert names[:rename].count("fsync") == 1 + 2 * len(FILES) + 2 + 1
    assert names[:rename].count("write") == len(FILES)


def test_an_interrupted_call_is_continued_and_what_was_damaged_meanwhile_is_written_again(tmp_path: Path) -> None:
    def interrupted(**options: Any) -> None:
        with Stage(tmp_path / "out", JOB, **options) as stage:
            for name in ("one.bin", "two.bin"):
                stage.write(name, FILES[name], {"sha256": hashlib.sha256(FILES[name]).hexdigest()})
            raise KeyboardInterrupt

    staged = tmp_path / ".out.staged"
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (staged / "files" / "one.bin").exists()
    (staged / "files" / "two.bin").write_bytes(b"x" * 3000)
    assert save(tmp_path / "out")[0] == 2
    assert held(tmp_path / "out") == FILES
    assert not staged.exists()

    for options, job in (({"resume": False}, JOB), ({}, {"base": "another"})):
        (tmp_path / "out").rename(tmp_path / f"done{len(options)}")
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert save(tmp_path / "out", job, **options)[0] == 3
    (tmp_path / "out").rename(tmp_path / "done")
    with pytest.raises(KeyboardInterrupt):
        interrupted(resume=False)
    assert not staged.exists()


@pytest.mark.parametrize("kind", ["symlink", "hard link", "symlink to the same bytes", "folder", "files"])
def test_nothing_is_written_through_a_link_in_an_unfinished_output(tmp_path: Path, kind: str) -> None:
    def interrupted() -> None:
        with Stage(tmp_path / "out", JOB) as stage:
            for name, data in FILES.items():
                stage.write(name, data, {"sha256": hashlib.sha256(data).hexdigest()})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    files = tmp_path / ".out.staged" / "files"
    base = {"one.bin": FILES["one.bin"] if "same bytes" in kind else b"of the base", "three.bin": b"of the base"}
    fill(tmp_path / "base", base)
    if kind == "files":
        shutil.rmtree(files)
        files.symlink_to(tmp_path / "base")
    elif kind == "folder":
        shutil.rmtree(files / "deep")
        (files / "deep").symlink_to(tmp_path / "base")
    else:
        (files / "one.bin").unlink()
        link = os.link if kind == "hard link" else os.symlink
        link(tmp_path / "base" / "one.bin", files / "one.bin")
    assert save(tmp_path / "out")[0] == (3 if kind == "files" else 1)
    assert held(tmp_path / "base") == base
    assert held(tmp_path / "out") == FILES
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in (tmp_path / "out").rglob("*.bin"))


@pytest.mark.parametrize("name", ["lock", "journal"])
def test_the_lock_and_the_journal_are_not_written_through_a_link(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "base", {"one.bin": b"of the base"})
    (tmp_path / ".out.staged").mkdir()
    (tmp_path / ".out.staged" / name).symlink_to(tmp_path / "base" / "one.bin")
    if name == "lock":
        with pytest.raises(OutputError, match="symbolic link"):
            save(tmp_path / "out")
    else:  # a journal of no job is replaced
        save(tmp_path / "out")
        assert held(tmp_path / "out") == FILES
    assert held(tmp_path / "base") == {"one.bin": b"of the base"}


def test_a_link_that_appears_while_files_are_written_is_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "base", {"one.bin": b"of the base"})
    with Stage(tmp_path / "out", JOB) as stage:
        (stage.files / "one.bin").symlink_to(tmp_path / "base" / "one.bin")
        stage.write("one.bin", b"new")
        stage.commit()
    assert held(tmp_path / "base") == {"one.bin": b"of the base"}
    assert held(tmp_path / "out") == {"one.bin": b"new"}


def test_the_journal_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"event":"job"}\n{"event":"fi')
    assert journal.read_events(path) == [{"event": "job"}]
    log = journal.Journal(path)
    log.append({"event": "next"})
    log.close()
    assert journal.read_events(path) == [{"event": "job"}, {"event": "next"}]
    path.write_bytes(b'{"event":"job"}\n\0\0\0\n{"event":"file"}\n[1]\n')
    assert journal.read_events(path) == [{"event": "job"}]


def test_another_writer_is_named_and_a_dead_one_blocks_nobody(tmp_path: Path) -> None:
    with Stage(tmp_path / "out", JOB) as stage:
        stage.write("one.bin", b"1")
        with pytest.raises(OutputError, match=rf"pid {os.getpid()} on .*\) is writing"):
            save(tmp_path / "out")
        assert (stage.files / "one.bin").exists()
        stage.commit()
    root = tmp_path / ".late.staged"
    root.mkdir()
    (root / "lock").write_text("4194305\n")  # a process that is gone
    save(tmp_path / "late")
    assert held(tmp_path / "late") == FILES
    assert not root.exists()


def test_a_writer_that_has_the_lock_and_no_line_yet_is_waited_for(tmp_path: Path) -> None:
    root = tmp_path / ".out.staged"
    root.mkdir()
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        later = threading.Timer(0.3, (root / "lock").write_text, ["pid 7 on a-host\n"])
        later.start()
        with pytest.raises(OutputError, match=r"pid 7 on a-host\) is writing"):
            save(tmp_path / "out")
        later.join()
        lock.truncate(0)
        with pytest.raises(OutputError, match=r"just started\) is writing"):
            save(tmp_path / "out")


AT_ONCE = """
import sys, time
from pathlib import Path
from safe_loading import OutputError
from safe_loading._output.stage import Stage
root, name, others = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def wait_for(pattern, count):
    end = time.monotonic() + 60
    while len(list(root.glob(pattern))) < count and time.monotonic() < end:
        time.sleep(0.01)
(root / f"{name}.here").touch()
wait_for("*.here", others + 1)
try:
    with Stage(root / "out", {"name": name}, overwrite=True) as stage:
        stage.write("who", name.encode())
        wait_for("*.told", others)
        stage.commit()
    print("wrote")
except OutputError as error:
    print(error)
    (root / f"{name}.told").touch()
"""


@pytest.mark.parametrize(("count", "there"), [(2, True), (4, False)])
def test_of_processes_that_write_one_output_at_once_one_writes_and_the_others_are_told(
    tmp_path: Path, count: int, there: bool
) -> None:
    if there:
        fill(tmp_path / "out", OLD)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", AT_ONCE, str(tmp_path), str(number), str(count - 1)],
            env=child_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in started]
    (winner,) = [number for number, text in enumerate(said) if text == "wrote"]
    assert held(tmp_path / "out") == {"who": str(winner).encode()}
    for number, text in enumerate(said):
        if number != winner:
            assert f"Another process (pid {started[winner].pid} on " in text
    assert not list(tmp_path.glob(".*"))


def leave(folder: Path, name: str) -> Path:
    """What ``kill -9`` leaves beside an output."""

    def interrupted() -> None:
        with left:
            left.write("one.bin", b"1", {"sha256": ""})
            raise KeyboardInterrupt

    left = Stage(folder / name, JOB)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    return left.root


def age(root: Path, days: float) -> None:
    for path in (*root.rglob("*"), root):
        os.utime(path, (path.stat().st_mtime - days * 86400,) * 2)


def test_a_stage_that_nobody_goes_on_with_is_swept_after_a_week_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale, late, touched, aside, written = (leave(tmp_path, name) for name in ("stale", "late", "slow", "aside", "w"))
    own = fill(tmp_path / ".my.staged", {"journal": b"mine", "lock": b""})
    (aside / "before").mkdir()  # what an output was: the call for that output moves it back
    lock = journal.take_lock(written, tmp_path / "w")  # its writer lives, and waits for something
    for root in (stale, touched, aside, written, own):
        age(root, 8)
    age(late, 6)
    os.utime(touched / "files" / "one.bin")
    (tmp_path / ".link.staged").symlink_to(stale)
    with caplog.at_level("WARNING", "safe_loading"):
        save(tmp_path / "out")
    os.close(lock)
    assert not stale.exists()
    assert all(path.exists() for path in (late, touched, aside, written, own))
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"Deleted {stale} (")
    assert "an interrupted call left it more than a week ago" in said
    assert save(tmp_path / "late") == (3, None)


def test_on_a_file_system_of_several_machines_each_has_its_stage_and_one_of_them_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel's lock ends at the machine's own door."""
    monkeypatch.setattr(stage_folders, "is_network", lambda kind: True)
    folder = fill(tmp_path / "out", OLD)

    def on(machine: str, **options: Any) -> Stage:
        monkeypatch.setattr(stage_folders, "_machine", lambda: machine)
        return Stage(folder, {"by": machine}, overwrite=True, **options)

    with on("one") as one:
        one.write("who", b"one")
        with pytest.raises(OutputError, match=r"Another machine \(pid \d+ on .*\) is writing .*staged-one' [01] s ago"):
            on("two").__enter__()
        age(one.root, 1)  # nothing written for a day: that machine is gone, or hangs
        with on("two") as two:
            two.write("who", b"two")
            two.commit()
        one.commit()
    assert held(folder) == {"who": b"one"}  # each whole, one after the other
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_two_machines_that_replace_a_folder_in_two_steps_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_folders, "is_network", lambda kind: True)
    monkeypatch.setattr(stage_module, "check_alone", lambda stage, output: None)  # neither saw the other
    monkeypatch.setattr(stage_module, "exchange", lambda one, other: False)
    folder = fill(tmp_path / "out", OLD)
    monkeypatch.setattr(stage_folders, "_machine", lambda: "one")
    one = Stage(folder, JOB, overwrite=True).__enter__()
    monkeypatch.setattr(stage_folders, "_machine", lambda: "two")
    two = Stage(folder, JOB, overwrite=True).__enter__()
    one.write("who", b"one")
    two.write("who", b"two")
    rename = Path.rename

    def between(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path == folder:  # the old one stands aside: the moment in which the other comes
            monkeypatch.setattr(Path, "rename", rename)
            two.commit()
        return moved

    monkeypatch.setattr(Path, "rename", between)

    monkeypatch.setattr(Stage, "__enter__", lambda stage: stage)  # both have begun
    with pytest.raises(OutputError, match="not empty"), one:
        one.commit()
    with two:
        pass
    assert held(folder) == {"who": b"two"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_lock_on_a_file_that_was_just_deleted_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, taken = tmp_path / "root", []
    flock = fcntl.flock

    def slow(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        taken.append(descriptor)
        if len(taken) == 1:  # the last writer ends between our open and our lock
            (root / "lock").unlink()
            root.rmdir()

    monkeypatch.setattr(fcntl, "flock", slow)
    descriptor = journal.take_lock(root, tmp_path / "out")
    assert len(taken) == 2
    assert (root / "lock").read_text().startswith(f"pid {os.getpid()} on ")
    os.close(descriptor)


# ------------------------------------------------------------------------------------------------ what is refused


def test_the_output_must_be_apart_from_what_is_read(tmp_path: Path) -> None:
    base = fill(tmp_path / "models" / "base", OLD)
    (tmp_path / "link").symlink_to(base)
    cases = {
        base: "is the base itself",
        tmp_path / "link": "is the base itself",
        base / "merged": "is inside the base",
        tmp_path / "link" / "merged" / "deep": "is inside the base",
        tmp_path / "models": "contains the base",
    }
    for target, text in cases.items():
        with pytest.raises(OutputError, match=text) as caught:
            output.check_apart(output.output_path(target), {"the base": base, "the adapter": tmp_path / "other"})
        assert str(base) in str(caught.value)
    output.check_apart(tmp_path / "models" / "base2", {"the base": base})
    output.check_apart(tmp_path / "out", {"the base": base})


def test_a_file_and_a_mount_point_are_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        save(tmp_path / "file", overwrite=True)
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(OutputError, match="is a mount point"):
        save(tmp_path / "disk", overwrite=True)


def test_too_little_room_names_both_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    facts = os.statvfs(tmp_path)
    needed = 1 << 60
    with pytest.raises(OutputError, match=r"needs .* \(1152921504606846976 bytes\), and .* bytes\) free") as caught:
        save(tmp_path / "new" / "out", needed=needed)
    assert isinstance(caught.value, OSError)
    assert list(tmp_path.iterdir()) == []
    assert facts.f_bavail > 0
    output.check_room(tmp_path / "out", needed, reusable=needed)


def test_a_folder_that_comes_to_stand_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def late() -> None:
        with Stage(tmp_path / "out", JOB) as stage:
            stage.write("one.bin", b"1")
            fill(tmp_path / "out", OLD)
            stage.commit()

    with pytest.raises(OutputError, match="is not empty"):
        late()
    assert held(tmp_path / "out") == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---------------------------------------------------------------------------------- readers, signals, rights, systems

WRITER = """
import sys
from pathlib import Path
from safe_loading._output.stage import Stage
folder = Path(sys.argv[1])
for turn in range(100):
    with Stage(folder, {"turn": turn}, overwrite=True) as stage:
        for name in ("model.safetensors.index.json", "config.json", *(f"{n}.safetensors" for n in range(1 + turn % 3))):
            stage.write(name, (folder.parent / str(turn % 3) / name).read_bytes())
        stage.commit()
"""


def state(folder: Path, kind: int) -> Path:
    """A checkpoint of `kind` + 1 files, every byte of which is `kind` + 1."""
    write_model(folder, {f"{n}.safetensors": {f"t{n}": 64} for n in range(kind + 1)})
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-64] + bytes([kind + 1]) * 64)
    return folder


def test_a_reader_during_100_rewrites_sees_the_old_or_the_new_and_never_a_mix(tmp_path: Path) -> None:
    for kind in range(3):
        state(tmp_path / str(kind), kind)
    state(tmp_path / "out", 0)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "out")], env=child_environment())
    whole, changed = 0, 0
    while writer.poll() is None or not whole:
        checkpoint = read_checkpoint(tmp_path / "out")  # never an error
        try:
            held = {path.read_bytes()[-64:] for path in checkpoint.files}
            require_unchanged(checkpoint)
        except (FileNotFoundError, CheckpointError):  # exchanged between the headers and the bytes: told, not mixed
            changed += 1
            continue
        assert held == {bytes([len(checkpoint.files)]) * 64}
        whole += 1
    assert writer.returncode == 0
    assert whole > 20


def child_environment() -> dict[str, str]:
    package = str(Path(stage_module.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package, *SHARED])}


def test_what_the_system_refuses_is_an_error_of_this_package_with_the_system_s_number(tmp_path: Path) -> None:
    folder = fill(tmp_path / "out", OLD)

    def refuse(code: int) -> Callable[[], None]:
        def then() -> None:
            raise OSError(code, os.strerror(code))

        return then

    for code, at in ((errno.EROFS, 1), (errno.EACCES, 1), (errno.ENOSPC, 9), (errno.EIO, 9)):
        as_it_was = pytest.raises(OutputError, match=r"out' is as it was: .*Check the disk")
        with as_it_was as caught, operations(at, refuse(code)):
            save(folder, overwrite=True)
        assert caught.value.errno == code
        assert held(folder) == OLD
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_the_system_will_not_rename_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "out", OLD)

    def across(one: Path, other: Path) -> bool:  # overlayfs, for a folder of a lower layer
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(stage_module, "exchange", across)
    with pytest.raises(OutputError, match=r"as it was: .*cross-device") as caught:
        save(folder, overwrite=True)
    assert caught.value.errno == errno.EXDEV
    assert held(folder) == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(tmp_path / "out")
    finally:
        os.umask(before)
    modes = {p.relative_to(tmp_path).as_posix(): oct(p.stat().st_mode & 0o777) for p in tmp_path.rglob("*")}
    assert modes == {"out": "0o750", "out/deep": "0o750"} | dict.fromkeys((f"out/{n}" for n in FILES), "0o640")


@pytest.mark.parametrize("when", ["while it writes", "after the rename"])
def test_sigterm_keeps_what_is_finished_says_so_and_gives_the_signal_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    folder = fill(tmp_path / "out", OLD)

    def end(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    original = Stage.write if when == "while it writes" else stage_module.exchange
    if when == "while it writes":
        monkeypatch.setattr(Stage, "write", end)
    else:
        monkeypatch.setattr(stage_module, "exchange", end)
    with pytest.raises(SystemExit) as caught:
        save(folder, overwrite=True)
    assert caught.value.code == 128 + signal.SIGTERM
    assert held(folder) == (OLD if when == "while it writes" else FILES)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if when == "after the rename":
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        return
    assert re.search(
        r"1 finished file\(s\) of '.*out' are kept in \.out\.staged; the same call again goes on", caplog.text
    )
    monkeypatch.undo()
    assert save(folder, overwrite=True)[0] == 2  # files that were written anew
    assert held(folder) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("options", [{"keep": False}, {"resume": False}])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_nothing_that_a_second_call_could_not_use(
    tmp_path: Path, options: dict[str, Any], error: type[BaseException]
) -> None:
    def write(name: str | None, **given: Any) -> None:
        with Stage(tmp_path / "out", JOB, **given) as stage:
            if name is not None:
                stage.write(name, FILES[name], {"sha256": ""})
            raise error

    for name, given in (("one.bin", options), (None, {})):
        with pytest.raises(error):
            write(name, **given)
        assert not list(tmp_path.iterdir())


def test_a_handler_of_somebody_else_keeps_sigterm(tmp_path: Path) -> None:
    def handler(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with Stage(tmp_path / "out", JOB) as stage:
            assert signal.getsignal(signal.SIGTERM) is handler
            stage.commit()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
