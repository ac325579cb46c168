"""``Spread``: how a job is spread over the GPUs of several ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from safe_loading.errors import ArgumentError

from .arguments import whole_number

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Spread:
    """How a job is spread over ranks, each with one GPU and a micro-batch of its own. Make one with `fsdp2`.

    Attributes:
        ranks: Over how many ranks each parameter is sharded.
        replicas: How many such groups there are, each with a copy of the whole model (hybrid sharding, HSDP).
        param_dtype: The dtype in which parameters are gathered; None for their own.
        reduce_dtype: The dtype in which gradients are reduced; None for theirs.
        reshard_after_forward: Whether gathered parameters are freed after the forward pass and gathered again.
    """

    ranks: int
    replicas: int = 1
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard_after_forward: bool = True

    @staticmethod
    def fsdp2(
        ranks: int,
        *,
        replicas: int = 1,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
    ) -> Spread:
        """FSDP2 with the units of `wrap_fsdp_meta_safe`: each layer, the norm and the head, and the rest.

        Args:
            ranks: Over how many ranks each parameter is sharded.
            replicas: How many such groups there are; from 2 on this is HSDP.
            param_dtype: ``"bfloat16"`` or ``"float16"`` for mixed precision.
            reduce_dtype: The same for the reduction of gradients, ``"float32"`` for example.
            reshard_after_forward: False keeps what was gathered until the backward pass, as ZeRO-2 does.

        Raises:
            ArgumentError: A number that is not a positive integer, or an unknown dtype.
        """
        whole_number(ranks, "ranks", least=1, what="a number of ranks")
        whole_number(replicas, "replicas", least=1, what="a number of groups")
        for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype is not None and dtype not in DTYPES:
                raise ArgumentError(f"{name}={dtype!r:.80}: one of {list(DTYPES)}, or None.")
        if not isinstance(reshard_after_forward, bool):
            raise ArgumentError(f"reshard_after_forward={reshard_after_forward!r:.80}: True or False.")
        return Spread(ranks, replicas, param_dtype, reduce_dtype, reshard_after_forward)

    @property
    def cards(self) -> int:
        """How many GPUs the job takes."""
        return self.ranks * self.replicas
