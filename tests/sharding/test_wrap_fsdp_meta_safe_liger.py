"""Models that Liger-Kernel has patched: the same units and weights, and a head that its fused loss reads."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_cases import NOTHING
from torchrun import run_ranks

pytest.importorskip("triton", reason="liger-kernel needs triton")
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

SCRIPT = """
import sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from transformers.models.llama import modeling_llama
from liger_kernel.transformers import apply_liger_kernel_to_llama
from liger_kernel.transformers.model import llama as liger
from fsdp_cases import *
from peft import LoraConfig, get_peft_model
from safe_loading import wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
make = lambda: llama(num_hidden_layers=2, use_cache=False)
plain_one = reference(make)
if rank == 0:
    save(plain_one, folder)
dist.barrier()
plain_units = [unit.name for unit in wrap_fsdp_meta_safe(on_meta(make), folder).fsdp_report.units]

# Liger's forward without its kernels, which take a GPU: its fused loss reads the head's weight, and calls no head
def on_the_cpu(hidden_states, lm_head_weight, labels, **options):
    logits = torch.nn.functional.linear(hidden_states, lm_head_weight)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

own = modeling_llama.LlamaForCausalLM.forward
apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True)
liger.LigerForCausalLMLoss = on_the_cpu
report(patched=modeling_llama.LlamaForCausalLM.forward is not own)
lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
for case in ("untied", "tied", "adapted"):
    kind, config = llama(num_hidden_layers=2, use_cache=False, tie_word_embeddings=case == "tied")
    made = (lambda config: get_peft_model(kind(config), lora)) if case == "adapted" else kind
    make_case = lambda: (made, config)
    single = reference(make_case)
    model = wrap_fsdp_meta_safe(reference(make_case) if rank == 0 else on_meta(make_case))
    losses = []
    for each in (single, model):
        each.zero_grad()
        output = each(**inputs("llama"))
        output.loss.backward()
        losses.append(output.loss.detach()[None])
    report(**{f"fused {case}": compared(single, model, *losses), f"logits {case}": output.logits is None})

# all of it: other classes of norms and of MLPs
apply_liger_kernel_to_llama()
model = on_meta(make)
kinds = {type(module).__name__ for module in model.modules() if "Liger" in type(module).__name__}
model = wrap_fsdp_meta_safe(model, folder, verify="bytes")
values = {plain(name): whole(p) for name, p in model.named_parameters()}
report(
    kinds=sorted(kinds),
    units=[unit.name for unit in model.fsdp_report.units] == plain_units,
    weights=all(torch.equal(values[name], p) for name, p in plain_one.named_parameters()),
)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, 2, args=[tmp_path_factory.mktemp("liger")], timeout=240).found


@pytest.mark.parametrize("case", ["untied", "tied", "adapted"])
def test_its_fused_loss_reads_the_head_outside_its_forward(found: list[dict[str, Any]], case: str) -> None:
    for facts in found:
        assert facts["patched"]
        assert facts[f"logits {case}"]
        assert facts[f"fused {case}"] == NOTHING


def test_a_patched_model_has_the_units_and_the_weights_of_a_plain_one(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert {"LigerRMSNorm", "LigerSwiGLUMLP"} <= {*facts["kinds"]}
        assert facts["units"]
        assert facts["weights"]
