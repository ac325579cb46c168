"""Forecasts of spread jobs, held against ranks over NCCL and PyTorch's own CUDA allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from models import WIDE
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import MemoryForecast, Spread, Workload, predict_memory

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
SCRIPT = """
    import contextlib, gc, time, warnings
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    from safe_loading import MemoryForecast, Spread
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

    def reference_by(spread):  # as trl places it
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device)
        if spread.kind == "fsdp1":
            return flat(spread, model).eval()
        if spread.kind == "fsdp2":
            fully_shard(model, mesh=mesh_of(spread), reshard_after_forward=spread.reshard_after_forward)
        return model.eval()

    def flat(spread, model):
        dtypes = {key: getattr(torch, getattr(spread, key) or "", None) for key in ("param_dtype", "reduce_dtype")}
        units = plan_units(model, flat=True)
        rotary = model.model.rotary_emb
        model = model.to("meta")
        model.model.rotary_emb = type(rotary)(model.config).to(device)
        return fsdp1.wrap(
            model, units, mesh_of(spread), device, MixedPrecision(**dtypes), CPUOffload(spread.cpu_offload), (),
            spread.reshard_after_forward, shard=spread.shard,
        )

    def wrapped_by(spread):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device).train()
        if spread.kind == "fsdp1":
            return flat(spread, model)
        if spread.kind == "ddp":
            names = ("bucket_cap_mb", "gradient_as_bucket_view", "find_unused_parameters")
            options = {name: getattr(spread, name) for name in names}
            return DistributedDataParallel(model, device_ids=[device], **options)
        dtypes = {key: getattr(torch, getattr(spread, key) or "", None) for key in ("param_dtype", "reduce_dtype")}
        offload = CPUOffloadPolicy() if spread.cpu_offload else OffloadPolicy()
        policy = MixedPrecisionPolicy(**dtypes)
        fsdp2.wrap(model, plan_units(model), mesh_of(spread), policy, offload, (), spread.reshard_after_forward)
        return model

    def optimizer_of(spread, wrapped):
        held = [p for p in wrapped.parameters() if p.numel()]
        if spread.shard_optimizer:
            return ZeroRedundancyOptimizer(held, torch.optim.AdamW, fused=True)
        return torch.optim.AdamW(held, fused=True)

    def tokens():
        ids = torch.full((2, 128), 5, device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def micro_batch(spread, wrapped, batch, last, reference):
        unreduced = not last and spread.kind != "fsdp2" and spread.sync_each_batch == (spread.kind == "ddp")
        if spread.kind == "fsdp2" and not spread.sync_each_batch:
            wrapped.set_requires_gradient_sync(last)
        with wrapped.no_sync() if unreduced else contextlib.nullcontext():
            output = wrapped(**batch, use_cache=False)
            if reference is not None:
                with torch.no_grad():
                    reference(**batch, use_cache=False)
            loss = output.loss
            del output
            loss.backward()

    def peak_of(name, spread, micro_batches, referred):
        torch.cuda.set_device(device)
        world = int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.path.join(sys.argv[1], name), world)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
        product = torch.ones(8, 8, device=device, requires_grad=True)
        (product @ product).sum().backward()  # which makes cuBLAS's workspaces, one for each thread
        del product
        workspaces = torch.cuda.memory_stats()["requested_bytes.all.current"]
        wrapped = wrapped_by(spread)
        reference = reference_by(spread) if referred else None
        optimizer = optimizer_of(spread, wrapped)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = torch.cuda.memory_stats()["requested_bytes.all.current"] - workspaces
        torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
        for _ in range(3):
            batches = [tokens() for _ in range(micro_batches)]
            for number, batch in enumerate(batches):
                micro_batch(spread, wrapped, batch, number == micro_batches - 1, reference)
            del batch, batches
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if spread.kind == "ddp":
                time.sleep(0.5)  # NCCL's watchdog looks every 0.1 s, and lets go of the buckets that DDP replaces
        torch.cuda.synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][device.index]
        allocated = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
        dist.barrier()
        dist.destroy_process_group()
        return [most_asked(begun, history), allocated]

    def most_asked(held, history):
        # not the counter of torch, which counts a block until the last stream that uses it is past it
        most = held
        for event in history:
            if event["action"] in ("alloc", "free_requested"):
                held += event["size"] if event["action"] == "alloc" else -event["size"]
                most = max(most, held)
        return most

    for name, (text, micro_batches, referred) in JOBS.items():
        # in a process: FSDP1 and DDP are never freed
        case(lambda: peak_of(name, eval(text), micro_batches, referred), name)
"""


class Job(NamedTuple):
    """How a job is spread, how many micro-batches it takes before its optimizer steps, and if it has a reference."""

    spread: Spread
    micro_batches: int = 1
    rare: bool = False
    referred: bool = False


HALF = "bfloat16"
MIXED: dict[str, Any] = {"param_dtype": HALF, "reduce_dtype": "float32"}
JOBS = {
    "DDP": Job(Spread.ddp(2)),
    "DDP, small buckets": Job(Spread.ddp(2, bucket_cap_mb=1), rare=True),
    "DDP, views": Job(Spread.ddp(2, gradient_as_bucket_view=True), rare=True),
    "DDP, views, two micro-batches": Job(Spread.ddp(2, gradient_as_bucket_view=True), 2),
    "DDP, two micro-batches": Job(Spread.ddp(2), 2, rare=True),
    "DDP, find_unused_parameters": Job(Spread.ddp(2, find_unused_parameters=True)),
    "DDP, ZeroRedundancyOptimizer": Job(Spread.ddp(2, shard_optimizer=True), rare=True),
    "DDP, a reference": Job(Spread.ddp(2), referred=True),
    "FSDP2": Job(Spread.fsdp2(2)),
    "FSDP2, a reference": Job(Spread.fsdp2(2), referred=True),
    "FSDP2, a reference, not resharded": Job(Spread.fsdp2(2, reshard_after_forward=False), rare=True, referred=True),
    "FSDP2, three ranks": Job(Spread.fsdp2(3), rare=True),
    "FSDP2, not resharded": Job(Spread.fsdp2(2, reshard_after_forward=False), rare=True),
    "FSDP2, bfloat16": Job(Spread.fsdp2(2, param_dtype=HALF), rare=True),
    "FSDP2, bfloat16, reduced in float32": Job(Spread.fsdp2(2, **MIXED)),
    "FSDP2, offloaded": Job(Spread.fsdp2(2, cpu_offload=True)),
    "FSDP2, offloaded, bfloat16": Job(Spread.fsdp2(2, cpu_offload=True, param_dtype=HALF), rare=True),
    "FSDP2, two micro-batches": Job(Spread.fsdp2(2), 2, rare=True),
    "FSDP2, two micro-batches, reduced once": Job(Spread.fsdp2(2, sync_each_batch=False), 2),
    "FSDP2, two, reduced once in float32": Job(Spread.fsdp2(2, sync_each_batch=False, **MIXED), 2, rare=True),
    "HSDP": Job(Spread.fsdp2(2, replicas=2)),
    "HSDP, bfloat16, reduced in float32": Job(Spread.fsdp2(2, replicas=2, **MIXED), rare=True),
    "HSDP, two micro-batches, reduced once": Job(Spread.fsdp2(2, replicas=2, sync_each_batch=False), 2, rare=True),
    "FULL_SHARD": Job(Spread.fsdp1(2)),
    "FULL_SHARD, a reference": Job(Spread.fsdp1(2), referred=True),
    "FULL_SHARD, three ranks": Job(Spread.fsdp1(3), rare=True),
    "FULL_SHARD, bfloat16": Job(Spread.fsdp1(2, param_dtype=HALF)),
    "FULL_SHARD, bfloat16, reduced in float32": Job(Spread.fsdp1(2, **MIXED), rare=True),
    "FULL_SHARD, offloaded": Job(Spread.fsdp1(2, cpu_offload=True)),
    "FULL_SHARD, offloaded, bfloat16": Job(Spread.fsdp1(2, cpu_offload=True, param_dtype=HALF)),
    "FULL_SHARD, two micro-batches": Job(Spread.fsdp1(2), 2, rare=True),
    "FULL_SHARD, two micro-batches, reduced once": Job(Spread.fsdp1(2, sync_each_batch=False), 2),
    "SHARD_GRAD_OP": Job(Spread.fsdp1(2, reshard_after_forward=False)),
    "SHARD_GRAD_OP, bfloat16": Job(Spread.fsdp1(2, param_dtype=HALF, reshard_after_forward=False), rare=True),
    "SHARD_GRAD_OP, offloaded": Job(Spread.fsdp1(2, cpu_offload=True, reshard_after_forward=False), rare=True),
    "NO_SHARD": Job(Spread.fsdp1(2, shard=False), rare=True),
    "NO_SHARD, bfloat16": Job(Spread.fsdp1(2, shard=False, param_dtype=HALF), rare=True),
    "NO_SHARD, two micro-batches": Job(Spread.fsdp1(2, shard=False, sync_each_batch=False), 2, rare=True),
    "HYBRID_SHARD": Job(Spread.fsdp1(2, replicas=2)),
    "HYBRID_SHARD, not resharded": Job(Spread.fsdp1(2, replicas=2, reshard_after_forward=False), rare=True),
}


def forecast(job: Job) -> MemoryForecast:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**WIDE))
    reference: Any = "model" if job.referred else None
    workload = Workload.train(2, 128, gradient_accumulation_steps=job.micro_batches, reference=reference)
    return predict_memory(model, workload, spread=job.spread, capability=(9, 0))


@pytest.mark.parametrize(
    ("ranks", "rare"),
    [
        (2, False),
        *(pytest.param(*job, marks=pytest.mark.slow) for job in ((4, False), (2, True), (3, True), (4, True))),
    ],
)
def test_ranks_take_what_their_forecast_says(
    simulated_cuda: CudaRunner, tmp_path: Path, *, ranks: int, rare: bool
) -> None:
    jobs = {name: job for name, job in JOBS.items() if job.spread.cards == ranks and job.rare == rare}
    texts = {name: (str(job.spread), job.micro_batches, job.referred) for name, job in jobs.items()}
    script = SCRIPT.replace("SIZES", repr(WIDE)).replace("JOBS", repr(texts))
    env = {"SIMCUDA_GPU": "H100", "SIMCUDA_VALUES": "65536"}
    found = simulated_cuda.run_ranks(script, ranks, args=[tmp_path], env=env)
    asked: dict[str, list[int]] = {}
    allocated: dict[str, float] = {}
    for name, job in jobs.items():
        of_ranks = [facts[name] for facts in found]
        assert not any("error" in peaks for peaks in of_ranks), (name, of_ranks)
        expected = forecast(job)
        asked[name] = [expected.ranks[rank % job.spread.ranks] - most for rank, (most, _) in enumerate(of_ranks)]
        in_blocks = max(in_blocks for _, in_blocks in of_ranks)
        allocated[name] = expected.allocated_peak_bytes / in_blocks - 1
    assert {name: off for name, off in asked.items() if max(map(abs, off)) > 1024} == {}
    # which blocks are whole is up to streams too, and a forecast has one
    assert {name: off for name, off in allocated.items() if abs(off) > 0.01} == {}
