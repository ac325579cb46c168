"""A wrap or a prepare that is interrupted or fails, on one rank and on two: all is as it was, and it runs again."""

from __future__ import annotations

from typing import Any

import pytest
from rank_server import RankServer
from test_load_at_prepare import PRELUDE

SCRIPT = """
import importlib, json, os, signal
import accelerate
from accelerate.state import AcceleratorState
from peft import get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from fsdp_cases import llama, reference
from interrupts import WITHIN, everything, interrupted_at, sampled
from safe_loading import load_at_prepare, wrap_fsdp_meta_safe
from safe_loading._ranks.exchange import Ranks
from safe_loading._sharding import fsdp1, fsdp2

importlib.import_module("safe_loading._sharding.load_at_prepare")._has_several_ranks = lambda: True
kind, version, how, most = sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
case = Case("accelerate", "LoRA", "none", version)
within = (*WITHIN, str(pathlib.Path(accelerate.__file__).parent))
ranks = dist.get_world_size()
pids = [None] * ranks
dist.all_gather_object(pids, os.getpid())
scaled = "base_model.model.model.layers.1.mlp.up_proj.weight"

class Prepare:
    # what a script has before it calls prepare
    def __init__(self, lean=True):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(11)
        mixed = "bf16" if version == 2 else "no"
        self.accelerator = accelerate_with_fsdp(case, mixed_precision=mixed)
        self.accelerator.state.fsdp_plugin.activation_checkpointing = version == 2
        with load_at_prepare(timeout=60) if lean else contextlib.nullcontext():
            dtype = torch.bfloat16 if version == 2 else torch.float32
            model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager")
        # adapters in 16 bits, which prepare casts
        self.model = get_peft_model(model, lora(case), autocast_adapter_dtype=version == 1)
        with torch.no_grad():
            self.model.get_parameter(scaled).mul_(2)  # so that it is real
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW([{"params": trained[:3], "lr": 1e-3}, {"params": trained[3:]}], lr=1e-2)
        self.loader = DataLoader(torch.arange(40).reshape(20, 2), batch_size=2, shuffle=True)

    def call(self):
        if version == 1:
            model, loader = self.accelerator.prepare(self.model, self.loader)
            return model, None, loader
        return self.accelerator.prepare(self.model, self.optimizer, self.loader)

    def facts(self):
        found = everything(self.model)
        found["generator"] = str(found["generator"])
        owners = {"optimizer": self.optimizer, "loader": self.loader, "sampler": self.loader.sampler,
                  "plugin": self.accelerator.state.fsdp_plugin, "accelerator": self.accelerator}
        for name, owner in owners.items():
            found[name] = {key: id(value) for key, value in vars(owner).items()}
        found["groups"] = [{key: [id(p) for p in value] if key == "params" else value for key, value in group.items()}
                           for group in self.optimizer.param_groups]
        lists = (self.accelerator._models, self.accelerator._optimizers, self.accelerator._dataloaders)
        found["prepared"] = [[id(each) for each in items] for items in lists]
        return found

    def made(self):
        # the weights, which of them the optimizer has, and the order of the rows
        model, optimizer, loader = self.call()
        names = {id(p): plain(name) for name, p in model.named_parameters()}
        groups = optimizer.param_groups if optimizer is not None else []
        held = [[names[id(p)] for p in group["params"]] for group in groups]
        return weights(model), held, [row.tolist() for row in loader]

class Wrap:
    # a model with values, on the first rank or on all
    def __init__(self, lean=True):
        torch.manual_seed(11)
        make = lambda: get_peft_model(reference(lambda: llama(num_hidden_layers=2)), lora(case))
        self.model = make()
        if rank and kind == "rank 0":
            self.model = self.model.to("meta")
        self.lean = lean

    def call(self):
        return wrap_fsdp_meta_safe(self.model, version=version, timeout=60)

    def facts(self):
        return everything(self.model)

    def made(self):
        return [weights(self.call())] if self.lean else [
            dict(self.model.named_parameters()) if rank == 0 or kind != "rank 0" else None
        ]

Script = Prepare if kind == "prepare" else Wrap

@contextlib.contextmanager
def no_room_in(label):
    # this rank fails at the end of a block that the ranks do together
    real = Ranks.together
    @contextlib.contextmanager
    def together(self, name, *, timeout):
        with real(self, name, timeout=timeout) as phase:
            yield phase
            if name == label:
                raise MemoryError("no room")
    Ranks.together = together
    try:
        yield
    finally:
        Ranks.together = real

labels = []
real_together = Ranks.together
def noted(self, name, *, timeout):
    labels.append(name)
    return real_together(self, name, timeout=timeout)
Ranks.together = noted
Script().call()  # what a first call imports and remembers
Ranks.together = real_together
if how == "fails":
    turns = labels
else:
    script = Script()
    with interrupted_at(within=within) as lines:
        script.call()
    # half of them in the last part, in which the model is changed
    turns = [
        *sampled(lines.count * 9 // 10, most),
        *(lines.count * 3 // 4 + number for number in sampled(lines.count // 6, most)),
    ]
wanted = Script(lean=False).made()
found = []
for turn, where in enumerate(turns):
    script, victim = Script(), turn % ranks
    before, error, place = script.facts(), None, str(where)
    try:
        dist.barrier()  # in here, as the signal may come to a rank that has not left it yet
        if rank != victim:
            script.call()
        elif how == "fails":
            with no_room_in(where):
                script.call()
        else:
            with interrupted_at(where, within=within, signalled=turn % 4 < 2, also=pids) as lines:
                script.call()
    except BaseException as raised:
        error = type(raised).__name__
    after = script.facts()
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    found.append([lines.place if how != "fails" and rank == victim else place, error, changed])
    report(found=found)
    if ranks > 1 and (how != "fails" or where == "scatter the weights"):
        # the ranks were cut off in the middle of what they sent one another
        dist.destroy_process_group()
        # by a file: the next port may be taken
        dist.init_process_group("gloo", init_method=f"file://{folder}/group{turn}", rank=rank, world_size=ranks)
    again = script.made()
    first = [] if wanted[0] is None else differing(wanted[0], again[0])
    found[-1] += [first, list(wanted[1:]) == list(again[1:])]
    report(found=found)
    del again
report(done=True)
dist.barrier()
dist.destroy_process_group()
"""


def check(rank_server: RankServer, folder: Any, ranks: int, *args: object) -> list[list[Any]]:
    run = rank_server.run(PRELUDE + SCRIPT, ranks, args=[folder, *map(str, args)], timeout=400)
    for facts in run.found:
        assert facts["done"]
        for where, error, *changed_differing_same in facts["found"]:
            assert error in ("KeyboardInterrupt", "MemoryError", "RankError"), where
            assert changed_differing_same == [[], [], True], where
    return [facts["found"] for facts in run.found]


@pytest.mark.parametrize("most", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", [2, 1])
def test_an_interrupted_prepare_leaves_everything_as_it_was_and_runs_again(
    rank_server: RankServer, tmp_path: Any, version: int, most: int
) -> None:
    """In the same process; the ranks of several meet again in a new process group, which the next test makes."""
    (found,) = check(rank_server, tmp_path, 1, "prepare", version, "interrupted", most)
    assert {error for _, error, *_ in found} == {"KeyboardInterrupt"}


@pytest.mark.each_value
@pytest.mark.parametrize("most", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("kind", [pytest.param("prepare", marks=pytest.mark.slow), "rank 0", "all"])
def test_ctrl_c_on_all_ranks_leaves_everything_as_it_was_and_a_new_group_goes_on(
    rank_server: RankServer, tmp_path: Any, kind: str, version: int, most: int
) -> None:
    """The first rank has values and the second is on meta ("rank 0"), or both have them."""
    found = check(rank_server, tmp_path, 2, kind, version, "interrupted", most)
    assert [{error for _, error, *_ in each} <= {"KeyboardInterrupt", "RankError"} for each in found] == [True, True]


@pytest.mark.each_value
@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("kind", ["prepare", "rank 0", "all"])
def test_where_one_rank_fails_both_are_as_they_were_and_go_on(
    rank_server: RankServer, tmp_path: Any, kind: str, version: int
) -> None:
    """At each step that the ranks do together; only where weights were being sent it takes a new group."""
    found = check(rank_server, tmp_path, 2, kind, version, "fails", 0)
    assert {"MemoryError", "RankError"} == {error for each in found for _, error, *_ in each}


LEAVES = """
import os, pathlib, signal, sys, threading, time
import torch, torch.distributed as dist
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.waiting import Waiting
from safe_loading._sharding.local_shard import ElementRange
from safe_loading._sharding.scatter import broadcast, warm_up

dist.init_process_group("gloo")
rank, left, cpu = dist.get_rank(), pathlib.Path(sys.argv[1], "left"), torch.device("cpu")
waiting = Waiting(Ranks.resolve(), "scatter the weights", cpu, 600)
if rank == 1:
    memory = {"weight": torch.empty(4)}
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        warm_up(dist.group.WORLD, cpu, waiting)
        broadcast([ElementRange("weight", 0, 4, torch.float32)], None, memory.get, dist.group.WORLD, cpu, waiting)
    except KeyboardInterrupt:
        report(interrupted=True)
    dist.destroy_process_group()
    left.touch()
while not left.exists():
    time.sleep(0.01)
if rank == 0:
    dist.destroy_process_group()
"""


def test_an_interrupted_rank_leaves_its_group_while_the_other_still_has_its_own(
    rank_server: RankServer, tmp_path: Any
) -> None:
    """Else two that meet again in a new group would wait for one another, as the other one does not close its end."""
    assert rank_server.run(LEAVES, 2, args=[tmp_path], timeout=60).found[1] == {"interrupted": True}
