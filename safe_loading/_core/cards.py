"""GPUs by name, with their memory and compute capability. Imports no torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from safe_loading.errors import ArgumentError

from .parse_size import parse_size
from .report import GiB, format_bytes


@dataclass(frozen=True)
class Card:
    """A GPU, as far as memory is concerned."""

    name: str
    memory: int  # bytes that CUDA offers: what torch calls the total capacity when it runs out
    capability: tuple[int, int]


# "GPU 0 has a total capacity of ... GiB" in torch's errors: less than the number on the box, and differs by some
# hundred MiB between drivers and boards, so the least that was found stands here.
_TOTAL_CAPACITY = {
    "t4": (14.56, (7, 5)),
    "v100-16gb": (15.77, (7, 0)),
    "v100-32gb": (31.73, (7, 0)),
    "rtx-3090": (23.55, (8, 6)),
    "rtx-4090": (23.52, (8, 9)),
    "rtx-5090": (31.33, (12, 0)),
    "a10": (21.98, (8, 6)),
    "a10g": (21.98, (8, 6)),
    "l4": (21.95, (8, 9)),
    "l40": (44.39, (8, 9)),
    "l40s": (44.39, (8, 9)),
    "a40": (44.34, (8, 6)),
    "a6000": (47.40, (8, 6)),
    "rtx-6000-ada": (47.38, (8, 9)),
    "a100-40gb": (39.38, (8, 0)),
    "a100-80gb": (79.10, (8, 0)),
    "h100": (79.10, (9, 0)),
    "h200": (139.72, (9, 0)),
    "b200": (178.35, (10, 0)),
}
CARDS = {name: Card(name, int(size * GiB), capability) for name, (size, capability) in _TOTAL_CAPACITY.items()}
_SPELLINGS = {"h10080gb": "h100", "h100sxm": "h100", "h200141gb": "h200", "rtxa6000": "a6000", "l4048gb": "l40"}
_NEAR = 0.08  # 24 GB on the box are 22.4 GiB as a size, and the cards that are sold so offer 21.9 to 23.6
_SEVERAL = re.compile(r"\s*(\d+)\s*[x×*]\s*(\S.*?)\s*")  # as in 2x48GB
_OTHER = (8, 0)  # the capability of a card that is given by its size alone


def card_of(text: str) -> Card:
    """Return the card of a name such as ``"h100"`` or ``"RTX 4090"``, or one with as much memory as ``"24GB"`` says."""
    plain = re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", text.lower())
    by_spelling = {re.sub("-", "", name): card for name, card in CARDS.items()}
    by_spelling |= {spelling: CARDS[name] for spelling, name in _SPELLINGS.items()}
    by_spelling |= {key.removeprefix("rtx"): card for key, card in by_spelling.items() if key.startswith("rtx")}
    if plain in by_spelling:
        return by_spelling[plain]
    if several := _SEVERAL.fullmatch(text):
        number, one = several.groups()
        raise ArgumentError(f"card {text!r} is {number} cards: pass {one} with --gpus {number}, or spread= in Python.")
    if re.match(r"\s*[0-9.]", text):
        return Card(text.strip(), parse_size(text, "card"), _OTHER)
    sizes = [name for name in CARDS if plain and name.startswith(f"{plain}-")]
    near = sizes or difflib.get_close_matches(plain, CARDS, n=3, cutoff=0.5)
    hint = f"write {' or '.join(near)}" if near else f"known are {', '.join(CARDS)}"
    why = "comes in several sizes" if sizes else "is not known"
    raise ArgumentError(f"card {text!r} {why}: {hint}, or give its memory, such as 24GB.")


def card_memory(card: object, options: dict[str, Any], **of_named: object) -> int:
    """Return the memory of a card; for one that is named, fill in its capability and the options of `of_named`."""
    if not isinstance(card, str):
        return parse_size(card, "max_memory")
    found = card_of(card)
    if found.name in CARDS:
        for name, value in {"capability": found.capability, **of_named}.items():
            options.setdefault(name, value)
    return found.memory


def sold_as(card: Card) -> str:
    """Return a sentence that names cards of about the size of one that is given by its size; empty without any."""
    if card.name in CARDS:
        return ""
    near = [named for named in CARDS.values() if abs(named.memory - card.memory) < _NEAR * card.memory]
    if not near or any(named.memory == card.memory for named in near):
        return ""
    names = ", ".join(f"{named.name} {format_bytes(named.memory)}" for named in near)
    return f"{card.name} is {format_bytes(card.memory)}. By their names, cards of about this size are: {names}."


def card_text(card: Card) -> str:
    """Return name and memory: ``"h100 (79.1 GiB)"``."""
    return f"{card.name} ({format_bytes(card.memory)})"
