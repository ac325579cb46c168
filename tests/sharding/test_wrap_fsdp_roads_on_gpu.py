"""Weights that rank 0 sends, and adapters that are trained and saved whole from shards, on CUDA devices over NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
RANKS = 2

SCRIPT = """
    import peft, torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from safe_loading import device_for_rank, meta_model, wrap_fsdp_meta_safe

    base, adapter, out = sys.argv[1:]
    own = device_for_rank()
    torch.accelerator.set_device_index(own)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=own)
    tokens = torch.arange(1, 25, device=own).reshape(2, 12)

    def wrapped(**how):
        model = peft.PeftModel.from_pretrained(meta_model(base), adapter, is_trainable=True, torch_device="cpu")
        return wrap_fsdp_meta_safe(model, base, adapters=adapter, **how)

    for name, how in (("fsdp2", {}), ("offloaded", {"cpu_offload": True}), ("fsdp1", {"version": 1})):
        model = wrapped(**how)
        model.save_pretrained(f"{out}/{name}")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, foreach=False)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        model.save_pretrained(f"{out}/{name} trained")
        report(**{name: contexts()})

    whole = AutoModelForCausalLM.from_pretrained(base, device_map={"": own})
    expected = whole(input_ids=tokens).logits
    for version in (2, 1):
        given = AutoModelForCausalLM.from_pretrained(base) if dist.get_rank() == 0 else meta_model(base)
        sent = wrap_fsdp_meta_safe(given, version=version)
        report(**{f"sent {version}": [torch.equal(sent(input_ids=tokens).logits, expected), contexts()]})
    dist.barrier()
    dist.destroy_process_group()
"""


def test_weights_are_sent_and_adapters_are_saved_whole(cuda: CudaRunner, tmp_path: Path) -> None:
    if cuda.count < RANKS:
        pytest.skip("one CUDA device, and each rank of NCCL needs its own")
    base = save_llama(tmp_path / "base", torch.float32)
    adapter = save_adapter(tmp_path / "adapter", base)
    expected = load_file(adapter / "adapter_model.safetensors")
    for rank, facts in enumerate(cuda.run_ranks(SCRIPT, RANKS, args=[base, adapter, tmp_path / "out"])):
        assert facts["fsdp2"] == facts["offloaded"] == facts["fsdp1"] == [rank]
        assert facts["sent 2"] == facts["sent 1"] == [True, [rank]]
    trained = []
    for name in ("fsdp2", "offloaded", "fsdp1"):
        saved = load_file(tmp_path / "out" / name / "adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[key], tensor) for key, tensor in expected.items()), name
        trained.append(load_file(tmp_path / "out" / f"{name} trained" / "adapter_model.safetensors"))
        assert trained[-1].keys() == expected.keys()
        assert not any(torch.equal(trained[-1][key], tensor) for key, tensor in expected.items()), name
        assert all(torch.equal(trained[-1][key], trained[0][key]) for key in expected), name
