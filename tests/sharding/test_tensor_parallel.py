"""FSDP with tensor parallelism: two shards of two parts compute, train, save and resume as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import needs
from rank_server import RankServer

pytestmark = needs("transformers", "5.23")

COMMON = """
import sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
import logging
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from torch.distributed.device_mesh import init_device_mesh
from peft import LoraConfig, get_peft_model
import fsdp_cases
from fsdp_cases import *
from safe_loading import SafeLoadingError, assert_optimizer_sharded, meta_model, wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank, world, folder = dist.get_rank(), dist.get_world_size(), sys.argv[1]

def qwen3(**options):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    sizes = dict(hidden_size=60, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, head_dim=10,
        num_key_value_heads=2, vocab_size=252, attn_implementation="eager", pad_token_id=0)
    return Qwen3ForCausalLM, Qwen3Config(**{**sizes, **options})

def phi3(**options):
    from transformers import Phi3Config, Phi3ForCausalLM
    sizes = dict(hidden_size=60, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=252, attn_implementation="eager", pad_token_id=0)
    return Phi3ForCausalLM, Phi3Config(**{**sizes, **options})

def llama(**options):
    return fsdp_cases.llama(**{"vocab_size": 252, "num_hidden_layers": 2, "pad_token_id": 0, **options})

def with_lora(model, **options):
    torch.manual_seed(7)
    targets = ["q_proj", "o_proj", "down_proj", "qkv_proj"]
    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM", **options}))

def tensor_mesh(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))

def error_of(call):
    try:
        call()
    except SafeLoadingError as error:
        return f"{type(error).__name__}: {error}"
    return None
"""

EQUAL = (
    COMMON
    + """
BATCHES = torch.randint(1, 250, (2, 2, 16), generator=torch.Generator().manual_seed(3))

def loaded(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype).train()

def passes(model, batches):
    logits = [model(input_ids=batch, labels=batch) for batch in batches]
    (sum(each.loss for each in logits) / len(batches)).backward()
    return [each.logits.detach() for each in logits]

def off(one, exact):
    # how far it is from the exact one, in units of the largest element
    return float((whole(one).double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))

def errors(one, exact):
    grads = dict(exact.named_parameters())
    return {name: off(each.grad, grads[name].grad) for name, each in one.named_parameters() if each.grad is not None}

def same_on_parts(model, group):
    # what every part has must have the same bits on all of them
    different = []
    for name, each in model.named_parameters():
        if each.placements[1].is_replicate():
            local = each.to_local().contiguous()
            found = [torch.empty_like(local) for _ in range(2)]
            dist.all_gather(found, local, group=group)
            different += [] if torch.equal(*found) else [name]
    return different

def accumulated(model, batches):
    # the gradients of two micro-batches, reduced once
    model.zero_grad()
    for number, batch in enumerate(batches):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number == len(batches) - 1)
        model(input_ids=batch, labels=batch).loss.backward()

mesh = tensor_mesh(2, 2)
mine = BATCHES[mesh.get_local_rank(0)]
for name, make in {
    "llama": llama, "qwen3": qwen3, "phi3": phi3,
    "tied": lambda: qwen3(tie_word_embeddings=True),
    "odd": lambda: qwen3(vocab_size=253, attention_bias=True),
    "odd and tied": lambda: llama(vocab_size=253, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
}.items():
    path = f"{folder}/{name}"
    if rank == 0:
        save(reference(make), path)
    dist.barrier()
    for adapter in (False, True):
        put = with_lora if adapter else (lambda model: model)
        one, exact = put(loaded(path)), put(loaded(path)).double()
        if adapter:
            for parameter, other in zip(one.parameters(), exact.parameters()):
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.1)
                    other.data.copy_(parameter)
            if rank == 0:
                one.save_pretrained(f"{path} adapter")
            dist.barrier()
        model = put(meta_model(path, attn_implementation="eager").train())
        sent = f"{path} adapter" if adapter else None
        model = wrap_fsdp_meta_safe(model, path, mesh=mesh, verify="bytes", adapters=sent)
        facts = model.fsdp_report
        base = [p for p in model.named_parameters() if "lora_" not in p[0]]
        found = {
            "parameters": [n for n, p in one.named_parameters() if not torch.equal(p, whole(model.get_parameter(n)))],
            "read": facts.bytes_read, "sent": facts.bytes_sent, "place": [facts.shards, facts.parts],
            "local": sum(local_bytes(p) for _, p in base), "model": sum(whole(p).nbytes for _, p in base),
            "undivided": facts.undivided, "gathered": sum(unit.bytes for unit in facts.units), "ok": facts.ok,
        }
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, one, exact)]
        assert_optimizer_sharded(optimizers[0], model)
        for number in range(3):
            [logits], plain, right = passes(model, [mine]), passes(one, BATCHES), passes(exact, BATCHES)
            place = mesh.get_local_rank(0)
            norms = [float(whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9))) for m in (model, one, exact)]
            found |= {f"step {number}": {
                "logits": [off(logits, right[place]), off(plain[place], right[place])],
                "gradients": [errors(model, exact), errors(one, exact)],
                "norms": norms,
            }} if number == 0 else {}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found["moved"] = max(off(p, exact.get_parameter(n)) for n, p in model.named_parameters())
        found["apart"] = same_on_parts(model, mesh["tp"].get_group())
        started = {n: whole(p).clone() for n, p in model.named_parameters()}
        for each in (one, exact):
            for n, p in each.named_parameters():
                p.data.copy_(started[n])
        accumulated(model, [mine, mine.flip(0)])
        for each in (one, exact):
            each.zero_grad()
            passes(each, [*BATCHES, *BATCHES.flip(1)])
        # FSDP means over its ranks, and each of them adds up two batches
        for each in (one, exact):
            for p in each.parameters():
                if p.grad is not None:
                    p.grad *= 2
        found["accumulated"] = [errors(model, exact), errors(one, exact)]
        model.zero_grad(), one.zero_grad(), exact.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        passes(model, [mine]), passes(one, BATCHES), passes(exact, BATCHES)
        found["checkpointed"] = [errors(model, exact), errors(one, exact)]
        model.gradient_checkpointing_disable()
        model.zero_grad()
        generate = dict(input_ids=mine[:, :4], max_new_tokens=4, do_sample=False)
        found["generated"] = model.eval().generate(**generate).tolist() == one.eval().generate(**generate).tolist()
        model.save_pretrained(f"{path} saved {adapter}")
        dist.barrier()
        if adapter:
            from safetensors.torch import load_file
            saved = load_file(f"{path} saved True/adapter_model.safetensors")
            wanted = {n.replace(".default", ""): t for n, t in started.items() if "lora_" in n}
        else:
            saved = dict(loaded(f"{path} saved False").named_parameters())
            wanted = started
        found["saved"] = [saved.keys() == wanted.keys(), [n for n in wanted if not torch.equal(saved[n], wanted[n])]]
        report(**{f"{name} {adapter}": found})
        del model
dist.destroy_process_group()
"""
)
CASES = ["llama", "qwen3", "phi3", "tied", "odd", "odd and tied"]


@pytest.fixture(scope="module")
def equal(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(EQUAL, 4, args=[tmp_path_factory.mktemp("parts")], timeout=400).found


def _near(pair: list[Any]) -> bool:
    """Whether parts are as near to float64 as one process is: the same sums in another order."""
    parts, one = pair
    if isinstance(parts, dict):
        assert parts.keys() == one.keys()
        return all(parts[name] <= 8 * max(one.values()) for name in parts)
    return bool(parts <= 8 * one)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_parts_compute_and_train_as_one_process(equal: list[dict[str, Any]], case: str, adapter: bool) -> None:
    for facts in equal:
        found = facts[f"{case} {adapter}"]
        assert found["ok"]
        assert found["place"] == [2, 2]
        assert found["parameters"] == []
        first = found["step 0"]
        assert _near(first["logits"])
        assert _near(first["gradients"])
        ours, one, exact = first["norms"]
        assert abs(ours - exact) <= 8 * max(abs(one - exact), exact * 2**-24)
        assert found["apart"] == []
        assert _near(found["accumulated"])
        assert _near(found["checkpointed"])
        assert found["generated"]
        assert found["saved"] == [True, []]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_reads_its_slice_of_its_slice_and_nothing_is_sent(equal: list[dict[str, Any]], case: str) -> None:
    for facts in equal:
        found = facts[f"{case} False"]
        assert found["read"] == found["local"]
        assert found["sent"] == 0
        assert found["local"] <= found["model"] / 4 * (1.05 if "odd" not in case else 1.5)
