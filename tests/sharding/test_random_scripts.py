"""Random scripts between ``from_pretrained`` and ``prepare``: load_at_prepare trains the values of a plain run.

A script writes, replaces, swaps, copies, cuts, resizes, ties, unties, casts, freezes, reads and adds an adapter in
random order. The same seed gives the same script to the plain model.
"""

from __future__ import annotations

from typing import Any

import pytest
from rank_server import RankServer

SCRIPT = """
import contextlib, copy, pathlib, random, sys, traceback, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
from safe_loading import load_at_prepare
from trainer_matrix import *
tell_accelerate()
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), pathlib.Path(sys.argv[1])
base = folder / "base"
if rank == 0:
    save_base(base)
dist.barrier()

def core(m):
    return m.get_base_model() if isinstance(m, PeftModel) else m
def layers(m):
    return core(m).model.layers
def some(m, r):
    name = r.choice(sorted(n for n, _ in m.named_parameters()))
    path, _, attribute = name.rpartition(".")
    return m.get_submodule(path), attribute
def write(m, r):
    module, name = some(m, r)
    parameter, how = getattr(module, name), r.randrange(6)
    with torch.no_grad():
        if how == 0: nn.init.zeros_(parameter)
        elif how == 1: parameter.data.normal_()
        elif how == 2: parameter[0] = parameter[-1] + 1
        elif how == 3: parameter.data = torch.full_like(parameter, 0.5)
        elif how == 4: parameter.detach().mul_(2)
        else: parameter.copy_(torch.rand_like(parameter))
def replace(m, r):
    module, name = some(m, r)
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(torch.randn(old.shape).to(old.dtype), old.requires_grad))
def swap(m, r):
    of = layers(m)
    one, other = r.randrange(len(of)), r.randrange(len(of))
    of[one], of[other] = of[other], of[one]
def swap_weights(m, r):
    mlp = r.choice(list(layers(m))).mlp
    mlp.up_proj.weight, mlp.gate_proj.weight = mlp.gate_proj.weight, mlp.up_proj.weight
def copy_layer(m, r):
    of = layers(m)
    if len(of) < 4:
        of.append(copy.deepcopy(r.choice(list(of))))
def cut(m, r):
    if len(layers(m)) > 1:
        del layers(m)[r.randrange(len(layers(m)))]
def resize(m, r):
    core(m).resize_token_embeddings(r.randrange(200, 260))
def tie(m, r):
    inner = core(m)
    if inner.lm_head.weight.shape == inner.model.embed_tokens.weight.shape:
        inner.lm_head.weight = inner.model.embed_tokens.weight
def untie(m, r):
    head = core(m).lm_head
    head.weight = nn.Parameter(head.weight.clone())
def cast(m, r):
    m.to(r.choice([torch.bfloat16, torch.float16, torch.float32]))
def freeze(m, r):
    r.choice(list(m.modules())).requires_grad_(False)
def read(m, r):
    module, name = some(m, r)
    assert getattr(module, name).float().sum().isfinite()
def adapter(m, r):
    if isinstance(m, PeftModel):
        return m
    return get_peft_model(m, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=r.random() < 0.3))
STEPS_OF = [write, write, replace, swap, swap_weights, copy_layer, cut, resize, tie, untie, cast, freeze, read, adapter]

def changed(m, seed):
    r, done = random.Random(seed), []
    for number in range(r.randrange(2, 8)):
        step = r.choice(STEPS_OF)
        done.append(step.__name__)
        torch.manual_seed(1000 * seed + number)
        m = step(m, r) or m
    return m, done

def load(lean):
    with load_at_prepare() if lean else contextlib.nullcontext():
        return AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")

def facts(m):
    return {plain(n): (p.dtype, p.requires_grad, whole(p.detach())) for n, p in m.named_parameters()}

def prepared(m):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate_with_fsdp(Case("accelerate", "full", "none", 2))
    return accelerator.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))[0]

def problem(seed):
    model, done = changed(load(False), seed)
    wanted = facts(model)
    try:
        found = facts(prepared(changed(load(True), seed)[0]))
    except Exception as error:
        return [done, f"{type(error).__name__}: {error}"[:600] + traceback.format_exc()[-600:]]
    wrong = sorted({*wanted, *found} - {*wanted} & {*found}) + [
        name for name in wanted if name in found and not (
            wanted[name][:2] == found[name][:2] and torch.equal(wanted[name][2], found[name][2]))]
    return [done, wrong] if wrong else None

first, last = int(sys.argv[2]), int(sys.argv[3])
problems = {str(seed): told for seed in range(first, last) if (told := problem(seed)) is not None}
report(problems=problems)
dist.barrier()
dist.destroy_process_group()
"""
BLOCK = 100  # scripts of one process group


def check(rank_server: RankServer, folder: Any, first: int, last: int) -> None:
    found = rank_server.run(SCRIPT, 2, args=[folder, str(first), str(last)], timeout=600).found
    assert [facts["problems"] for facts in found] == [{}, {}]


def test_random_scripts_train_the_values_of_a_plain_run(rank_server: RankServer, tmp_path: Any) -> None:
    check(rank_server, tmp_path, 0, 12)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, BLOCK))
def test_two_thousand_random_scripts(rank_server: RankServer, tmp_path: Any, first: int) -> None:
    check(rank_server, tmp_path, first, first + BLOCK)
