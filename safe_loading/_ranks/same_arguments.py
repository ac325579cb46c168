"""Whether all ranks were called with the same arguments, told from those that each one shares in an exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safe_loading.errors import RanksDisagree

from .store_exchange import rank_list


def check_same_arguments(verb: str, ranks: Sequence[int], given: Sequence[Mapping[str, str]]) -> None:
    """Fail if a rank was called with other arguments; ``given`` has them by name, for each rank."""
    problems = []
    for name in given[0]:
        by_value: dict[str, list[int]] = {}
        for rank, arguments in zip(ranks, given, strict=True):
            by_value.setdefault(arguments[name], []).append(rank)
        if len(by_value) > 1:
            problems.append("; ".join(f"{rank_list(which)}: {name}={value}" for value, which in by_value.items()))
    if problems:
        raise RanksDisagree(
            f"The ranks call {verb} with different arguments, and would hold different models. Pass the same ones on "
            f"all of them, or ranks='self' where each loads for itself:",
            problems,
        )
