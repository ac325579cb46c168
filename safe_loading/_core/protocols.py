"""Types that several rooms share: parsed JSON, and protocols for the engines' objects. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

JsonObject = dict[str, Any]
"""A parsed JSON object. What its values are is checked where they are read, hence the ``Any``."""

EngineKwargs = Mapping[str, Any]
"""Keyword arguments that are handed on to a function of an engine, which alone knows their types."""


class ModelClass(Protocol):
    """A class with which transformers loads a model: the model's own, or an auto class."""

    __name__: str

    def from_pretrained(self, source: Any, /, **options: Any) -> Any:
        """Return the model, or with ``output_loading_info=True`` a pair of the model and its loading info."""
