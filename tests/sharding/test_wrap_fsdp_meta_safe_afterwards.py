"""What people do with a sharded model: generate, merge, save, look its classes up; as with the model in one process."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_cases import NOTHING
from rank_server import RankServer

SCRIPT = """
import inspect, pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from transformers import LlamaForSequenceClassification
from transformers import logging as transformers_logging
from transformers.distributed import DistributedConfig
from transformers.distributed.fsdp import is_fsdp_managed_module
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
import torch.distributed.checkpoint as dist_checkpoint
from torch.distributed.fsdp import fully_shard
from accelerate.utils.dataclasses import get_module_class_from_name
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
import fsdp_cases
from fsdp_cases import *
from safe_loading import merge_lora_checkpoint, meta_model, wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
llama = lambda **options: fsdp_cases.llama(num_hidden_layers=2, pad_token_id=0, **options)
base = f"{folder}/base"
if rank == 0:
    save(reference(llama), base)
dist.barrier()

def skeleton():
    return meta_model(base, attn_implementation="eager").train()

def loaded():
    return llama()[0].from_pretrained(base, attn_implementation="eager").train()

def adapted(model, **options):
    torch.manual_seed(7)
    chosen = dict(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, LoraConfig(**{**chosen, **options}))

def generated(model):
    return model.eval().generate(input_ids=TOKENS[:, :4], max_new_tokens=4, do_sample=False).tolist()

trained = adapted(loaded())
for name, parameter in trained.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.3)
if rank == 0:
    trained.save_pretrained(f"{folder}/adapter")
dist.barrier()

def wrapped(version, adapter=True, **options):
    if not adapter:
        return wrap_fsdp_meta_safe(skeleton(), base, version=version, **options)
    model = adapted(skeleton(), **options)
    return wrap_fsdp_meta_safe(model, base, version=version, adapters=None if options else f"{folder}/adapter")

wanted = {True: generated(trained), False: generated(loaded())}
for version in (2, 1):
    for adapter in (True, False):
        model = wrapped(version, adapter)
        step(model, inputs("llama"))
        model.zero_grad()  # before generate, which leaves the root gathered: zero_grad would not see its shards
        first = generated(model)
        again = differences(trained if adapter else loaded(), model.train(), inputs("llama"))
        inner = wrapped(version, adapter)
        inner = inner.module if version == 1 else inner
        report(**{f"generated {version} {adapter}": [
            first == wanted[adapter], again, generated(inner) == wanted[adapter], wanted[True] != wanted[False],
        ]})
        report(**{f"signature {version} {adapter}": "labels" in inspect.signature(
            model.forward if version == 1 or not adapter else model.get_base_model().forward).parameters})

def all_trained(model):
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model

for stepped in (False, True):
    model = wrapped(2)
    if stepped:
        step(model, inputs("llama"))
    one = all_trained(PeftModel.from_pretrained(loaded(), f"{folder}/adapter").merge_and_unload())
    merged = all_trained(model.merge_and_unload())
    merged.save_pretrained(f"{folder}/merged {stepped}")
    dist.barrier()
    saved = llama()[0].from_pretrained(f"{folder}/merged {stepped}", attn_implementation="eager").state_dict()
    report(**{f"merged {stepped}": [
        differences(one, merged, inputs("llama")), generated(merged) == wanted[True],
        all(torch.equal(saved[name], tensor) for name, tensor in one.state_dict().items()),
    ]})
report(unmerged=[
    error_of(lambda: wrapped(2).merge_and_unload(safe_merge=True)),
    error_of(lambda: wrapped(2).merge_adapter(None, True)),
    error_of(lambda: wrap_fsdp_meta_safe(
        get_peft_model(loaded(), IA3Config(task_type="CAUSAL_LM"))).merge_and_unload()),
    error_of(lambda: wrapped(1).merge_and_unload()),
    error_of(lambda: wrapped(1).base_model.unload()),
])
# the road that they name
early = wrapped(1)
early.save_pretrained(f"{folder}/again")
report(early=differences(trained.train(), early.train(), inputs("llama")))
if rank == 0:
    merge_lora_checkpoint(base, f"{folder}/again", f"{folder}/on disk")
    on_disk = {}
    for path in pathlib.Path(f"{folder}/on disk").glob("*.safetensors"):
        on_disk |= load_file(path)
    report(road=all(torch.allclose(on_disk[name], t, atol=1e-6) for name, t in one.state_dict().items()))
dist.barrier()

# transformers would gather a model whose config says how it shards, and wait for ranks that have gathered already
for adapter in (True, False):
    model = wrapped(2, adapter)
    model.config.distributed_config = DistributedConfig(fsdp_size=2)
    model.save_pretrained(f"{folder}/saved {adapter}")
    given = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if rank == 0:
        model.save_pretrained(f"{folder}/given {adapter}", state_dict=given)
    dist.barrier()
    files = [sorted(path.name for path in pathlib.Path(f"{folder}/{how} {adapter}").glob("*.safetensors"))
        for how in ("saved", "given")]
    report(**{f"saved {adapter}": [type(model.config.distributed_config).__name__, *files]})

# as accelerate's scripts save: with its get_state_dict, which is empty on the other ranks
saving = wrap_fsdp_meta_safe(adapted(loaded(), modules_to_save=["lm_head"], trainable_token_indices=[3, 5]))
saving.save_pretrained(f"{folder}/by name")
given = {name: whole(tensor) for name, tensor in saving.state_dict().items()}
given = given if rank == 0 else {}
report(others=[
    error_of(lambda: saving.save_pretrained(f"{folder}/by state", state_dict=given, is_main_process=rank == 0)),
    dist.barrier() or sorted(load_file(f"{folder}/by state/adapter_model.safetensors"))
    == sorted(load_file(f"{folder}/by name/adapter_model.safetensors")),
])

# a checkpoint of shards is refused as a source, and the road that the error names is right
model = wrapped(2, False)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1.0)
dist_checkpoint.save(model.state_dict(), checkpoint_id=f"{folder}/shards")
other = wrapped(2, False)
state = other.state_dict()
dist_checkpoint.load(state, checkpoint_id=f"{folder}/shards")
report(shards=[
    error_of(lambda: wrap_fsdp_meta_safe(skeleton(), f"{folder}/shards")),
    all(torch.equal(whole(p), whole(q)) for p, q in zip(model.parameters(), other.parameters(), strict=True)),
    error_of(lambda: wrap_fsdp_meta_safe(fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4)))[0])),
])

# classes keep their names
model = wrapped(2)
layer = get_module_class_from_name(model, "LlamaDecoderLayer")
report(names=[
    type(model).__name__, type(model.get_base_model()).__name__, repr(model)[:22],
    sum(isinstance(module, layer) for module in model.modules()), layer.__mro__[1].__name__,
    is_fsdp_managed_module(model.get_base_model()), is_fsdp_managed_module(wrapped(1, False).module),
])
# rank 0 is done at once, and waits for the other
model = wrapped(2, False).eval()
report(waits=model.generate(
    input_ids=TOKENS[:, :4], max_new_tokens=6, do_sample=False, eos_token_id=list(range(251)) if rank == 0 else 250,
).shape[1])
for version in (2, 1):
    for reshard in (False, True):
        model = wrapped(version, False, reshard_after_forward=reshard)
        one = loaded()
        report(**{f"reshard {version} {reshard}": differences(one, model, inputs("llama"))})
        model(**inputs("llama"))
        layer = (model.module if version == 1 else model).model.layers[0]
        freed = layer._flat_param._full_param_padded.untyped_storage().size() == 0 if version == 1 else isinstance(
            layer.mlp.up_proj.weight, DTensor)
        report(**{f"freed {version} {reshard}": freed})
report(reshards=[
    error_of(lambda: wrapped(2, False, reshard_after_forward="yes")),
    error_of(lambda: wrapped(1, False, reshard_after_forward=2)),
    error_of(lambda: wrapped(2, False, reshard_after_forward=rank == 0)),
])

# a new head, which an adapter copies: given values once, as in one process
classifier = lambda: (LlamaForSequenceClassification, llama(num_labels=3)[1])
batch = {"input_ids": TOKENS, "labels": torch.tensor([0, 2])}
for task in ("SEQ_CLS", None):
    single = reference(classifier)
    single.model.load_state_dict(loaded().model.state_dict())
    torch.manual_seed(5)
    torch.nn.init.normal_(single.score.weight)
    single = adapted(single, task_type=task)
    model = adapted(on_meta(classifier), task_type=task)
    # a generator of its own, because the global one gives the adapter's values
    model = wrap_fsdp_meta_safe(model, base, init_new=lambda module: torch.nn.init.normal_(
        module.weight, generator=torch.Generator().manual_seed(5)))
    report(**{f"head {task}": differences(single, model, batch)})
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 2, args=[tmp_path_factory.mktemp("afterwards")], timeout=240).found


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("version", [2, 1])
def test_generate_is_that_of_one_process_and_training_goes_on(
    found: list[dict[str, Any]], version: int, adapter: bool
) -> None:
    for facts in found:
        assert facts[f"generated {version} {adapter}"] == [True, NOTHING, True, True]
        assert facts[f"signature {version} {adapter}"]


@pytest.mark.parametrize("stepped", [False, True])
def test_a_model_merged_after_the_wrap_computes_trains_and_is_saved(found: list[dict[str, Any]], stepped: bool) -> None:
    assert [facts[f"merged {stepped}"] for facts in found] == [[NOTHING, True, True]] * 2


def test_merges_that_would_be_lost_are_refused_and_the_road_is_right(found: list[dict[str, Any]]) -> None:
    for facts in found:
        safe, adapter, kind, flat, unload = facts["unmerged"]
        assert "safe_merge=True" in safe
        assert "merge_adapter() of a model that FSDP2 wrapped" in adapter
        assert "default is IA3" in kind
        assert "merge_and_unload() of a model that FSDP1 wrapped" in flat
        assert "unload() of a model that FSDP1 wrapped" in unload
        assert all("merge_lora_checkpoint" in text for text in facts["unmerged"])
    assert found[0]["road"]


def test_an_adapter_that_is_saved_before_the_first_step_can_be_trained(found: list[dict[str, Any]]) -> None:
    """FSDP1 takes the unit that is gathered first for the root, and the root has no tensor of the adapter."""
    assert [facts["early"] for facts in found] == [NOTHING] * 2


@pytest.mark.parametrize("adapter", [True, False])
def test_a_config_that_says_how_to_shard_does_not_hang_a_save(found: list[dict[str, Any]], adapter: bool) -> None:
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert [facts[f"saved {adapter}"] for facts in found] == [["DistributedConfig", [file], [file]]] * 2


def test_the_empty_state_that_accelerate_gives_other_ranks_saves_nothing_there(found: list[dict[str, Any]]) -> None:
    """peft looks in it for the saved modules and the trained tokens, and fails."""
    assert [facts["others"] for facts in found] == [[None, True]] * 2


def test_classes_keep_the_names_by_which_engines_look_them_up(found: list[dict[str, Any]]) -> None:
    wanted = ["PeftModelForCausalLM", "LlamaForCausalLM", "PeftModelForCausalLM(\n", 2, "FSDPModule", True, True]
    assert [facts["names"] for facts in found] == [wanted] * 2


def test_a_rank_that_has_generated_all_waits_for_the_others(found: list[dict[str, Any]]) -> None:
    assert [facts["waits"] for facts in found] == [5, 10]


def test_a_checkpoint_of_shards_is_no_source_and_the_road_is_right(found: list[dict[str, Any]]) -> None:
    for facts in found:
        refused, equal, dtensor = facts["shards"]
        assert "a checkpoint of torch.distributed.checkpoint" in refused
        assert "torch.distributed.checkpoint.load" in refused
        assert equal
        assert "wrap the plain model, for tensor parallelism with a mesh of the dimensions 'fsdp' and 'tp'" in dtensor


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("version", [2, 1])
def test_units_are_freed_after_the_forward_pass_or_not(
    found: list[dict[str, Any]], version: int, reshard: bool
) -> None:
    assert [facts[f"reshard {version} {reshard}"] for facts in found] == [NOTHING] * 2
    assert [facts[f"freed {version} {reshard}"] for facts in found] == [reshard] * 2


def test_ranks_must_free_units_alike(found: list[dict[str, Any]]) -> None:
    for facts in found:
        no_bool, a_number, alike = facts["reshards"]
        assert "reshard_after_forward='yes'" in no_bool
        assert "FSDP1 takes a bool" in a_number
        assert "RanksDisagree" in alike
        assert "reshard_after_forward=True" in alike


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_an_adapter_of_a_classifier_with_a_new_head_equals_one_process(found: list[dict[str, Any]], task: str) -> None:
    assert [facts[f"head {task}"] for facts in found] == [NOTHING] * 2
