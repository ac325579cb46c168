"""Trainable tokens: rows of an embedding that an adapter replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

from safe_loading._model.tensor_values import is_finite

from .lora_layers import data_of
from .variants import CannotMergeError, refuse_own_forward


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of a weight, ``owner.attribute``, that are replaced."""

    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor
    rows: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # (row numbers, values) for each adapter

    @property
    def written(self) -> tuple[str, ...]:
        """The name of the tensor that is written."""
        return (self.attribute,)

    def moved_to(self, tensor: torch.Tensor) -> TokenRows:
        """Return the same for a copy of the tensor."""
        return dataclasses.replace(self, tensor=tensor)

    def why_not_finite(self) -> str | None:
        """Return why the rows would not be finite in the dtype of the weight, or None."""
        for _, values in self.rows:
            if not is_finite(values.to(self.tensor.dtype)):
                return f"a trained token holds NaN, infinity or a number beyond {self.tensor.dtype}"
        return None

    def write(self) -> None:
        """Overwrite the rows."""
        for index, values in self.rows:
            self.tensor.index_copy_(0, index, values.to(self.tensor))

    def equals(self, other: TokenRows) -> bool:
        """Return whether ``other`` replaces the same rows by the same values."""
        return len(self.rows) == len(other.rows) and all(
            torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(self.rows, other.rows, strict=True)
        )


def token_rows(layer: TrainableTokensLayer, names: Sequence[str]) -> TokenRows:
    """Return the rows that the adapters ``names`` replace; two that train the same token are refused."""
    refuse_own_forward(layer.base_layer, replaces_rows=True)
    try:
        layer._check_overlapping_tokens(list(names))
    except ValueError as error:
        raise CannotMergeError(f"two of its adapters train the same token ({error}). Merge one of them") from error
    weight = data_of(layer.base_layer)
    rows = tuple(
        (torch.tensor(layer.token_indices[name], device=weight.device), layer.trainable_tokens_delta[name].data)
        for name in names
    )
    return TokenRows(layer.base_layer, "weight", weight, rows)
