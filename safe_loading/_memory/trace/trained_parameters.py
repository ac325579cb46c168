"""The parameters that a traced step trains: which of them the optimizer gets, and how gradients come to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from safe_loading._core.workload import Workload

from .ledger import Ledger


class TrainedParameters:
    """The parameters of a step on one device: its optimizer gets all of them, and autograd sets their gradients."""

    sharded = False  # whether what a rank holds of a parameter may be a part of it
    rehearses = False  # whether an engine learns from a first pass what it does in the later ones
    remembers_evaluations = False  # whether an evaluation changes what the step after it gathers

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @property
    def stepped(self) -> list[torch.nn.Parameter]:
        """Those that this rank's optimizer gets."""
        return self.parameters

    def stepped_of(self, weights: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
        """Those of `stepped` that are these weights of modules, or the rank's parts of them."""
        return [parameter for parameter in self.stepped if any(parameter is weight for weight in weights)]

    def unused(self) -> list[torch.nn.Parameter]:
        """Those of `stepped` that the step gave no gradient."""
        return [parameter for parameter in self.stepped if parameter.grad is None]

    def rehearsed(self) -> None:
        """End the first pass of an engine that learns from it."""

    def evaluated(self) -> None:
        """End an evaluation before the step."""

    def begin_micro_batch(self, last: bool) -> None:
        """Do a trainer's work before the forward pass; `last` is the micro-batch after which the optimizer steps."""

    def begin_backward(self, last: bool) -> None:
        """Do an engine's work between the forward and the backward pass."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss from which the backward pass starts."""
        return loss

    def bring_gradients(self, ledger: Ledger) -> None:
        """Give the optimizer's parameters their gradients after a backward pass."""

    def before_step(self) -> None:
        """Do an engine's work before the optimizer's step."""

    def step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Update the parameters; without an optimizer only its state is counted."""
        if optimizer is not None:
            optimizer.step()

    def after_step(self) -> None:
        """Do an engine's work after the optimizer's step."""

    def drop_gradients(self) -> None:
        """Drop the gradients, as ``zero_grad(set_to_none=True)`` does."""
        for parameter in self.parameters:
            parameter.grad = None


class RunningModel(NamedTuple):
    """A model as one rank runs it, the parameters it trains there, and a reference in shards beside it."""

    model: torch.nn.Module
    trained: TrainedParameters
    reference: torch.nn.Module | None = None


class OneCard:
    """The job of one card, which runs the model as it is; those over ranks, in `over_ranks`, spread it first."""

    over_ranks = False

    def joined(self) -> AbstractContextManager[None]:
        """Make this process a rank of the job inside the block."""
        return contextlib.nullcontext()

    def reference_to_shard(self, model: torch.nn.Module, workload: Workload) -> torch.nn.Module | None:
        """Return a copy of the model that the job shards beside it; None where there is none."""
        return None

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
        yield RunningModel(model, TrainedParameters(parameters))


def cast_parameters(
    model: torch.nn.Module, trained: list[torch.nn.Parameter], dtype: torch.dtype, ledger: Ledger, *, frozen: bool
) -> list[torch.nn.Parameter]:
    """Cast the parameters in floating point as an engine does, the frozen ones too or not; return those trained.

    The modules' attributes are the caller's to restore.
    """
    cast = dict[int, torch.nn.Parameter]()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            if not (frozen or parameter.requires_grad):
                continue
            if id(parameter) not in cast:
                made = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                old = ledger.allocation_of(parameter)
                if old is not None:
                    ledger.classify(made, old.component, module=old.module, op=old.op)
                cast[id(parameter)] = made
            module._parameters[name] = cast[id(parameter)]
    return [cast.get(id(parameter), parameter) for parameter in trained]
