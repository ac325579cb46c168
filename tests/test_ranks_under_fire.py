"""A rank is killed or raises at any step of a verb that ranks call together: the others raise, and say whose fault.

``wrap_fsdp_meta_safe`` has a file of its own, and ``merge_lora_inplace`` has one exchange only. One process imports
everything and forks the ranks of each case; another holds the store, as torchrun does, so that any rank may die.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from models import save_adapter, save_llama
from torchrun import spawn_ranks

SCRIPT = """
import contextlib, json, os, pathlib, signal, sys, time, traceback, warnings
warnings.simplefilter("ignore")
import peft, torch, torch.distributed as dist
import transformers.models.llama.modeling_llama
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from safe_loading import load_adapter_on_rank, load_peft_on_rank
from safe_loading._distributed.exchange import Ranks

folder, base, adapter, second, cases = *map(pathlib.Path, sys.argv[1:5]), json.loads(sys.argv[5])
# in a process of its own: its threads hold locks, which a fork would take along locked
ours, theirs = os.pipe()
server_pid = os.fork()
if not server_pid:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(theirs, str(server.port).encode())
    signal.pause()
port = int(os.read(ours, 10))
steps = 0

def alone():
    return load_peft_on_rank(adapter, base, device="cpu", ranks="self")

VERBS = {
    "load_peft_on_rank": (lambda: None, lambda _: load_peft_on_rank(adapter, base, device="cpu", timeout=60)),
    "load_adapter_on_rank": (alone, lambda model: load_adapter_on_rank(model, second, "second", timeout=60)),
}

def arm(kind, at):
    real_together, real_exchange = Ranks.together, Ranks.exchange

    def step(raises):
        global steps
        steps += 1
        if steps == at:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif raises:
                raise MemoryError("no room here")

    @contextlib.contextmanager
    def together(self, name, *, timeout):
        with real_together(self, name, timeout=timeout) as phase:
            step(True)
            yield phase
            step(True)

    def exchange(self, name, payload=None, error=None, *, timeout):
        step(False)
        result = real_exchange(self, name, payload, error, timeout=timeout)
        step(False)
        return result

    Ranks.together, Ranks.exchange = together, exchange

def rank_main(number, verb, world, victim, kind, at, rank):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world)
    make, call = VERBS[verb]
    made = make()
    dist.barrier()
    if rank == victim:
        arm(kind, at)
    started = time.monotonic()
    found = {"error": None, "text": ""}
    try:
        call(made)
    except BaseException as error:
        found = {"error": type(error).__name__, "text": str(error)}
    found.update(seconds=time.monotonic() - started, steps=steps)
    (folder / f"{number}.{rank}.json").write_text(json.dumps(found))

for number, (verb, world, victim, kind, at) in enumerate(cases):
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            try:
                rank_main(number, verb, world, victim, kind, at, rank)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        pids.append(pid)
    end, left = time.monotonic() + 60, set(pids)
    while left and time.monotonic() < end:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    paths = [folder / f"{number}.{rank}.json" for rank in range(world)]
    report(**{str(number): {
        "pid": pids[victim],
        "ranks": [json.loads(path.read_text()) if path.exists() else None for path in paths],
    }})
os.kill(server_pid, signal.SIGKILL)
"""
VERBS = ("load_peft_on_rank", "load_adapter_on_rank")
Case = tuple[str, int, int, str, int]  # verb, ranks, who fails, how, at which step


def tried(root: Path, cases: list[Case]) -> list[dict[str, Any]]:
    base = save_llama(root / "base")
    folders = [base, save_adapter(root / "adapter", base), save_adapter(root / "second", base, seed=3)]
    found = spawn_ranks(SCRIPT, 1, args=[root, *folders, json.dumps(cases)], timeout=1800).found[0]
    return [found[str(number)] for number in range(len(cases))]


def check(case: Case, facts: dict[str, Any]) -> None:
    _, world, victim, kind, at = case
    own = facts["ranks"][victim]
    if own is not None and own["error"] is None:  # at this step it does not raise: see `step`, or it has fewer of them
        assert kind == "raise" or own["steps"] < at
        return
    for rank in set(range(world)) - {victim}:
        each = facts["ranks"][rank]
        assert each is not None, f"rank {rank} hangs in {case}"
        if each["error"] is None:  # it has all that it needs: the victim fell after the last exchange
            assert own is None
            continue
        assert each["error"] == "RankError", (case, each)
        assert f"Rank {victim} (host " in each["text"], (case, each)
        assert (f"process {facts['pid']}) ended" if kind == "kill" else "MemoryError: no room here") in each["text"]
        assert each["seconds"] < 30


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sample", "all"])
def test_the_other_ranks_raise_and_name_the_rank_and_its_cause(tmp_path: Path, every: bool) -> None:
    dice = random.Random(20261122)
    cases: list[Case] = []
    for verb in VERBS:
        for world in (2, 4):
            # Step 3 is the first exchange. Who is killed before it has never been there, and is missed at the limit.
            steps = {"kill": range(4, 25), "raise": range(1, 25)}
            for kind, at in steps.items():
                chosen = at if every else dice.sample(at[:6], 1)
                cases += [(verb, world, dice.randrange(world), kind, step) for step in chosen]
    found = tried(tmp_path, cases)
    for case, facts in zip(cases, found, strict=True):
        check(case, facts)
    fallen = {
        verb
        for (verb, *_), facts in zip(cases, found, strict=True)
        if any(each and each["error"] == "RankError" for each in facts["ranks"])
    }
    assert fallen == set(VERBS)
