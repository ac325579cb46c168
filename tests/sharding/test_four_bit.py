"""QLoRA over a base on meta: each rank packs what it owns, equal to a base that every rank loaded whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import needs
from rank_server import RankServer
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, meta_model

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytestmark = needs("peft", "0.21")  # before, a PeftModel called its base past the hooks of FSDP

SCRIPT = """
import itertools, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from quantized_bits import bits, differing, statistics
from fsdp_cases import error_of
from safe_loading import meta_model, wrap_fsdp_meta_safe
from safe_loading._sharding.peak_memory import Peak

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
# Qwen2 has biases; rows of 60 elements make shards that end inside of a block of 64
sizes = dict(hidden_size=60, intermediate_size=124, num_hidden_layers=2, vocab_size=128)
if rank == 0:
    torch.manual_seed(0)
    small = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    small.to(torch.bfloat16).save_pretrained(f"{folder}/bf16", max_shard_size="50KB")
    small.float().save_pretrained(f"{folder}/f32")
    even = sizes | dict(hidden_size=64, intermediate_size=128)  # what bitsandbytes reorders
    even = Qwen2ForCausalLM(Qwen2Config(**even, num_attention_heads=2, num_key_value_heads=2))
    even.to(torch.bfloat16).save_pretrained(f"{folder}/even")
    large = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8)
    LlamaForCausalLM(LlamaConfig(**large, vocab_size=1000)).to(torch.bfloat16).save_pretrained(f"{folder}/large")
dist.barrier()
ids = torch.arange(32).view(2, 16)

def nf4(storage=torch.bfloat16, nested=False, kind="nf4"):
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage, bnb_4bit_use_double_quant=nested)

def adapted(base, prepared=False):
    torch.manual_seed(0)
    base = prepare_model_for_kbit_training(base) if prepared else base
    return get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")).train()

def on_meta(name, quantization, dtype=None):
    return meta_model(f"{folder}/{name}", quantization_config=quantization, dtype=dtype)

def whole(name, quantization, dtype="auto"):
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", quantization_config=quantization, dtype=dtype)

def facts_of(model):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"loss": bits(loss)}
    for name, parameter in model.named_parameters():
        found[name] = bits(parameter)
        if parameter.grad is not None:
            found[f"{name}.grad"] = bits(parameter.grad)
    for name, module in model.named_modules():
        if (state := getattr(module, "quant_state", None)) is not None:
            found |= statistics(name, state)
            found[f"{name} shape"] = torch.tensor([*state.shape, state.blocksize, state.dtype.itemsize])
    return found

def compare(label, name="bf16", quantization=nf4, prepared=False, dtype=None, **options):
    wanted = adapted(whole(name, quantization(), dtype or "auto"), prepared)
    plain = facts_of(wrap_fsdp_meta_safe(wanted, **options))
    model = wrap_fsdp_meta_safe(adapted(on_meta(name, quantization(), dtype), prepared), f"{folder}/{name}",
        verify="bytes", **options)
    own = facts_of(model)
    counts = [sum(" absmax" in key for key in own), sum(key.endswith(".grad") for key in own)]
    report(**{label: [differing(plain, own), *counts]})

compare("bfloat16")
compare("uint8, double", quantization=lambda: nf4(torch.uint8, True))
compare("float32, fp4", quantization=lambda: nf4(torch.float32, kind="fp4"))
compare("prepared for k-bit training", prepared=True)
compare("from float32 to bfloat16", name="f32", dtype=torch.bfloat16)
compare("FSDP1, double", quantization=lambda: nf4(nested=True), version=1)
compare("replicas", mesh=(2, 2))

for version in (2, 1):
    model = wrap_fsdp_meta_safe(adapted(on_meta("even", nf4())), f"{folder}/even", version=version)
    in_training = model(input_ids=ids).logits
    with torch.no_grad():
        first, second = (model.eval()(input_ids=ids).logits for _ in range(2))
    again = model.train()(input_ids=ids).logits
    far = (first - in_training).abs().max().item()
    report(**{f"evaluated {version}": [torch.equal(first, second), torch.equal(again, in_training), far]})

with Peak(torch.device("cpu")) as peak:
    model = wrap_fsdp_meta_safe(on_meta("large", nf4()), f"{folder}/large")
states = [state for module in model.modules() if (state := getattr(module, "quant_state", None)) is not None]
held = sum(p._local_tensor.nbytes for p in model.parameters()) + sum(state.absmax.nbytes for state in states)
report(memory=[peak.bytes, held, model.fsdp_report.bytes_read])

base = (whole if rank == 0 else on_meta)("bf16", nf4()).requires_grad_(False)
report(root=error_of(lambda: wrap_fsdp_meta_safe(base)))
dist.barrier()
dist.destroy_process_group()
"""
CASES = (
    *("bfloat16", "uint8, double", "float32, fp4", "prepared for k-bit training", "from float32 to bfloat16"),
    *("FSDP1, double", "replicas"),
)


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 4, args=[tmp_path_factory.mktemp("four bit")], timeout=240).found


@pytest.mark.parametrize("case", CASES)
def test_codes_statistics_and_a_step_are_those_of_a_base_that_was_loaded_whole(
    found: list[dict[str, Any]], case: str
) -> None:
    for facts in found:
        differing, statistics, gradients = facts[case]
        assert differing == []
        assert statistics == 14  # linear layers
        assert gradients == 8  # factors of LoRA


@pytest.mark.parametrize("version", [2, 1])
def test_a_pass_in_eval_mode_leaves_the_codes_in_their_order(found: list[dict[str, Any]], version: int) -> None:
    for facts in found:  # bitsandbytes reorders codes at one on a CPU with AVX-512, and FSDP gathers them anew
        is_repeated, trains_as_before, far = facts[f"evaluated {version}"]
        assert is_repeated
        assert trains_as_before
        assert far < 0.02


def test_a_rank_holds_its_shard_and_the_statistics(found: list[dict[str, Any]]) -> None:
    base = 2 * (6 * (2 * 1024 * 1024 + 2 * 1024 * 128 * 8 + 3 * 1024 * 4096) + 2 * 1000 * 1024)  # in 16 bits
    for facts in found:
        peak, held, read = facts["memory"]
        assert peak < held + (64 << 20) < base / 2
        assert read < 1.01 * base / 4


def test_statistics_of_another_rank_are_not_sent(found: list[dict[str, Any]]) -> None:
    assert [facts["root"] for facts in found if "4 bits on rank 0 and on meta" not in facts["root"]] == []
    assert [facts["root"] for facts in found if "as the source" not in facts["root"]] == []


def refused(config: Any, kind: type, quantization: object, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        meta_model(config, kind, quantization_config=quantization)  # type: ignore[arg-type]  # wrong on purpose


def test_what_cannot_be_packed_on_meta_is_refused() -> None:
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.float32)
    gpt2 = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)
    odd = LlamaConfig(hidden_size=6, intermediate_size=7, num_hidden_layers=1, num_attention_heads=1, vocab_size=32)
    refused(gpt2, GPT2LMHeadModel, four_bit, "c_attn is a Conv1D")
    refused(odd, LlamaForCausalLM, four_bit, "q_proj has 36 elements, which cannot be stored 8 at a time")
    for other in (BitsAndBytesConfig(load_in_8bit=True), {"quant_method": "gptq", "bits": 4}):
        refused(odd, LlamaForCausalLM, other, r"only BitsAndBytesConfig\(load_in_4bit=True\)")
    smaller = {"load_in_4bit": True, "llm_int8_skip_modules": ["up_proj", "lm_head"]}  # uint8, and no odd layer
    model = meta_model(odd, LlamaForCausalLM, quantization_config=smaller)
    assert type(model.get_submodule("model.layers.0.self_attn.q_proj")).__name__ == "Linear4bit"
    assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is torch.nn.Linear
    assert torch.get_default_dtype() == torch.float32
