"""Random wraps on three ranks and on six: the values of the source, and three steps of the engine's own wrap."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_server import RankServer

SCRIPT = """
import pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from random_wraps import check
dist.init_process_group("gloo")
first, last = map(int, sys.argv[2:])
report(problems=[each for seed in range(first, last) for each in check(seed, pathlib.Path(sys.argv[1]))])
dist.barrier()
dist.destroy_process_group()
"""
BLOCK = 50  # wraps of one process group


def check(rank_server: RankServer, ranks: int, folder: Path, first: int, last: int) -> None:
    found = rank_server.run(SCRIPT, ranks, args=[folder, str(first), str(last)], timeout=600).found
    assert [facts["problems"] for facts in found] == [[]] * ranks


def test_a_sample_loads_and_trains_as_the_engine_does(rank_server: RankServer, tmp_path: Path) -> None:
    check(rank_server, 3, tmp_path, 0, 12)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, BLOCK))
def test_five_hundred_on_three_ranks(rank_server: RankServer, tmp_path: Path, first: int) -> None:
    check(rank_server, 3, tmp_path, first, first + BLOCK)


@pytest.mark.slow
def test_replicas_of_two_and_of_three(rank_server: RankServer, tmp_path: Path) -> None:
    check(rank_server, 6, tmp_path, 1000, 1000 + BLOCK)
