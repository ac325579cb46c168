"""What docs/containers.md says of a job that is stopped, as far as no container engine is needed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from safe_loading.__main__ import main
from safe_loading._output.stage import Stage


def test_a_merge_that_gets_sigterm_exits_with_143_and_the_same_command_goes_on(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["merge", str(tiny_llama), str(tiny_adapter), str(tmp_path / "out" / "merged")]
    write = Stage.write

    def stopped(*arguments: Any, **options: Any) -> Any:
        result = write(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)  # as `docker stop` sends it
        return result

    with monkeypatch.context() as patched:
        patched.setattr(Stage, "write", stopped)
        with pytest.raises(SystemExit) as caught:
            main(words)
    assert caught.value.code == 143
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".merged.staged"]
    assert main(words) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["merged"]
    assert main(["verify", *words[1:]]) == 0


def test_the_inputs_may_be_read_only_and_the_temporary_folder_elsewhere(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))  # as TMPDIR sets it
    opened: list[str] = []
    original = os.open

    def seen(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            opened.append(os.fspath(path) if isinstance(path, (str, os.PathLike)) else "")
        return original(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", seen)
    assert main(["merge", str(tiny_llama), str(tiny_adapter), str(tmp_path / "merged")]) == 0
    assert opened
    own = re.compile(rf"{re.escape(str(tmp_path))}/(\.merged\.staged|merged|tmp)\b")
    assert [path for path in opened if not own.match(path)] == []
    assert list(temporary.iterdir()) == []
