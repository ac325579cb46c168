"""Conversions that do more than move elements, done by transformers' own converter on the tensors that it takes."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._model.dtypes import DTYPES

from .layout import Conversion

Fetch = Callable[[str], torch.Tensor]


def convert(conversion: Conversion, fetch: Fetch, slots: Mapping[str, Any], config: Any) -> dict[str, torch.Tensor]:
    """Return the parameters that a converter makes, as ``from_pretrained`` makes them.

    ``fetch`` returns a tensor on disk by its name; ``slots`` has the shape and the dtype of the model's tensors.
    """
    rule = copy.deepcopy(conversion.rule)
    # transformers casts what it reads to the dtype of the first target, then converts
    dtype = slots[conversion.key].dtype
    for pattern, names in conversion.sources.items():
        for name in names:

            def read(name: str = name) -> torch.Tensor:
                return fetch(name).to(dtype)

            rule.add_tensor(conversion.key, name, pattern, read)  # type: ignore[arg-type]  # it calls what is no Future
    # the operations ask the model for nothing but shapes
    model = types.SimpleNamespace(config=config, get_parameter=slots.__getitem__)
    with torch.no_grad():
        made = rule.convert(conversion.key, model=model, config=config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def made_by(
    conversion: Conversion, tensors: Mapping[str, TensorInfo], slots: Mapping[str, Any], config: Any
) -> tuple[dict[str, tuple[int, ...]], str | None]:
    """Return the names and shapes that a conversion makes, found by a trial on meta, and why it fails if it does."""

    def fetch(name: str) -> torch.Tensor:
        info = tensors[name]
        return torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")

    try:
        made = convert(conversion, fetch, slots, config)
    except Exception as error:  # whatever an operation of transformers raises
        names = [name for group in conversion.sources.values() for name in group]
        operations = [type(operation).__name__ for operation in conversion.rule.operations]
        problem = f"{conversion.key}: transformers converts {names} by {operations}, which fails: {error}"
        return dict.fromkeys(conversion.targets, ()), problem
    return {name: tuple(value.shape) for name, value in made.items()}, None
