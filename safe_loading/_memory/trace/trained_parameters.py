"""The parameters that a traced step trains: which of them the optimizer gets, and how gradients come to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .ledger import Ledger


class TrainedParameters:
    """The parameters of a step on one device: its optimizer gets all of them, and autograd sets their gradients."""

    sharded = False  # whether what a rank holds of a parameter may be a part of it
    rehearses = False  # whether an engine learns from a first pass what it does in the later ones

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @property
    def stepped(self) -> list[torch.nn.Parameter]:
        """Those that this rank's optimizer gets."""
        return self.parameters

    def unused(self) -> list[torch.nn.Parameter]:
        """Those of `stepped` that the step gave no gradient."""
        return [parameter for parameter in self.stepped if parameter.grad is None]

    def rehearsed(self) -> None:
        """End the first pass of an engine that learns from it."""

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
