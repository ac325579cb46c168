"""``Spread``: how a job is spread over the GPUs of several ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from safe_loading.errors import ArgumentError

from .arguments import whole_number
from .job_args import job_of

if TYPE_CHECKING:
    import os

    from peft import PeftConfig
    from transformers import TrainingArguments

DTYPES = ("bfloat16", "float16", "float32")
Wrapper = Literal["safe_loading", "accelerate"]
PREFETCHES = ("backward_pre", "backward_post", "no_prefetch")  # as the Trainer's fsdp_config has them


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's ``zero_optimization``, under its own names and with its own defaults.

    Attributes:
        stage: What is shared out: 1 the optimizer's state, 2 the gradients too, 3 the parameters as well.
        reduce_bucket_size: How many elements of gradients are reduced at a time.
        overlap_comm: Whether gradients are reduced beside the backward pass, with two such buckets in stages 1 and 2.
        offload_optimizer: Whether the optimizer, its state and the gradients that it reads are on the host.
        offload_param: Whether the ranks' parts of the parameters are on the host, and come to the card to be gathered.
        round_robin_gradients: Whether stages 1 and 2 deal the parameters out to the ranks' shares by turns.
        stage3_prefetch_bucket_size: How many elements are gathered ahead at a time.
        stage3_max_live_parameters: How many gathered elements stop ZeRO-3 from gathering ahead.
        stage3_max_reuse_distance: Parameters that are used again within so many elements stay gathered.
        stage3_param_persistence_threshold: Parameters of no more elements stay gathered from step to step.
        sub_group_size: How many elements of a rank's share the optimizer updates at a time.
    """

    stage: int
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    offload_optimizer: bool = False
    offload_param: bool = False
    round_robin_gradients: bool = False
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    sub_group_size: int = 1_000_000_000

    def __str__(self) -> str:
        """Return the arguments of `Spread.zero` that are not as by default."""
        default = Zero(self.stage, overlap_comm=self.stage == 3)
        changed = [f"{name}={value!r}" for name, value in vars(self).items() if value != vars(default)[name]]
        return ", ".join([f"stage={self.stage}", *changed])


@dataclass(frozen=True)
class Spread:
    """How a job is spread over ranks, each with one GPU and a micro-batch.

    Make one with `fsdp2`, `fsdp1`, `ddp` or `zero`, or from a trainer's arguments with `from_training_args`.

    Attributes:
        ranks: Over how many ranks each parameter is sharded; with DDP, how many hold the model; 0 where
            :func:`fewest_ranks` is to find it.
        replicas: How many such groups there are, each with a copy of the whole model (hybrid sharding, HSDP).
        param_dtype: The dtype in which parameters are gathered; None for their own.
        reduce_dtype: The dtype in which gradients are reduced; None for theirs.
        reshard_after_forward: Whether gathered parameters are freed after the forward pass and gathered again.
        kind: ``"fsdp2"``, ``"fsdp1"``, ``"ddp"`` or ``"zero"``.
        cpu_offload: Whether shards, gradients and the optimizer's state stay on the host.
        sync_each_batch: Whether gradients are reduced in each micro-batch, or only in the last.
        bucket_cap_mb: The size of DDP's buckets in MiB.
        gradient_as_bucket_view: Whether gradients are views into DDP's buckets.
        find_unused_parameters: Whether DDP looks for parameters without a gradient, for which it copies the outputs.
        shard_optimizer: Whether DDP's optimizer is a ``ZeroRedundancyOptimizer``, which shares out its state.
        shard: Whether FSDP1 shards at all, or each rank holds everything (``NO_SHARD``).
        deepspeed: DeepSpeed's settings of ZeRO.
        wrapped_by: Who chooses the units of FSDP: ``"safe_loading"`` or ``"accelerate"``.
        backward_prefetch: When FSDP1 gathers the next unit in the backward pass; None as its wrapper does by default.
        forward_prefetch: Whether FSDP1 gathers the next unit before one runs in the forward pass.
        use_orig_params: Whether FSDP1's optimizer has the parameters themselves, or a flat one of each unit.
    """

    ranks: int
    replicas: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard_after_forward: bool = True
    kind: Literal["fsdp2", "fsdp1", "ddp", "zero"] = "fsdp2"
    cpu_offload: bool = False
    sync_each_batch: bool = True
    bucket_cap_mb: float = 25
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    shard_optimizer: bool = False
    shard: bool = True
    deepspeed: Zero | None = None
    wrapped_by: Wrapper = "safe_loading"
    backward_prefetch: str | None = None
    forward_prefetch: bool = False
    use_orig_params: bool = True

    @staticmethod
    def fsdp2(
        ranks: int | None,
        *,
        replicas: int = 1,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        sync_each_batch: bool = True,
        wrapped_by: Wrapper = "safe_loading",
    ) -> Spread:
        """FSDP2 with the units of `wrap_fsdp_meta_safe`: each layer, the norm and the head, and the rest.

        Args:
            ranks: Over how many ranks each parameter is sharded; None for :func:`fewest_ranks` to find.
            replicas: How many such groups there are; from 2 on this is HSDP.
            param_dtype: ``"bfloat16"`` or ``"float16"`` for mixed precision.
            reduce_dtype: The same for the reduction of gradients, ``"float32"`` for example.
            reshard_after_forward: False keeps what was gathered until the backward pass, as ZeRO-2 does.
            cpu_offload: True for ``CPUOffloadPolicy``. The host's memory is not in the forecast.
            sync_each_batch: False for gradient accumulation as accelerate and the Trainer do it by default: until the
                last micro-batch the gradients stay whole on each rank.
            wrapped_by: ``"accelerate"`` for the Trainer, trl's trainers and ``Accelerator.prepare``, where
                `load_at_prepare` does not wrap: embeddings that are not tied are a unit of their own, and with a
                `param_dtype` the parameters that are trained are in float32, whatever the dtype of the model.

        Raises:
            ArgumentError: A number that is not a positive integer, an unknown dtype or wrapper.
        """
        ranks = _number_of(ranks)
        _sharded(replicas, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        _flags(reshard_after_forward=reshard_after_forward, cpu_offload=cpu_offload, sync_each_batch=sync_each_batch)
        sharding = (replicas, param_dtype, reduce_dtype, reshard_after_forward)
        wrapper = _wrapper(wrapped_by)
        return Spread(ranks, *sharding, cpu_offload=cpu_offload, sync_each_batch=sync_each_batch, wrapped_by=wrapper)

    @staticmethod
    def fsdp1(
        ranks: int | None,
        *,
        replicas: int = 1,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
        shard: bool = True,
        cpu_offload: bool = False,
        sync_each_batch: bool = True,
        wrapped_by: Wrapper = "safe_loading",
        backward_prefetch: str | None = None,
        forward_prefetch: bool = False,
        use_orig_params: bool = True,
    ) -> Spread:
        """FSDP1, ``FullyShardedDataParallel``, with the units of `wrap_fsdp_meta_safe`.

        For an adapter in another dtype than its base these are the units of accelerate and peft, too: each layer, each
        matrix of the adapter, and the rest in the root.

        The parameters of a unit are one flat tensor, whose gradient is whole where only some of them are trained, as
        with LoRA. It is for training.

        Args:
            ranks: Over how many ranks each unit is sharded; None for :func:`fewest_ranks` to find.
            replicas: How many such groups there are; from 2 on this is ``HYBRID_SHARD``.
            param_dtype: ``"bfloat16"`` or ``"float16"`` for mixed precision.
            reduce_dtype: The same for the reduction of gradients, ``"float32"`` for example.
            reshard_after_forward: True for ``FULL_SHARD``, False for ``SHARD_GRAD_OP``.
            shard: False for ``NO_SHARD``: each rank holds everything, and gradients are averaged as with DDP.
            cpu_offload: True for ``CPUOffload(offload_params=True)``. The host's memory is not in the forecast.
            sync_each_batch: False for gradient accumulation under ``no_sync()``: until the last micro-batch the
                gradients stay whole on each rank.
            wrapped_by: As for `fsdp2`. accelerate fetches no unit ahead in the backward pass, unless it is told a
                ``backward_prefetch``, and peft makes each trained matrix of an adapter a unit.
            backward_prefetch: ``"backward_pre"``, ``"backward_post"`` or ``"no_prefetch"``, as in ``fsdp_config`` or in
                accelerate's file. None for torch's default, the first, and under accelerate for its own, the last.
            forward_prefetch: As in ``fsdp_config`` or in accelerate's file.
            use_orig_params: False for a flat parameter of each unit, of which all is trained or all is frozen: the
                default of accelerate's file, but neither of the Trainer nor of `wrap_fsdp_meta_safe`.

        Raises:
            ArgumentError: A number that is not a positive integer, an unknown dtype or wrapper, or what FSDP1 does not
                combine.
        """
        ranks = _number_of(ranks)
        _sharded(replicas, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        flags = {"reshard_after_forward": reshard_after_forward, "shard": shard, "cpu_offload": cpu_offload}
        flags |= {"forward_prefetch": forward_prefetch, "use_orig_params": use_orig_params}
        _flags(**flags, sync_each_batch=sync_each_batch)
        if not shard and (replicas > 1 or not reshard_after_forward or ranks == 1):
            raise ArgumentError(
                "shard=False is NO_SHARD, for two ranks or more: leave out replicas and reshard_after_forward."
            )
        if not shard and cpu_offload:
            raise ArgumentError(
                "shard=False with cpu_offload=True is not forecast: real ranks took less memory than FSDP1's traced "
                "hooks. Leave one of the two out."
            )
        if cpu_offload and not sync_each_batch:
            raise ArgumentError("FSDP1 cannot accumulate gradients under no_sync() with cpu_offload=True.")
        sharding = (replicas, param_dtype, reduce_dtype, reshard_after_forward)
        return Spread(
            ranks,
            *sharding,
            "fsdp1",
            cpu_offload,
            sync_each_batch,
            shard=shard,
            wrapped_by=_wrapper(wrapped_by),
            backward_prefetch=_prefetch(backward_prefetch),
            forward_prefetch=forward_prefetch,
            use_orig_params=use_orig_params,
        )

    @staticmethod
    def ddp(
        ranks: int | None,
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
            shard_optimizer: True for torch's ``ZeroRedundancyOptimizer``, torch's own ZeRO-1.

        Raises:
            ArgumentError: A number that is not positive, or a flag that is none.
        """
        ranks = _number_of(ranks)
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
    def zero(
        ranks: int | None,
        *,
        stage: int,
        param_dtype: str | None = None,
        reduce_bucket_size: int = 500_000_000,
        overlap_comm: bool | None = None,
        offload_optimizer: bool = False,
        offload_param: bool = False,
        round_robin_gradients: bool = False,
        stage3_prefetch_bucket_size: int = 50_000_000,
        stage3_max_live_parameters: int = 1_000_000_000,
        stage3_max_reuse_distance: int = 1_000_000_000,
        stage3_param_persistence_threshold: int = 100_000,
        sub_group_size: int = 1_000_000_000,
    ) -> Spread:
        """DeepSpeed's ZeRO, whose engine keeps flat copies and buckets of its own; for training.

        For torch's own ZeRO-1, ``ZeroRedundancyOptimizer``, use `ddp` with ``shard_optimizer=True``. The arguments
        have the names and defaults of DeepSpeed's ``zero_optimization``. Gradients are averaged in the dtype of the
        parameters, ``contiguous_gradients`` and ``reduce_scatter`` are on, and everything that is trained is in one
        group of parameters.

        Args:
            ranks: Over how many ranks the optimizer's state is shared out.
            stage: 1, 2 or 3.
            param_dtype: ``"bfloat16"`` where DeepSpeed's config enables ``bf16``, ``"float16"`` for ``fp16``: all
                parameters are cast to it. None leaves them in their dtype, which has to be one.
            reduce_bucket_size: How many elements of gradients are reduced at a time; each backward pass allocates
                the whole bucket, whatever the size of the model. transformers' ``"auto"`` is ``hidden_size ** 2``.
            overlap_comm: Whether DeepSpeed reduces beside the backward pass, which takes two such buckets in stages 1
                and 2. None is False for these, and True for stage 3.
            offload_optimizer: True for ``{"device": "cpu"}``. The host's memory is not in the forecast.
            offload_param: True for ``{"device": "cpu"}`` in stage 3, where parts of parameters wait on the host.
            round_robin_gradients: Whether stages 1 and 2 deal the parameters out to the ranks' shares by turns.
            stage3_prefetch_bucket_size: How many elements are gathered ahead at a time.
            stage3_max_live_parameters: How many gathered elements stop ZeRO-3 from gathering ahead.
            stage3_max_reuse_distance: Parameters that are used again within so many elements stay gathered.
            stage3_param_persistence_threshold: Parameters of no more elements stay gathered from step to step.
            sub_group_size: How many elements of a rank's share the optimizer updates at a time in stage 3.

        Raises:
            ArgumentError: An argument that DeepSpeed would refuse, or what is not forecast.
        """
        ranks = _number_of(ranks)
        _sharded(1, param_dtype=param_dtype)
        if stage not in (1, 2, 3) or isinstance(stage, bool):
            raise ArgumentError(f"stage={stage!r:.80}: 1, 2 or 3.")
        overlapped = stage == 3 if overlap_comm is None else overlap_comm
        _flags(
            overlap_comm=overlapped,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            round_robin_gradients=round_robin_gradients,
        )
        whole_number(reduce_bucket_size, "reduce_bucket_size", least=1, what="a number of elements")
        options = Zero(
            stage,
            reduce_bucket_size,
            overlapped,
            offload_optimizer,
            offload_param,
            round_robin_gradients,
            stage3_prefetch_bucket_size,
            stage3_max_live_parameters,
            stage3_max_reuse_distance,
            stage3_param_persistence_threshold,
            sub_group_size,
        )
        _check_stage(options)
        return Spread(ranks, param_dtype=param_dtype, kind="zero", deepspeed=options)

    @staticmethod
    def from_training_args(
        args: TrainingArguments,
        ranks: int | None,
        adapter: PeftConfig | str | os.PathLike[str] | None = None,
        *,
        hidden_size: int | None = None,
        wrapped_by: Wrapper = "accelerate",
    ) -> Spread:
        """The job that a Trainer runs with these arguments on so many ranks, or a trainer of trl's with its config.

        FSDP by ``fsdp`` and ``fsdp_config``, ZeRO by ``deepspeed``, and else DDP, each with mixed precision and
        accumulation of gradients as the Trainer has them. Where the arguments say nothing, the variables that
        ``accelerate launch`` sets for its file are followed, as accelerate does. Layers are the units of FSDP, by the
        classes that the model names, whatever ``transformer_layer_cls_to_wrap`` does.

        Args:
            args: As for :meth:`Workload.from_training_args`.
            ranks: How many processes the job has in all; None for :func:`fewest_ranks` to find.
            adapter: The adapter of the workload: around a model of peft's the Trainer lets DDP look for unused
                parameters.
            hidden_size: The model's, where DeepSpeed's settings are "auto".
            wrapped_by: ``"safe_loading"`` where `load_at_prepare` wraps.

        Raises:
            ArgumentError: What no job of these expresses, such as layers that are split over ranks.
        """
        kind, options = job_of(args, ranks, hidden_size, adapted=adapter is not None)
        if kind.startswith("fsdp"):
            options["wrapped_by"] = wrapped_by
        make: Callable[..., Spread] = getattr(Spread, kind)
        return make(**options)

    @property
    def cards(self) -> int:
        """How many GPUs the job takes."""
        return self.ranks * self.replicas

    def __str__(self) -> str:
        """Return the call that makes it, without arguments that have their defaults."""
        default = Spread(self.ranks, kind=self.kind, deepspeed=self.deepspeed)
        words = [f"{name}={value!r}" for name, value in vars(self).items() if value != vars(default)[name]]
        words = words if self.deepspeed is None else [str(self.deepspeed), *words]
        return f"Spread.{self.kind}({', '.join([f'ranks={self.ranks or None}', *words])})"


def _number_of(ranks: int | None) -> int:
    """Return the number of ranks; 0 where it is to be found."""
    if ranks is None:
        return 0
    whole_number(ranks, "ranks", least=1, what="a number of ranks")
    return ranks


def _wrapper(wrapped_by: Wrapper) -> Wrapper:
    if wrapped_by not in ("safe_loading", "accelerate"):
        raise ArgumentError(f'wrapped_by={wrapped_by!r:.80}: "safe_loading" or "accelerate".')
    return wrapped_by


def _prefetch(backward_prefetch: str | None) -> str | None:
    """Return the word in small letters; accelerate's files have it in capitals."""
    word = backward_prefetch.lower() if isinstance(backward_prefetch, str) else backward_prefetch
    if word is not None and word not in PREFETCHES:
        raise ArgumentError(f"backward_prefetch={backward_prefetch!r:.80}: one of {list(PREFETCHES)}, or None.")
    return word


def _sharded(replicas: int, **dtypes: str | None) -> None:
    whole_number(replicas, "replicas", least=1, what="a number of groups")
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in DTYPES:
            raise ArgumentError(f"{name}={dtype!r:.80}: one of {list(DTYPES)}, or None.")


def _check_stage(options: Zero) -> None:
    """Refuse settings that are none, or that the stage does not have."""
    default = vars(Zero(options.stage))
    given = {name: value for name, value in vars(options).items() if name.startswith(("stage3_", "sub_group"))}
    for name, value in given.items():
        whole_number(value, name, least=0, what="a number of elements")
    given["offload_param"] = options.offload_param
    changed = [f"{name}={value}" for name, value in given.items() if value != default[name]]
    if options.stage == 3 and options.round_robin_gradients:
        raise ArgumentError("round_robin_gradients=True is a setting of stages 1 and 2, and stage=3 does not have it.")
    if options.stage != 3 and changed:
        raise ArgumentError(f"These are settings of stage 3, and stage={options.stage} has none of them:", changed)


def _flags(**flags: object) -> None:
    problems = [f"{name}={flag!r:.80}: True or False." for name, flag in flags.items() if not isinstance(flag, bool)]
    if problems:
        raise ArgumentError("A job cannot be spread so:", problems)
