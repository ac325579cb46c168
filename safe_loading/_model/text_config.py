"""The config of the language model inside a model's config."""

from __future__ import annotations

from typing import Any


def text_config(config: object) -> Any:
    """Return the config of the language model inside one; of its decoder where there are two; else the config itself.

    MusicGen has two of them, of the text that it reads and of the sounds that it writes, and transformers, which is
    not told which is meant, raises.
    """
    inside: Any = getattr(config, "get_text_config", None)
    if not callable(inside):
        return config
    try:
        return inside()
    except ValueError:
        return inside(decoder=True)
