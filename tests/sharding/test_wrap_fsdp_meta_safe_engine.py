"""Policies of the engines, and models that others have changed: as over a model that was loaded whole."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_cases import NOTHING, llama, reference
from rank_server import RankServer

SCRIPT = """
import os, pathlib, shutil, sys, time, types, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from fsdp_cases import *
from safe_loading import wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
small = lambda: llama(num_hidden_layers=2, use_cache=False)
if rank == 0:
    save(reference(small), folder)
dist.barrier()
batch = inputs("llama")
policy2 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
policy1 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

def by_engine(version):
    model = reference(small)
    if version == 2:
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy2)
        fully_shard([model.model.norm, model.lm_head], mp_policy=policy2)
        return fully_shard(model, mp_policy=policy2)
    chosen = set(model.model.layers)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=CustomPolicy(lambda module: module in chosen), mixed_precision=policy1,
        device_id=torch.device("cpu"), use_orig_params=True,
    )

def result(model):
    seen = {}
    layer = model.model.layers[1].mlp.up_proj
    layer.register_forward_pre_hook(lambda module, given: seen.update(
        weight=str(module.weight.dtype), input=str(given[0].dtype)))
    kept = sorted({str(p.dtype) for p in model.parameters()})
    logits = step(model, batch)
    if type(model).__name__ == "FullyShardedDataParallel":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            grads = {plain(n): p.grad.clone() for n, p in model.named_parameters()}
    else:
        grads = {n: whole(p.grad) for n, p in model.named_parameters()}
    return logits, grads, {**seen, "kept": kept, "grads": sorted({str(g.dtype) for g in grads.values()})}

for version, policy in ((2, policy2), (1, policy1)):
    logits, grads, facts = result(by_engine(version))
    ours = wrap_fsdp_meta_safe(on_meta(small), folder, version=version, mp_policy=policy)
    own, own_grads, own_facts = result(ours)
    report(**{f"mixed {version}": {
        "logits": torch.equal(logits, own), "dtype": str(own.dtype),
        "grads": own_grads.keys() == grads.keys() and all(torch.equal(own_grads[n], g) for n, g in grads.items()),
        "facts": own_facts, "engine": facts,
    }})

# offloaded: the shards, their gradients and an optimizer's step lie on the host
one = reference(small)
for version, asked in ((2, True), (2, CPUOffloadPolicy()), (1, True), (1, CPUOffload(True))):
    ours = wrap_fsdp_meta_safe(on_meta(small), folder, version=version, offload_policy=asked)
    found = differences(one, ours, batch)
    places = sorted({str(p.device) for p in ours.parameters()})
    report(**{f"offload {version} {type(asked).__name__}": [found, places]})

# layers in other modules: activation checkpointing, compilation; with their own names in between
for version in (2, 1):
    model = on_meta(small)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    ours = wrap_fsdp_meta_safe(model, folder, version=version)
    report(**{f"checkpointed {version}": [
        differences(one, ours, batch),
        any("_checkpoint_wrapped_module" in name for name, _ in ours.named_parameters()),
        [unit.name for unit in ours.fsdp_report.units],
    ]})
model = on_meta(small)
for number, layer in enumerate(model.model.layers):
    model.model.layers[number] = torch.compile(layer, backend="eager")
ours = wrap_fsdp_meta_safe(model, folder, verify="bytes")
values = {plain(name): whole(p) for name, p in ours.named_parameters()}
report(compiled=[
    all(torch.equal(values[name], p) for name, p in one.named_parameters()) and len(values) == len([*one.parameters()]),
    any("_orig_mod" in name for name, _ in ours.named_parameters()),
    [unit.name for unit in ours.fsdp_report.units],
])

# a fused linear cross-entropy reads the head's weight, and never calls the head
def fused(self, input_ids, labels):
    hidden = self.model(input_ids=input_ids).last_hidden_state
    logits = nn.functional.linear(hidden, self.lm_head.weight)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return types.SimpleNamespace(logits=logits, loss=loss)

for tied in (False, True):
    make = lambda: llama(num_hidden_layers=2, tie_word_embeddings=tied)
    single, model = reference(make), on_meta(make)
    for each in (single, model):
        each.forward = types.MethodType(fused, each)
    if rank == 0:
        save(single, f"{folder}/tied{tied}")
    dist.barrier()
    ours = wrap_fsdp_meta_safe(model, f"{folder}/tied{tied}")
    first = differences(single, ours, batch)
    for each in (single, ours):
        with torch.no_grad():
            for p in each.parameters():
                p.sub_(p.grad, alpha=0.1)
    report(**{f"fused {tied}": [first, differences(single, ours, batch)]})

# a value head that computes by another method than forward
class WithValue(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(60, 1)
    def forward(self, **given):
        return self.inner(**given)
    def score(self, tokens):
        return self.head(self.inner.model(input_ids=tokens).last_hidden_state)

torch.manual_seed(3)
single = WithValue(reference(small))
with torch.device("meta"):
    model = WithValue(on_meta(small))
ours = wrap_fsdp_meta_safe(model, {n: t for n, t in single.state_dict().items()} if rank == 0 else None)
report(score=torch.equal(single.score(TOKENS), ours.score(TOKENS)))

# a hub id, in a cache as the hub's client makes it: links from a snapshot to blobs
cache, commit = pathlib.Path(os.environ["HF_HOME"], "hub", "models--org--tiny"), "0123456789" * 4
if rank == 0:
    for part in ("refs", "blobs", f"snapshots/{commit}"):
        (cache / part).mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    for number, path in enumerate(path for path in pathlib.Path(folder).iterdir() if path.is_file()):
        shutil.copy(path, cache / "blobs" / f"{number:040x}")
        (cache / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{number:040x}")
dist.barrier()
ours = wrap_fsdp_meta_safe(on_meta(small), "org/tiny")
report(hub=[differences(one, ours, batch), ours.fsdp_report.bytes_read, ours.fsdp_report.bytes_sent])

# saved on every rank, as people call it: plainly, with is_main_process, and with a state dict of their own
def held_in(path):
    return sorted(key for file in pathlib.Path(path).glob("*.safetensors") for key in load_file(file))
def read_back(make, path):
    again = type(reference(make)).from_pretrained(path, attn_implementation="eager")
    names = dict(again.named_parameters()).keys()
    return names == dict(reference(make).named_parameters()).keys() and all(
        torch.equal(p, dict(again.named_parameters())[n]) for n, p in reference(make).named_parameters())

for name in ("llama", "gpt2", "mixtral"):  # plain, tied, and experts that are stacked in the model
    make = CASES[name]
    if rank == 0:
        reference(make).save_pretrained(f"{folder}/plain {name}")
    real = lambda: reference(make) if rank == 0 else on_meta(make)
    for version in (2, 1):
        ours = wrap_fsdp_meta_safe(real(), version=version)
        for label, options in (("plainly", {}), ("main", {"is_main_process": rank == 0})):
            path = f"{folder}/saved {name} {version} {label}"
            ours.save_pretrained(path, **options)
            dist.barrier()
            wrong = differences(reference(make), ours, batch)["gradients"]
            once = held_in(path) == held_in(f"{folder}/plain {name}")  # what is tied, as one process writes it
            report(**{f"saved {name} {version} {label}": [read_back(make, path), once, *wrong]})
        if version == 2:
            given = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if rank == 0:
                ours.save_pretrained(f"{folder}/given {name}", state_dict=given)
            dist.barrier()
            report(**{f"given {name}": read_back(make, f"{folder}/given {name}")})

# an adapter: no weight of the base is gathered for it
torch.manual_seed(7)
single = get_peft_model(reference(small), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
for version in (2, 1):
    torch.manual_seed(7)
    base = reference(small) if rank == 0 else on_meta(small)
    ours = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    if version == 2:
        for number, layer in enumerate(base.model.layers):
            base.model.layers[number] = checkpoint_wrapper(layer)
    ours = wrap_fsdp_meta_safe(ours, version=version)
    gathered = []
    full_tensor = DTensor.full_tensor
    DTensor.full_tensor = lambda self, **options: gathered.append(self.numel()) or full_tensor(self, **options)
    ours.save_pretrained(f"{folder}/adapter {version}", safe_serialization=True)
    DTensor.full_tensor = full_tensor
    dist.barrier()
    single.save_pretrained(f"{folder}/adapter of {rank} {version}")
    one_file, other = (load_file(f"{folder}/{n}/adapter_model.safetensors")
        for n in (f"adapter {version}", f"adapter of {rank} {version}"))
    report(**{f"adapter {version}": [
        one_file.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one_file.items()),
        sum(gathered), sum(p.numel() for p in single.parameters() if p.requires_grad),
    ]})

# the first rank cannot write; it is told not to; the others do not come
def refused(call):
    started = time.monotonic()
    try:
        call()
        return None
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
pathlib.Path(f"{folder}/a file").touch()
report(unsaved=[
    refused(lambda: ours.save_pretrained(f"{folder}/a file")),
    refused(lambda: ours.save_pretrained(f"{folder}/x", is_main_process=False)),
])
late = wrap_fsdp_meta_safe(on_meta(small), folder, timeout=2)
report(alone=refused(lambda: late.save_pretrained(f"{folder}/alone")) if rank == 0 else None)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 2, args=[tmp_path_factory.mktemp("engine")], timeout=240).found


@pytest.mark.parametrize("version", [2, 1])
def test_mixed_precision_is_the_engines_own_over_a_loaded_model(found: list[dict[str, Any]], version: int) -> None:
    for facts in found:
        mixed = facts[f"mixed {version}"]
        assert mixed["logits"]
        assert mixed["grads"]
        assert mixed["facts"] == mixed["engine"]
        assert mixed["facts"]["kept"] == mixed["facts"]["grads"] == ["torch.float32"]
        assert mixed["facts"]["weight"] == mixed["facts"]["input"] == "torch.bfloat16"


@pytest.mark.parametrize("case", ["2 bool", "2 CPUOffloadPolicy", "1 bool", "1 CPUOffload"])
def test_offloaded_shards_lie_on_the_host_and_train_as_one_process(found: list[dict[str, Any]], case: str) -> None:
    assert [facts[f"offload {case}"] for facts in found] == [[NOTHING, ["cpu"]]] * 2


@pytest.mark.parametrize("version", [2, 1])
def test_layers_with_activation_checkpointing_are_units_and_right(found: list[dict[str, Any]], version: int) -> None:
    for facts in found:
        differences, wrapped, units = facts[f"checkpointed {version}"]
        assert differences == NOTHING
        assert wrapped
        assert units[:2] == ["model.layers.0", "model.layers.1"]


def test_compiled_layers_are_units_and_get_their_weights(found: list[dict[str, Any]]) -> None:
    units = ["model.layers.0", "model.layers.1", "model.embed_tokens", "model.norm + lm_head", "(root)"]
    assert [facts["compiled"] for facts in found] == [[True, True, units]] * 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_fused_loss_may_read_the_weight_of_the_head(found: list[dict[str, Any]], tied: bool) -> None:
    assert [facts[f"fused {tied}"] for facts in found] == [[NOTHING, NOTHING]] * 2


def test_a_value_head_may_compute_by_another_method(found: list[dict[str, Any]]) -> None:
    assert all(facts["score"] for facts in found)


def test_a_hub_id_is_read_from_the_links_of_its_cache(found: list[dict[str, Any]]) -> None:
    read = 0
    for facts in found:
        differences, bytes_read, bytes_sent = facts["hub"]
        assert differences == NOTHING
        assert bytes_sent == 0
        read += bytes_read
    assert read == sum(parameter.nbytes for parameter in reference(lambda: llama(num_hidden_layers=2)).parameters())


@pytest.mark.parametrize("label", ["plainly", "main"])
@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_save_pretrained_on_every_rank_writes_the_whole_model(
    found: list[dict[str, Any]], name: str, version: int, label: str
) -> None:
    assert [facts[f"saved {name} {version} {label}"] for facts in found] == [[True, True]] * 2


def test_a_state_dict_of_the_callers_own_is_saved_as_it_is(found: list[dict[str, Any]]) -> None:
    assert all(facts[f"given {name}"] for facts in found for name in ("llama", "gpt2", "mixtral"))


@pytest.mark.parametrize("version", [2, 1])
def test_save_pretrained_of_an_adapter_gathers_the_adapter_alone(found: list[dict[str, Any]], version: int) -> None:
    for facts in found:
        equal, gathered, trained = facts[f"adapter {version}"]
        assert equal
        assert gathered == (trained if version == 2 else 0)  # FSDP1 has no DTensor


def test_a_save_that_cannot_be_is_an_error_on_every_rank(found: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(found):
        a_file, nobody = facts["unsaved"]
        assert a_file[0] == ("ValueError" if rank == 0 else "RankError")
        assert "should be a directory" in a_file[1]
        assert nobody[0] == ("ArgumentError" if rank == 0 else "RankError")
        assert "pass rank == 0" in nobody[1]
    kind, text, seconds = found[0]["alone"]
    assert kind == "RankTimeout"
    assert "for rank 1" in text
    assert "call save_pretrained, which every rank must do" in text
    assert "pass a larger timeout= to the load or the wrap" in text  # save_pretrained has no such argument
    assert seconds < 10
