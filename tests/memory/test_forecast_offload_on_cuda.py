"""FSDP1 with CPU offload in a forecast, held against ranks over NCCL and PyTorch's own CUDA allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import WIDE
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import Spread, Workload, predict_memory

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
WORKSPACES = 64 << 20  # of cuBLAS on an H100, for two threads
SCRIPT = """
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffload
    from transformers import LlamaConfig, LlamaForCausalLM

    from safe_loading._sharding import fsdp1
    from safe_loading._sharding.fsdp_units import plan_units

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("shard",))
    wrapped = fsdp1.wrap(
        model, plan_units(model, flat=True), mesh, device, None, CPUOffload(offload_params=True), (), RESHARD
    )
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.numel()])
    for _ in range(3):
        ids = torch.full((2, 128), 5, device=device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        del ids
        loss = wrapped(**batch, use_cache=False).loss
        del batch
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    report(asked=torch.cuda.memory_stats()["requested_bytes.all.peak"])
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("reshard", [True, False])
def test_offloaded_shards_take_what_real_ranks_take(simulated_cuda: CudaRunner, *, reshard: bool) -> None:
    script = SCRIPT.replace("SIZES", repr(WIDE)).replace("RESHARD", repr(reshard))
    found = simulated_cuda.run_ranks(script, 2, env={"SIMCUDA_GPU": "H100", "SIMCUDA_VALUES": "65536"})
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**WIDE))
    spread = Spread.fsdp1(2, cpu_offload=True, reshard_after_forward=reshard)
    expected = predict_memory(model, Workload.train(2, 128), spread=spread, capability=(9, 0)).ranks
    for rank, facts in enumerate(found):
        assert facts["asked"] - WORKSPACES == pytest.approx(expected[rank], abs=1024)
