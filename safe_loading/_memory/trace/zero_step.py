"""ZeRO-1 and ZeRO-2 in a traced step: the allocations of DeepSpeed's engine, made on fake tensors by the same rules.

DeepSpeed is not needed. What it allocates follows from its settings and from the order in which gradients come: flat
copies of the trained parameters, a share of them in float32, buckets into which gradients are copied, and the copies in
which a rank keeps its share. The rules are those of ``runtime/zero/stage_1_and_2.py`` of DeepSpeed 0.19; collectives
work in place and allocate nothing. Steps are held against the engine itself in docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple

import torch
from torch._utils import _flatten_dense_tensors

from safe_loading._core.spread import Spread, Zero
from safe_loading.errors import ArgumentError

from .ledger import Ledger, fake_device
from .trained_parameters import TrainedParameters

_ALIGNED_TO = 2  # elements, times the number of ranks: DeepSpeed's nccl_start_alignment_factor


class Part(NamedTuple):
    """A rank's part of a parameter: a range of its elements."""

    place: int  # of the parameter among the trained ones
    start: int
    stop: int


def flat_order(count: int, spread: Spread) -> list[int]:
    """Return the places of so many parameters in the order in which they lie in the flat tensor."""
    step = spread.ranks if spread.deepspeed is not None and spread.deepspeed.round_robin_gradients else 1
    return [place for first in range(step) for place in range(first, count, step)]


def parts_of_ranks(sizes: list[int], spread: Spread) -> list[list[Part]]:
    """Return for each rank its parts, when parameters of these sizes lie one after the other and are cut evenly."""
    ranks, order = spread.ranks, flat_order(len(sizes), spread)
    share = padded(sum(sizes), _ALIGNED_TO * ranks) // ranks
    ends = list(itertools.accumulate(sizes[place] for place in order))
    parts: list[list[Part]] = []
    for first in range(0, share * ranks, share or 1):
        held = []
        for place, end in zip(order, ends, strict=True):
            size = sizes[place]
            start, stop = max(first, end - size), min(first + share, end)
            if start < stop:
                held.append(Part(place, start - (end - size), stop - (end - size)))
        parts.append(held)
    return parts or [[]] * ranks


def alike_parts(parameters: list[torch.nn.Parameter], spread: Spread) -> dict[int, tuple[int, ...]]:
    """Return for each rank the sizes of its parts and of their parameters: the same sizes take the same memory."""
    sizes = [parameter.numel() for parameter in parameters]
    return {
        rank: tuple(size for part in own for size in (sizes[part.place], part.stop - part.start))
        for rank, own in enumerate(parts_of_ranks(sizes, spread))
    }


def padded(count: int, multiple: int) -> int:
    """Return the first multiple that is not less than a count."""
    return -(-count // multiple) * multiple


def one_dtype(parameters: list[torch.nn.Parameter]) -> torch.dtype:
    """Return the dtype of the trained parameters, which DeepSpeed lays into one flat tensor."""
    dtypes = {parameter.dtype for parameter in parameters}
    if len(dtypes) > 1:
        raise ArgumentError(
            f"ZeRO lays what is trained into one flat tensor, and this model trains parameters in "
            f"{' and '.join(sorted(str(dtype) for dtype in dtypes))}. DeepSpeed casts them as its config says: "
            f'pass param_dtype="bfloat16" for bf16, or "float16" for fp16.'
        )
    return dtypes.pop() if dtypes else torch.float32


class DeepSpeedParameters(TrainedParameters):
    """The trained parameters of a model under DeepSpeed's engine, at any stage of ZeRO."""

    sharded = True

    def __init__(
        self, parameters: list[torch.nn.Parameter], zero: Zero, spread: Spread, rank: int, ledger: Ledger
    ) -> None:
        super().__init__(parameters)
        self._zero = zero
        self._ranks, self._rank, self._ledger = spread.ranks, rank, ledger
        self._dtype = one_dtype(parameters)
        self._losses: tuple[torch.Tensor, ...] = ()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Divide the loss by the number of micro-batches and scale it, as the engine does even by 1, and keep all."""
        divided = loss / 1.0
        self._losses = (loss, divided, divided * 1.0)
        return self._losses[-1]

    def _take_gradients(self) -> None:
        """Let `_take` have each gradient as soon as it is there."""
        own = weakref.proxy(self)  # torch holds a hook where the garbage collector does not see the cycle
        for place, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, place=place: own._received(place))  # type: ignore[no-untyped-call]  # of torch

    @torch.no_grad()
    def _received(self, place: int) -> None:
        gradient = self.parameters[place].grad
        if gradient is not None:
            self._ledger.classify(gradient, "gradients")
            self._take(place, gradient)

    def _take(self, place: int, gradient: torch.Tensor) -> None:
        """Do the engine's work when the gradient of a parameter is there."""
        raise NotImplementedError


class ZeroParameters(DeepSpeedParameters):
    """The trained parameters of a model under ZeRO-1 or ZeRO-2, whose gradients go into DeepSpeed's buckets."""

    def __init__(self, parameters: list[torch.nn.Parameter], spread: Spread, rank: int, ledger: Ledger) -> None:
        super().__init__(parameters, spread.deepspeed or Zero(stage=2), spread, rank, ledger)
        self._buffers: list[torch.Tensor] = []
        self._in_bucket: list[int] = []
        self._filled = self._index = 0
        self._large: int | None = None  # a gradient that is larger than a bucket
        self._kept: torch.Tensor | None = None  # the gradients of the parameters that this rank has a part of
        self._kept_until = 0
        self._accumulated: list[torch.Tensor] | None = None
        self._averaged: list[torch.Tensor] = []
        self._scaled_norm: torch.Tensor | None = None
        self._last = True
        sizes = [parameter.numel() for parameter in parameters]
        self._order = flat_order(len(sizes), spread)
        self._parts = parts_of_ranks(sizes, spread)
        self._own = {part.place: part for part in self._parts[rank]}
        self._share = padded(sum(sizes), _ALIGNED_TO * spread.ranks) // spread.ranks
        self._master: torch.nn.Parameter | None = None
        if parameters:
            self._flatten()
        self._take_gradients()

    @property
    def stepped(self) -> list[torch.nn.Parameter]:
        """The rank's share in float32, one flat tensor."""
        return [] if self._master is None else [self._master]

    def _flatten(self) -> None:
        """Lay the parameters into one flat tensor, and copy the rank's share of it in float32."""
        allocations = filter(None, map(self._ledger.allocation_of, self.parameters))
        only_adapters = {allocation.component for allocation in allocations} == {"adapters"}
        count = self._share * self._ranks
        flat = torch.empty(count, dtype=self._dtype, device=self.parameters[0].device)
        self._ledger.classify(flat, "adapters" if only_adapters else "weights", op="zero.flat")
        start = 0
        for parameter in (self.parameters[place] for place in self._order):
            parameter.data = flat.narrow(0, start, parameter.numel()).view(parameter.shape)
            start += parameter.numel()
        self._flat = flat
        # DeepSpeed clones the share, so that it is a tensor of its own where it is float32 already
        share = self._own_share().clone().float()
        self._master = torch.nn.Parameter(share.to(fake_device("cpu")) if self._zero.offload_optimizer else share)
        where = self._master.device
        self._norm = torch.zeros((), device=where)  # of the step before, which the engine keeps
        for made in (self._master, self._norm):
            self._ledger.classify(made, "optimizer")
        if self._zero.offload_optimizer:  # through it gradients of the host come back to be added up
            largest = max(parameter.numel() for parameter in self.parameters)
            self._staging = torch.empty(largest, dtype=self._dtype, device=flat.device)
            self._ledger.classify(self._staging, "gradients")

    def _own_share(self) -> torch.Tensor:
        return self._flat.narrow(0, self._rank * self._share, self._share).detach()

    def begin_backward(self, last: bool) -> None:
        """Remember whether this is the last micro-batch, in which alone ZeRO-1 reduces."""
        self._last = last

    def _take(self, place: int, gradient: torch.Tensor) -> None:
        """Allocate the buckets with the first gradient, and reduce it where its stage does so at once."""
        if not self._buffers:
            for _ in range(2 if self._zero.overlap_comm else 1):
                self._buffers.append(
                    torch.empty(self._zero.reduce_bucket_size, dtype=self._dtype, device=gradient.device)
                )
                self._ledger.classify(self._buffers[-1], "gradients")
        if self._zero.stage == 2 or (self._zero.overlap_comm and self._last):
            self._put_into_bucket(place)

    def _put_into_bucket(self, place: int) -> None:
        gradient = self.parameters[place].grad
        if gradient is None or not gradient.numel():
            return
        size = gradient.numel()
        if self._filled + size > self._zero.reduce_bucket_size:
            self._reduce()
            self._index = 1 - self._index if self._zero.overlap_comm else 0
        if size > self._zero.reduce_bucket_size:
            self._large = place
            if self._zero.offload_optimizer:
                gradient.data = gradient.detach().clone()
        else:
            view = self._buffers[self._index].narrow(0, self._filled, size)
            view.copy_(gradient.view(-1))
            gradient.data = view.view_as(gradient)
        self._filled += size
        self._in_bucket.append(place)

    def _reduce(self) -> None:
        """Average the gradients in the bucket over the ranks, and keep those of which this rank has a part."""
        if self._large is not None:
            gradient = self.parameters[self._large].grad
            bucket = None if gradient is None else gradient.view(-1)
        else:
            bucket = self._buffers[self._index].narrow(0, 0, self._filled)
        if bucket is not None:
            bucket.div_(self._ranks)
            self._all_reduce(bucket)
        for place in self._in_bucket:
            if place in self._own:
                self._keep(place)
            elif self._zero.stage == 2:
                self.parameters[place].grad = None
        self._in_bucket, self._filled, self._large = [], 0, None

    def _all_reduce(self, bucket: torch.Tensor) -> None:
        """Reduce slices of the bucket, each of the parts of one rank, in copies that are not larger than a bucket."""
        lengths: list[int] = []
        last_owner = -1
        for place in self._in_bucket:
            for owner, parts in enumerate(self._parts):
                for part in parts:
                    if part.place != place:
                        continue
                    if owner == last_owner:
                        lengths[-1] += part.stop - part.start
                    else:
                        lengths.append(part.stop - part.start)
                    last_owner = owner
        copied: list[torch.Tensor] = []
        start = count = 0
        for length in lengths:
            copied.append(bucket.narrow(0, start, length))
            start, count = start + length, count + length
            if count > self._zero.reduce_bucket_size:
                _flatten_dense_tensors(copied)  # type: ignore[no-untyped-call]  # of torch
                copied, count = [], 0
        if copied:
            _flatten_dense_tensors(copied)  # type: ignore[no-untyped-call]  # of torch

    def _keep(self, place: int) -> None:
        """Copy a gradient out of the bucket, whole even where the rank has only a part of it."""
        gradient = self.parameters[place].grad
        if gradient is None:
            return
        if self._zero.offload_optimizer:
            if self._last:
                self._send_to_host(gradient, self._own[place])
                self.parameters[place].grad = None
            return
        if self._kept is None:
            total = sum(self.parameters[own].numel() for own in self._own)
            self._kept = torch.empty(total, dtype=self._dtype, device=gradient.device)
            self._ledger.classify(self._kept, "gradients")
            self._kept_until = 0
        view = self._kept.narrow(0, self._kept_until, gradient.numel())
        view.copy_(gradient.view(-1))
        gradient.data = view.view_as(gradient)
        self._kept_until += gradient.numel()

    def _send_to_host(self, gradient: torch.Tensor, part: Part) -> None:
        """Copy a part to the host in float32; its norm is taken on the way, and infinite values are looked for."""
        piece = gradient.view(-1).narrow(0, part.start, part.stop - part.start)
        _norm_of([piece])
        _count_invalid([gradient])
        piece.float().to(fake_device("cpu"))

    @torch.no_grad()
    def bring_gradients(self, ledger: Ledger) -> None:
        """End a backward pass: ZeRO-2 adds up its share in each micro-batch, ZeRO-1 reduces in the last one."""
        if self._zero.stage == 1 and not self._last:
            self._losses = ()
            return
        if self._zero.stage == 1 and not self._zero.overlap_comm:
            for place in range(len(self.parameters)):
                self._put_into_bucket(place)
        if self._buffers:
            self._reduce()
        if not self._zero.offload_optimizer:
            self._average()
        self._buffers, self._kept, self._index, self._losses = [], None, 0, ()
        for parameter in self.parameters:
            parameter.grad = None

    def _average(self) -> None:
        """Add up the gradients of this rank's parts over the micro-batches."""
        held = [parameter.grad for parameter in (self.parameters[place] for place in self._own)]
        gradients = [
            torch.zeros_like(self.parameters[place]) if gradient is None else gradient
            for place, gradient in zip(self._own, held, strict=True)
        ]
        if self._accumulated is None:
            self._accumulated = gradients
        else:
            for total, gradient in zip(self._accumulated, gradients, strict=True):
                total.add_(gradient)
        if self._last:
            self._averaged = self._parts_of(self._accumulated)
            self._accumulated = None

    def _parts_of(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of its gradients, filled up with zeros to the size of its share."""
        parts = [
            gradient
            if part.stop - part.start == gradient.numel()
            else gradient.view(-1).narrow(0, part.start, part.stop - part.start)
            for part, gradient in zip(self._own.values(), gradients, strict=True)
        ]
        missing = self._share - sum(part.numel() for part in parts)
        if missing:
            parts.append(torch.zeros(missing, dtype=self._dtype, device=self._flat.device))
        return parts

    @torch.no_grad()
    def before_step(self) -> None:
        """Look for infinite gradients, take their norm, and give the optimizer the share's gradient in float32."""
        if self._master is None:
            return
        if self._zero.offload_optimizer:
            self._master.grad = torch.zeros_like(self._master)
            return
        if self._dtype != torch.float32:
            _count_invalid(self._averaged)
        self._scaled_norm = _norm_of(self._averaged[: len(self._own)])
        flat = _flatten_dense_tensors(self._averaged)  # type: ignore[no-untyped-call]  # of torch
        gradient = flat.float()
        del flat
        self._ledger.classify(gradient, "gradients")
        self._master.grad = gradient
        self._averaged = []
        gradient.mul_(1.0)  # unscaled and clipped in place

    @torch.no_grad()
    def after_step(self) -> None:
        """Copy the share back into the flat parameters, which the ranks then gather in place."""
        if self._master is not None:
            self._scaled_norm = self._master.grad = None
            self._own_share().copy_(self._master.detach())


def _count_invalid(gradients: list[torch.Tensor]) -> torch.Tensor:
    found = torch.zeros([1], dtype=torch.float32, device=gradients[0].device)
    for gradient in gradients:
        found += torch.isfinite(gradient.amax()).logical_and(torch.isfinite(gradient.amin())).logical_not()
    return found.bool().byte()


def _norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of gradients, each copied to float64 for it."""
    norms = [torch.linalg.vector_norm(gradient.double(), ord=2.0) for gradient in gradients]
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    total = torch.stack(norms).pow(2.0).sum().float()
    return total.pow(0.5)
