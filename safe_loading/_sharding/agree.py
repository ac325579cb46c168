"""Do all ranks wrap the same model in the same way? Asked over the store, before any collective moves a weight."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.store_exchange import rank_list
from safe_loading.errors import RanksDisagree

_SHOWN = 8  # differing tensors; the first ones say it
_DIGITS = 12  # of the hash of a line


def agree(
    ranks: Ranks, arguments: Mapping[str, str], lines: Sequence[str], units: Sequence[str], *, timeout: float
) -> None:
    """Make sure that all ranks have the same arguments, tensors and units.

    One exchange of a hash where they agree; two more find what differs.

    Args:
        ranks: Who wraps together.
        arguments: What the ranks were asked for.
        lines: One for each tensor: name, dtype, shape, ties, whether it is trained.
        units: One for each unit.
        timeout: Longest wait for the others, in seconds.

    Raises:
        RanksDisagree: They differ; the arguments, or the first tensors that differ, are named with both sides.
        RankError: Another rank failed.
    """
    told = [*(f"{name}={value}" for name, value in arguments.items()), *lines, *(f"unit {unit}" for unit in units)]
    whole = hashlib.sha256("\n".join(told).encode()).hexdigest()
    if len(set(ranks.exchange("agree on the model", whole, timeout=timeout))) == 1:
        return
    short = [hashlib.sha256(line.encode()).hexdigest()[:_DIGITS] for line in told]
    every: list[list[str]] = ranks.exchange("find what differs", short, timeout=timeout)
    places = _differing(every)
    shown = ranks.exchange(
        "name what differs", [told[place] if place < len(told) else None for place in places], timeout=timeout
    )
    problems = [_sides(ranks, [each[number] for each in shown]) for number in range(len(places))]
    counts = {len(each) for each in every}
    more = "" if len(counts) == 1 else f" (the ranks hold {sorted(counts)} tensors, units and arguments)"
    raise RanksDisagree(
        f"The ranks would wrap different models{more}. Build it the same way on every rank; where one is tied and "
        f"another is not, call tie_weights() on both:",
        problems,
    )


def _differing(every: Sequence[Sequence[str]]) -> list[int]:
    first, length = every[0], max(map(len, every))
    padded = [[*each, *[""] * (length - len(each))] for each in every]
    reference = [*first, *[""] * (length - len(first))]
    places = [place for place in range(length) if any(each[place] != reference[place] for each in padded)]
    return places[:_SHOWN]


def _sides(ranks: Ranks, lines: Sequence[str | None]) -> str:
    who: dict[str, list[int]] = {}
    for rank, line in zip(ranks.ranks, lines, strict=True):
        who.setdefault(line or "nothing", []).append(rank)
    return "; ".join(f"{rank_list(which)}: {line}" for line, which in who.items())
