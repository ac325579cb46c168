"""Whether all ranks were called alike: with the same arguments, and with folders that are there for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safe_loading._core.paths import is_there
from safe_loading.errors import CheckpointNotFound, RanksDisagree

from .store_exchange import rank_list

FolderSeen = tuple[str, bool]
"""A folder or a hub id as it was passed, and whether this rank sees a folder there."""


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


def folder_seen(source: str) -> FolderSeen:
    """Return a source's text, and whether this rank has its folder: told to the others before one asks a hub for it."""
    return source, is_there(Path(source).expanduser())


def check_same_folders(ranks: Sequence[int], seen: Sequence[Mapping[str, Sequence[object]]]) -> None:
    """Refuse a folder that some ranks have and others lack; ``seen`` has the folders of each rank, by argument."""
    problems = []
    for argument in seen[0]:
        sides: dict[bool, dict[str, list[int]]] = {True: {}, False: {}}
        for rank, folders in zip(ranks, seen, strict=True):
            path, there = folders.get(argument, ("", None))
            if isinstance(there, bool):
                sides[there].setdefault(str(path), []).append(rank)
        if sides[True] and sides[False]:
            lacking, having = (_side(sides[there]) for there in (False, True))
            problems.append(f"{argument}: is not there for {lacking}; it is for {having}")
    if problems:
        raise CheckpointNotFound(
            "Some ranks lack a folder that others have. Copy it to each node, or pass the same files under a path that "
            "every rank has (absolute, or relative to where each rank was started):",
            problems,
        )


def _side(by_path: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{rank_list(which)} ({path})" for path, which in by_path.items())
