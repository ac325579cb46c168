from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest
from faults.checkpoints import LFS_POINTER
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_loading import CheckpointError, CheckpointNotFound
from safe_loading._checkpoint.files import is_lfs_pointer, not_contained, open_regular, size_of


def refused(path: Path, seconds: float = 10) -> str:
    """Return the message with which a path is refused; fail instead of hanging."""
    result: list[BaseException] = []

    def attempt() -> None:
        try:
            open_regular(path).close()
        except BaseException as error:  # handed to the thread that asserts
            result.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"{path} was opened, and that hangs"
    assert len(result) == 1
    assert isinstance(result[0], CheckpointError)
    return str(result[0])


def test_a_regular_file_and_a_link_to_one_are_opened(tmp_path):
    file = tmp_path / "blob"
    file.write_bytes(b"content")
    link = tmp_path / "model.safetensors"
    link.symlink_to("blob")
    for path in (file, link):
        with open_regular(path) as opened:
            assert opened.read() == b"content"


def test_a_fifo_is_refused_and_never_opened(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    message = refused(path)
    assert str(path) in message
    assert "FIFO" in message
    assert "Fix:" in message


def test_a_link_to_a_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    assert "FIFO" in refused(tmp_path / "link")


def test_a_fifo_that_takes_the_place_of_a_file_after_the_first_look_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    regular = os.stat_result([stat.S_IFREG | 0o644, *path.stat()[1:]])
    monkeypatch.setattr(Path, "stat", lambda self, **how: regular)
    closed: list[int] = []
    monkeypatch.setattr(os, "close", lambda fd, real=os.close: (closed.append(fd), real(fd)))
    assert "FIFO" in refused(path)
    assert len(closed) == 1


def test_a_socket_a_device_and_a_directory_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert "a socket" in refused(tmp_path / "socket")
    assert "a character device" in refused(Path("/dev/zero"))
    assert "a directory" in refused(tmp_path)


def test_a_missing_file_and_a_file_under_a_file_are_not_found(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointNotFound, match="no such file") as caught:
            open_regular(path)
        assert isinstance(caught.value, FileNotFoundError)


def test_a_broken_link_is_named_with_its_target(tmp_path):
    path = tmp_path / "model.safetensors"
    path.symlink_to("../blobs/abc")
    with pytest.raises(CheckpointNotFound, match=r"symbolic link to '\.\./blobs/abc'.*Fix: download"):
        open_regular(path)


def test_a_circle_of_links_is_named(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError, match="form a circle"):
        open_regular(tmp_path / "a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    path = tmp_path / "file"
    path.touch(0o000)
    with pytest.raises(CheckpointError, match="may not read"):
        open_regular(path)


def test_a_refused_permission_is_named(tmp_path, monkeypatch):
    def deny(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(CheckpointError, match=r"this user may not read it\. Fix: run `chmod"):
        open_regular(tmp_path / "file")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000])
def test_a_path_that_the_system_cannot_name_is_a_checkpoint_error(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot read it"):
        open_regular(tmp_path / name)


def test_lfs_pointers_are_known_by_their_first_bytes():
    assert is_lfs_pointer(LFS_POINTER)
    assert is_lfs_pointer(LFS_POINTER[:60])
    assert not is_lfs_pointer(b"")
    assert not is_lfs_pointer(b"version 1")


def test_size_is_that_of_regular_files_only(tmp_path):
    (tmp_path / "file").write_bytes(b"123")
    assert size_of(tmp_path / "file") == 3
    assert size_of(tmp_path) == 0
    assert size_of(tmp_path / "none") == 0


@pytest.mark.parametrize("name", ["model.safetensors", "a/b/c.safetensors", "..model", "a..b", "…", "a b", "ab:c"])
def test_names_inside_the_folder_are_taken(name):
    assert not_contained(Path("/ckpt"), name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is absolute"),
        ("//host/share", "is absolute"),
        ("C:/x", "drive"),
        ("c:x", "drive"),
        ("..", "'..' part"),
        ("../x", "'..' part"),
        ("a/../../x", "'..' part"),
        ("a/..", "'..' part"),
        (".", "'.'"),
        ("./x", "'.'"),
        ("a//b", "empty"),
        ("a/", "empty"),
        ("a\\b", "backslash"),
        ("..\\x", "backslash"),
        ("a\0b", "NUL"),
    ],
)
def test_names_that_leave_the_folder_or_are_not_portable_are_refused(name, reason):
    found = not_contained(Path("/ckpt"), name)
    assert found is not None
    for word in ("/ckpt", repr(name), reason, "Fix:"):
        assert word in found


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab./\\:\0", max_size=12))
def test_whatever_is_taken_stays_inside(name):
    folder = Path("/ckpt")
    if not_contained(folder, name) is None:
        inside = os.path.normpath(folder / name)
        assert inside.startswith("/ckpt/")
        assert inside == str(folder / name) == f"/ckpt/{name}"
