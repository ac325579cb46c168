"""A rank is killed, raises, hangs or goes astray at any point of a wrap: all others raise soon, and say who it was."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest
from rank_server import RankServer

SCRIPT = """
import contextlib, functools, json, os, pathlib, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.fsdp, torch.distributed.tensor
from torch.distributed import device_mesh
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from fsdp_cases import *
from safe_loading import wrap_fsdp_meta_safe
from safe_loading._ranks.exchange import Ranks
from safe_loading._model.layout import reading
from safe_loading._sharding import scatter
from torchrun import fork_ranks, held_store

mine, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = pathlib.Path(sys.argv[1], str(mine))
small = lambda: llama(num_hidden_layers=2)
one = reference(small)
save(one, folder / "llama")
skeleton = on_meta(small)

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
    if when.isdigit():
        owner, method = {"read": (reading._OpenFiles, "_descriptor"), "send": (scatter._ByteStream, "read"),
                         "receive": (scatter._ByteStream, "write"), "group": (device_mesh, "new_group")}[label]
        real, count = getattr(owner, method), iter(range(10**6))
        def counted(*arguments, **options):
            if next(count) == int(when):
                fire(kind)
            return real(*arguments, **options)
        setattr(owner, method, counted)

def rank_main(victim, kind, when, label, source, timeout, mesh, rank):
    scatter.BLOCK_BYTES = 4096  # several blocks, so that a rank can come to grief between two of them
    if rank == victim:
        arm(kind, when, label)
    model = one if source is None and rank == 0 else skeleton
    started = time.monotonic()
    found = {"error": None, "text": ""}
    try:
        wrap_fsdp_meta_safe(model, source and str(folder / "llama"), mesh=mesh, timeout=timeout)
    except BaseException as error:
        found = {"error": type(error).__name__, "text": str(error)}
    return {**found, "seconds": time.monotonic() - started}

with held_store() as port:
    for number, (world, victim, kind, *where) in [*enumerate(json.loads(sys.argv[2]))][mine::processes]:
        main = functools.partial(rank_main, victim, kind, *where)
        hanging = victim if kind == "hang" else None
        report(**{str(number): fork_ranks(port, str(number), world, main, hanging=hanging)})
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


class Case(NamedTuple):
    """One rank of some comes to grief: before, inside or after a block, or in the n-th call of something."""

    ranks: int
    victim: int
    kind: str
    when: str
    where: str
    source: str | None = "folder"
    limit: float = 60
    mesh: tuple[int, ...] | None = None


SPECIAL = {
    "killed while it reads": Case(2, 1, "kill", "2", "read"),
    "killed while it receives": Case(2, 1, "kill", "2", "receive", None),
    "rank 0 killed while it sends": Case(2, 0, "kill", "2", "send", None),
    "raises while it receives": Case(2, 1, "raise", "2", "receive", None),
    "rank 0 raises while it sends": Case(2, 0, "raise", "2", "send", None),
    "raises while it reads": Case(2, 1, "raise", "2", "read"),
    "hangs while it receives": Case(2, 1, "hang", "2", "receive", None, 1.5),
    "hangs while it reads": Case(2, 1, "hang", "2", "read", limit=1.5),
    "goes astray": Case(2, 1, "astray", "before", "make room for the shards"),
    "killed before it came": Case(2, 1, "kill", "before", "check the arguments", limit=1.5),
    "one of four killed while it receives": Case(4, 2, "kill", "2", "receive", None),
    "one of four raises while it receives": Case(4, 3, "raise", "2", "receive", None),
    "one of a mesh killed while its groups are made": Case(4, 3, "kill", "2", "group", mesh=(2, 2)),
    "rank 0 of a mesh killed while its groups are made": Case(4, 0, "kill", "1", "group", mesh=(2, 2)),
    "one of a mesh raises while its groups are made": Case(4, 1, "raise", "3", "group", mesh=(2, 2)),
    "one of a mesh hangs while its groups are made": Case(4, 2, "hang", "0", "group", limit=1.5, mesh=(2, 2)),
    "one of a mesh killed while it hands on": Case(4, 1, "kill", "2", "send", None, mesh=(2, 2)),
    "one of a mesh killed while it is handed its part": Case(4, 3, "kill", "2", "receive", None, mesh=(2, 2)),
    "one of a mesh raises while it is handed its part": Case(4, 2, "raise", "2", "receive", None, mesh=(2, 2)),
}


def killed(ranks: int, source: str | None, mesh: tuple[int, ...] | None) -> dict[str, Case]:
    """A rank is killed at every block and exchange."""
    return {
        f"rank {victim} of {mesh or ranks} killed {when} {label!r}": Case(
            ranks, victim, "kill", when, label, source, mesh=mesh
        )
        for labels, place in ((BLOCKS, ""), (EXCHANGES, " exchange"))
        for label in labels
        for when in (f"before{place}", f"inside{place}", f"after{place}")
        for victim in range(ranks)
        if (label, when) not in (("check the arguments", "before"), ("check the arguments", "inside"))
        # after the last phase there is nothing that a rank could spoil
        and (label, when) != ("check the wrapped model", "after")
        and when != "inside exchange"
    }


KILLED = killed(2, "folder", None)
OF_A_MESH = {
    **{f"{name}, folder": case for name, case in killed(4, "folder", (2, 2)).items()},
    **{f"{name}, rank 0": case for name, case in killed(4, None, (2, 2)).items()},
    **{
        f"rank {victim} of a mesh killed in the {label} {number}": Case(
            4, victim, "kill", str(number), label, None, mesh=(2, 2)
        )
        for label in ("group", "send")
        for number in range(4)
        for victim in range(4 if label == "group" else 2)  # the first replica alone sends
    },
}
_random = random.Random(20261121)
SAMPLE = {
    **{name: KILLED[name] for name in _random.sample(sorted(KILLED), 4)},
    **{name: OF_A_MESH[name] for name in _random.sample(sorted(OF_A_MESH), 4)},
}


def tried(rank_server: RankServer, cases: dict[str, Case], folder: Any, timeout: float = 500) -> dict[str, Any]:
    # two processes share the cases, which mostly wait
    halves = rank_server.run(SCRIPT, 2, args=[folder, json.dumps(list(cases.values()))], timeout=timeout).found
    found = halves[0] | halves[1]
    return {name: found[str(number)] for number, name in enumerate(cases)}


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tried(rank_server, {**SPECIAL, **SAMPLE}, tmp_path_factory.mktemp("fire"))


@pytest.fixture(scope="module")
def all_found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tried(rank_server, {**KILLED, **OF_A_MESH}, tmp_path_factory.mktemp("every fire"), 3000)


def check(case: Case, facts: dict[str, Any]) -> None:
    world, victim, kind, when, label, _, limit, _ = case
    for rank in set(range(world)) - {victim}:
        each = facts["ranks"][rank]
        assert each is not None, f"rank {rank} hangs"
        late = kind == "hang" or (label == "check the arguments" and when == "before")
        assert each["seconds"] < (limit + 20 if late else 30)
        if late and label == "group":  # nobody sees who hangs inside torch; the first that gives up tells the others
            assert each["error"] in ("RankTimeout", "RankError"), each
            assert f"Waited {limit:g} s for the other ranks to make the device mesh" in each["text"], each
            continue
        assert each["error"] == ("RankTimeout" if late else "RankError"), each
        if late:
            assert f"for rank {victim}" in each["text"] or "for all ranks" in each["text"], each
        elif kind == "kill":
            assert f"Rank {victim} (host " in each["text"], each
            assert f"process {facts['pids'][victim]}) ended" in each["text"], each
        elif kind == "raise":
            assert f"Rank {victim} (host " in each["text"], each
            assert "MemoryError: no room for a shard" in each["text"], each
        else:
            assert f"rank {victim}: 'do something else'" in each["text"], each


@pytest.mark.parametrize("name", [*SPECIAL, *SAMPLE])
def test_the_other_ranks_raise_and_name_the_rank_and_its_cause(found: dict[str, Any], name: str) -> None:
    check({**SPECIAL, **SAMPLE}[name], found[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KILLED, *OF_A_MESH])
def test_a_rank_may_be_killed_at_any_point(all_found: dict[str, Any], name: str) -> None:
    check({**KILLED, **OF_A_MESH}[name], all_found[name])


def test_a_rank_that_raises_gets_its_own_error(found: dict[str, Any]) -> None:
    for name in ("raises while it receives", "rank 0 raises while it sends", "raises while it reads"):
        facts = found[name]["ranks"][SPECIAL[name].victim]
        assert (facts["error"], facts["text"]) == ("MemoryError", "no room for a shard")
