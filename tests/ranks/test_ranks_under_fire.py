"""A rank is killed or raises at any step of a verb that ranks call together: the others raise, and say whose fault.

``wrap_fsdp_meta_safe`` has a file of its own, and ``merge_lora_inplace`` has one exchange only.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from models import save_adapter, save_llama
from rank_server import RankServer

SCRIPT = """
import contextlib, functools, json, os, pathlib, signal, sys, time, warnings
warnings.simplefilter("ignore")
import peft, torch, torch.distributed as dist
import transformers.models.llama.modeling_llama
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from safe_loading import load_adapter_on_rank, load_peft_on_rank
from safe_loading._ranks.exchange import Ranks
from torchrun import fork_ranks, held_store

base, adapter, second, cases = *map(pathlib.Path, sys.argv[1:4]), json.loads(sys.argv[4])
steps = 0

def alone():
    return load_peft_on_rank(base, adapter, device="cpu", ranks="self")

VERBS = {
    "load_peft_on_rank": (lambda: None, lambda _: load_peft_on_rank(base, adapter, device="cpu", timeout=60)),
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

def rank_main(verb, victim, kind, at, rank):
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
    return {**found, "seconds": time.monotonic() - started, "steps": steps}

with held_store() as port:
    for number, (verb, world, *who) in enumerate(cases):
        report(**{str(number): fork_ranks(port, str(number), world, functools.partial(rank_main, verb, *who))})
"""
VERBS = ("load_peft_on_rank", "load_adapter_on_rank")
Case = tuple[str, int, int, str, int]  # verb, ranks, who fails, how, at which step


def tried(server: RankServer, root: Path, cases: list[Case]) -> list[dict[str, Any]]:
    base = save_llama(root / "base")
    folders = [base, save_adapter(root / "adapter", base), save_adapter(root / "second", base, seed=3)]
    found = server.spawn(SCRIPT, 1, args=[*folders, json.dumps(cases)], timeout=1800).found[0]
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
        assert (f"process {facts['pids'][victim]}) ended" if kind == "kill" else "MemoryError: no room here") in each[
            "text"
        ]
        assert each["seconds"] < 30


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sample", "all"])
def test_the_other_ranks_raise_and_name_the_rank_and_its_cause(
    rank_server: RankServer, tmp_path: Path, every: bool
) -> None:
    dice = random.Random(20261122)
    cases: list[Case] = []
    for verb in VERBS:
        for world in (2, 4):
            # Step 3 is the first exchange. Who is killed before it has never been there, and is missed at the limit.
            steps = {"kill": range(4, 25), "raise": range(1, 25)}
            for kind, at in steps.items():
                chosen = at if every else dice.sample(at[:6], 1)
                cases += [(verb, world, dice.randrange(world), kind, step) for step in chosen]
    found = tried(rank_server, tmp_path, cases)
    for case, facts in zip(cases, found, strict=True):
        check(case, facts)
    fallen = {
        verb
        for (verb, *_), facts in zip(cases, found, strict=True)
        if any(each and each["error"] == "RankError" for each in facts["ranks"])
    }
    assert fallen == set(VERBS)
