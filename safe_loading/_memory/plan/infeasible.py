"""Why there is no plan: the missing bytes, their device, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from safe_loading._core.parse_size import UNLIMITED, Device, forgotten_unit
from safe_loading._core.report import format_bytes
from safe_loading.errors import DeviceMapInfeasible

from .layer_groups import Puzzle
from .offload import Away, OffloadPlan
from .request import PlanRequest

_T = TypeVar("_T", int, str)
_MOST_GROUPS = 400  # for more groups the advice would take longer than the plan
_MOST_KINDS = 4  # of cards, for the same reason
_MOST_MAINS = 2  # cards that are tried as the one that runs what is offloaded


def infeasible(
    request: PlanRequest,
    name: str,
    puzzle: Puzzle,
    away: Sequence[Away],
    extra: Mapping[Device, int],
    merged: Sequence[str],
    temporaries: str,
    changes: Sequence[str],
) -> DeviceMapInfeasible:
    """Return the exception for a model, named by its class, that does not fit.

    The puzzle's limits are without the overhead. `extra` is what a traced step needed beyond the count; `merged` is
    what stays together because an operation met tensors of two devices, in words; `temporaries` the sentence of
    :func:`most_temporaries`, and `changes` are calls that are known to fit.
    """
    running, refused_within = request.running, bool(puzzle.bounds)
    shortages = {}
    for number, missing in puzzle.shortages().items():
        reserved = request.overhead.get(running[number], 0) + extra.get(running[number], 0)
        # what is kept free may itself be more than the limit
        shortages[running[number]] = missing + max(reserved - request.limits.get(running[number], 0), 0)
    device = min(shortages, key=lambda key: shortages[key])
    missing = shortages[device]
    needs = sum(group.resident for group in (*puzzle.groups, *puzzle.occupied))
    there = sum(request.limits.get(key, 0) for key in running)
    enough = request.limits.get(device, 0) + missing
    sizes = {key: format_bytes(request.limits.get(key, 0)) for key in running}
    limits = ", ".join(f"{_names(alike)}: {size}" for size, alike in _alike(sizes).items())
    problems = [
        f"max_memory[{alike[0]!r}] + {size} bytes ({format_bytes(size)})"
        + (f", or the same for any one of the cards {_names(alike)}" if len(alike) > 1 else "")
        for size, alike in _alike(shortages).items()
    ]
    bounds = set(puzzle.bounds)
    more = _more_cards(request, puzzle)
    for card, count in more.items():
        limit = request.limits.get(card, 0)
        cards = "1 more card" if count == 1 else f"{count} more cards"
        problems.append(f"{cards} with a limit of {limit} bytes ({format_bytes(limit)}), like device {card!r}")
    sentences = [
        f"{name} for {request.workload!r} does not fit: {format_bytes(needs)} stay allocated, and the limits are "
        f"{{{limits}}}, {format_bytes(there)} in all. Device {device!r} is {missing} bytes ({format_bytes(missing)}) "
        f"short: the smallest change to a single limit that makes it fit is max_memory[{device!r}] = {enough}."
    ]
    sentences.append(temporaries or (_largest_piece(puzzle) if needs <= there else ""))
    if merged:
        sentences.append(f"Kept on one device, because an operation there met tensors of two: {', '.join(merged)}.")
    if extra:
        sentences.append(f"The traced step needed more than was counted: {dict(extra)} bytes by device.")
    if bounds or (more and puzzle.bounds):
        unproven = "That fewer cards more do not do" if not bounds else "That no smaller change does"
        unproven = "That nothing fits" if refused_within and needs <= there else unproven
        sentences.append(f"{unproven} is not proven: {'; '.join(sorted(puzzle.bounds))}.")
    sentences += [forgotten_unit(map(request.limits.get, request.running)), _by_offloading(request, puzzle, away)]
    message = " ".join(filter(None, sentences)) + " Any one of these changes is enough:"
    return DeviceMapInfeasible(
        message, [*problems, *changes], missing_bytes=missing, device=device, shortages=shortages, more_cards=more
    )


def _largest_piece(puzzle: Puzzle) -> str:
    pieces = [sum(puzzle.groups[member].resident for member in members) for members in puzzle.together]
    largest = max([*pieces, *(each.resident for each in puzzle.occupied)])
    return f"No order of the devices works; the largest piece is {format_bytes(largest)}."


def most_temporaries(puzzle: Puzzle, paths: Sequence[str]) -> str:
    """Return a sentence that names the unit with the most temporaries, if these decide; empty if they do not.

    They decide where everything that stays allocated has a place. `paths` are those of the puzzle's groups.
    """
    if not puzzle.without_temporaries().fits():
        return ""
    size, path = max(zip((group.transient for group in puzzle.groups), paths, strict=True))
    return (
        f"What stays allocated fits, and temporaries decide: activations that live only while a block runs, up to "
        f"{format_bytes(size)} at once in {path or 'the whole model'}."
    )


def unexplained(request: PlanRequest, name: str, puzzle: Puzzle) -> DeviceMapInfeasible:
    """Return the exception without a remedy, for searches that only ask whether a model fits."""
    proven = f" That nothing fits is not proven: {'; '.join(sorted(puzzle.bounds))}." if puzzle.bounds else ""
    return DeviceMapInfeasible(f"{name} for {request.workload!r} does not fit.{proven}")


def _alike(values: Mapping[Device, _T]) -> dict[_T, list[Device]]:
    """Return the devices of each value, in their order."""
    found: dict[_T, list[Device]] = {}
    for device, value in values.items():
        found.setdefault(value, []).append(device)
    return found


def _names(devices: Sequence[Device]) -> str:
    """Return devices in few words: ``0-15, 18``; two neighbors are written as both."""
    runs: list[list[Device]] = []
    for device in devices:
        last = runs[-1][-1] if runs else None
        if isinstance(device, int) and isinstance(last, int) and device == last + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _more_cards(request: PlanRequest, puzzle: Puzzle) -> dict[Device, int]:
    """Return for each kind of card, by the first one, how many more like it would do; without those of which none do.

    Of many kinds only the largest are asked about.
    What a traced step needed beyond the count is taken to be needed on a card more, too.
    """
    running = request.running
    if not request.explains or running == ["cpu"]:
        return {}
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, device in enumerate(running):
        kinds.setdefault((request.limits.get(device, 0), request.overhead.get(device, 0)), []).append(number)
    found: dict[Device, int] = {}
    largest = sorted(kinds, key=lambda kind: kind[1] - kind[0])[:_MOST_KINDS]
    for numbers in (numbers for kind, numbers in kinds.items() if kind in largest):
        limit = min(puzzle.limits[number] for number in numbers)
        low, high = 0, len(puzzle.links) + len(puzzle.pins)  # then each piece has a card of its own
        if not puzzle.with_limits([*puzzle.limits, *[limit] * high]).fits():
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if puzzle.with_limits([*puzzle.limits, *[limit] * middle]).fits():
                high = middle
            else:
                low = middle
        found[running[numbers[0]]] = high
    return found


def _by_offloading(request: PlanRequest, puzzle: Puzzle, away: Sequence[Away]) -> str:
    if request.running == ["cpu"]:
        return ""
    # the objective decides where the rest goes, and not what leaves: "fill" is found sooner
    if request.offload == "never":
        if len(puzzle.groups) > _MOST_GROUPS:
            return ""
        many = len(set(puzzle.limits)) > _MOST_KINDS
        most_mains = _MOST_MAINS if many else len(puzzle.limits)
        split = OffloadPlan(puzzle, away, [UNLIMITED], "fill", request.main_of, most_mains).solve()
        most = "at most " if many else ""
        return (
            f"Or pass offload='cpu', which would keep {most}{format_bytes(split.bytes)} on the host." if split else ""
        )
    sizes = {host: request.limits.get(host, 0) for host in request.hosts}
    unlimited = "without a limit"
    there = ", ".join(
        f"{host} {unlimited if size >= UNLIMITED else format_bytes(size)}" for host, size in sizes.items()
    )
    search = OffloadPlan(puzzle, away, [UNLIMITED], "fill", request.main_of)
    split = search.solve()
    parts = "blocks, embeddings and heads" + (" and experts" if any(each.pieces for each in away) else "")
    tried = "Of the choices of" if search.bounds else "Every choice of"
    most = "the most promising were tried" if search.bounds else "was tried"
    searched = f"{tried} {parts} to offload {most}, with each device as the one that runs them"
    if split is not None:
        return f"Offloading to {there} does not make it fit. {searched}: {format_bytes(split.bytes)} there would do."
    largest = max(each.transient for each in away)
    return (
        f"Offloading to {there} does not make it fit. {searched}: what stays on that device and what passes through, "
        f"up to {format_bytes(largest)} at once, are more than its limit."
    )
