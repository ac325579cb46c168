"""Merges under unusual conditions, whole: killed in a row, by fork and asyncio, two at once, over two file systems."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from models import save_adapter, save_llama
from torchrun import SHARED

import safe_loading
from safe_loading import OutputError, merge_lora_checkpoint

pytestmark = pytest.mark.slow

MERGE = """
import sys, safe_loading
safe_loading.merge_lora_checkpoint(sys.argv[1], sys.argv[2], sys.argv[3], overwrite=True, threads=1)
"""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    base = save_llama(tmp_path / "base")
    return base, save_adapter(tmp_path / "adapter", base)


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_merge_that_is_killed_again_and_again_completes_to_the_same_bytes(
    tmp_path: Path, pair: tuple[Path, Path], record_property: Callable[[str, object], None]
) -> None:
    """At the first file, the second and so on; each call goes on from the one before."""
    merge_lora_checkpoint(*pair, tmp_path / "whole")
    folders = [str(path) for path in (*pair, tmp_path / "out")]
    package = str(Path(safe_loading.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *SHARED])}
    staged = tmp_path / ".out.staged" / "files"
    killed = 0
    for number in range(1, 7):
        child = subprocess.Popen([sys.executable, "-c", MERGE, *folders], env=environment)
        while child.poll() is None and not (staged.exists() and len(list(staged.iterdir())) >= number):
            time.sleep(0.001)
        child.kill()
        killed += child.wait() == -signal.SIGKILL
        found = tmp_path / "out"
        assert not found.exists() or bytes_of(found) == bytes_of(tmp_path / "whole")
    merge_lora_checkpoint(*pair, tmp_path / "out", overwrite=True)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert [path.name for path in tmp_path.glob(".*")] == []
    record_property("killed", killed)


def test_fork_and_asyncio_make_the_same_bytes(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    merge_lora_checkpoint(*pair, tmp_path / "whole")
    child = os.fork()
    if not child:
        try:
            merge_lora_checkpoint(*pair, tmp_path / "forked", threads=2)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    async def several() -> None:
        calls = [asyncio.to_thread(merge_lora_checkpoint, *pair, tmp_path / f"task{number}") for number in range(4)]
        await asyncio.gather(*calls)

    asyncio.run(several())
    for name in ("forked", *(f"task{number}" for number in range(4))):
        assert bytes_of(tmp_path / name) == bytes_of(tmp_path / "whole"), name


def test_of_two_merges_into_one_output_at_once_one_writes_and_the_other_is_told(
    tmp_path: Path, pair: tuple[Path, Path], record_property: Callable[[str, object], None]
) -> None:
    merge_lora_checkpoint(*pair, tmp_path / "whole")
    told = 0

    async def both() -> list[object]:
        calls = [asyncio.to_thread(merge_lora_checkpoint, *pair, tmp_path / "out", overwrite=True) for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    for _ in range(20):
        outcomes = asyncio.run(both())
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert all(isinstance(error, OutputError) for error in errors)
        assert len(errors) < 2
        told += len(errors)
        assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    record_property("told", told)


def test_base_and_output_on_two_file_systems(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system to write to")
    merge_lora_checkpoint(*pair, tmp_path / "whole")
    output = other / f"safe_loading-{os.getpid()}"
    try:
        merge_lora_checkpoint(*pair, output)
        assert bytes_of(output) == bytes_of(tmp_path / "whole")
    finally:
        subprocess.run(["rm", "-rf", str(output)], check=True)
