"""The whole verb under kill -9, a full disk and Ctrl-C: the output is absent or whole, and a second call completes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from faults.merge_sweep import swept
from faults.operations import disk_full, operations
from models import save_adapter, save_llama
from rank_server import RankServer
from transformers import AutoModelForCausalLM

import safe_loading
from safe_loading import CheckpointError, OutputError, merge_lora_checkpoint
from safe_loading._checkpoint import copy_bytes as copies
from safe_loading._merging.disk import write_files as writing

SEED = 7


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    base = save_llama(tmp_path / "base")
    return base, save_adapter(tmp_path / "adapter", base)


@pytest.mark.parametrize("sample", [2, pytest.param(0, marks=pytest.mark.slow, id="all")])
def test_a_fault_at_any_call_that_changes_a_file_leaves_the_old_or_the_new_and_a_second_call_completes(
    faulting_server: RankServer, tmp_path: Path, pair: tuple[Path, Path], sample: int
) -> None:
    """Each of SIGKILL, ENOSPC, EIO and EROFS, at each call of the C library, over three kinds of target."""
    merge_lora_checkpoint(pair[0], save_adapter(tmp_path / "other", pair[0], seed=5), tmp_path / "old")
    found = swept(faulting_server, tmp_path, sample, SEED, timeout=600 if sample else 7200)
    assert {target: each["problems"] for target, each in found.items()} == {target: [] for target in found}
    for target, each in found.items():
        assert len(each["calls"]) > 100, target
        assert each["resumed"] > 5, target  # weight files of the call before were verified and kept
    calls = found["replaced"]["calls"]
    assert {"pwrite64", "write", "fsync", "ftruncate64", "mkdir", "unlink", "rmdir"} <= set(calls)
    assert calls.count("renameat2") == 1  # and it is by this alone that the output changes
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "old")  # what is compared byte for byte is a model
    assert loaded.config.num_hidden_layers == 3


@pytest.mark.parametrize("threads", [1, 3])
def test_a_full_disk_leaves_nothing(tmp_path: Path, pair: tuple[Path, Path], threads: int) -> None:
    with operations() as log:
        merge_lora_checkpoint(*pair, tmp_path / "out", threads=1)
    last = next(number for number, line in enumerate(log.log) if line.startswith("rename")) + 1
    shutil.rmtree(tmp_path / "out")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert last > 50
    for n in [*range(1, last, 9), last - 1, last]:
        try:
            with operations(n, disk_full) as faulted:
                merge_lora_checkpoint(*pair, tmp_path / "out", threads=threads)
        except OSError as error:
            assert "No space left" in str(error)  # noqa: PT017 - what is raised is not the only thing that may happen
        else:
            # Files are synced on a thread of their own, so the n-th operation is not the same in every run. pathlib
            # takes any error of a mkdir for a folder that is there.
            assert len(faulted.log) < n or faulted.log[n - 1].startswith("mkdir")
            shutil.rmtree(tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == before, n
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("merge")]


def test_ctrl_c_is_continued_and_a_damaged_file_is_written_again(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = merge_lora_checkpoint(*pair, tmp_path / "whole")
    done: list[str] = []

    def stop(name: str) -> Any:
        def record(stage: Any, file: str, *arguments: Any) -> None:
            original(stage, file, *arguments)
            done.append(file)
            if len(done) == 4:
                raise KeyboardInterrupt

        return record

    original = writing.Stage.record
    monkeypatch.setattr(writing.Stage, "record", stop("record"))
    with pytest.raises(KeyboardInterrupt, match=r"4 finished file\(s\) of .* the same call again goes on from there"):
        merge_lora_checkpoint(*pair, tmp_path / "out", threads=1)
    monkeypatch.setattr(writing.Stage, "record", original)
    staged = tmp_path / ".out.staged" / "files"
    assert len(done) == 4
    damaged = staged / done[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    report = merge_lora_checkpoint(*pair, tmp_path / "out")
    assert set(report.resumed) == set(done[1:])
    assert report.tensors == whole.tensors
    assert report.bytes_written < whole.bytes_written
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def _all(entry: Any) -> Any:
    return lambda facts: facts.update(tensors=dict.fromkeys(facts["tensors"], entry))


EDITS: dict[str, Any] = {
    "no tensors": lambda facts: facts.pop("tensors"),
    "tensors that are a list": lambda facts: facts.update(tensors=[1]),
    "a tensor that is a text": _all("ab"),
    "a tensor without entries": _all([]),
    "a hash that is a number": _all([1, None]),
    "a change that is a text": _all(["a", "b"]),
    "one loss too few": _all(["a", 0.0, 1.0, 1.0]),
    "bytes that are a text": lambda facts: facts.update(bytes="1"),
    "no bytes": lambda facts: facts.pop("bytes"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_record_means_to_begin_anew_and_is_told_once(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("safe_loading._merging.merge_lora_checkpoint.report_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            merge_lora_checkpoint(*pair, tmp_path / "out")
    journal = tmp_path / ".out.staged" / "journal"
    events = [json.loads(line) for line in journal.read_bytes().splitlines()]
    EDITS[edit](events[1]["facts"])
    journal.write_bytes(b"".join(json.dumps(event).encode() + b"\n" for event in events))
    report = merge_lora_checkpoint(*pair, tmp_path / "out")
    assert "begun-anew" in {finding.code for finding in report.findings}
    assert report.resumed == ()
    again = merge_lora_checkpoint(*pair, tmp_path / "out", overwrite=True)
    assert "begun-anew" not in {finding.code for finding in again.findings}
    assert again.tensors == report.tensors


def test_another_adapter_does_not_continue_what_one_began(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_adapter(tmp_path / "other", pair[0], seed=9)

    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safe_loading._merging.merge_lora_checkpoint.report_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        merge_lora_checkpoint(*pair, tmp_path / "out")
    monkeypatch.undo()
    assert merge_lora_checkpoint(pair[0], other, tmp_path / "out").resumed == ()


@pytest.mark.parametrize("change", ["nothing", "emptied", "damaged", "another config", "other base_kwargs"])
def test_an_output_whose_call_ended_after_the_rename_is_believed_only_where_it_is_what_is_asked_for(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The old folder is deleted last, and Ctrl-C may come then; the output can be changed before the next call."""
    out = tmp_path / "out"
    merge_lora_checkpoint(*pair, out)
    expected = {path.name: path.read_bytes() for path in out.iterdir()}
    clear = writing.Stage._clear

    def interrupted(stage: writing.Stage, **options: bool) -> None:
        if stage._committed:
            raise KeyboardInterrupt
        clear(stage, **options)

    monkeypatch.setattr(writing.Stage, "_clear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_lora_checkpoint(*pair, out, overwrite=True)
    monkeypatch.undo()
    asked: dict[str, Any] = {}
    if change == "emptied":
        for path in out.iterdir():
            path.unlink()
    elif change == "damaged":
        file = next(out.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    elif change == "another config":
        (out / "config.json").write_text("{}")
    elif change == "other base_kwargs":
        asked = {"base_kwargs": {"rms_norm_eps": 0.5}}
    report = merge_lora_checkpoint(*pair, out, overwrite=True, **asked)
    assert bool(report.resumed) == (change == "nothing")
    found = {path.name: path.read_bytes() for path in out.iterdir()}
    if asked:
        assert json.loads(found.pop("config.json"))["rms_norm_eps"] == 0.5
        expected.pop("config.json")
    assert found == expected


def test_too_little_room_is_said_before_the_first_byte(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)

    class Small:
        f_bavail, f_frsize = 10, 512

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OutputError, match=r"5.0 KiB \(5120 bytes\) free; nothing was written"):
        merge_lora_checkpoint(*pair, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert real.f_bavail


@pytest.mark.parametrize("broken", ["EXDEV", "ENOSYS", "absent"])
def test_without_the_kernel_s_copy_the_bytes_are_the_same(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    import errno

    merge_lora_checkpoint(*pair, tmp_path / "whole")
    if broken == "absent":
        monkeypatch.delattr(os, "copy_file_range")
    else:

        def refuse(*arguments: Any) -> int:
            raise OSError(getattr(errno, broken), broken)

        monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(copies, "_BLOCK", 100)
    monkeypatch.setattr(copies, "_sync_file_range", None)
    merge_lora_checkpoint(*pair, tmp_path / "out")
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_calls_that_read_or_write_less_than_asked_are_repeated(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_lora_checkpoint(*pair, tmp_path / "whole")
    preadv, pwrite, kernel = os.preadv, os.pwrite, os.copy_file_range
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:777]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[:333], at))
    monkeypatch.setattr(os, "copy_file_range", lambda s, t, n, a, b: kernel(s, t, min(n, 555), a, b))
    merge_lora_checkpoint(*pair, tmp_path / "out")
    monkeypatch.undo()
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_base_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    import unittest.mock

    base, adapter = pair
    shard = sorted(base.glob("*.safetensors"))[0]

    def cut(*arguments: Any, **options: Any) -> Any:
        os.truncate(shard, shard.stat().st_size - 64)
        return original(*arguments, **options)

    original = writing.write_files
    with (
        unittest.mock.patch("safe_loading._merging.merge_lora_checkpoint.write_files", cut),
        pytest.raises(CheckpointError, match=rf"{shard.name} became shorter while it was read"),
    ):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.staged").exists()


SLOW_MERGE = """
import sys, time
from pathlib import Path
from safe_loading import merge_lora_checkpoint
from safe_loading._merging.disk import write_files as writing
base, adapter, output, begun = map(Path, sys.argv[1:])
original = writing.Stage.record
def record(stage, file, *arguments):
    original(stage, file, *arguments)
    begun.touch()
    time.sleep(1)
writing.Stage.record = record
merge_lora_checkpoint(base, adapter, output, threads=1, overwrite=True)
"""


def test_sigterm_to_torchrun_in_the_middle_of_a_merge_leaves_what_was_there_and_what_is_finished(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    (tmp_path / "script.py").write_text(SLOW_MERGE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_text("old")
    begun = tmp_path / "begun"
    package = str(Path(safe_loading.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    arguments = [str(tmp_path / "script.py"), *map(str, pair), str(tmp_path / "out"), str(begun)]
    agent = subprocess.Popen([*torchrun, *arguments], env=env, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        late = time.monotonic() + 180
        while not begun.exists() and agent.poll() is None and time.monotonic() < late:
            time.sleep(0.1)
        assert begun.exists()
        assert (tmp_path / ".out.staged" / "files").is_dir()
        agent.send_signal(signal.SIGTERM)
        agent.wait(90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old.txt"]
    assert merge_lora_checkpoint(*pair, tmp_path / "out", overwrite=True).resumed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "begun", "out", "script.py"]


@pytest.mark.parametrize("written", ["*.safetensors", "config.json", "generation_config.json"])
def test_a_base_that_is_written_again_while_it_is_read_is_an_error(
    tmp_path: Path, pair: tuple[Path, Path], written: str
) -> None:
    import unittest.mock

    base, adapter = pair
    shard = sorted(base.glob(written))[0]

    def rewritten(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        os.utime(shard, ns=(1, 1))  # the same bytes or others: nobody can tell without reading them again
        return result

    original = writing.write_files
    with (
        unittest.mock.patch("safe_loading._merging.merge_lora_checkpoint.write_files", rewritten),
        pytest.raises(CheckpointError, match=rf"1 of \d+ files were written while they were read: '{shard.name}'"),
    ):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
