from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_server import RankServer
from torchrun import RanksFailed, run_ranks, spawn_ranks

from safe_loading._ranks import exchange as module
from safe_loading._ranks import machine, store_exchange
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.store_exchange import rank_list
from safe_loading.errors import ArgumentError, RankError, RankTimeout

LONG = 20.0  # seconds; a test that waits this long has failed


def tcp_stores(count: int) -> list[Any]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LONG))
    others = [dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=LONG)) for _ in range(count - 1)]
    return [dist.PrefixStore("default_pg", store) for store in (server, *others)]


def file_stores(count: int) -> list[Any]:
    path = Path(tempfile.mkdtemp()) / "store"
    return [dist.FileStore(str(path), count) for _ in range(count)]


STORES: dict[str, Callable[[int], list[Any]]] = {
    "hash": lambda count: [dist.HashStore()] * count,
    "tcp": tcp_stores,
    "file": file_stores,
}


@pytest.fixture(params=STORES)
def stores(request: pytest.FixtureRequest) -> Callable[[int], list[Any]]:
    return STORES[request.param]


def group(stores: list[Any]) -> list[Ranks]:
    members = tuple(range(len(stores)))
    return [Ranks(rank, members, store) for rank, store in enumerate(stores)]


def each(ranks: list[Ranks], do: Callable[[Ranks], Any]) -> list[Any]:
    """What `do` gives or raises on each rank, all at the same time."""
    outcomes: list[Any] = [None] * len(ranks)

    def run(place: int) -> None:
        try:
            outcomes[place] = do(ranks[place])
        except BaseException as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def test_a_rank_that_never_made_a_call_joins_the_next(stores: Callable[[int], list[Any]]):
    first, second, third = group(stores(3))
    again = threading.Event()

    def calls(ranks: Ranks) -> list[Any]:
        if ranks is third:  # it raised before its call, which the others gave up
            again.wait(LONG)
            time.sleep(0.3)
            return [ranks.exchange("load", 2, timeout=LONG), ranks.exchange("read", 5, timeout=LONG)]
        with pytest.raises(RankTimeout, match="for rank 2"):
            ranks.exchange("load", timeout=0.5)
        again.set()
        return [ranks.exchange("load", ranks.rank, timeout=LONG), ranks.exchange("read", 5, timeout=LONG)]

    assert each([first, second, third], calls) == [[[0, 1, 2], [5, 5, 5]]] * 3


def test_a_rank_that_was_late_in_a_call_hears_of_it_and_is_in_step_again(stores: Callable[[int], list[Any]]):
    first, second = group(stores(2))

    def calls(ranks: Ranks) -> list[Any]:
        if ranks is second:
            time.sleep(1.0)
        with pytest.raises(RankTimeout, match="for rank 1"):
            ranks.exchange("end", timeout=0.5)
        return ranks.exchange("begin", ranks.rank, timeout=LONG)

    assert each([first, second], calls) == [[0, 1]] * 2


def test_a_long_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(store_exchange, "_SILENT_SECONDS", 0.1)
    first, second = group(tcp_stores(2))

    def calls(ranks: Ranks) -> list[Any]:
        time.sleep(0.5 * ranks.rank)
        return ranks.exchange("load", timeout=LONG)

    with caplog.at_level("WARNING", logger="safe_loading"):
        each([first, second], calls)
    assert "Rank 0 waits for rank 1 to load" in caplog.text


def test_all_get_all_payloads_in_rank_order(stores: Callable[[int], list[Any]]):
    ranks = group(stores(3))
    payloads: list[Any] = [{"a": [1, None]}, "ü", None]
    assert each(ranks, lambda r: r.exchange("say", payloads[r.rank], timeout=LONG)) == [payloads] * 3
    assert each(ranks, lambda r: r.exchange("say it again", "same", timeout=LONG)) == [["same"] * 3] * 3


def test_one_fails_and_all_raise_before_the_last_one_arrives(stores: Callable[[int], list[Any]]):
    ranks = group(stores(3))
    failed = ValueError("shard 7 is torn")
    arrive = threading.Event()
    seconds: dict[int, float] = {}

    def do(r: Ranks) -> None:
        if r.rank == 2:
            arrive.wait(LONG)
        start = time.monotonic()
        try:
            with r.together("read the shards", timeout=LONG):
                if r.rank == 1:
                    time.sleep(0.1)
                    raise failed
        finally:
            seconds[r.rank] = time.monotonic() - start
            if r.rank == 0:
                arrive.set()

    outcomes = each(ranks, do)
    assert outcomes[1] is failed
    for rank in (0, 2):
        assert type(outcomes[rank]) is RankError
        assert "Rank 1 (host " in str(outcomes[rank])
        assert "failed to read the shards" in str(outcomes[rank])
        assert "ValueError: shard 7 is torn" in str(outcomes[rank])
        assert seconds[rank] < LONG / 4
    assert str(outcomes[0]) == str(outcomes[2])
    assert each(ranks, lambda r: r.exchange("go on", r.rank, timeout=LONG)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupted_rank_tells_the_others(error: BaseException):
    def do(r: Ranks) -> None:
        with r.together("load", timeout=LONG):
            if r.rank == 0:
                raise error

    outcomes = each(group(tcp_stores(2)), do)
    assert outcomes[0] is error
    assert type(error).__name__ in str(outcomes[1])


def test_an_interrupted_wait_tells_the_others(monkeypatch: pytest.MonkeyPatch):
    ranks = group([dist.HashStore()] * 2)
    wait = store_exchange.StoreExchange._wait

    def interrupted(board: store_exchange.StoreExchange, timeout: float) -> bool:
        if board._rank == 0:
            raise KeyboardInterrupt
        return wait(board, timeout)

    monkeypatch.setattr(store_exchange.StoreExchange, "_wait", interrupted)

    def do(r: Ranks) -> Any:
        time.sleep(0.2 * r.rank)
        return r.exchange("load", timeout=LONG)

    outcomes = each(ranks, do)
    assert isinstance(outcomes[0], KeyboardInterrupt)
    # Rank 1 arrives last: what was published first stands.
    assert isinstance(outcomes[1], RankError)
    assert "KeyboardInterrupt" in str(outcomes[1])


def test_an_error_that_is_given_is_raised_as_it_is():
    errors = [ValueError("zero"), KeyError("one")]
    outcomes = each(group(tcp_stores(2)), lambda r: r.exchange("load", None, errors[r.rank], timeout=LONG))
    assert outcomes[0] is errors[0]
    assert outcomes[1] is errors[1]


def test_one_never_arrives(stores: Callable[[int], list[Any]]):
    ranks = group(stores(4))
    outcomes = each([ranks[0], ranks[3]], lambda r: r.exchange("load the base", timeout=0.3))
    for outcome in outcomes:
        assert type(outcome) is RankTimeout
        assert isinstance(outcome, TimeoutError)
        for part in ("0.3 s", "ranks 1-2 of 4", "load the base", "ranks='self'", "larger timeout="):
            assert part in str(outcome)
        assert "different calls" not in str(outcome)
    # They come too late: the same error, at once, and the next exchange is whole again.
    start = time.monotonic()
    late = each(ranks[1:3], lambda r: r.exchange("load the base", timeout=LONG))
    assert [str(outcome) for outcome in late] == [str(outcomes[0])] * 2
    assert time.monotonic() - start < LONG / 4
    assert each(ranks, lambda r: r.exchange("go on", r.rank, timeout=LONG)) == [[0, 1, 2, 3]] * 4


def test_ranks_in_different_calls_are_told_so():
    ranks = group([dist.HashStore()] * 3)
    outcomes = each(ranks, lambda r: r.exchange("load" if r.rank < 2 else "merge", timeout=LONG))
    for outcome in outcomes:
        assert type(outcome) is RankError
        assert "different calls: ranks 0-1: 'load'; rank 2: 'merge'" in str(outcome)
    late = each(ranks[1:], lambda r: r.exchange("load" if r.rank < 2 else "merge", timeout=0.2))
    assert all("rank 0 of 3" in str(outcome) for outcome in late)
    assert all("rank 1: 'load'; rank 2: 'merge'" in str(outcome) for outcome in late)


def test_sets_of_ranks_do_not_meet():
    stores = tcp_stores(3)
    everyone = group(stores)
    pair = [Ranks(rank, (0, 2), stores[rank]) for rank in (0, 2)]
    assert each(pair, lambda r: r.exchange("load", r.rank, timeout=LONG)) == [[0, 2]] * 2
    assert each(pair, lambda r: r.exchange("load", r.rank, timeout=LONG)) == [[0, 2]] * 2
    assert each(everyone, lambda r: r.exchange("load", r.rank, timeout=LONG)) == [[0, 1, 2]] * 3


def test_a_new_group_on_an_old_store_reads_nothing_old():
    store = dist.HashStore()
    for generation in range(3):
        # torchrun's store outlives destroy_process_group; the next group gets a new object before the same keys.
        ranks = group([dist.PrefixStore("default_pg", store) for _ in range(2)])
        outcomes = each(ranks, lambda r, g=generation: r.exchange("load", [g, r.rank], timeout=LONG))
        assert outcomes == [[[generation, 0], [generation, 1]]] * 2


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_the_store_does_not_fill_up(kind: str):
    stores = STORES[kind](3)
    ranks = group(stores)

    def do(r: Ranks) -> list[int]:
        keys = []
        for turn in range(200):
            if turn % 10 == 3:
                with pytest.raises((RankError, ValueError)):
                    r.exchange("fail", error=ValueError("no") if r.rank == turn % 3 else None, timeout=LONG)
            else:
                r.exchange("go on", [turn, r.rank], timeout=LONG)
            keys.append(stores[0].num_keys())
        return keys

    for keys in each(ranks, do):
        # 3 posts and 4 shared keys a turn, for two turns, and 3 that say which group it is.
        assert max(keys) <= 2 * 7 + 3 + 3


@pytest.mark.parametrize("payload", [{1, 2}, b"bytes", object(), "x" * (store_exchange.MAX_BYTES + 1)])
def test_a_payload_that_cannot_be_shared_fails_on_all_ranks(payload: Any):
    outcomes = each(group([dist.HashStore()] * 2), lambda r: r.exchange("load", payload if r.rank else 1, timeout=LONG))
    assert isinstance(outcomes[0], RankError)
    assert isinstance(outcomes[1], ArgumentError)


def test_payloads_that_are_too_much_together_fail_on_all_ranks():
    half = "x" * (store_exchange.MAX_BYTES // 2)
    outcomes = each(group(tcp_stores(3)), lambda r: r.exchange("load", f"{r.rank}{half}", timeout=LONG))
    assert [type(outcome) for outcome in outcomes] == [RankError] * 3
    assert each(group(tcp_stores(3)), lambda r: len(r.exchange("load", half, timeout=LONG))) == [3] * 3


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), None, True, "3"])
def test_every_wait_has_a_limit(timeout: Any):
    with pytest.raises(ArgumentError, match="timeout="):
        Ranks(0, (0,)).exchange("load", timeout=timeout)


def test_a_long_message_is_cut():
    error = ValueError("x" * 100_000)
    outcomes = each(
        group([dist.HashStore()] * 2), lambda r: r.exchange("load", error=None if r.rank else error, timeout=LONG)
    )
    assert "(100000 characters)" in str(outcomes[1])
    assert len(str(outcomes[1])) < 10_000


def test_a_store_that_is_gone_is_a_rank_error():
    stores = tcp_stores(2)
    ranks = [Ranks(1, (0, 1), stores[1])]
    each(ranks, lambda r: r.exchange("begin", timeout=0.05))
    stores.clear()

    # The server ends with its last reference, as it does with the process of rank 0.
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("Connection reset by peer")

    outcomes = each([Ranks(1, (0, 1), Gone())], lambda r: r.exchange("load", timeout=LONG))  # type: ignore[arg-type]
    assert isinstance(outcomes[0], RankError)
    assert "lost the store" in str(outcomes[0])
    assert "Connection reset by peer" in str(outcomes[0])


def test_alone_nothing_is_exchanged():
    alone = Ranks.resolve()
    assert (alone.rank, alone.ranks, alone.size) == (0, (0,), 1)
    assert alone == Ranks.resolve("self") == Ranks.resolve([0])
    assert alone.exchange("load", {"a": (1, 2)}, timeout=1) == [{"a": [1, 2]}]
    with alone.together("load", timeout=1) as phase:
        phase.payload = "mine"
    assert phase.results == ["mine"]
    assert alone.leader(timeout=1) == 0
    failed = OSError("disk")
    with pytest.raises(OSError, match="disk") as caught, alone.together("load", timeout=1):
        raise failed
    assert caught.value is failed
    with pytest.raises(OSError, match="disk") as caught:
        alone.exchange("load", error=failed, timeout=1)
    assert caught.value is failed


@pytest.mark.parametrize("ranks", ["both", [0, 1], [1], [-1], [], [True], ["0"], [0, 0], [0.0]])
def test_ranks_that_are_not_there(ranks: Any):
    with pytest.raises(ArgumentError, match="ranks="):
        Ranks.resolve(ranks)


def test_nodes_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    place = threading.local()
    monkeypatch.setattr(module, "host_identity", lambda: place.host)
    ranks = group(tcp_stores(4))

    def do(r: Ranks) -> Any:
        place.host = "a" if r.rank in (0, 3) else "b"
        return r.leader(timeout=LONG)

    assert each(ranks, do) == [0, 1, 1, 0]


def test_the_host_is_its_name_and_its_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    boot = tmp_path / "boot_id"
    boot.write_text("4f0c\n")
    monkeypatch.setattr(machine, "_BOOT_ID", boot)
    monkeypatch.setattr("socket.gethostname", lambda: "pod")
    assert machine.host_identity() == "pod 4f0c"
    boot.unlink()
    assert machine.host_identity() == "pod"


def test_ranks_are_written_short():
    assert rank_list([3]) == "rank 3"
    assert rank_list([7, 0, 1, 2, 9, 10]) == "ranks 0-2, 7, 9-10"


PRELUDE = """
    import os, time
    import torch.distributed as dist
    from safe_loading._ranks import exchange
    from safe_loading._ranks.exchange import Ranks
    rank = int(os.environ["RANK"])

    def tried(name, call):
        start = time.monotonic()
        try:
            found = {"value": call()}
        except Exception as error:
            found = {"error": type(error).__name__, "text": str(error)}
        report(**{name: {**found, "seconds": time.monotonic() - start}})
"""

SCRIPT = (
    PRELUDE
    + """
    dist.init_process_group("gloo")
    ranks = Ranks.resolve()
    tried("set", lambda: [ranks.rank, ranks.size])
    tried("all", lambda: ranks.exchange("say", {"rank": rank}, timeout=30))

    def one_fails():
        with ranks.together("load the base", timeout=30):
            if rank == 1:
                time.sleep(0.3)
                raise ValueError("torn shard")
            if rank == 2:
                time.sleep(2)

    tried("one fails", one_fails)
    tried("subset", lambda: Ranks.resolve([2, 0]).exchange("pair", rank, timeout=30) if rank != 1 else None)
    tried("not in it", lambda: Ranks.resolve([0, 2]) and None)
    tried("self", lambda: Ranks.resolve("self").exchange("alone", rank, timeout=30) if rank == 2 else None)
    exchange.host_identity = lambda: "one" if rank == 0 else "two"
    tried("leader", lambda: ranks.leader(timeout=30))
    tried("late", lambda: ranks.exchange("load", timeout=0.5) if rank != 2 else None)
    dist.barrier()
    tried("too late", lambda: ranks.exchange("load", timeout=30) if rank == 2 else None)
    dist.barrier()
    dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def torchrun() -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, 3).found


def test_torchrun_all_succeed(torchrun: list[dict[str, Any]]):
    for rank, found in enumerate(torchrun):
        assert found["set"]["value"] == [rank, 3]
        assert found["all"]["value"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_torchrun_one_fails_and_all_raise_with_the_cause(torchrun: list[dict[str, Any]]):
    assert torchrun[1]["one fails"]["error"] == "ValueError"
    for rank in (0, 2):
        found = torchrun[rank]["one fails"]
        assert found["error"] == "RankError"
        assert "Rank 1 (host " in found["text"]
        assert "failed to load the base" in found["text"]
        assert "ValueError: torn shard" in found["text"]
    assert torchrun[0]["one fails"]["seconds"] < torchrun[2]["one fails"]["seconds"]


def test_torchrun_a_subset_and_one_alone(torchrun: list[dict[str, Any]]):
    assert [found["subset"]["value"] for found in torchrun] == [[0, 2], None, [0, 2]]
    assert torchrun[1]["not in it"]["error"] == "ArgumentError"
    assert torchrun[2]["self"]["value"] == [2]


def test_torchrun_two_nodes(torchrun: list[dict[str, Any]]):
    assert [found["leader"]["value"] for found in torchrun] == [0, 1, 1]


def test_torchrun_one_never_arrives(torchrun: list[dict[str, Any]]):
    for rank, case in ((0, "late"), (1, "late"), (2, "too late")):
        assert torchrun[rank][case]["error"] == "RankTimeout"
        assert "rank 2 of 3" in torchrun[rank][case]["text"]


# Rank 0 holds the store in its own process, and no launcher watches.
OWN_STORE = (
    PRELUDE
    + """
    from datetime import timedelta
    import pathlib
    address = pathlib.Path(os.environ["RENDEZVOUS"])
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
        address.with_suffix(".part").write_text(str(store.port))
        address.with_suffix(".part").replace(address)
    else:
        while not address.exists():
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(address.read_text()), None, False, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    ranks = Ranks.resolve()
    ranks.exchange("begin", timeout=30)

    def load():
        with ranks.together("load", timeout=30):
            if rank == 0:
                time.sleep(0.2)
                raise ValueError("torn shard")

    tried("load", load)
    os._exit(0)
"""
)


def test_a_rank_that_holds_the_store_leaves_after_the_others_have_read(rank_server: RankServer):
    begin, end = OWN_STORE.split("    def load():")[0], "    os._exit(0)\n"
    slow = """
    from safe_loading._ranks import store_exchange
    wait = store_exchange.StoreExchange._wait
    def late(self, timeout):
        there = wait(self, timeout)
        time.sleep(0.5 * rank)  # rank 1 has read and ended when rank 0 looks who is left, before rank 2 has read
        return there
    store_exchange.StoreExchange._wait = late
    ranks.exchange("end", timeout=30)
    report(done=True)
"""
    assert [found["done"] for found in rank_server.spawn(begin + slow + end, 3).found] == [True] * 3


@pytest.mark.parametrize("moment", ["exchange", "connect"])
def test_a_store_that_is_silent_is_a_timeout(rank_server: RankServer, moment: str):
    start = OWN_STORE.split("    ranks = Ranks.resolve()" if moment == "connect" else "    def load():")[0]
    stopped = """
    import signal
    dist.barrier()
    if rank == 0:
        if os.fork() == 0:
            while len(list(address.parent.glob("heard-*"))) < 2:
                time.sleep(0.02)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    time.sleep(0.3)
    from safe_loading._ranks import exchange as module
    module.OPENING_SECONDS = 1.0
    tried("load", lambda: Ranks.resolve().exchange("load the base", timeout=0.5))
    (address.parent / f"heard-{rank}").touch()
    os._exit(0)
"""
    for found in rank_server.spawn(start + stopped, 3, timeout=90).found[1:]:
        assert found["load"]["error"] == "RankTimeout"
        assert "store of the process group does not answer" in found["load"]["text"]
        assert ("load the base" if moment == "exchange" else "connect to the other ranks") in found["load"]["text"]


def test_the_cause_outlives_the_rank_that_holds_the_store(rank_server: RankServer):
    run = rank_server.spawn(OWN_STORE, 3)
    assert run.found[0]["load"]["error"] == "ValueError"
    for found in run.found[1:]:
        assert found["load"]["error"] == "RankError"
        assert "ValueError: torn shard" in found["load"]["text"]


def test_ranks_of_a_test_do_not_outlive_it(tmp_path: Path):
    script = f"import pathlib, time; time.sleep(1.2); pathlib.Path({str(tmp_path / 'x')!r}).touch()"
    with pytest.raises(RanksFailed, match=r"not done after 0\.2 s"):
        spawn_ranks(script, 1, timeout=0.2)
    time.sleep(1.5)
    assert not (tmp_path / "x").exists()


def test_a_failed_rank_of_a_test_is_seen():
    with pytest.raises(RanksFailed, match=r"status 3:\n(?s:.*)said this"):
        spawn_ranks("import sys; report(found=1); print('said this'); sys.exit(3)", 1)
    run = spawn_ranks("import sys; report(found=1); sys.exit(3)", 1, check=False)
    assert (run.code, run.found) == (3, [{"found": 1}])


# Imports once, and forks the ranks of each job, of which the last one ends.
GONE = """
import functools, os, signal, time
from safe_loading._ranks.exchange import Ranks
from torchrun import fork_ranks, held_store

def rank_main(kind, rank):
    ranks = Ranks.resolve()
    ranks.exchange("begin", timeout=30)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL) if kind == "killed" else os._exit(0)
    start = time.monotonic()
    try:
        ranks.exchange("load", timeout=60)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": None}

with held_store() as port:
    for kind in ("killed", "left"):
        report(**{kind: fork_ranks(port, kind, 3, functools.partial(rank_main, kind))["ranks"]})
"""


def test_a_rank_that_is_gone_is_named_long_before_the_limit(rank_server: RankServer):
    for outcomes in rank_server.spawn(GONE, 1).found[0].values():
        assert outcomes[2] is None
        for outcome in outcomes[:2]:
            assert outcome["error"] == "RankError"
            assert "Rank 2 (host " in outcome["text"]
            assert "ended before all 3 ranks could load" in outcome["text"]
            assert outcome["seconds"] < LONG


def test_a_process_that_ended_is_told_from_one_that_lives_and_from_its_successor():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        began = machine._start_time(child.pid)
        entries = machine.process_entry(0) + f"1:{child.pid}:{began};2:{child.pid}:{int(began) - 1};"
        assert machine.ended_processes(entries, (0, 1, 2)) == {2: child.pid}
        assert machine.ended_processes(entries, (0, 1)) == {}
        child.kill()
        while machine._start_time(child.pid):  # it is a zombie now: nobody has waited for it
            time.sleep(0.01)
        assert machine.ended_processes(entries, (0, 1)) == {1: child.pid}
    finally:
        child.kill()
        child.wait(LONG)
    assert machine.ended_processes(entries, (0, 1)) == {1: child.pid}


def test_without_proc_nobody_is_declared_dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "none")
    assert machine.neighborhood() is None
    monkeypatch.setattr(store_exchange, "_LIVENESS_SECONDS", 0.0)
    first, second = each(group([dist.HashStore()] * 2), lambda ranks: ranks.exchange("say", ranks.rank, timeout=LONG))
    assert first == second == [0, 1]
