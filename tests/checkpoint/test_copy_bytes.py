from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safe_loading import CheckpointError
from safe_loading._checkpoint import copy_bytes as copying
from safe_loading._checkpoint.copy_bytes import ReadAhead, copy_range, read_into, write_from
from safe_loading._merging.disk.write_files import _in_lanes

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Any:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 3 * MIB + 5])
def test_what_is_written_is_what_is_read(file: int, size: int) -> None:
    data = os.urandom(size)
    write_from(file, memoryview(data), 3)
    found = bytearray(size)
    read_into(file, memoryview(found), 3)
    assert bytes(found) == data
    assert os.fstat(file).st_size == (size + 3 if size else 0)


def test_a_write_that_is_cut_short_goes_on_where_it_stopped(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: real(descriptor, bytes(data)[:1000], at))
    data = os.urandom(300_001)
    write_from(file, memoryview(data), 0)
    assert os.pread(file, 400_000, 0) == data


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EXDEV, errno.EINVAL])
def test_bytes_are_copied_where_the_kernel_cannot(
    file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*_: Any) -> int:
        raise OSError(code, "no")

    monkeypatch.setattr(os, "copy_file_range", refused)
    data = os.urandom(2 * MIB + 17)
    source = tmp_path / "source"
    source.write_bytes(data)
    with source.open("rb") as opened:
        copy_range(opened.fileno(), 5, file, 11, len(data) - 5)
        assert os.pread(file, len(data), 11) == data[5:]
        with pytest.raises(CheckpointError, match="became shorter"):
            copy_range(opened.fileno(), 5, file, 0, len(data))


@pytest.mark.parametrize("count", [1, 10 * MIB, 32 * MIB, 100 * MIB + 3])
def test_each_byte_is_asked_for_once_and_in_time(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, advice: asked.append((at, size)))
    ahead, start = ReadAhead(0, 4097, count), 4097
    for at in [*range(MIB, count, MIB), count]:
        ahead.reach(at)
        reached = asked[-1][0] + asked[-1][1] - start
        assert min(count, at + copying._READ_AHEAD_BYTES // 2) <= reached <= min(count, at + copying._READ_AHEAD_BYTES)
    assert [at for at, _ in asked] == [start, *(at + size for at, size in asked[:-1])]
    assert sum(size for _, size in asked) == count
    ahead.reach(MIB)  # a second pass over what was read asks for nothing
    assert sum(size for _, size in asked) == count


def test_nothing_is_asked_of_no_file_and_of_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("asked"))
    ReadAhead(-1, 0, MIB).reach(MIB)
    ReadAhead(0, 0, 0).reach(0)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_write_files_of_their_own_and_few_are_begun_at_once(threads: int) -> None:
    files: Any = [
        SimpleNamespace(name=name, order=lambda size=size: tuple(range(size)))
        for name, size in (("a", 3), ("b", 5), ("c", 1), ("d", 1))
    ]
    ordered: Any = _in_lanes(files, threads)
    tasks = [(file.name, tensor) for file, tensor in ordered]
    assert sorted(tasks) == sorted((file.name, tensor) for file in files for tensor in file.order())
    lanes = min(threads, 2)
    assert len({name for name, _ in tasks[:lanes]}) == lanes
    for at in range(len(tasks)):
        begun, left = {name for name, _ in tasks[:at]}, {name for name, _ in tasks[at:]}
        assert len(begun & left) <= lanes
