"""Forecasts of spread jobs, held against ranks over NCCL and PyTorch's own CUDA allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from models import WIDE
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import Spread, Workload, predict_memory

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
SCRIPT = """
    import contextlib, gc, warnings
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    from safe_loading import Spread
    from safe_loading._sharding import fsdp1, fsdp2
    from safe_loading._sharding.fsdp_units import plan_units

    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)

    def mesh_of(spread):
        if spread.replicas == 1:
            return dist.init_device_mesh("cuda", (spread.ranks,), mesh_dim_names=("shard",))
        shape = (spread.replicas, spread.ranks)
        return dist.init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))

    def wrapped_by(spread):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device).train()
        if spread.kind == "ddp":
            options = ("bucket_cap_mb", "gradient_as_bucket_view", "find_unused_parameters")
            return DistributedDataParallel(model, device_ids=[device], **{name: getattr(spread, name) for name in options})
        dtypes = {key: getattr(torch, getattr(spread, key) or "", None) for key in ("param_dtype", "reduce_dtype")}
        units = plan_units(model, flat=spread.kind == "fsdp1")
        if spread.kind == "fsdp2":
            offload = CPUOffloadPolicy() if spread.cpu_offload else OffloadPolicy()
            policy = MixedPrecisionPolicy(**dtypes)
            fsdp2.wrap(model, units, mesh_of(spread), policy, offload, (), spread.reshard_after_forward)
            return model
        rotary = model.model.rotary_emb
        model = model.to("meta")
        model.model.rotary_emb = type(rotary)(model.config).to(device)
        return fsdp1.wrap(
            model, units, mesh_of(spread), device, MixedPrecision(**dtypes), CPUOffload(spread.cpu_offload), (),
            spread.reshard_after_forward, shard=spread.shard,
        )

    def optimizer_of(spread, wrapped):
        held = [p for p in wrapped.parameters() if p.numel()]
        if spread.shard_optimizer:
            return ZeroRedundancyOptimizer(held, torch.optim.AdamW, fused=True)
        return torch.optim.AdamW(held, fused=True)

    def micro_batch(spread, wrapped, last):
        ids = torch.full((2, 128), 5, device=device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        del ids
        unreduced = not last and spread.kind != "fsdp2" and spread.sync_each_batch == (spread.kind == "ddp")
        if spread.kind == "fsdp2" and not spread.sync_each_batch:
            wrapped.set_requires_gradient_sync(last)
        with wrapped.no_sync() if unreduced else contextlib.nullcontext():
            loss = wrapped(**batch, use_cache=False).loss
            del batch
            loss.backward()

    def peak_of(name, spread, micro_batches):
        torch.cuda.set_device(device)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        world = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("nccl", store=dist.PrefixStore(name, store), rank=rank, world_size=world)
        product = torch.ones(8, 8, device=device, requires_grad=True)
        (product @ product).sum().backward()
        del product
        workspaces = torch.cuda.memory_stats()["requested_bytes.all.current"]
        wrapped = wrapped_by(spread)
        optimizer = optimizer_of(spread, wrapped)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            for number in range(micro_batches):
                micro_batch(spread, wrapped, number == micro_batches - 1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        dist.barrier()
        dist.destroy_process_group()
        return peak - workspaces

    for name, (text, micro_batches) in JOBS.items():
        import time
        t=time.time()
        case(lambda: peak_of(name, eval(text), micro_batches), name)
        report(**{"t"+name: time.time()-t})
"""


class Job(NamedTuple):
    """How a job is spread, and how many micro-batches it takes before a step of its optimizer."""

    spread: Spread
    micro_batches: int = 1


HALF = "bfloat16"
JOBS = {
    "DDP": Job(Spread.ddp(2)),
    "DDP, small buckets": Job(Spread.ddp(2, bucket_cap_mb=1)),
    "DDP, views": Job(Spread.ddp(2, gradient_as_bucket_view=True)),
    "DDP, unused": Job(Spread.ddp(2, find_unused_parameters=True)),
    "DDP, accumulated": Job(Spread.ddp(2), 2),
    "DDP, views, accumulated": Job(Spread.ddp(2, gradient_as_bucket_view=True), 2),
    "DDP, ZeRO-1": Job(Spread.ddp(2, shard_optimizer=True)),
    "FSDP2": Job(Spread.fsdp2(2)),
    "FSDP2, kept": Job(Spread.fsdp2(2, reshard_after_forward=False)),
    "FSDP2, mixed": Job(Spread.fsdp2(2, param_dtype=HALF)),
    "FSDP2, mixed, float32 reduced": Job(Spread.fsdp2(2, param_dtype=HALF, reduce_dtype="float32")),
    "FSDP2, offloaded": Job(Spread.fsdp2(2, cpu_offload=True)),
    "FSDP2, offloaded, mixed": Job(Spread.fsdp2(2, cpu_offload=True, param_dtype=HALF)),
    "FSDP2, reduced each time": Job(Spread.fsdp2(2), 2),
    "FSDP2, reduced once": Job(Spread.fsdp2(2, sync_each_batch=False), 2),
    "FSDP2, reduced once, mixed": Job(Spread.fsdp2(2, sync_each_batch=False, param_dtype=HALF, reduce_dtype="float32"), 2),
    "FULL_SHARD": Job(Spread.fsdp1(2)),
    "SHARD_GRAD_OP": Job(Spread.fsdp1(2, reshard_after_forward=False)),
    "NO_SHARD": Job(Spread.fsdp1(2, shard=False)),
    "FULL_SHARD, mixed": Job(Spread.fsdp1(2, param_dtype=HALF)),
    "FULL_SHARD, mixed, float32 reduced": Job(Spread.fsdp1(2, param_dtype=HALF, reduce_dtype="float32")),
    "SHARD_GRAD_OP, mixed": Job(Spread.fsdp1(2, param_dtype=HALF, reshard_after_forward=False)),
    "NO_SHARD, mixed": Job(Spread.fsdp1(2, shard=False, param_dtype=HALF)),
    "FULL_SHARD, offloaded": Job(Spread.fsdp1(2, cpu_offload=True)),
    "SHARD_GRAD_OP, offloaded": Job(Spread.fsdp1(2, cpu_offload=True, reshard_after_forward=False)),
    "FULL_SHARD, reduced each time": Job(Spread.fsdp1(2), 2),
    "FULL_SHARD, reduced once": Job(Spread.fsdp1(2, sync_each_batch=False), 2),
    "NO_SHARD, reduced once": Job(Spread.fsdp1(2, shard=False, sync_each_batch=False), 2),
    "FSDP2, three ranks": Job(Spread.fsdp2(3)),
    "FULL_SHARD, three ranks": Job(Spread.fsdp1(3)),
    "HSDP": Job(Spread.fsdp2(2, replicas=2)),
    "HSDP, mixed": Job(Spread.fsdp2(2, replicas=2, param_dtype=HALF, reduce_dtype="float32")),
    "HSDP, reduced once": Job(Spread.fsdp2(2, replicas=2, sync_each_batch=False), 2),
    "HYBRID_SHARD": Job(Spread.fsdp1(2, replicas=2)),
    "HYBRID_SHARD, kept": Job(Spread.fsdp1(2, replicas=2, reshard_after_forward=False)),
}


def forecast(job: Job) -> dict[int, int]:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**WIDE))
    workload = Workload.train(2, 128, gradient_accumulation_steps=job.micro_batches)
    return predict_memory(model, workload, spread=job.spread, capability=(9, 0)).ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_allocate_what_their_forecast_says(simulated_cuda: CudaRunner, ranks: int) -> None:
    jobs = {name: job for name, job in JOBS.items() if job.spread.cards == ranks}
    texts = {name: (str(job.spread), job.micro_batches) for name, job in jobs.items()}
    script = SCRIPT.replace("SIZES", repr(WIDE)).replace("JOBS", repr(texts))
    env = {"SIMCUDA_GPU": "H100", "SIMCUDA_VALUES": "65536"}
    found = simulated_cuda.run_ranks(script, ranks, env=env)
    off = {}
    for name, job in jobs.items():
        expected = forecast(job)
        off[name] = [expected[rank % job.spread.ranks] - facts[name] if not isinstance(facts[name],dict) else facts[name]["error"] for rank, facts in enumerate(found)]
        print(name, expected[0], off[name],found[0]["t"+name])
