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


def wants_tie(model: object) -> bool:
    """Return whether config and class tie the head to another weight, whatever the model holds now.

    The flag ``tie_word_embeddings`` alone does not say: some classes never tie (CPM-Ant), and of several configs in one
    that of the class counts (Qwen3-VL).
    """
    head = ends_of(model).head
    if head is None or not isinstance(model, torch.nn.Module) or not hasattr(model, "get_expanded_tied_weights_keys"):
        return False
    names = {f"{path}.weight" for path, module in model.named_modules(remove_duplicate=False) if module is head}
    expand: Any = model.get_expanded_tied_weights_keys
    try:
        pairs = expand(all_submodels=True).items()
    except ValueError:  # a pattern of the class finds no parameter, which a tuner renamed
        return False
    return any(names.intersection(pair) for pair in pairs)
