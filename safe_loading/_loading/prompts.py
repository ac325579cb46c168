"""Prompts that were trained on a base of another width or depth, which peft loads: the model fails as it runs."""

from __future__ import annotations

import torch
from peft import PeftConfig

from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.text_config import text_config

_PER_LAYER = ("PREFIX_TUNING", "CARTRIDGE")  # keys and values for each layer; other prompts are rows of embeddings
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers", "decoder_layers", "encoder_layers")


def foreign_prompt(config: PeftConfig, base: torch.nn.Module, where: object) -> list[str]:
    """Return the problem of a prompt with another width or number of layers than its base; ``where`` is its config."""
    columns = getattr(config, "token_dim", None)
    if not config.is_prompt_learning or columns is None:
        return []
    name = type(base).__name__
    if config.peft_type in _PER_LAYER:
        known = _layer_counts(base)
        layers = getattr(config, "num_layers", None)
        misfit = layers is not None and known and layers not in known
        said = f"num_layers={layers}, and {name} has {' or '.join(map(str, sorted(known)))} layers"
    else:
        embeddings = embeddings_and_head_of(base).weights[0]
        width = None if embeddings is None or embeddings.dim() != 2 else embeddings.shape[1]
        misfit = width is not None and columns != width
        said = f"token_dim={columns}, and the embeddings of {name} have {width} columns"
    return [f"{where}: the prompt has {said}. Pass the base that it was trained on."] if misfit else []


def _layer_counts(base: torch.nn.Module) -> set[int]:
    config = getattr(base, "config", None)
    counts = (getattr(each, name, None) for each in (config, text_config(config)) for name in _LAYER_COUNTS)
    return {count for count in counts if isinstance(count, int)}
