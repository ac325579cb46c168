"""The two ends of a model: its embeddings, and the layer that gives the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Ends(NamedTuple):
    """What stands at the two ends of a model; None where it has no such end, or cannot say.

    Attributes:
        embeddings: What ``get_input_embeddings`` returns, a tuner's layer included.
        head: What ``get_output_embeddings`` returns, as above.
    """

    embeddings: torch.nn.Module | None
    head: torch.nn.Module | None

    @property
    def weights(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Their weights, those of the layers that tuners wrap."""
        found = []
        for end in self:
            weight = getattr(getattr(end, "base_layer", end), "weight", None)
            found.append(weight if isinstance(weight, torch.Tensor) else None)
        return found[0], found[1]


def ends_of(model: object) -> Ends:
    """Return the ends of a transformers model, and two times None for any other object."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        get: Any = getattr(model, name, None)
        try:
            end = get()
        except (NotImplementedError, AttributeError, TypeError):  # transformers raises for CLIP, Wav2Vec2, ...
            end = None
        found.append(end if isinstance(end, torch.nn.Module) else None)
    return Ends(found[0], found[1])
