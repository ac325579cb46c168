"""QLoRA over CUDA devices and NCCL: what each rank packs of its shards is what a base that was loaded whole has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import needs
from models import save_llama

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytestmark = [pytest.mark.gpu, needs("peft", "0.21")]  # before, a PeftModel called its base past the hooks of FSDP
RANKS = 2

SCRIPT = """
    import warnings, torch.distributed as dist
    warnings.simplefilter("ignore")
    from peft import LoraConfig, get_peft_model
    from quantized_bits import bits, differing, statistics
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from safe_loading import device_for_rank, meta_model, wrap_fsdp_meta_safe

    folder, own = sys.argv[1], device_for_rank()
    torch.accelerator.set_device_index(own)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=own)
    ids = torch.arange(1, 25, device=own).reshape(2, 12)

    def nf4(nested):
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16, bnb_4bit_use_double_quant=nested)

    def adapted(base):
        torch.manual_seed(0)
        return get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")).train()

    def facts_of(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {name: bits(parameter) for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            found |= statistics(name, getattr(module, "quant_state", None))
        return losses, found

    for nested, how in ((False, {}), (True, {"version": 1})):
        whole = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4(nested), device_map={"": own})
        losses, plain = facts_of(wrap_fsdp_meta_safe(adapted(whole), **how))
        model = wrap_fsdp_meta_safe(adapted(meta_model(folder, quantization_config=nf4(nested))), folder, **how)
        found = facts_of(model)
        report(**{f"version {how.get('version', 2)}": {
            "differing": differing(plain, found[1]), "losses": [losses, found[0]],
            "statistics": sum(" absmax" in n for n in found[1]),
            "devices": sorted({str(p.device) for p in model.parameters()}), "contexts": contexts()}})
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(simulated_cuda: CudaRunner, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base = save_llama(tmp_path_factory.mktemp("four bit") / "base", torch.bfloat16)
    return simulated_cuda.run_ranks(SCRIPT, RANKS, args=[base], env={"SIMCUDA_VALUES": "all"})


@pytest.mark.parametrize("version", [2, 1])
def test_packed_shards_and_training_are_those_of_a_base_that_was_loaded_whole(
    ranks: list[dict[str, Any]], version: int
) -> None:
    for rank, facts in enumerate(found[f"version {version}"] for found in ranks):
        assert facts["differing"] == []
        assert facts["statistics"] > 10
        plain, own = facts["losses"]
        assert plain == own
        assert own[1] < own[0]
        assert facts["devices"] == [f"cuda:{rank}"]
        assert facts["contexts"] == [rank]
