"""Adapters under FSDP: initial values, mixed dtypes, modules to save, and gradients, equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from fsdp_cases import NOTHING
from peft import LoraConfig, PeftModel, get_peft_model
from rank_server import RankServer
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import meta_model, wrap_fsdp_meta_safe

pytestmark = needs("peft", "0.21")  # before, a PeftModel called its base past the hooks of FSDP

SCRIPT = """
import sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
import fsdp_cases
from fsdp_cases import *
from safe_loading import SafeLoadingError, meta_model, wrap_fsdp_meta_safe

llama = lambda: fsdp_cases.llama(num_hidden_layers=2)

dist.init_process_group("gloo")
rank = dist.get_rank()
folder = sys.argv[1]
kind, _ = llama()
if rank == 0:
    save(reference(llama), f"{folder}/f32")
    save(reference(llama, torch.bfloat16), f"{folder}/bf16")
dist.barrier()
LAYERS = ["q_proj", "v_proj", "down_proj"]

def config(**options):
    return LoraConfig(**{**dict(r=4, lora_alpha=8, target_modules=LAYERS, task_type="CAUSAL_LM"), **options})

def skeleton(dtype):
    return meta_model(f"{folder}/{dtype}", attn_implementation="eager").train()

def loaded(dtype):
    return kind.from_pretrained(f"{folder}/{dtype}", dtype="auto", attn_implementation="eager").train()

def attached(base, seed, **options):
    torch.manual_seed(seed)
    return get_peft_model(base, config(**options))

def trained_twice(model):
    # two steps of SGD, so that lora_A has a gradient too
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        step(model, inputs("llama"))
        optimizer.step()

def compare(label, one, model, steps=True):
    first = differences(one, model, inputs("llama"))
    trained_twice(one)
    trained_twice(model)
    report(**{label: [first, differences(one, model, inputs("llama")), [u.name for u in model.fsdp_report.units]]})

CASES = {
    "plain": ("f32", {}),
    "mixed": ("bf16", {}),
    "saved": ("f32", dict(modules_to_save=["lm_head"])),
    "mixed and saved": ("bf16", dict(modules_to_save=["lm_head"])),
    "embedding": ("bf16", dict(target_modules=["embed_tokens", "q_proj"])),
    "gaussian": ("f32", dict(init_lora_weights="gaussian")),
}
for version in (2, 1):
    for name, (dtype, options) in CASES.items():
        if version == 1 and name in ("gaussian", "embedding"):
            continue
        one = attached(loaded(dtype), 7, **options)
        model = wrap_fsdp_meta_safe(attached(skeleton(dtype), 7, **options), f"{folder}/{dtype}", version=version)
        compare(f"{name} {version}", one, model)

# seeded before the wrap, and not before peft
torch.manual_seed(3); first = get_peft_model(skeleton("f32"), config())
torch.rand(5)
torch.manual_seed(11); torch.rand(2)
state = torch.get_rng_state()
model = wrap_fsdp_meta_safe(first, f"{folder}/f32")
unmoved = torch.equal(state, torch.get_rng_state())
base = loaded("f32")
torch.manual_seed(11); torch.rand(2)
one = get_peft_model(base, config())
report(later=[differences(one, model, inputs("llama")) , unmoved])

# an adapter with values on rank 0, over a base on meta
one = attached(loaded("f32"), 5, modules_to_save=["lm_head"])
for name, parameter in one.named_parameters():
    if "lora_" in name or "modules_to_save" in name:
        torch.nn.init.normal_(parameter, std=0.1)
if rank == 0:
    one.save_pretrained(f"{folder}/adapter")
dist.barrier()
one = PeftModel.from_pretrained(loaded("f32"), f"{folder}/adapter", is_trainable=True).train()
model = PeftModel.from_pretrained(skeleton("f32"), f"{folder}/adapter", is_trainable=True).train()
model = wrap_fsdp_meta_safe(model, f"{folder}/f32", adapters=f"{folder}/adapter")
compare("from a folder", one, model)

# attached after the wrap: each rank draws its own, and rank 0's are everyone's
def attached_later(label, ran, second=False, mesh=None, policy=None, dtype="f32", **options):
    one, base = attached(loaded(dtype), 7, **options), skeleton(dtype)
    model = wrap_fsdp_meta_safe(base, f"{folder}/{dtype}", mesh=mesh, mp_policy=policy)
    if ran:
        step(model, inputs("llama"))
    torch.manual_seed(7 + rank)
    model = get_peft_model(model, config(**options))
    assert wrap_fsdp_meta_safe(model) is model
    facts = model.fsdp_report
    if policy is not None:
        return one, model
    compare(label, one, model)
    report(**{f"facts of {label}": [facts.bytes_sent, facts.model_bytes - facts.local_bytes, facts.bytes_read]})
    if second:
        for each in (one, model):
            torch.manual_seed(9 + (rank if each is model else 0))
            each.add_adapter("second", config(r=2, target_modules=["k_proj", "q_proj"]))
        wrap_fsdp_meta_safe(model)
        for each in (one, model):
            each.set_adapter("second")
        compare(f"{label}, a second", one, model)

attached_later("attached later", False, second=True, target_modules=[*LAYERS, "lm_head"])
attached_later("attached later, after a step", True, target_modules=[*LAYERS, "lm_head"])
attached_later("attached later, mixed", False, dtype="bf16")
attached_later("attached later, embedding", False, target_modules=["embed_tokens", "q_proj"])

# what the first call was told holds for the second
early = wrap_fsdp_meta_safe(attached(skeleton("f32"), 7), f"{folder}/f32", mp_policy=torch.bfloat16)
_, late = attached_later("", False, policy=torch.bfloat16)
report(policy=[str(step(each, inputs("llama")).dtype) for each in (early, late)])
kept = wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32", ignored_params=["model.norm"])
kept = wrap_fsdp_meta_safe(get_peft_model(kept, config()))
report(kept=[type(kept.base_model.model.model.norm.weight).__name__, [u.name for u in kept.fsdp_report.units][:2]])

# a head that came later, and is on meta
headed = wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32")
headed.value = torch.nn.Linear(60, 3, device="meta")
def init(module):
    torch.nn.init.normal_(module.weight)
    torch.nn.init.ones_(module.bias)
torch.manual_seed(5)
headed = wrap_fsdp_meta_safe(headed, init_new=init)
single, x = torch.nn.Linear(60, 3), torch.linspace(-1, 1, 60)[None]
torch.manual_seed(5)
init(single)
report(head=[torch.equal(whole(headed.value.weight), single.weight), torch.equal(headed.value(x), single(x))])

def late_error(model, *args, **options):
    try:
        wrap_fsdp_meta_safe(model, *args, **options)
    except SafeLoadingError as error:
        return str(error)
    return None

def refused_by(call):
    try:
        call()
    except SafeLoadingError as error:
        return str(error)
    return None

copied = wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32")
copied = get_peft_model(copied, config(modules_to_save=["down_proj"]))
units = wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32")
of_units = {
    each: refused_by(lambda: get_peft_model(units, config(modules_to_save=[each])))
    for each in ("embed_tokens", "lm_head")
}
has_run = wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32")
step(has_run, inputs("llama"))
has_run = get_peft_model(has_run, config(target_modules=["embed_tokens"]))
prompts = wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32")
prompts = get_peft_model(prompts, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
flat = wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32", mesh=(1, 2))
flat = get_peft_model(flat, config())
again = get_peft_model(wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32"), config())
one_of_two = get_peft_model(wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32"), config(r=4 + rank))
first = get_peft_model(wrap_fsdp_meta_safe(skeleton("f32"), f"{folder}/f32", version=1), config())
report(late_refused={
    "copies": late_error(copied),
    "copied embeddings": of_units["embed_tokens"],
    "copied head": of_units["lm_head"],
    "embeddings after a step": late_error(has_run),
    "virtual tokens": late_error(prompts),
    "replicas": late_error(flat),
    "arguments": late_error(again, f"{folder}/f32", auto_wrap_policy="LlamaMLP", adapters=f"{folder}/adapter"),
    "ranks": late_error(one_of_two),
    "nothing": late_error(late),
    "version 1": late_error(first, version=1),
})

refused = {}
for name, options in {"dora": dict(use_dora=True), "embedding 1": dict(target_modules=["embed_tokens"])}.items():
    try:
        dtype = "bf16" if name.endswith("1") else "f32"
        version = 1 if name.endswith("1") else 2
        wrap_fsdp_meta_safe(attached(skeleton(dtype), 7, **options), f"{folder}/{dtype}", version=version)
        refused[name] = None
    except SafeLoadingError as error:
        refused[name] = str(error)
report(refused=refused)
dist.destroy_process_group()
"""
NAMES = [
    *(f"{name} 2" for name in ("plain", "mixed", "saved", "mixed and saved", "embedding", "gaussian")),
    *(f"{name} 1" for name in ("plain", "mixed", "saved", "mixed and saved")),
    "from a folder",
    *(f"attached later{how}" for how in ("", ", a second", ", after a step", ", mixed", ", embedding")),
]


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 2, args=[tmp_path_factory.mktemp("peft")], timeout=240).found


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_starts_and_trains_as_in_one_process(found: list[dict[str, Any]], name: str) -> None:
    for facts in found:
        at_first, after_two_steps, _ = facts[name]
        assert at_first == NOTHING
        assert after_two_steps == NOTHING


def test_draws_made_before_the_wrap_count_when_peft_has_lost_its_own(found: list[dict[str, Any]]) -> None:
    assert [facts["later"] for facts in found] == [[NOTHING, True]] * 2


def test_fsdp1_gives_layers_of_another_dtype_units_of_their_own(found: list[dict[str, Any]]) -> None:
    units = found[0]["mixed 1"][2]
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default" in units
    assert units[-1] == "(root)"


def test_what_cannot_be_initialized_or_flattened_is_refused(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert (
            "made from the weights of the base" in facts["refused"]["dora"] or "no values" in facts["refused"]["dora"]
        )
        assert "lora_embedding_A.default is torch.float32" in facts["refused"]["embedding 1"]


@pytest.mark.parametrize("name", ["attached later", "attached later, after a step"])
def test_of_an_adapter_that_came_later_rank_0_sends_the_parts(found: list[dict[str, Any]], name: str) -> None:
    for rank, facts in enumerate(found):
        sent, of_others, read = facts[f"facts of {name}"]
        assert sent == (of_others if rank == 0 else 0)
        assert read == 0


def test_a_second_call_keeps_to_what_the_first_was_told(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["policy"] == ["torch.bfloat16"] * 2
        kind, units = facts["kept"]
        assert kind == "Parameter"
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        assert units[0] == f"{layer}.lora_A.default + {layer}.lora_B.default"


def test_a_head_that_came_later_is_sharded_and_computes(found: list[dict[str, Any]]) -> None:
    assert [facts["head"] for facts in found] == [[True, True]] * 2


LATE = {
    "copies": ["down_proj.modules_to_save.default.weight", "Attach this adapter first"],
    "copied embeddings": ["This Embedding is sharded by FSDP2", "attach the adapter first"],
    "copied head": ["This Linear is sharded by FSDP2", "attach the adapter first"],
    "embeddings after a step": ["model.embed_tokens", "Attach to these before the first forward pass"],
    "virtual tokens": ["default: PROMPT_TUNING", "attach it first, then wrap"],
    "replicas": ["q_proj: the adapter has out_features=", "the layer 60", "Attach the adapter first"],
    "arguments": ["source=", "auto_wrap_policy=", "adapters=", "PeftModel.from_pretrained"],
    "ranks": ["lora_A.default.weight: float32[4, 60]", "[5, 60]"],
    "nothing": ["nothing was attached to it since"],
    "version 1": ["attach it first, then wrap"],
}


@pytest.mark.parametrize("name", LATE)
def test_what_came_later_and_cannot_be_sharded_is_refused(found: list[dict[str, Any]], name: str) -> None:
    for facts in found:
        for word in LATE[name]:
            assert word in facts["late_refused"][name]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_weights_of_the_base_that_peft_saves_with_an_adapter_arrive(
    tmp_path: Path, tied: bool, target: str, version: Any
) -> None:
    """peft saves the weights of adapted embeddings and heads, which may be others than the base's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=64, tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj", target], init_lora_weights=False, task_type="CAUSAL_LM")
    made: Any = get_peft_model(base, lora)
    with torch.no_grad():
        made.get_base_model().get_output_embeddings().weight.mul_(1.5)
    made.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    truth = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    model = get_peft_model(meta_model(tmp_path / "base"), LoraConfig.from_pretrained(tmp_path / "adapter"))
    wrapped = wrap_fsdp_meta_safe(model, tmp_path / "base", adapters=tmp_path / "adapter", version=version)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(wrapped(tokens).logits, truth.eval()(tokens).logits)
