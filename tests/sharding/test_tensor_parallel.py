"""FSDP with tensor parallelism: two shards of two parts compute, train, save and resume as one process does."""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import needs
from rank_server import RankServer
from tiny_models import causal_lm_classes, image_text_classes

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
from safe_loading import assert_optimizer_sharded, meta_model, wrap_fsdp_meta_safe

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

def mixtral(**options):
    sizes = {"vocab_size": 252, "num_local_experts": 6, "intermediate_size": 64, "num_hidden_layers": 2}
    return fsdp_cases.mixtral(**{**sizes, **options})

def qwen3_moe(**options):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    sizes = dict(hidden_size=60, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=2, head_dim=10,
        num_attention_heads=6, num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[1],
        vocab_size=252, attn_implementation="eager", pad_token_id=0)
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**sizes, **options})

def gpt_oss(**options):
    from transformers import GptOssConfig, GptOssForCausalLM
    sizes = dict(hidden_size=60, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, head_dim=10,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2, vocab_size=252, sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, attn_implementation="eager", pad_token_id=0)
    return GptOssForCausalLM, GptOssConfig(**{**sizes, **options})

def llama4(**options):
    from transformers import Llama4ForCausalLM, Llama4TextConfig
    sizes = dict(hidden_size=60, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=2, head_dim=10,
        num_attention_heads=6, num_key_value_heads=2, num_local_experts=4, moe_layers=[1], vocab_size=252,
        attention_chunk_size=64, attn_implementation="eager", pad_token_id=0)
    return Llama4ForCausalLM, Llama4TextConfig(**{**sizes, **options})

def latent(**options):
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
    sizes = dict(hidden_size=60, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=2, vocab_size=252,
        num_attention_heads=6, num_key_value_heads=6, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
        topk_method="greedy", n_group=1, topk_group=1, attn_implementation="eager", pad_token_id=0)
    return DeepseekV2ForCausalLM, DeepseekV2Config(**{**sizes, **options})

def chosen():
    # each token attends to the four that a small network of whole weights chooses
    from tiny_models import tiny_config
    from transformers import DeepseekV32ForCausalLM
    config = tiny_config("DeepseekV32ForCausalLM")
    config.update(dict(index_topk=4, vocab_size=252, pad_token_id=0))
    config._attn_implementation = "eager"
    return DeepseekV32ForCausalLM, config

def with_lora(model, **options):
    torch.manual_seed(7)
    targets = ["q_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_b_proj"]
    of_experts = any(each in type(model).__name__ for each in ("Moe", "Deepseek"))  # whose parameters peft adapts
    targets += [] if of_experts else ["down_proj"]
    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM", **options}))

def tensor_mesh(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))
"""

EQUAL = (
    COMMON
    + """
import itertools, json
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
MODELS = {
    "gpt oss": gpt_oss, "llama 4": llama4, "latent": latent, "chosen": chosen,
    "llama": llama, "qwen3": qwen3, "phi3": phi3, "mixtral": mixtral, "qwen3 moe": qwen3_moe,
    "tied": lambda: qwen3(tie_word_embeddings=True),
    "odd": lambda: qwen3(vocab_size=253, attention_bias=True),
    "odd and tied": lambda: llama(vocab_size=253, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
}
for name, adapters in itertools.groupby(json.loads(sys.argv[2]), key=lambda case: case[0]):
    path = f"{folder}/{name}"
    if rank == 0:
        made = reference(MODELS[name])
        for parameter in made.parameters():
            if not parameter.any():  # biases that start so would hide where they are added
                torch.nn.init.normal_(parameter, std=0.1)
        save(made, path)
    dist.barrier()
    for _, adapter in adapters:
        put = with_lora if adapter else (lambda model: model)
        one, exact = put(loaded(path)), put(loaded(path)).double()
        exact.config._experts_implementation = "eager"  # torch groups no products in float64
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
            if number == 0:
                norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1e9) for each in (model, one, exact)]
                found["step 0"] = {
                    "logits": [off(logits, right[place]), off(plain[place], right[place])],
                    "gradients": [errors(model, exact), errors(one, exact)],
                    "norms": [float(whole(norm)) for norm in norms],
                }
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
# A model, and whether it has an adapter. Each class once, and what is odd both ways.
SAMPLE = [("llama", True), ("phi3", False), ("odd and tied", False), ("odd and tied", True), ("qwen3 moe", False)]
SAMPLE += [("mixtral", True), ("gpt oss", False), ("llama 4", False), ("latent", True)]
REST = [
    ("llama", False),
    ("qwen3", False),
    ("phi3", True),
    ("mixtral", False),
    ("gpt oss", True),
    ("llama 4", True),
    ("latent", False),
    ("chosen", False),
    ("chosen", True),
    ("qwen3 moe", True),
    ("qwen3", True),
    ("tied", False),
    ("tied", True),
    ("odd", False),
    ("odd", True),
]
CASES = [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
Found = Callable[[str, bool], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def equal(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found of a case."""

    @functools.cache
    def ranks(sample: bool) -> list[dict[str, Any]]:
        arguments = [tmp_path_factory.mktemp("parts"), json.dumps(SAMPLE if sample else REST)]
        return rank_server.run(EQUAL, 4, args=arguments, timeout=400).found

    return lambda case, adapter: [found[f"{case} {adapter}"] for found in ranks((case, adapter) in SAMPLE)]


def _near(pair: list[Any]) -> bool:
    """Whether parts are as near to float64 as one process is: the same sums in another order."""
    parts, one = pair
    if isinstance(parts, dict):
        assert parts.keys() == one.keys()
        return all(parts[name] <= 8 * max(one.values()) for name in parts)
    return bool(parts <= 8 * one)


@pytest.mark.parametrize(("case", "adapter"), CASES)
def test_parts_compute_and_train_as_one_process(equal: Found, case: str, adapter: bool) -> None:
    for found in equal(case, adapter):
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


@pytest.mark.parametrize(
    "case",
    [
        *("phi3", "odd and tied", "qwen3 moe", "gpt oss"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("llama", "qwen3")),
    ],
)
def test_each_rank_reads_its_slice_of_its_slice_and_nothing_is_sent(equal: Found, case: str) -> None:
    for found in equal(case, False):
        assert found["read"] == found["local"]
        assert found["sent"] == 0
        assert found["local"] <= found["model"] / 4 * (1.05 if "odd" not in case else 1.5)


RESUMED = (
    COMMON
    + """
import torch.distributed.checkpoint as dist_checkpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

def wrapped(adapters):
    mesh = tensor_mesh(2, 2) if sys.argv[2] == "parts" else None
    model = with_lora(meta_model(f"{folder}/base", attn_implementation="eager").train())
    return wrap_fsdp_meta_safe(model, f"{folder}/base", mesh=mesh, adapters=adapters, verify="bytes")

def step(model, optimizer):
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    norm = float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    optimizer.step()
    optimizer.zero_grad()
    return norm

def trained(model):
    return {name: whole(each).detach().clone() for name, each in model.named_parameters() if each.requires_grad}

def checkpoint(model, optimizer):
    states = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    return dict(zip(("model", "optimizer"), states))

if sys.argv[2] == "parts":
    if rank == 0:
        save(reference(qwen3), f"{folder}/base")
    dist.barrier()
    model = wrapped(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer), step(model, optimizer)
    model.save_pretrained(f"{folder}/adapter")
    dist_checkpoint.save(checkpoint(model, optimizer), checkpoint_id=f"{folder}/state")
    before = trained(model)
    norm = step(model, optimizer)
    if rank == 0:
        torch.save([before, trained(model), norm], f"{folder}/wanted")
    else:
        trained(model)
    dist.barrier()
before, after, norm = torch.load(f"{folder}/wanted")
model = wrapped(f"{folder}/adapter")
mine = trained(model)
adapter = [name for name, value in before.items() if not torch.equal(value, mine[name])]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = checkpoint(model, optimizer)
dist_checkpoint.load(state, checkpoint_id=f"{folder}/state")
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
    options=StateDictOptions(ignore_frozen_params=True, strict=False))
kept = trained(model)
step_norm = step(model, optimizer)
report(
    adapter=adapter, kept=[name for name, value in before.items() if not torch.equal(value, kept[name])],
    norm=[norm, step_norm], off=max(float((value - after[name]).abs().max()) for name, value in trained(model).items()),
)
dist.destroy_process_group()
"""
)


def test_a_training_goes_on_on_other_numbers_of_ranks(rank_server: RankServer, tmp_path: Path) -> None:
    for ranks, mesh in ((4, "parts"), (4, "plain"), (2, "plain"), (1, "plain")):
        for facts in rank_server.run(RESUMED, ranks, args=[tmp_path, mesh]).found:
            assert facts["adapter"] == []
            assert facts["kept"] == []
            before, after = facts["norm"]
            assert abs(before - after) <= 1e-5 * before
            # AdamW divides each gradient by its size, so that rounding moves an element by a part of the step of 1e-2
            assert facts["off"] <= 1e-4


REFUSED = (
    COMMON
    + """
from peft import IA3Config
from transformers import BitsAndBytesConfig
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig

mesh = tensor_mesh(2, 2)
mixtral_of, mixtral = mixtral, lambda: mixtral_of(num_local_experts=4)
cases = {
    "gpt2": gpt2, "mixtral": mixtral, "llama": llama, "untidy": lambda: llama(intermediate_size=63),
    "rows": lambda: mixtral_of(intermediate_size=36),
    "tied": lambda: llama(tie_word_embeddings=True), "latent": latent, "gpt oss": gpt_oss,
    "pairs": lambda: gpt_oss(intermediate_size=63),
}
for name, make in cases.items():
    if rank == 0:
        save(reference(make), f"{folder}/{name}")
dist.barrier()

def refused(name, change=lambda model: model, mesh=mesh, ignored_params=None, **options):
    model = change(meta_model(f"{folder}/{name}", attn_implementation="eager", **options))
    before = {n: (id(p), p.is_meta) for n, p in model.named_parameters()}
    said = error_of(lambda: wrap_fsdp_meta_safe(model, f"{folder}/{name}", mesh=mesh, ignored_params=ignored_params))
    return [said, before == {n: (id(p), p.is_meta) for n, p in model.named_parameters()}]

def other_plan(model):
    model.tp_plan = {"model.embed_tokens": "embedding_colwise", "lm_head": "colwise_gather_output"}
    return model

def with_slope(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.PReLU(device="meta")
    return model

def with_dropout(model):
    model.config.residual_dropout = 0.1
    return model

def with_sparse_layers(model):
    for layer in model.model.layers:
        layer.mlp.activation_sparsity = 0.95  # as Gemma3n has it
    return model

def with_scale(model):
    for layer in model.model.layers:
        layer.mlp.experts.scale = torch.nn.Parameter(torch.empty(4, 60, device="meta"))
    return model

def with_halves(model):
    # as transformers' plan for Inkling
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.experts.gate_up_proj": "colwise"}
    return model

def with_norms(model):
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True  # as MuseSpark has it
    return model

def with_whole_bias(model):
    model.tp_plan = {"model.layers.*.self_attn.sinks": "replicate", "model.layers.*.self_attn": "local_params"}
    return model

def adapted_past_the_plan(model):
    model.tp_plan = {name: style for name, style in model.tp_plan.items() if "v_proj" not in name}
    return with_lora(model, target_modules=["v_proj"])

def turned_experts(model):
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.experts.down_proj": "colwise"}
    return model

def with_noise(model):
    model.config.router_jitter_noise = 0.1
    return model

named = lambda sizes, names: init_device_mesh("cpu", sizes, mesh_dim_names=names)
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16)
report(
    plan=refused("gpt2"), scale=refused("mixtral", with_scale), experts=refused("mixtral", turned_experts),
    halves=refused("mixtral", with_halves), norms=refused("mixtral", with_norms), pairs=refused("pairs"),
    latent=refused("latent", lambda model: with_lora(model, target_modules=["kv_a_proj_with_mqa"])),
    parameters=refused("gpt oss", lambda model: with_lora(model, target_parameters=["mlp.experts.down_proj"])),
    sinks=refused("gpt oss", with_whole_bias), past=refused("llama", adapted_past_the_plan),
    noise=refused("mixtral", with_noise), rows=refused("rows"), heads=refused("llama", mesh=tensor_mesh(1, 4)),
    size=refused("untidy"), ties=refused("tied", other_plan), packed=refused("llama", quantization_config=nf4),
    dropout=refused("llama", lambda model: with_lora(model, lora_dropout=0.1)),
    dora=refused("llama", lambda model: with_lora(model, use_dora=True)),
    copies=refused("llama", lambda model: with_lora(model, modules_to_save=["lm_head"])),
    kind=refused("llama", lambda model: get_peft_model(model, IA3Config(task_type="CAUSAL_LM"))),
    embedding=refused("llama", lambda model: with_lora(model, target_modules=["embed_tokens"])),
    order=refused("llama", mesh=named((2, 2), ("tp", "fsdp"))), one=refused("llama", mesh=named((4,), ("tp",))),
    three=refused("llama", mesh=named((2, 1, 2), ("cp", "fsdp", "tp"))),
    ep=refused("mixtral", mesh=named((2, 2), ("fsdp", "ep"))),
    turned=refused("llama", mesh=DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("fsdp", "tp"))),
    unsaid=refused("llama", with_slope), residual=refused("llama", with_dropout),
    sparse=refused("llama", with_sparse_layers), ignored=refused("llama", ignored_params="lm_head"),
)
flat = meta_model(f"{folder}/llama", attn_implementation="eager")
model = meta_model(f"{folder}/llama", attn_implementation="eager").train()
model = wrap_fsdp_meta_safe(model, f"{folder}/llama", mesh=mesh)
other = lambda: model(input_ids=TOKENS + mesh.get_local_rank(1 if rank < 2 else 0), labels=TOKENS)
report(
    version=error_of(lambda: wrap_fsdp_meta_safe(flat, f"{folder}/llama", mesh=mesh, version=1)),
    later=error_of(lambda: wrap_fsdp_meta_safe(with_lora(model))),
    batch=error_of(other),
)

from trainer_matrix import tell_accelerate
from transformers import Trainer, TrainingArguments
tell_accelerate()
rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.arange(1, 129).reshape(8, 16)]
quiet = dict(report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", max_steps=1)
sharded = dict(fsdp=True, fsdp_config={"version": 2}, per_device_train_batch_size=2)
arguments = TrainingArguments(f"{folder}/out", **sharded, **quiet)
model = meta_model(f"{folder}/llama", attn_implementation="eager").train()
model = wrap_fsdp_meta_safe(model, f"{folder}/llama", mesh=mesh)
report(trainer=error_of(lambda: Trainer(model, arguments, train_dataset=rows).train()))

# the roads
made = wrap_fsdp_meta_safe(meta_model(f"{folder}/mixtral", attn_implementation="eager").train(), f"{folder}/mixtral")
one = reference(mixtral)
report(without=differences(one, made, inputs("llama")))
sizes = DistributedConfig(fsdp_size=4, ep_size=2)
split = AutoModelForCausalLM.from_pretrained(f"{folder}/mixtral", attn_implementation="eager", distributed_config=sizes)
loss = split(**inputs("llama")).loss
loss.backward()
report(split=abs(float(loss) - float(one(**inputs("llama")).loss)))
single = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
for name, change in {
    "dropout": lambda m: with_lora(m, lora_dropout=0.0), "later": with_lora, "kind": with_lora, "plain": lambda m: m
}.items():
    model = change(meta_model(f"{folder}/llama", attn_implementation="eager").train())
    model = wrap_fsdp_meta_safe(model, f"{folder}/llama", mesh=single)
    place = single.get_local_rank(0)
    report(**{f"taken {name}": bool(torch.isfinite(model(input_ids=TOKENS + place, labels=TOKENS).loss))})
dist.barrier()
dist.destroy_process_group()
"""
)
SAYS = {
    "plan": ["GPT2LMHeadModel has no plan for tensor parallelism", "Leave 'tp' out of the mesh"],
    "scale": [
        "model.layers.*.mlp.experts.scale is whole among split experts, and each rank would add it",
        "Leave 'tp' out of the mesh, or tp_size= out of accelerate's ParallelismConfig, and FSDP shards the model",
    ],
    "experts": ["model.layers.*.mlp.experts.down_proj has the style colwise of its own"],
    "halves": [
        "model.layers.*.mlp.experts.gate_up_proj holds all gates before all projections up, and the style colwise of "
        "the plan would give a rank the ones without the others"
    ],
    "norms": ["model.layers.*.mlp.experts.down_proj is of experts with a norm after each"],
    "pairs": ["model.layers.*.mlp.experts.gate_up_proj [6, 60, 126] has 63 pairs to split over 2 ranks"],
    "latent": [
        "model.layers.*.self_attn.kv_a_proj_with_mqa has an adapter, of whose output each rank's heads turn a part"
    ],
    "parameters": ["the adapter default is LORA with target_parameters: attach LoRA alone"],
    "sinks": ["model.layers.*.self_attn.sinks is whole in a module that computes with parts"],
    "past": ["model.layers.*.self_attn.v_proj is among split layers, and the plan does not say what it gets"],
    "noise": ["router_jitter_noise=0.1 of the config draws other noise on each rank: set it to 0"],
    "rows": ["mlp.experts.down_proj [6, 60, 36] has parts whose rows torch does not align in grouped_mm"],
    "heads": ["model.layers.*.self_attn.k_proj has 2 heads to split over 4 ranks"],
    "size": ["model.layers.*.mlp.up_proj.weight [63, 60] has 63 to split over 2 ranks", "down_proj.weight [60, 63]"],
    "ties": ["model.embed_tokens.weight and lm_head.weight are tied, and would be split in different ways"],
    "packed": ["model.layers.*.self_attn.q_proj has packed weights, whose codes cannot be split"],
    "dropout": ["q_proj.lora_dropout.default drops with p=0.1, at other places on each rank: set it to 0"],
    "dora": ["q_proj has a variant of LoRA (DoraLinearVariant): attach LoRA alone"],
    "copies": ["the adapter default is LORA with modules_to_save: attach LoRA alone"],
    "kind": ["the adapter default is IA3: attach LoRA alone"],
    "embedding": ["is a ParameterDict, whose tensors are read from outside"],
    "order": ["('tp', 'fsdp')", "mesh_dim_names=('fsdp', 'tp')"],
    "one": ["('tp',)", "mesh_dim_names=('fsdp', 'tp')"],
    "three": ["('cp', 'fsdp', 'tp')", "(replicas, shards, parts) with ('dp_replicate', 'fsdp', 'tp')"],
    "ep": ["('fsdp', 'ep')", "Leave 'ep' out", "DistributedConfig(ep_size=)"],
    "turned": ["its ranks in the order [2, 3, 0, 1]: make it with init_device_mesh"],
    "unsaid": ["model.layers.*.mlp.act_fn is among split layers, and the plan does not say what it gets"],
    "residual": ["residual_dropout=0.1 of the config drops at other places on each rank: set it to 0"],
    "sparse": ["model.layers.*.mlp keeps the largest activations of the whole layer"],
    "ignored": ["lm_head.weight is kept whole: leave ignored_params= out"],
}


@pytest.fixture(scope="module")
def refusals(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(REFUSED, 4, args=[tmp_path_factory.mktemp("refused")], timeout=300).found


@pytest.mark.parametrize("case", SAYS)
def test_what_cannot_be_split_is_refused_by_name_before_anything_is_touched(
    refusals: list[dict[str, Any]], case: str
) -> None:
    for facts in refusals:
        said, untouched = facts[case]
        assert untouched
        for part in SAYS[case]:
            assert part in said


def test_a_split_model_is_told_of_its_mesh_and_of_its_batches(refusals: list[dict[str, Any]]) -> None:
    for facts in refusals:
        assert "version=2" in facts["version"]
        assert "what was attached since is whole. Attach it first, then wrap." in facts["later"]
        # ranks 0 and 1 have the parts of one layer, and other batches; all ranks are told
        assert "mesh.get_local_rank(0)" in facts["batch"]
        assert "rank 0: " in facts["batch"]
        assert "rank 2: " not in facts["batch"]
        # Trainer gives each rank other rows
        assert "rank 0: " in facts["trainer"]
        assert "rank 2: " in facts["trainer"]


def test_the_roads_are_right(refusals: list[dict[str, Any]]) -> None:
    for facts in refusals:
        assert facts["without"]["parameters"] == []
        assert facts["without"]["gradients"] == []
        assert facts["without"]["logits"] == 0
        assert facts["split"] < 1e-5
        assert all(facts[f"taken {name}"] for name in ("dropout", "later", "kind", "plain"))


SOURCES = (
    COMMON
    + """
mesh = tensor_mesh(2, 2)
if rank == 0:
    save(reference(qwen3), f"{folder}/base")
dist.barrier()

def loaded():
    return AutoModelForCausalLM.from_pretrained(f"{folder}/base", attn_implementation="eager").train()

def on_meta():
    return meta_model(f"{folder}/base", attn_implementation="eager").train()

def wrapped(model, source, **options):
    return wrap_fsdp_meta_safe(model, source, mesh=mesh, verify="bytes", **options)

def unequal(one, model):
    return [n for n, p in one.named_parameters() if not torch.equal(p, whole(model.get_parameter(n)))]

def near(one, model):
    plain, parts = step(one, inputs("llama")), step(model, inputs("llama"))
    grads = [float((whole(p.grad) - one.get_parameter(n).grad).abs().max() / one.get_parameter(n).grad.abs().max())
        for n, p in model.named_parameters() if p.grad is not None and one.get_parameter(n).grad.any()]
    return max(float((plain - parts).abs().max()), *grads)

one = loaded()
whole_bytes = sum(p.nbytes for p in one.parameters())
model = wrapped(loaded() if rank == 0 else on_meta(), None)
report(real=[unequal(one, model), model.fsdp_report.bytes_sent, near(one, model), whole_bytes])
model = wrapped(on_meta(), one.state_dict() if rank == 0 else None)
report(state=[unequal(one, model), model.fsdp_report.bytes_sent, near(one, model), whole_bytes])
for options in ({"offload_policy": True}, {"reshard_after_forward": False}, {"auto_wrap_policy": "Qwen3MLP"}):
    model = wrapped(on_meta(), f"{folder}/base", **options)
    report(**{str(options): near(loaded(), model)})
model = wrapped(on_meta(), f"{folder}/base", mp_policy=torch.bfloat16)
report(bfloat16=near(loaded(), model))
targets = ["q_proj", "o_proj", "down_proj", "lm_head"]
one = with_lora(loaded(), target_modules=targets)
torch.manual_seed(5)
for name, parameter in one.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.1)
model = with_lora(loaded() if rank == 0 else on_meta(), target_modules=targets)
if rank == 0:
    model.load_state_dict(one.state_dict())
model = wrapped(model, None)
report(adapted=[unequal(one, model), near(one, model)])
merged, plain = model.merge_and_unload(), one.merge_and_unload()
off = max(float((whole(p) - plain.get_parameter(n)).abs().max()) for n, p in merged.named_parameters())
report(merged=[off, near(plain.requires_grad_(True), merged.requires_grad_(True))])
text = dict(input_ids=TOKENS[:, :4], max_new_tokens=4, do_sample=False, cache_implementation="static")
model = wrapped(on_meta().eval(), f"{folder}/base")
report(static=model.generate(**text).tolist() == loaded().eval().generate(**text).tolist())
half = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("halves", "fsdp", "tp"))["fsdp", "tp"]
model = wrap_fsdp_meta_safe(on_meta(), f"{folder}/base", mesh=half)
facts = model.fsdp_report
report(half=[unequal(loaded(), model), near(loaded(), model), [facts.rank, facts.ranks, facts.shards, facts.parts]])

# two replicas of one shard of two parts, each with a batch of its own
copies = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "fsdp", "tp"))
batches = [TOKENS, TOKENS.flip(1)]
one = loaded()
(sum(one(input_ids=batch, labels=batch).loss for batch in batches) / 2).backward()
for name, model, source in (
    ("folder", on_meta(), f"{folder}/base"), ("rank 0", loaded() if rank == 0 else on_meta(), None)
):
    model = wrap_fsdp_meta_safe(model, source, mesh=copies, verify="bytes")
    facts, batch = model.fsdp_report, batches[copies.get_local_rank(0)]
    model(input_ids=batch, labels=batch).loss.backward()
    grads = [(whole(p.grad), one.get_parameter(n).grad) for n, p in model.named_parameters()]
    off = max(float((own - right).abs().max() / right.abs().max()) for own, right in grads)
    local, buffers = sum(local_bytes(p) for p in model.parameters()), sum(each.nbytes for each in model.buffers())
    model.save_pretrained(f"{folder}/copies")
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/copies")
    report(**{f"copies {name}": [unequal(one, model) + unequal(one, saved), off, [facts.shards, facts.parts],
        facts.bytes_read, facts.bytes_sent, local, buffers]})

# the gates and projections up of experts are packed into one parameter, of which a part is two pieces
import torch.distributed.checkpoint as dist_checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
if rank == 0:
    save(reference(mixtral), f"{folder}/experts")
dist.barrier()
def of_experts(mesh):
    model = wrap_fsdp_meta_safe(meta_model(f"{folder}/experts"), f"{folder}/experts", mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
def checkpoint(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
def values(model, optimizer):
    moments = {n: whole(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters() if p in optimizer.state}
    return [{n: whole(p).clone() for n, p in model.named_parameters()}, moments]
for name, from_mesh, to_mesh in (("to", None, mesh), ("from", mesh, None), ("from replicas", copies, mesh)):
    model, optimizer = of_experts(from_mesh)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    dist_checkpoint.save(checkpoint(model, optimizer), checkpoint_id=f"{folder}/state {name}")
    other, other_optimizer = of_experts(to_mesh)
    state = checkpoint(other, other_optimizer)
    dist_checkpoint.load(state, checkpoint_id=f"{folder}/state {name}")
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    wanted, found = values(model, optimizer), values(other, other_optimizer)
    unlike = [n for one, same in zip(wanted, found) for n in one if not torch.equal(one[n], same[n])]
    report(**{f"checkpoint {name}": unlike})
model = wrap_fsdp_meta_safe(on_meta(), f"{folder}/base", mesh=copies)
report(batch=error_of(lambda: model(input_ids=TOKENS + rank, labels=TOKENS)))
dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def sources(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SOURCES, 4, args=[tmp_path_factory.mktemp("sources")], timeout=300).found


@pytest.mark.parametrize("source", ["real", "state"])
def test_rank_0_sends_each_rank_its_part(sources: list[dict[str, Any]], source: str) -> None:
    for rank, facts in enumerate(sources):
        unequal, sent, off, model = facts[source]
        assert unequal == []
        assert off < 1e-5
        # norms are whole on both ranks of a part, and sent to both
        assert (0.75 * model <= sent <= 0.77 * model) if rank == 0 else sent == 0


def test_the_options_of_a_wrap_hold_for_parts(sources: list[dict[str, Any]]) -> None:
    for facts in sources:
        for options in ({"offload_policy": True}, {"reshard_after_forward": False}, {"auto_wrap_policy": "Qwen3MLP"}):
            assert facts[str(options)] < 1e-5
        assert 1e-4 < facts["bfloat16"] < 0.1
        assert facts["static"]


def test_an_adapter_of_a_real_model_is_split_and_merged(sources: list[dict[str, Any]]) -> None:
    for facts in sources:
        assert facts["adapted"][0] == []
        assert facts["adapted"][1] < 1e-5
        assert facts["merged"][0] < 1e-6
        assert facts["merged"][1] < 1e-5


def test_each_half_of_the_ranks_may_split_a_model_of_its_own(sources: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(sources):
        unequal, off, place = facts["half"]
        assert unequal == []
        assert off < 1e-5
        assert place == [rank % 2, 2, 1, 2]


def test_replicas_of_parts_mean_the_gradients_of_their_batches(sources: list[dict[str, Any]]) -> None:
    for facts in sources:
        for source in ("folder", "rank 0"):
            unequal, off, place, *_ = facts[f"copies {source}"]
            assert unequal == []
            assert off < 1e-5
            assert place == [1, 2]
        *_, read, sent, local, _ = facts["copies folder"]
        assert (read, sent) == (local, 0)
        assert "mesh.get_local_rank(0) * mesh.size(1) + mesh.get_local_rank(1)" in facts["batch"]
    *_, sent, local, buffers = zip(*(facts["copies rank 0"] for facts in sources), strict=True)
    assert sum(sent) == sum(local[1:]) + sum(buffers[1:])  # what each of the others has, once


def test_checkpoints_hold_each_piece_of_packed_experts_at_its_place(sources: list[dict[str, Any]]) -> None:
    """Weights and moments; torch alone refuses to save them, and loads other rows into them without a word."""
    for facts in sources:
        assert facts["checkpoint to"] == facts["checkpoint from"] == facts["checkpoint from replicas"] == []


NATIVE = (
    COMMON
    + """
from transformers.distributed import DistributedConfig

path = f"{folder}/base"
if rank == 0:
    save(reference(llama), path)
dist.barrier()

def native(**sizes):
    sizes = DistributedConfig(**sizes)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", distributed_config=sizes)

def fails(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

model, one = native(tp_size=2, fsdp_size=2), AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
off = float((step(model, inputs("llama")) - step(one, inputs("llama"))).abs().max())
adapted = with_lora(native(tp_size=2, fsdp_size=2))
report(
    refused=[error_of(lambda: wrap_fsdp_meta_safe(native(**sizes), path)) for sizes in (
        {"tp_size": 2, "fsdp_size": 2}, {"tp_size": 4})], off=off,
    clipped=fails(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    adapted=fails(lambda: adapted(**inputs("llama"))),
)
# the road: the plain model, and a mesh
model = with_lora(meta_model(path, attn_implementation="eager").train())
model = wrap_fsdp_meta_safe(model, path, mesh=tensor_mesh(2, 2))
step(model, inputs("llama"))
report(road=bool(torch.isfinite(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))))
dist.barrier()
dist.destroy_process_group()
"""
)


def test_what_transformers_has_split_is_refused_and_the_road_is_right(rank_server: RankServer, tmp_path: Path) -> None:
    """What docs/fsdp.md says of transformers' own road is true as well: it computes, and neither clips nor adapts."""
    for facts in rank_server.run(NATIVE, 4, args=[tmp_path]).found:
        both, layers = facts["refused"]
        assert "The layers of this model are split over DeviceMesh" in both
        assert "wrap the plain model, for tensor parallelism with a mesh of the dimensions 'fsdp' and 'tp'" in layers
        assert facts["off"] < 1e-5
        assert "must have the same mesh" in facts["clipped"]
        assert facts["adapted"] is not None
        assert facts["road"]


SWEEP = (
    COMMON
    + """
import pathlib, shutil
import transformers
from fsdp_sweep import batch_of
from tiny_models import saved

def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()

def squares(model, batch):
    torch.manual_seed(0)
    output = model(**batch)
    logits = output.logits if hasattr(output, "logits") else output[0]
    logits.float().pow(2).mean().backward()
    return logits.detach()

def check(name, path):
    kind = getattr(transformers, name)
    one = without_dropout(kind.from_pretrained(path, attn_implementation="eager"))
    model = without_dropout(meta_model(path, kind, attn_implementation="eager"))
    if not model.tp_plan:
        return "no plan"
    said = error_of(lambda: wrap_fsdp_meta_safe(model, path, mesh=tensor_mesh(1, 2)))
    if said is not None:
        return "refused" if "Tensor parallelism cannot split" in said else said
    unequal = [n for n, p in one.named_parameters() if not torch.equal(p, whole(model.get_parameter(n)))]
    try:
        batch = batch_of(one)
        logits = squares(one, batch)
    except Exception:
        return unequal or "no step"
    off = float((squares(model, batch) - logits).abs().max() / logits.abs().max())
    largest = max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        grad, own = one.get_parameter(name).grad, parameter.grad
        if grad is None or own is None:
            off = max(off, *(float(whole(g).abs().max()) for g in (grad, own, torch.zeros(1)) if g is not None))
        else:
            off = max(off, float((whole(own) - grad).abs().max()) / max(float(grad.abs().max()), 1e-3 * largest))
    return unequal or ("equal" if off < 1e-4 else off)

for name in sys.argv[2].split(","):
    path = pathlib.Path(folder, name)
    if rank == 0:
        saved(name, path)
    dist.barrier()
    try:
        found = check(name, path)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"[:500]
    report(**{name: found})
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
dist.destroy_process_group()
"""
)
# Each reads weights past the forward of their module, leaves a head undivided or has a tower without a plan.
SPLIT = [
    "DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM",
    "PhiForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    # sinks, latent attention that chooses tokens, experts that give what they get
    "GraniteSWAForCausalLM",
    "GlmMoeDsaForCausalLM",
    "LongcatFlashForCausalLM",
]
# Among its split layers a module has parameters, takes a mean over a whole layer, or would be cut between its halves.
NOT_SPLIT = ["ApertusForCausalLM", "Gemma3nForCausalLM", "InklingForCausalLM"]


def test_a_sample_of_classes_is_equal_or_refused(rank_server: RankServer, tmp_path: Path) -> None:
    for facts in rank_server.run(SWEEP, 2, args=[tmp_path, ",".join([*SPLIT, *NOT_SPLIT])], timeout=200).found:
        assert facts == dict.fromkeys(SPLIT, "equal") | dict.fromkeys(NOT_SPLIT, "refused")


@pytest.mark.slow
def test_every_class_is_equal_or_refused(rank_server: RankServer, tmp_path: Path) -> None:
    every = sorted({*causal_lm_classes(), *image_text_classes()})
    for facts in rank_server.run(SWEEP, 2, args=[tmp_path, ",".join(every)], timeout=1200).found:
        known = {"equal", "refused", "no plan", "no step"}
        assert {name: found for name, found in facts.items() if found not in known} == {}
        assert collections.Counter(facts.values())["equal"] > 135
