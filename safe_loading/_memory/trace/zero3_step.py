"""ZeRO-3 in a traced step: the allocations of DeepSpeed's engine, made on fake tensors by the same rules.

Each rank holds a part of every parameter, and of the trained ones a copy in float32, the optimizer's state and the
gradient. When parameters are whole is the matter of ``zero3_fetching``; gradients and the optimizer's step are here, by
the rules of ``runtime/zero/stage3.py`` of DeepSpeed 0.19. Steps are held against the engine itself in
docs/benchmarks.md.
"""

from __future__ import annotations

import itertools

import torch
from torch._utils import _flatten_dense_tensors

from safe_loading._core.spread import Spread, Zero
from safe_loading.errors import TraceError

from .ledger import Ledger, fake_device
from .zero3_fetching import Fetching, Held, elements_of_rank, part_size
from .zero_step import DeepSpeedParameters


def is_stage_3(spread: Spread) -> bool:
    """Whether a job is one of ZeRO-3."""
    return spread.deepspeed is not None and spread.deepspeed.stage == 3


def real_elements(parameters: list[torch.nn.Parameter], spread: Spread) -> dict[int, tuple[int, ...]]:
    """Return for each rank how many elements of each parameter it sends to the host: without its padding.

    Ranks of the same numbers take the same memory. All do where nothing is sent: parts are padded to one size.
    """
    ranks = spread.ranks
    offloaded = spread.deepspeed is not None and spread.deepspeed.offload_optimizer
    counts = [parameter.numel() for parameter in parameters if offloaded]
    return {rank: tuple(elements_of_rank(rank, count, ranks) for count in counts) for rank in range(ranks)}


class PartitionedParameters(DeepSpeedParameters):
    """The trained parameters of a model under ZeRO-3: of each the rank has a part, in flat tensors."""

    rehearses = True  # the first pass records the order in which modules run

    def __init__(
        self, model: torch.nn.Module, parameters: list[torch.nn.Parameter], spread: Spread, rank: int, ledger: Ledger
    ) -> None:
        super().__init__(parameters, spread.deepspeed or Zero(stage=3), spread, rank, ledger)
        self._norm: torch.Tensor | None = None  # of the last step, which the engine keeps
        self._in_bucket: list[int] = []
        self._filled = 0
        self._first = self._last = True  # whether this is the step's first, or last, micro-batch
        self._part_norms: list[torch.Tensor] = []  # of gradients that went to the host
        held = self._hold(model)
        own = {id(one.parameter): one for one in held}
        self._trained = [own[id(parameter)] for parameter in parameters]
        self._lay_out()
        for one in held:
            one.free()
        self._fetching = Fetching(model, held, self._zero, spread.ranks, ledger)
        self._take_gradients()

    def _hold(self, model: torch.nn.Module) -> list[Held]:
        """Return the record of each parameter, and allocate this rank's parts of those that are frozen."""
        held: list[Held] = []
        for place, parameter in enumerate(model.parameters()):
            if not parameter.is_floating_point():
                raise TraceError(
                    f"ZeRO-3 of quantized weights ({str(parameter.dtype).removeprefix('torch.')}) is not forecast: "
                    f"DeepSpeed was not seen to train such a model. Spread.zero(ranks, stage=2) can be forecast."
                )
            persists = parameter.numel() <= self._zero.stage3_param_persistence_threshold
            one = Held(parameter, place, self._ranks, persists, self._zero.offload_param)
            allocation = self._ledger.allocation_of(parameter)
            if allocation is not None:
                one.component = allocation.component
            if not parameter.requires_grad:
                where = fake_device("cpu") if one.on_host else parameter.device
                part = torch.empty(one.size, dtype=parameter.dtype, device=where)
                self._ledger.classify(part, one.component, op="zero.part")
                one.part = part
            held.append(one)
        return held

    def _lay_out(self) -> None:
        """Allocate the flat tensors: this rank's parts, their copies in float32 and their gradients, and the bucket."""
        self._groups = self._sub_groups()
        sizes = [one.size for one in self._trained]
        total = sum(sizes)
        device = self.parameters[0].device if self.parameters else fake_device(0)
        where = fake_device("cpu") if self._zero.offload_optimizer else device
        at_rest = fake_device("cpu") if self._zero.offload_param else device
        self._flat = torch.empty(total, dtype=self._dtype, device=at_rest)
        only_adapters = {one.component for one in self._trained} == {"adapters"}
        self._ledger.classify(self._flat, "adapters" if only_adapters else "weights", op="zero.flat")
        for one, part in zip(self._trained, torch.split(self._flat, sizes), strict=True):
            one.part = part
        self._masters = [
            torch.nn.Parameter(torch.empty(sum(one.size for one in group), dtype=torch.float32, device=where))
            for group in self._groups
        ]
        self._bucket = torch.empty(self._zero.reduce_bucket_size, dtype=self._dtype, device=device)
        self._gradient = torch.zeros(total, dtype=self._dtype, device=where)
        self._overflow = torch.zeros(1, dtype=torch.bool, device=where)
        for made in (*self._masters, self._overflow):
            self._ledger.classify(made, "optimizer")
        for made in (self._bucket, self._gradient):
            self._ledger.classify(made, "gradients")
        self._gradients = list(torch.split(self._gradient, sizes))

    def _sub_groups(self) -> list[list[Held]]:
        groups: list[list[Held]] = []
        room = 0
        for one in self._trained:
            if room <= 0:
                groups.append([])
                room = self._zero.sub_group_size
            groups[-1].append(one)
            room -= one.size
        return groups

    @property
    def stepped(self) -> list[torch.nn.Parameter]:
        """The rank's parts in float32, one flat tensor for each sub-group."""
        return self._masters

    def unused(self) -> list[torch.nn.Parameter]:
        """Each sub-group has a gradient, of zeros where nothing came."""
        return []

    def begin_micro_batch(self, last: bool) -> None:
        """Remember where in the step this is: gradients are added up from the second micro-batch on."""
        self._first, self._last = self._last, last

    def _take(self, place: int, gradient: torch.Tensor) -> None:
        """Copy a gradient into the bucket, which is reduced before it would overflow; a larger one stays as it is."""
        size = gradient.numel()
        if self._filled and self._filled + size > self._zero.reduce_bucket_size:
            self._reduce()
        if self._filled + size <= self._zero.reduce_bucket_size:
            view = self._bucket.narrow(0, self._filled, size).view_as(gradient)
            view.copy_(gradient)
            gradient.data = view
        self._in_bucket.append(place)
        self._filled += size

    def _reduce(self) -> None:
        """Average the gradients in the bucket over the ranks, and keep this rank's parts."""
        if not self._in_bucket:
            return
        places = sorted(self._in_bucket, key=lambda place: self._trained[place].place)
        gradients = [gradient for gradient in (self.parameters[place].grad for place in places) if gradient is not None]
        parts = self._scattered(gradients)
        for place, part in zip(places, parts, strict=True):
            if self._trained[place].size * self._rank < self._trained[place].count:
                self._keep(place, part)
            self.parameters[place].grad = None
        self._in_bucket, self._filled = [], 0

    def _scattered(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of some gradients, out of one buffer in which those of each rank lie together."""
        ranks = self._ranks
        sizes = [part_size(gradient.numel(), ranks) for gradient in gradients]
        if len(gradients) == 1 and gradients[0].numel() == sizes[0] * ranks:
            flat = gradients[0].view(-1)
        else:
            padding = [
                torch.empty(missing, dtype=self._dtype, device=self._bucket.device)
                for rank in range(ranks)
                for gradient, size in zip(gradients, sizes, strict=True)
                if (missing := size - elements_of_rank(rank, gradient.numel(), ranks))
            ]
            flat = torch.empty(sum(sizes) * ranks, dtype=self._dtype, device=self._bucket.device)
            self._ledger.classify(flat, "gradients")
            del padding
        own = flat.narrow(0, self._rank * sum(sizes), sum(sizes))
        return [
            part.narrow(0, 0, elements_of_rank(self._rank, gradient.numel(), ranks))
            for gradient, part in zip(gradients, torch.split(own, sizes), strict=True)
        ]

    def _keep(self, place: int, part: torch.Tensor) -> None:
        """Copy a part of a gradient to its place on this rank, or add it to the values there."""
        kept = self._gradients[place].narrow(0, 0, part.numel())
        if not self._zero.offload_optimizer:
            kept.copy_(part) if self._first else kept.add_(part)
            return
        on_card = kept.to(part.device)  # where it is added up, before it goes to the host
        if self._last:
            self._part_norms.append((on_card.double().norm(2) ** 2.0) ** 0.5)
            on_card.to(torch.float32).to(kept.device)

    @torch.no_grad()
    def bring_gradients(self, ledger: Ledger) -> None:
        """End a backward pass: reduce the rest of the bucket, and free the parameters that no hook has freed."""
        self._reduce()
        self._fetching.end_backward()
        self._losses = ()

    @torch.no_grad()
    def before_step(self) -> None:
        """Free all parameters, and take the norm of the gradients, each copied to float64 for it."""
        self._fetching.release_all()
        if self._zero.offload_optimizer:
            return
        norms = [
            torch.stack([part.double().norm(2.0) for part in parts]).pow(2.0).sum().pow(0.5)
            for parts in self._by_group()
        ]
        self._scaled_norm = torch.linalg.vector_norm(torch.stack(norms), ord=2.0)
        norm = self._norm = self._scaled_norm / 1.0
        self._ledger.classify(norm, "optimizer")

    def _by_group(self) -> list[list[torch.Tensor]]:
        """Return this rank's gradients, those of each sub-group together."""
        gradients = iter(self._gradients)
        return [list(itertools.islice(gradients, len(group))) for group in self._groups]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Update one sub-group after the other, each with its gradient in float32 for as long as it takes."""
        start = 0
        for master, parts in zip(self._masters, self._by_group(), strict=True):
            if self._zero.offload_optimizer:
                master.grad = torch.zeros_like(master)
            else:
                gradient = _flatten_dense_tensors(parts).to(torch.float32)  # type: ignore[no-untyped-call]  # of torch
                self._ledger.classify(gradient, "gradients")
                master.grad = gradient.mul_(1.0)  # unscaled and clipped
                del gradient
            if optimizer is not None:
                optimizer.step()
            # torch casts a tensor of the card before it copies it to the host
            updated = master.to(self._dtype) if self._zero.offload_param else master
            self._flat.narrow(0, start, master.numel()).copy_(updated)
            del updated
            master.grad = None
            start += master.numel()

    @torch.no_grad()
    def after_step(self) -> None:
        """Gather the parameters that stay whole."""
        self._part_norms = []
        self._fetching.gather_persistent()

    def rehearsed(self) -> None:
        """End the pass that recorded the order as a step ends."""
        self._fetching.release_all()
        self.after_step()
