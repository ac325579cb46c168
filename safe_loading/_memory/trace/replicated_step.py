"""DDP in a traced step: torch's own reducer on fake tensors, in a process group whose collectives do nothing.

The buckets, the views into them and the copies between gradients and buckets are the reducer's. It is given the buckets
of a job that runs already, because what it does to arrange them anew after the first step reads values.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    GradBucket,
    Reducer,
    _compute_bucket_assignment_by_size,
    _register_comm_hook,
)
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_map_only

from safe_loading._core.report import MiB
from safe_loading._core.spread import Spread

from .ledger import Ledger
from .trained_parameters import TrainedParameters

_FIRST_BUCKET = _DEFAULT_FIRST_BUCKET_BYTES  # of the gradients that come first, so that reducing starts early


class ReplicatedParameters(TrainedParameters):
    """The trained parameters of a model that each rank holds whole, with DDP's reducer at their gradients."""

    def __init__(self, parameters: list[torch.nn.Parameter], spread: Spread, rank: int, ledger: Ledger) -> None:
        super().__init__(parameters)
        self._stepped = shares(parameters, spread)[rank]
        before = set(ledger.live.values())
        self._reducer = _reducer(parameters, spread)
        if spread.find_unused_parameters and parameters:  # a number for each that says whether it was used
            self._used = torch.empty(len(parameters), dtype=torch.int32, device=parameters[0].device)
        ledger.classify_temporary(set(ledger.live.values()) - before, "gradients")

    @property
    def stepped(self) -> list[torch.nn.Parameter]:
        """With ZeRO-1, this rank's share of them."""
        return self._stepped

    def begin_backward(self, last: bool) -> None:
        """Reduce gradients in the backward pass of the last micro-batch; the others run under ``no_sync()``."""
        if last:
            self._reducer.prepare_for_forward()
            self._reducer.prepare_for_backward([])


def shares(parameters: list[torch.nn.Parameter], spread: Spread) -> list[list[torch.nn.Parameter]]:
    """Return the parameters that each rank's optimizer gets, as torch's ``ZeroRedundancyOptimizer`` shares them out."""
    if not spread.shard_optimizer or not parameters:
        return [parameters] * spread.ranks
    sharing = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.0)
    return [[p for group in groups for p in group["params"]] for groups in sharing._partition_parameters()]  # type: ignore[attr-defined]  # of torch


def _reducer(parameters: list[torch.nn.Parameter], spread: Spread) -> Reducer:
    cap = int(spread.bucket_cap_mb * MiB)
    # gradients come in about the reverse of the order of the parameters, and so do the buckets
    backwards: list[torch.Tensor] = [*parameters[::-1]]
    buckets, limits = _compute_bucket_assignment_by_size(backwards, [_FIRST_BUCKET, cap], [False] * len(backwards))
    reducer = Reducer(
        backwards,
        buckets,
        limits,
        _get_default_group(),
        [False] * len(backwards),
        cap,
        False,
        spread.gradient_as_bucket_view,
        {},
        _FIRST_BUCKET,
    )
    # the futures of the fake group hold nothing, and the reducer reads them
    _register_comm_hook(reducer, None, _reduced_at_once)
    return reducer


def _reduced_at_once(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextlib.contextmanager
def replicated(model: torch.nn.Module, spread: Spread) -> Iterator[None]:
    """Inside, the model's outputs are copied where DDP copies them: to look for parameters without a gradient."""

    def copied(_: object, __: object, output: object) -> object:
        return tree_map_only(torch.Tensor, lambda t: t.clone() if t.grad_fn is not None else t, output)

    try:
        with model.register_forward_hook(copied) if spread.find_unused_parameters else contextlib.nullcontext():
            yield
    finally:
        gc.collect()  # the reducer's hooks refer to it in cycles
