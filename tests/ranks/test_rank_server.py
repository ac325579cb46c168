"""The server of ranks keeps torchrun's promises to a test: places, output, statuses, and nothing outlives a job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pages import run_command
from rank_server import RankServer
from torchrun import RanksFailed

PLACES = """
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RENDEZVOUS")
places = {name: os.environ[name] for name in names if name in os.environ}
report(places=places, cwd=os.getcwd(), env=os.environ.get("E"))
"""
# a rank, and a process that it has started, each of which would write a file
LATE = """
import os, pathlib, sys, time
name = "rank" if os.fork() else "child"
time.sleep(1.5)
pathlib.Path(sys.argv[1], name).touch()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    """A server that imports nothing, and so starts at once."""
    with RankServer(modules=()) as server:
        yield server


def test_each_rank_has_its_place(server: RankServer) -> None:
    launched = [facts["places"] for facts in server.run(PLACES, 2).found]
    assert [(place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) for place in launched] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert launched[0]["MASTER_PORT"] == launched[1]["MASTER_PORT"]
    assert "RENDEZVOUS" not in launched[0]
    spawned = [facts["places"] for facts in server.spawn(PLACES, 2).found]
    assert [set(place) for place in spawned] == [{"RANK", "WORLD_SIZE", "RENDEZVOUS"}] * 2
    assert spawned[0]["RENDEZVOUS"] == spawned[1]["RENDEZVOUS"]
    assert server.run_alone(PLACES).found[0]["places"] == {}


def test_a_rank_has_the_folder_and_the_environment_of_its_job(
    server: RankServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = server.run_alone(PLACES, env={"E": "mine"}).found[0]
    assert (facts["cwd"], facts["env"]) == (str(tmp_path), "mine")
    assert server.run_alone(PLACES).found[0]["env"] is None
    assert server.run_alone(PLACES, env={"E": None}).found[0]["env"] is None


def test_a_failure_has_the_output_and_what_was_found_before_it(server: RankServer) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)statuses \[.*3.*\]:.*said this"):
        server.run_alone("import sys; print('said this'); sys.exit(3)")
    with pytest.raises(RanksFailed, match="17 is no number"):
        server.run("raise ValueError('17 is no number')", 2)
    run = server.run_alone("import sys; report(found=1); sys.exit(3)", check=False)
    assert (run.code, run.found) == (3, [{"found": 1}])


CRASH = """
import os, pathlib, sys
runs = pathlib.Path(sys.argv[1])
with runs.open("a") as file:
    file.write("x")
if len(runs.read_text()) <= int(sys.argv[2]):
    os.kill(os.getpid(), 11)
report(runs=len(runs.read_text()))
"""

CRASH_OF_A_RANK = """
import os, pathlib
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1 and not pathlib.Path("crashed").exists():
    pathlib.Path("crashed").touch()
    os.kill(os.getpid(), 11)
dist.barrier()
if dist.get_rank() == 0:
    print(dist.get_world_size(), "ranks")
"""


def test_what_a_signal_ended_is_run_once_more_and_said(server: RankServer, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"(?s)\[-11\], and run again:.*Segmentation fault.*script.py"):
        assert server.run_alone(CRASH, args=[tmp_path / "once", "1"]).found == [{"runs": 2}]
    with pytest.warns(UserWarning, match="run again"), pytest.raises(RanksFailed, match=r"statuses \[-11\]"):
        server.run_alone(CRASH, args=[tmp_path / "twice", "2"])


def test_a_command_of_a_page_that_a_signal_ended_is_run_once_more(
    rank_server: RankServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(CRASH_OF_A_RANK)
    with pytest.warns(UserWarning, match="-11.*, and run again"):
        assert run_command("torchrun --standalone --nproc-per-node=2 train.py", rank_server) == "2 ranks\n"


@pytest.mark.parametrize("alone", [False, True])
def test_what_a_late_job_has_started_does_not_outlive_it(server: RankServer, tmp_path: Path, alone: bool) -> None:
    start = partial(server.run_alone, LATE) if alone else partial(server.run, LATE, 2)
    with pytest.raises(RanksFailed, match=r"not done after 0\.5 s"):
        start(args=[tmp_path], timeout=0.5)
    time.sleep(1.5)
    assert list(tmp_path.iterdir()) == []
    assert server.run_alone("report(there=True)").found == [{"there": True}], "the server goes on"


def test_a_server_that_ends_takes_its_ranks_along(tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    with RankServer(modules=()) as server:
        server.run_alone("report(there=True)")
        assert server._process is not None
        pid = server._process.pid
        if not os.fork():
            while not started.exists() or not started.read_text():
                time.sleep(0.02)
            os.kill(pid, 15)
            os._exit(0)
        with pytest.raises(RanksFailed, match="did not answer, or ended"):
            server.run_alone(script, args=[started])
    os.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
