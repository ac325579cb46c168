"""peft's methods beside LoRA: equal to one process in the block of load_at_prepare, by hand, and over a real base."""

from __future__ import annotations

from typing import Any

import pytest
from rank_server import RankServer

METHODS = """
METHODS = {
    "prompt tuning": lambda: PromptTuningConfig(task_type=TASK, num_virtual_tokens=4),
    "P-tuning": lambda: PromptEncoderConfig(task_type=TASK, num_virtual_tokens=4, encoder_hidden_size=16),
    "prefix tuning": lambda: PrefixTuningConfig(task_type=TASK, num_virtual_tokens=4),
    "projected prefixes": lambda: PrefixTuningConfig(
        task_type=TASK, num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16),
    "LNTuning": lambda: LNTuningConfig(task_type=TASK, target_modules=["input_layernorm", "norm"]),
    "IA3": lambda: IA3Config(task_type=TASK, target_modules=["k_proj"], feedforward_modules=[]),
    "trainable tokens": lambda: TrainableTokensConfig(
        task_type=TASK, token_indices=[3, 5], target_modules=["embed_tokens"]),
    "LoRA with tokens": lambda: LoraConfig(
        task_type=TASK, r=4, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
    # vectors that all layers share, of which peft keeps the one place outside of the base
    "VB-LoRA": lambda: VBLoRAConfig(
        task_type=TASK, r=2, num_vectors=8, vector_length=6, topk=2, target_modules=["q_proj"]),
}
"""
SCRIPT = f"""
import contextlib, pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from accelerate.state import AcceleratorState
from peft import (IA3Config, LNTuningConfig, LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig,
    TrainableTokensConfig, VBLoRAConfig, get_peft_model)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
from fsdp_cases import TOKENS
from safe_loading import SafeLoadingError, load_at_prepare, meta_model, wrap_fsdp_meta_safe
from trainer_matrix import *
tell_accelerate()
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), pathlib.Path(sys.argv[1])
base, TASK = folder / "base", "CAUSAL_LM"
if rank == 0:
    save_base(base)
dist.barrier()
{METHODS}
def load():
    return AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")

def attached(model, make):
    torch.manual_seed(4)
    return get_peft_model(model, make())

def trained(model):
    return {{plain(n): whole(p.detach()).clone() for n, p in model.named_parameters() if p.requires_grad}}

def steps(model, accelerator=None):
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    losses = []
    for _ in range(2):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        losses.append(float(loss.detach()))
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step(); optimizer.zero_grad()
    return losses, trained(model), model

def block(make):
    with load_at_prepare():
        model = load()
    AcceleratorState._reset_state(reset_partial_state=True)
    return steps(attached(model, make), accelerate_with_fsdp(Case("accelerate", "full", "none", 2)))

def by_hand(make, version=2):
    return steps(wrap_fsdp_meta_safe(attached(meta_model(base, attn_implementation="eager"), make), base,
        version=version))

def over_real(make):
    return steps(wrap_fsdp_meta_safe(attached(load(), make), base))

ROADS = {{"block": block, "by hand": by_hand, "by hand, FSDP1": lambda make: by_hand(make, 1), "real": over_real}}
for name, make in METHODS.items():
    losses, wanted, one = steps(attached(load(), make))
    if rank == 0:
        one.save_pretrained(folder / "one" / name)
    for road, run in ROADS.items():
        try:
            own, weights, model = run(make)
            # FSDP1 shows each rank its part of a flat parameter: the second loss tells whether the step was the same
            found = differing(wanted, weights) if "FSDP1" not in road else []
            found += ([] if own == losses else [f"{{own}}, not {{losses}}"])
            if road == "by hand":
                model.save_pretrained(folder / "saved" / name)
                dist.barrier()
                files = [folder / kind / name / "adapter_model.safetensors" for kind in ("one", "saved")]
                found += differing(*map(load_file, files))
        except Exception as error:
            found = [f"{{type(error).__name__}}: {{error}}"]
        report(**{{f"{{name}}, {{road}}": found}})
        dist.barrier()
# an adapter that was trained on rank 0 wins over the norms of the base that it was copied from
model = attached(load(), METHODS["LNTuning"])
with torch.no_grad():
    for each in trained(model) and [each for each in model.parameters() if each.requires_grad]:
        each.mul_(2)
wanted = trained(model)
report(kept=differing(wanted, trained(wrap_fsdp_meta_safe(model, base))))
dist.destroy_process_group()
"""
NAMES = [line.split('"')[1] for line in METHODS.splitlines() if line.startswith('    "')]
TOKENS = ("trainable tokens", "LoRA with tokens")  # rows of the base's embedding, which are not there on meta


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_server.run(SCRIPT, 2, args=[tmp_path_factory.mktemp("methods")], timeout=240).found


@pytest.mark.parametrize("road", ["block", "by hand", "by hand, FSDP1", "real"])
@pytest.mark.parametrize("name", NAMES)
def test_a_method_of_peft_equals_one_process(found: list[dict[str, Any]], name: str, road: str) -> None:
    for facts in found:
        problems = facts[f"{name}, {road}"]
        if name in TOKENS and road.startswith("by hand"):
            assert any("trainable_tokens_delta" in each or "rank 0" in each for each in problems)
        else:
            assert problems == []


def test_trained_tokens_on_meta_are_refused_with_their_road(found: list[dict[str, Any]]) -> None:
    for name in TOKENS:
        (problem,) = found[0][f"{name}, by hand"]
        assert problem.startswith("ArgumentError")
        assert "Attach it to a base with weights on every rank" in problem  # the road "real"
        assert "init_lora_weights=None" not in problem


def test_a_trained_copy_of_a_norm_wins_over_the_base(found: list[dict[str, Any]]) -> None:
    assert [facts["kept"] for facts in found] == [[], []]
