"""Wrapped models under FSDP2: whichever class is swapped first, units are found, the code runs, the head is trained."""

from __future__ import annotations

import pytest
from rank_server import RankServer

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from wrapped_models import TOKENS, Count, peft_llama
from safe_loading import Transparent, WrapError, attach_head, unwrap_transparent, wrap_fsdp_meta_safe, wrap_transparent
from transformers import LlamaForCausalLM

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))

class Value(Transparent):
    def __call__(self, *args, **kwargs):
        out = super().__call__(*args, **{**kwargs, "output_hidden_states": True})
        out.value = self.value_head(out.hidden_states[-1]).squeeze(-1)
        self.calls += 1
        return out

def model_with_head():
    torch.manual_seed(0)
    return attach_head(peft_llama(), "value_head", nn.Linear(32, 1))

def step(model):
    out = model(input_ids=TOKENS[dist.get_rank():][:1], labels=TOKENS[dist.get_rank():][:1])
    (out.loss + out.value.square().mean()).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.full_tensor()
            else:
                dist.all_reduce(grad)
                grad = grad / 2
            grads[name] = grad
    return grads

def shard(model):
    units = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return len(units)

reference = step(wrap_transparent(model_with_head(), Value, calls=0))
for order in ("wrap first", "shard first"):
    model = model_with_head()
    if order == "wrap first":
        wrap_transparent(model, Value, calls=0)
        units = shard(model)
    else:
        units = shard(model)
        wrap_transparent(model, Value, calls=0)
    found = step(model)
    worst = max(float((found[name] - reference[name]).abs().max()) for name in reference)
    head = found["base_model.model.value_head.modules_to_save.default.weight"]
    register_fsdp_forward_method(model, "generate")
    before = model.calls
    ids = model.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    generated = model.calls - before
    try:
        attach_head(model, "late", nn.Linear(32, 1))
        late = "attached"
    except WrapError as error:
        late = str(error)
    facts = dict(units=units, calls=before, worst=worst, head=bool(head.any()), same=sorted(found) == sorted(reference),
                 generated=generated, ids=ids.tolist(), late=late, base=type(model.get_base_model()).__name__,
                 verdicts=[proof.runs for proof in model.wrap_report.proofs])
    unwrap_transparent(model)
    facts["fsdp"] = isinstance(model, FSDPModule)
    facts["wrapped"] = isinstance(model, Transparent)
    facts["name"] = type(model).__name__
    model(input_ids=TOKENS)
    wrap_transparent(model, Count)
    model(input_ids=TOKENS)
    facts["again"] = model.calls
    report(**{order: facts})
whole = wrap_fsdp_meta_safe(peft_llama())
part = whole.get_base_model().model
wrap_transparent(part, Count, within=whole)
with torch.no_grad():
    whole(input_ids=TOKENS)
report(part=[part.calls, [proof.runs for proof in part.wrap_report.proofs],
             [name for name, each in whole.named_parameters() if not isinstance(each, DTensor)]])
late = wrap_transparent(wrap_fsdp_meta_safe(peft_llama()), Count)
for wrapped in (True, False):
    late.calls = 0
    late.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    report(**{f"late {wrapped}": late.calls})
    _ = unwrap_transparent(late) if wrapped else None
plain = model_with_head().eval()
ids = plain.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
report(ids=ids.tolist())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer) -> list[dict[str, object]]:
    return rank_server.run(SCRIPT, 2, timeout=180).found


@pytest.mark.parametrize("order", ["wrap first", "shard first"])
def test_both_orders_shard_train_and_generate(order: str, found: list[dict[str, object]]) -> None:
    for rank in found:
        facts = rank[order]
        assert facts["units"] == 3
        assert facts["calls"] == 1
        assert facts["same"]
        assert facts["worst"] < 1e-5
        assert facts["head"]
        assert facts["generated"] == 3
        assert facts["ids"] == rank["ids"]
        assert facts["base"] == "LlamaForCausalLM"
        assert "the model is sharded already" in facts["late"]


def test_the_proof_waits_for_no_other_rank(found: list[dict[str, object]]) -> None:
    assert found[0]["wrap first"]["verdicts"] == [True, True, True]
    assert found[0]["shard first"]["verdicts"] == [True, True, None]


def test_the_proof_gathers_nothing_around_a_part_of_a_sharded_model(found: list[dict[str, object]]) -> None:
    assert [rank["part"] for rank in found] == [[1, [None, None, None], []]] * 2


def test_generate_of_a_sharded_model_runs_code_that_came_later(found: list[dict[str, object]]) -> None:
    assert [(rank["late True"], rank["late False"]) for rank in found] == [(3, 0)] * 2


@pytest.mark.parametrize("order", ["wrap first", "shard first"])
def test_unwrap_leaves_the_sharding(order: str, found: list[dict[str, object]]) -> None:
    for rank in found:
        facts = rank[order]
        assert (facts["fsdp"], facts["wrapped"], facts["name"]) == (True, False, "FSDPPeftModelForCausalLM")
        assert facts["again"] == 1
