"""What a model is fed with in a traced step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from safe_loading._tracing.values import Values


def takes(model: torch.nn.Module) -> set[str]:
    """Return the names of the arguments of the model's forward, through wrappers that pass everything on."""
    seen: Any = model
    names = set[str]()
    for _ in range(4):
        parameters = inspect.signature(seen.forward).parameters
        names |= set(parameters)
        inner = getattr(seen, "base_model", None)
        if not isinstance(inner, torch.nn.Module) or inner is seen:
            break
        seen = inner.model if isinstance(getattr(inner, "model", None), torch.nn.Module) else inner
    return names


class Inputs:
    """Makes the tensors of a step, with the values that whole numbers have.

    Args:
        model: The model with its twins in place.
        values: Where true values are kept.
        device: The device on which a user would put the inputs.
        given: Tensors of the caller's, by name, of which shape and dtype are taken; they replace what would be made.
    """

    def __init__(
        self, model: torch.nn.Module, values: Values, device: torch.device, given: Mapping[str, torch.Tensor] | None
    ) -> None:
        self.names = takes(model)
        self.config: Any = getattr(model, "config", None)
        self.device = device
        self.values = values
        self.given = given or {}

    def tokens(self, rows: int, columns: int, value: int = 1) -> torch.Tensor:
        """Return a batch of whole numbers, all the same."""
        fake = torch.empty((rows, columns), dtype=torch.long, device=self.device)
        self.values.keep(fake, value)
        return fake

    def prompt(self, rows: int, columns: int) -> dict[str, Any]:
        """Return the arguments of a forward pass over `columns` tokens."""
        batch: dict[str, Any] = {}
        if "input_ids" in self.names:
            batch["input_ids"] = self.tokens(rows, columns)
        if "attention_mask" in self.names:
            batch["attention_mask"] = self.tokens(rows, columns)
        if getattr(self.config, "is_encoder_decoder", False) and "decoder_input_ids" in self.names:
            batch["decoder_input_ids"] = self.tokens(rows, columns)
        for name, tensor in self.given.items():
            batch[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return batch
