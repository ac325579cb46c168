"""Why FSDP1 over meta needs care: the recipe that is passed around, its three mistakes, and the right way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_cases import NOTHING
from peft import LoraConfig, get_peft_model
from rank_server import RankServer
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import wrap_fsdp_meta_safe

SCRIPT = """
import sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from fsdp_cases import *
from safe_loading import SafeLoadingError, wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank = dist.get_rank()
one = reference(llama)

def wrapped(model, inner=None, **options):
    # what the recipe does, on the CPU; the layers are units
    policy = CustomPolicy(lambda module: type(module).__name__ == "LlamaDecoderLayer")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)

def poisoned(module, recurse):
    # to_empty with memory that tells: what nothing fills later is NaN
    module.to_empty(device="cpu", recurse=recurse)
    with torch.no_grad():
        for parameter in module.parameters(recurse=recurse):
            parameter.fill_(float("nan"))

# 1. `param_init_fn=module.to_empty(...)` is a module, made real at once
model = on_meta(llama)
given = model.to_empty(device="cpu")
evaluated = [isinstance(given, nn.Module), not any(p.is_meta for p in model.parameters())]
try:
    wrapped(on_meta(llama), param_init_fn=given)
    called = None
except Exception as error:
    called = type(error).__name__
report(evaluated=[evaluated, called])

# 2. given to rank 0, `if not rank`: it wipes the only copy, and the others have nothing to receive into
model = reference(llama) if rank == 0 else on_meta(llama)
if not rank:
    poisoned(model, True)
report(wiped=any(p.isnan().any().item() for p in model.parameters() if not p.is_meta) if rank == 0 else True)
model = on_meta(llama)
try:
    # the others, without a function: FSDP1 calls reset_parameters of modules that have none, or initializes at random
    wrapped(model, param_init_fn=None)
    others = "initialized"
except Exception as error:
    others = type(error).__name__
report(others=others)

# FSDP1 refuses CPU parameters with sync_module_states; gloo broadcasts them as well as NCCL those of a GPU
from torch.distributed.fsdp import _init_utils
_init_utils._check_module_states_for_sync_module_states = lambda states: None

# 3. recursive, called from the outside after the units inside are wrapped: their values go
model = reference(llama) if rank == 0 else on_meta(llama)
class Recursive:
    def __call__(self, module):
        poisoned(module, True)
if rank:
    options = dict(param_init_fn=Recursive())
else:
    options = dict(param_init_fn=lambda module: None)
model = wrapped(model, sync_module_states=True, **options)
with FullyShardedDataParallel.summon_full_params(model, writeback=False):
    lost = sorted(plain(n) for n, p in model.named_parameters() if p.isnan().any())
report(recursive=len(lost))

# right: own parameters only
model = wrap_fsdp_meta_safe(on_meta(llama) if rank else reference(llama), version=1)
report(right=differences(one, model, inputs("llama")), type=type(model).__name__)

# mixed requires_grad in one unit, mixed precision, and a 4-bit weight kept in bytes
model = reference(llama) if rank == 0 else on_meta(llama)
for half in (one, model):
    for name, parameter in half.named_parameters():
        parameter.requires_grad_("mlp" in name)
model = wrap_fsdp_meta_safe(model, version=1)
report(frozen=differences(one, model, inputs("llama")))
model = reference(llama) if rank == 0 else on_meta(llama)
model = wrap_fsdp_meta_safe(model, version=1, mp_policy=torch.bfloat16)
report(low=str(model(**inputs("llama")).logits.dtype))

class Params4bit(nn.Parameter):
    pass

model = on_meta(llama)
small = torch.empty(30, 1, dtype=torch.uint8, device="meta")
model.model.layers[0].mlp.up_proj.weight = Params4bit(small, requires_grad=False)
try:
    wrap_fsdp_meta_safe(model, version=1)
    four = None
except SafeLoadingError as error:
    four = str(error)
report(four=four)

# what a rank takes while units are built: each would be there twice if its parameters were joined by a copy
from safe_loading._sharding import fsdp1
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
with torch.device("meta"):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)) for _ in range(3)))
units = [fsdp1.ShardingUnit((name,), (), 0) for name, _ in model.named_children()]
mesh = init_device_mesh("cpu", (2,))
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
    model = fsdp1.wrap(model, units, mesh, torch.device("cpu"), None, None, [], None)
live = [0]
for event in running.profiler.kineto_results.events():
    live += [live[-1] + event.nbytes()] if event.name() == "[memory]" else []
report(peak=max(live), kept=live[-1], local=fsdp1.local_bytes(model))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 2, timeout=200).found


def test_the_recipe_makes_the_model_real_at_once_and_hands_over_a_module(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["evaluated"][0] == [True, True]
        assert facts["evaluated"][1] is not None


def test_the_recipe_wipes_the_only_copy_and_leaves_the_others_without_a_way(found: list[dict[str, Any]]) -> None:
    assert found[0]["wiped"]
    assert all(facts["others"] != "initialized" for facts in found)


def test_a_recursive_param_init_fn_wipes_units_that_are_wrapped_already(found: list[dict[str, Any]]) -> None:
    assert all(facts["recursive"] > 0 for facts in found)


def test_here_it_is_right(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["right"] == NOTHING
        assert facts["type"] == "FullyShardedDataParallel"
        assert facts["frozen"] == NOTHING
        assert facts["low"] == "torch.bfloat16"


def test_four_bit_weights_kept_in_bytes_are_refused_with_the_way_out(found: list[dict[str, Any]]) -> None:
    assert all("bnb_4bit_quant_storage=torch.bfloat16" in facts["four"] for facts in found)


def test_a_rank_takes_its_shards_and_one_unit_while_they_are_built(found: list[dict[str, Any]]) -> None:
    for facts in found:
        unit = facts["local"] * 2 // 3
        assert facts["kept"] >= facts["local"]
        assert facts["peak"] <= facts["local"] + unit + unit // 8


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("policy", [None, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_single_rank_trains_and_saves_an_adapter_over_a_frozen_base(
    tmp_path: Path, tied: bool, policy: torch.dtype | None
) -> None:
    """The second step over tied weights ended in an assertion of torch, and ``state_dict`` after a step in another."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    lora = LoraConfig(r=4, target_modules=["q_proj"], bias="all", modules_to_save=["mlp"], init_lora_weights=False)
    truth = get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path), lora)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path), lora)
    model.load_state_dict(truth.state_dict())
    wrapped = wrap_fsdp_meta_safe(model, version=1, mp_policy=policy)
    names = [name for name, _ in model.named_parameters()]
    tokens = torch.arange(24).view(2, 12)
    steps = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (truth, wrapped)]
    for _ in range(3):
        losses = [each(tokens, labels=tokens).loss for each in (truth, wrapped)]
        for loss, step in zip(losses, steps, strict=True):
            loss.backward()
            step.step()
            step.zero_grad()
        assert [name for name, _ in model.named_parameters()] == names
        saved, whole = wrapped.state_dict(), truth.state_dict()
        assert saved.keys() == whole.keys()
        if policy is None:
            assert torch.equal(*losses)
            assert all(torch.equal(saved[name], whole[name]) for name in whole)
    with torch.no_grad():
        logits = [each.eval()(tokens).logits.float() for each in (truth, wrapped)]
    assert torch.allclose(*logits, atol=0.0 if policy is None else 0.1)
