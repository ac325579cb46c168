"""A process that loads, swaps, merges and unloads for long holds no more of anything at the end than at the start."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models import Made
from torch.utils.data import DataLoader, Dataset

from safe_loading import (
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
TOKENS = torch.arange(6)[None]
MORE_MEMORY = 64 << 20  # what an allocator may keep


def held() -> dict[str, int]:
    """What this process holds: memory in use, descriptors, threads, and files among the temporary ones."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "temporary files": len(list(Path(tempfile.gettempdir()).iterdir())),
    }


def logits(adapter: Path, base: Path) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = load_peft_on_rank(base, adapter)(input_ids=TOKENS).logits
    return result


def cycle(adapter: Path, second: Path, base: Path, output: Path) -> None:
    """Check, load, load another, swap, unload, merge in memory and on disk."""
    assert check_checkpoint(base).ok
    model = load_peft_on_rank(base, adapter)
    load_adapter_on_rank(model, second, "second")
    load_adapter_on_rank(model, second, "default", hotswap=True)
    model.delete_adapter("second")
    merge_lora_inplace(model)
    merge_lora_checkpoint(base, adapter, output, threads=1)
    shutil.rmtree(output)


def around_cycles(cycles: int, adapter: Path, second: Path, base: Path, output: Path) -> list[dict[str, int]]:
    """What this process holds before and after that many cycles."""
    for _ in range(3):  # what is made once
        cycle(adapter, second, base, output)
    before = held()
    for _ in range(cycles):
        cycle(adapter, second, base, output)
    return [before, held()]


@pytest.mark.parametrize("cycles", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_nothing_grows(
    tmp_path: Path, tiny_llama: Path, made: Made, tiny_adapter: Path, cycles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"  # which no other process of the machine writes to
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    second = made.adapter(tiny_llama, seed=2)
    # a process of its own: what tests before this one left behind comes and goes meanwhile
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = pool.submit(around_cycles, cycles, tiny_adapter, second, tiny_llama, tmp_path / "out")
        before, after = running.result(timeout=100 + 10 * cycles)
    assert after["memory"] - before["memory"] < MORE_MEMORY
    others = ("descriptors", "threads", "temporary files")
    assert {name: (before[name], after[name]) for name in others if after[name] > before[name]} == {}
    assert list(tmp_path.iterdir()) == [temporary]


def in_threads(adapter: Path, base: Path) -> list[torch.Tensor]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: logits(adapter, base), range(6)))


def in_asyncio(adapter: Path, base: Path) -> list[torch.Tensor]:
    async def every() -> list[torch.Tensor]:
        return await asyncio.gather(*(asyncio.to_thread(logits, adapter, base) for _ in range(4)))

    return asyncio.run(every())


def _in_child(queue: multiprocessing.Queue[list[float]], adapter: Path, base: Path) -> None:
    torch.set_num_threads(1)
    queue.put(logits(adapter, base).flatten().tolist())


def in_a_fork(adapter: Path, base: Path) -> list[torch.Tensor]:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[list[float]] = context.Queue()
    child = context.Process(target=_in_child, args=(queue, adapter, base))
    child.start()
    result = queue.get(timeout=120)
    child.join(60)
    return [torch.tensor(result)]


class Loads(Dataset[torch.Tensor]):
    """A data set whose workers load a model."""

    def __init__(self, adapter: Path, base: Path) -> None:
        self.adapter, self.base = adapter, base

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return logits(self.adapter, self.base)


def in_workers(adapter: Path, base: Path) -> list[torch.Tensor]:
    return list(DataLoader(Loads(adapter, base), batch_size=None, num_workers=2, timeout=120))


@pytest.mark.parametrize("way", [in_threads, in_asyncio, in_a_fork, in_workers])
def test_other_ways_to_run_load_the_same(
    tiny_llama: Path, tiny_adapter: Path, way: Callable[[Path, Path], list[torch.Tensor]]
) -> None:
    expected = logits(tiny_adapter, tiny_llama).flatten()
    for result in way(tiny_adapter, tiny_llama):
        assert torch.equal(result.flatten(), expected)
