"""A rank of a job in a traced step: the model spread as DDP, FSDP or ZeRO spread it, without the other ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from safe_loading._core.interrupts import undone
from safe_loading._core.spread import Spread
from safe_loading._core.workload import Workload
from safe_loading._model.quantized.kbit_preparation import KbitPreparation
from safe_loading._model.snapshot import Snapshot
from safe_loading._sharding.adapter_methods import refused_adapters, tied_factors
from safe_loading.errors import ArgumentError, TraceError

from .attached_adapter import with_adapter
from .flat_sharded_step import FlatShardedParameters, flat_sharded, trained_by_rank
from .forward_pass import NOTHING_TRAINED
from .ledger import Ledger
from .reference_pass import is_adapted
from .replicated_step import ReplicatedParameters, replicated, shares
from .sharded_step import ShardedParameters, accelerates_own, alike, fake_ranks, sharded, trains_in_float32
from .trace_step import ONE_AT_A_TIME
from .trained_parameters import OneCard, RunningModel, TrainedParameters, cast_parameters
from .zero3_fetching import linear_layers
from .zero3_step import PartitionedParameters, is_stage_3, real_elements
from .zero_step import ZeroParameters, alike_parts, one_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class RankOfJob(OneCard):
    """One rank of a job that is spread over several."""

    over_ranks = True
    _mesh: DeviceMesh  # of the process group that `joined` makes

    def __init__(self, spread: Spread, rank: int = 0) -> None:
        self.spread, self.rank = spread, rank

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Make this process a rank of the job inside the block, with a process group whose collectives do nothing."""
        with fake_ranks(self.spread, self.rank) as self._mesh:
            yield

    def reference_to_shard(self, model: torch.nn.Module, workload: Workload) -> torch.nn.Module | None:
        """Return a copy of the model that FSDP shards beside it, still with the model's own tensors; or None."""
        if self.spread.kind not in ("fsdp1", "fsdp2") or workload.reference != "model":
            return None
        own = [*model.parameters(), *model.buffers()]
        return copy.deepcopy(model, {id(tensor): tensor for tensor in own}).eval()

    @contextlib.contextmanager
    def spread_over_ranks(
        self,
        model: torch.nn.Module,
        reference: torch.nn.Module | None,
        parameters: list[torch.nn.Parameter],
        device: torch.device,
        ledger: Ledger,
    ) -> Iterator[RunningModel]:
        """Spread the model as the job does, and yield it as this rank runs it."""
        spread = self.spread
        if spread.kind == "ddp":
            with replicated(model, spread):
                yield RunningModel(model, ReplicatedParameters(parameters, spread, self.rank, ledger))
            return
        if spread.kind == "zero":
            with self._partitioned(model, parameters, ledger) as trained:
                yield RunningModel(model, trained)
            return
        if trains_in_float32(model, spread):
            cast_parameters(model, [], torch.float32, ledger, frozen=False)
        parameters.clear()  # the whole parameters are freed as they are sharded
        if spread.kind == "fsdp1":
            with flat_sharded(model, reference, spread, self._mesh, device, ledger) as (wrapped, flat_reference):
                yield RunningModel(wrapped, FlatShardedParameters(wrapped, spread), flat_reference)
            return
        with sharded(model, reference, spread, self._mesh, device, ledger):
            yield RunningModel(model, ShardedParameters(model, spread), reference)

    @contextlib.contextmanager
    def _partitioned(
        self, model: torch.nn.Module, parameters: list[torch.nn.Parameter], ledger: Ledger
    ) -> Iterator[TrainedParameters]:
        """Yield the parameters as DeepSpeed's engine holds them at the stage of the job."""
        spread = self.spread
        if spread.param_dtype is not None:
            parameters[:] = cast_parameters(model, parameters, getattr(torch, spread.param_dtype), ledger, frozen=True)
        if not is_stage_3(spread):
            yield ZeroParameters(parameters, spread, self.rank, ledger)
            return
        with linear_layers():
            partitioned = PartitionedParameters(model, list(parameters), spread, self.rank, ledger)
            parameters.clear()
            yield partitioned


def ranks_alike(
    model: torch.nn.Module, workload: Workload, spread: Spread, prepare_for_kbit: KbitPreparation
) -> list[list[int]]:
    """Return the ranks of a job, those together that hold parts of the same sizes and so allocate the same."""
    if spread.wrapped_by == "accelerate":
        accelerates_own()  # or raise before a trace does
    with ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        stack.enter_context(fake_ranks(spread))
        stack.enter_context(undone(Snapshot(model).restore))
        running = stack.enter_context(with_adapter(model, workload, prepare_for_kbit=prepare_for_kbit))
        if spread.kind in ("fsdp1", "fsdp2"):
            problems = [*tied_factors(running), *refused_adapters(running, 1 if spread.kind == "fsdp1" else 2)]
            if problems:
                raise ArgumentError(f"{spread} cannot run this {type(running).__name__}:", problems)
        held: dict[int, tuple[int, ...]]
        trained = [parameter for parameter in running.parameters() if parameter.requires_grad]
        if spread.kind == "ddp":
            if not trained:
                raise TraceError(NOTHING_TRAINED)
            held = {rank: tuple(sorted(p.numel() for p in part)) for rank, part in enumerate(shares(trained, spread))}
        elif spread.kind == "zero":
            if spread.param_dtype is None:
                one_dtype(trained)
            held = real_elements(trained, spread) if is_stage_3(spread) else alike_parts(trained, spread)
        elif spread.kind == "fsdp1":
            held = trained_by_rank(running, spread)
        else:
            held = alike(running.parameters(), spread)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, sizes in held.items():
        groups.setdefault(sizes, []).append(rank)
    return list(groups.values())


def refuse_reference_over_ranks(model: torch.nn.Module, workload: Workload, spread: Spread) -> None:
    """Refuse a reference whose place on the ranks was not held against any."""
    if workload.pair_loss is not None:
        raise ArgumentError(
            f"pair_loss= was not held against any job over ranks. Forecast one card, which takes its logits as well: "
            f"{workload}."
        )
    if workload.reference is not None and spread.kind == "zero":
        raise ArgumentError(
            f"reference= was not held against DeepSpeed. Forecast one card, or the job with reference=None: "
            f"{workload.replace(reference=None)}."
        )
    if workload.reference == "model" and spread.kind != "ddp" and is_adapted(model, workload):
        raise ArgumentError(
            f"reference='model' with an adapter was not held against FSDP, for which trl takes the base itself. Pass "
            f"{workload.replace(reference='adapter_off')}."
        )
    if workload.reference == "adapter_off" and spread.kind == "fsdp1" and workload.gradient_checkpointing:
        raise ArgumentError(
            "reference='adapter_off' with gradient checkpointing under FSDP1: torch raises a CheckpointError, because "
            "peft freezes the adapter for the pass of the reference. Forecast Spread.fsdp2(ranks), which runs it."
        )
