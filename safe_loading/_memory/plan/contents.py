"""The modules on a device, in words: ``"embed_tokens, layers 0-34"``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable


def contents_of(paths: Iterable[str]) -> str:
    """Return module paths of a device map as a short text, elements of a list of layers as a range.

    Args:
        paths: The keys of the map with that device, in the order of the model.

    Returns:
        Names without the part before the last point, such as ``"layers 0-34, norm, lm_head"`` or ``"layer 7"``; what
        lies inside a layer counts as a part of it. ``"the whole model"`` for the root, and an empty text for no path.
    """
    ranges: list[list[str | int]] = []  # [name, first, last] of neighbors in one list
    for path in paths:
        if not path:
            return "the whole model"
        parts = path.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if place is None or place == 0:
            ranges.append([parts[-1]])
            continue
        name = ("part of " if place < len(parts) - 1 else "") + parts[place - 1]
        number = int(parts[place])
        last = ranges[-1] if ranges else []
        if len(last) == 3 and last[0] == name and last[2] in (number - 1, number):
            last[2] = number
        else:
            ranges.append([name, number, number])
    texts = (_text(*found) if len(found) == 3 else str(found[0]) for found in ranges)
    return ", ".join(dict.fromkeys(texts))


def _text(name: str | int, first: str | int, last: str | int) -> str:
    return f"{str(name).removesuffix('s')} {first}" if first == last else f"{name} {first}-{last}"
