"""A rank is killed, raises, hangs or goes astray at every point of a wrap: all others raise soon, and say whose fault.

One process imports everything and forks the ranks of each case, so that a case costs a tenth of a second. It holds the
store, as torchrun does, so that any rank may die.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from torchrun import spawn_ranks

SCRIPT = """
import contextlib, functools, json, os, pathlib, signal, sys, time, traceback, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import torch.distributed.fsdp, torch.distributed.tensor
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from fsdp_cases import *
from safe_loading import wrap_fsdp_meta_safe
from safe_loading._distributed.exchange import Ranks
from safe_loading._sharding import fill, reading, scatter

folder = pathlib.Path(sys.argv[1])
small = lambda: llama(num_hidden_layers=2)
one = reference(small)
save(one, folder / "llama")
skeleton = on_meta(small)
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def fire(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise MemoryError("no room for a shard")
    if kind == "hang":
        time.sleep(60)
    if kind == "astray":
        Ranks.resolve().exchange("do something else", timeout=10)

def arm(kind, when, label):
    real_together, real_exchange = Ranks.together, Ranks.exchange

    @contextlib.contextmanager
    def together(self, name, *, timeout):
        # its own exchange is not counted twice
        if (when, label) == ("before", name):
            fire(kind)
        with real_together(self, name, timeout=timeout) as phase:
            yield phase
            if (when, label) == ("inside", name):
                fire(kind)
        if (when, label) == ("after", name):
            fire(kind)

    def exchange(self, name, payload=None, error=None, *, timeout):
        if (when, label) == ("before exchange", name):
            fire(kind)
        result = real_exchange(self, name, payload, error, timeout=timeout)
        if (when, label) == ("after exchange", name):
            fire(kind)
        return result

    Ranks.together, Ranks.exchange = together, exchange
    if when == "third":
        owner, method = {"read": (reading._Files, "fill"), "send": (scatter._Bytes, "read"),
                         "receive": (scatter._Bytes, "write")}[label]
        real, count = getattr(owner, method), iter(range(10**6))
        def third(*arguments):
            if next(count) == 2:
                fire(kind)
            return real(*arguments)
        setattr(owner, method, third)

def rank_main(case, rank):
    number, world, victim, kind, when, label, source, timeout = case
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world)
    fill.scatter = functools.partial(scatter.scatter, block_bytes=4096)
    if rank == victim:
        arm(kind, when, label)
    model = one if source is None and rank == 0 else skeleton
    started = time.monotonic()
    found = {"error": None, "text": ""}
    try:
        wrap_fsdp_meta_safe(model, source and str(folder / "llama"), timeout=timeout)
    except BaseException as error:
        found = {"error": type(error).__name__, "text": str(error)}
    found["seconds"] = time.monotonic() - started
    (folder / f"{number}.{rank}.json").write_text(json.dumps(found))

for case in json.loads(sys.argv[2]):
    number, world, victim = case[:3]
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            try:
                rank_main(case, rank)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        pids.append(pid)
    end, left = time.monotonic() + 40, set(pids)
    if case[3] == "hang":
        left.discard(pids[victim])
    while left and time.monotonic() < end:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in {*left, *([pids[victim]] if case[3] == "hang" else [])}:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    paths = [folder / f"{number}.{rank}.json" for rank in range(world)]
    report(**{str(number): {
        "pid": pids[victim],
        "ranks": [json.loads(path.read_text()) if path.exists() else None for path in paths],
    }})
"""
BLOCKS = (
    "check the arguments",
    "make the device mesh",
    "read the headers of the checkpoint",
    "find the values on rank 0",
    "compute the buffers",
    "make room for the shards",
    "read the weights",
    "scatter the weights",
    "shard the model",
    "check the wrapped model",
)
EXCHANGES = ("agree on the model", "learn what rank 0 gives")
Case = tuple[int, int, str, str, str, "str | None", float]  # ranks, victim, kind, when, where, source, limit

SPECIAL: dict[str, Case] = {
    "killed while it reads": (2, 1, "kill", "third", "read", "folder", 60),
    "killed while it receives": (2, 1, "kill", "third", "receive", None, 60),
    "rank 0 killed while it sends": (2, 0, "kill", "third", "send", None, 60),
    "raises while it receives": (2, 1, "raise", "third", "receive", None, 60),
    "rank 0 raises while it sends": (2, 0, "raise", "third", "send", None, 60),
    "raises while it reads": (2, 1, "raise", "third", "read", "folder", 60),
    "hangs while it receives": (2, 1, "hang", "third", "receive", None, 1.5),
    "hangs while it reads": (2, 1, "hang", "third", "read", "folder", 1.5),
    "goes astray": (2, 1, "astray", "before", "make room for the shards", "folder", 60),
    "killed before it came": (2, 1, "kill", "before", "check the arguments", "folder", 1.5),
    "one of four killed while it receives": (4, 2, "kill", "third", "receive", None, 60),
    "one of four raises while it receives": (4, 3, "raise", "third", "receive", None, 60),
}
KILLED: dict[str, Case] = {
    f"rank {victim} killed {when} {label!r}": (2, victim, "kill", when, label, "folder", 60)
    for labels, place in ((BLOCKS, ""), (EXCHANGES, " exchange"))
    for label in labels
    for when in (f"before{place}", f"inside{place}", f"after{place}")
    for victim in (0, 1)
    if (label, when) not in (("check the arguments", "before"), ("check the arguments", "inside"))
    # after the last phase there is nothing that a rank could spoil
    and (label, when) != ("check the wrapped model", "after")
    and when != "inside exchange"
}
SAMPLE = {name: KILLED[name] for name in random.Random(20261121).sample(sorted(KILLED), 6)}


def tried(cases: dict[str, Case], folder: Any) -> dict[str, Any]:
    import json

    numbered = [[number, *case] for number, case in enumerate(cases.values())]
    found = spawn_ranks(SCRIPT, 1, args=[folder, json.dumps(numbered)], timeout=500).found[0]
    return {name: found[str(number)] for number, name in enumerate(cases)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tried({**SPECIAL, **SAMPLE}, tmp_path_factory.mktemp("fire"))


@pytest.fixture(scope="module")
def all_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tried(KILLED, tmp_path_factory.mktemp("every fire"))


def check(case: Case, facts: dict[str, Any]) -> None:
    world, victim, kind, when, label, _, limit = case
    for rank in set(range(world)) - {victim}:
        each = facts["ranks"][rank]
        assert each is not None, f"rank {rank} hangs"
        late = kind == "hang" or (label == "check the arguments" and when == "before")
        assert each["error"] == ("RankTimeout" if late else "RankError"), each
        assert each["seconds"] < (limit + 20 if late else 30)
        if late:
            assert f"for rank {victim}" in each["text"] or "for all ranks" in each["text"], each
        elif kind == "kill":
            assert f"Rank {victim} (host " in each["text"], each
            assert f"process {facts['pid']}) ended" in each["text"], each
        elif kind == "raise":
            assert f"Rank {victim} (host " in each["text"], each
            assert "MemoryError: no room for a shard" in each["text"], each
        else:
            assert f"rank {victim}: 'do something else'" in each["text"], each


@pytest.mark.parametrize("name", [*SPECIAL, *SAMPLE])
def test_the_other_ranks_raise_and_name_the_rank_and_its_cause(found: dict[str, Any], name: str) -> None:
    check({**SPECIAL, **SAMPLE}[name], found[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_a_rank_may_be_killed_at_any_point(all_found: dict[str, Any], name: str) -> None:
    check(KILLED[name], all_found[name])


def test_a_rank_that_raises_gets_its_own_error(found: dict[str, Any]) -> None:
    for name in ("raises while it receives", "rank 0 raises while it sends", "raises while it reads"):
        facts = found[name]["ranks"][SPECIAL[name][1]]
        assert (facts["error"], facts["text"]) == ("MemoryError", "no room for a shard")
