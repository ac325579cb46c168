"""``Spread``: how a job is spread over the GPUs of several ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from safe_loading.errors import ArgumentError

from .arguments import whole_number

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Spread:
    """How a job is spread over ranks, each with one GPU and a micro-batch. Make one with `fsdp2`, `fsdp1` or `ddp`.

    Attributes:
        ranks: Over how many ranks each parameter is sharded; with DDP, how many hold the model.
        replicas: How many such groups there are, each with a copy of the whole model (hybrid sharding, HSDP).
        param_dtype: The dtype in which parameters are gathered; None for their own.
        reduce_dtype: The dtype in which gradients are reduced; None for theirs.
        reshard_after_forward: Whether gathered parameters are freed after the forward pass and gathered again.
        kind: ``"fsdp2"``, ``"fsdp1"`` or ``"ddp"``.
        cpu_offload: Whether shards, gradients and the optimizer's state stay on the host.
        sync_each_batch: Whether gradients are reduced in each micro-batch, or only in the last.
        bucket_cap_mb: The size of DDP's buckets in MiB.
        gradient_as_bucket_view: Whether gradients are views into DDP's buckets.
        find_unused_parameters: Whether DDP looks for parameters without a gradient, for which it copies the outputs.
        shard_optimizer: Whether the optimizer's state is shared out (ZeRO-1).
    """

    ranks: int
    replicas: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard_after_forward: bool = True
    kind: Literal["fsdp2", "fsdp1", "ddp"] = "fsdp2"
    cpu_offload: bool = False
    sync_each_batch: bool = True
    bucket_cap_mb: float = 25
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    shard_optimizer: bool = False

    @staticmethod
    def fsdp2(
        ranks: int,
        *,
        replicas: int = 1,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        sync_each_batch: bool = True,
    ) -> Spread:
        """FSDP2 with the units of `wrap_fsdp_meta_safe`: each layer, the norm and the head, and the rest.

        Args:
            ranks: Over how many ranks each parameter is sharded.
            replicas: How many such groups there are; from 2 on this is HSDP.
            param_dtype: ``"bfloat16"`` or ``"float16"`` for mixed precision.
            reduce_dtype: The same for the reduction of gradients, ``"float32"`` for example.
            reshard_after_forward: False keeps what was gathered until the backward pass, as ZeRO-2 does.
            cpu_offload: True for ``CPUOffloadPolicy``. The host's memory is not in the forecast.
            sync_each_batch: False for gradient accumulation as accelerate and the Trainer do it by default: until the
                last micro-batch the gradients stay whole on each rank.

        Raises:
            ArgumentError: A number that is not a positive integer, or an unknown dtype.
        """
        _sharded(ranks, replicas, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        _flags(reshard_after_forward=reshard_after_forward, cpu_offload=cpu_offload, sync_each_batch=sync_each_batch)
        return Spread(
            ranks,
            replicas,
            param_dtype,
            reduce_dtype,
            reshard_after_forward,
            cpu_offload=cpu_offload,
            sync_each_batch=sync_each_batch,
        )

    @staticmethod
    def fsdp1(
        ranks: int,
        *,
        replicas: int = 1,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
        sync_each_batch: bool = True,
    ) -> Spread:
        """FSDP1, ``FullyShardedDataParallel``, with the units of `wrap_fsdp_meta_safe` and ``use_orig_params=True``.

        The parameters of a unit are one flat tensor, whose gradient is whole where only some of them are trained, as
        with LoRA. It is for training.

        Args:
            ranks: Over how many ranks each unit is sharded.
            replicas: How many such groups there are; from 2 on this is ``HYBRID_SHARD``.
            param_dtype: ``"bfloat16"`` or ``"float16"`` for mixed precision.
            reduce_dtype: The same for the reduction of gradients, ``"float32"`` for example.
            reshard_after_forward: True for ``FULL_SHARD``, False for ``SHARD_GRAD_OP``.
            sync_each_batch: False for gradient accumulation under ``no_sync()``: until the last micro-batch the
                gradients stay whole on each rank.

        Raises:
            ArgumentError: A number that is not a positive integer, or an unknown dtype.
        """
        _sharded(ranks, replicas, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        _flags(reshard_after_forward=reshard_after_forward, sync_each_batch=sync_each_batch)
        return Spread(
            ranks,
            replicas,
            param_dtype,
            reduce_dtype,
            reshard_after_forward,
            kind="fsdp1",
            sync_each_batch=sync_each_batch,
        )

    @staticmethod
    def ddp(
        ranks: int,
        *,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        shard_optimizer: bool = False,
    ) -> Spread:
        """``DistributedDataParallel``: the whole model on each rank, and its gradients once more in buckets.

        Args:
            ranks: How many ranks there are.
            bucket_cap_mb: As for DDP.
            gradient_as_bucket_view: As for DDP: the gradients are in the buckets and take no memory of their own.
            find_unused_parameters: As for DDP, which then copies what the model returns. The Trainer sets it for a
                transformers model without gradient checkpointing.
            static_graph: As for DDP. From the second step on it changes no memory but that of
                ``find_unused_parameters``, whose copies it leaves out.
            shard_optimizer: True for torch's ``ZeroRedundancyOptimizer``, which is ZeRO-1.

        Raises:
            ArgumentError: A number that is not positive, or a flag that is none.
        """
        whole_number(ranks, "ranks", least=1, what="a number of ranks")
        if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0:
            raise ArgumentError(f"bucket_cap_mb={bucket_cap_mb!r:.80}: a size in MiB, more than 0.")
        flags = {"gradient_as_bucket_view": gradient_as_bucket_view, "find_unused_parameters": find_unused_parameters}
        _flags(**flags, static_graph=static_graph, shard_optimizer=shard_optimizer)
        return Spread(
            ranks,
            kind="ddp",
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters and not static_graph,
            shard_optimizer=shard_optimizer,
        )

    @staticmethod
    def zero(ranks: int, *, stage: int) -> Spread:
        """ZeRO by its stage, as far as torch itself has it: stage 1 is `ddp` with ``shard_optimizer=True``.

        Raises:
            ArgumentError: Stages 2 and 3, which are DeepSpeed's; the text says what is near to them.
        """
        if stage == 1:
            return Spread.ddp(ranks, shard_optimizer=True)
        near = {2: "Spread.fsdp2(ranks, reshard_after_forward=False)", 3: "Spread.fsdp2(ranks)"}
        if stage not in near:
            raise ArgumentError(f"stage={stage!r:.80}: 1, 2 or 3.")
        raise ArgumentError(
            f"ZeRO-{stage} is DeepSpeed's, whose flat copies and buckets follow from its own settings and are not "
            f"known here. {near[stage]} shards the same tensors by FSDP2, and can be forecast."
        )

    @property
    def cards(self) -> int:
        """How many GPUs the job takes."""
        return self.ranks * self.replicas

    def __str__(self) -> str:
        """Return the call that makes it, without what is as by default."""
        default = Spread(self.ranks, kind=self.kind)
        words = [f"{name}={value!r}" for name, value in vars(self).items() if value != vars(default)[name]]
        return f"Spread.{self.kind}({', '.join([f'ranks={self.ranks}', *words])})"


def _sharded(ranks: int, replicas: int, **dtypes: str | None) -> None:
    whole_number(ranks, "ranks", least=1, what="a number of ranks")
    whole_number(replicas, "replicas", least=1, what="a number of groups")
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in DTYPES:
            raise ArgumentError(f"{name}={dtype!r:.80}: one of {list(DTYPES)}, or None.")


def _flags(**flags: object) -> None:
    problems = [f"{name}={flag!r:.80}: True or False." for name, flag in flags.items() if not isinstance(flag, bool)]
    if problems:
        raise ArgumentError("A job cannot be spread so:", problems)
