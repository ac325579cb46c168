"""Whether all ranks wrap the same model in the same way, asked over the store before any collective moves a weight."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence

from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.store_exchange import rank_list
from safe_loading.errors import RanksDisagree

_MOST_SHOWN = 8  # of the tensors that differ: the first ones show what is wrong
_HASH_DIGITS = 12  # kept of the hash of a line


def agree(
    ranks: Ranks, arguments: Mapping[str, str], tensors: Sequence[str], units: Sequence[str], *, timeout: float
) -> None:
    """Make sure that all ranks have the same arguments, tensors and units, the latter two given as a line for each.

    One exchange of a hash where they agree; two more find what differs. The error names it with both sides.
    """
    lines = [*(f"{name}={value}" for name, value in arguments.items()), *tensors, *(f"unit {unit}" for unit in units)]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(ranks.exchange("agree on the model", digest, timeout=timeout))) == 1:
        return
    digests = [hashlib.sha256(line.encode()).hexdigest()[:_HASH_DIGITS] for line in lines]
    digests_of_ranks: list[list[str]] = ranks.exchange("find what differs", digests, timeout=timeout)
    numbers = _differing(digests_of_ranks)
    shown = ranks.exchange(
        "name what differs", [lines[number] if number < len(lines) else None for number in numbers], timeout=timeout
    )
    problems = [_sides(ranks, lines_of_ranks) for lines_of_ranks in zip(*shown, strict=True)]
    counts = {len(of_rank) for of_rank in digests_of_ranks}
    more = "" if len(counts) == 1 else f" (the ranks have {sorted(counts)} tensors, units and arguments)"
    raise RanksDisagree(
        f"The ranks would wrap different models{more}. Build it the same way on every rank; where a parameter is tied "
        f"on one rank and not on another, call tie_weights() on both:",
        problems,
    )


def _differing(digests_of_ranks: Sequence[Sequence[str]]) -> list[int]:
    """Return the numbers of the first lines that are not the same on all ranks."""
    rows = itertools.zip_longest(*digests_of_ranks, fillvalue="")
    different = (number for number, row in enumerate(rows) if len(set(row)) > 1)
    return list(itertools.islice(different, _MOST_SHOWN))


def _sides(ranks: Ranks, lines: Sequence[str | None]) -> str:
    ranks_by_line: dict[str, list[int]] = {}
    for rank, line in zip(ranks.ranks, lines, strict=True):
        ranks_by_line.setdefault(line or "nothing", []).append(rank)
    return "; ".join(f"{rank_list(which)}: {line}" for line, which in ranks_by_line.items())
