"""Why there is no plan: what is missing, where, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safe_loading._core.parse_size import UNLIMITED, Device
from safe_loading._core.report import format_bytes
from safe_loading.errors import DeviceMapInfeasible

from .layer_groups import Puzzle
from .offload import Away, OffloadPlan, offload
from .request import PlanRequest

_MOST_GROUPS = 400  # for more groups the advice would take longer than the plan


def infeasible(
    request: PlanRequest,
    name: str,
    puzzle: Puzzle,
    away: Sequence[Away],
    extra: Mapping[Device, int],
    merged: Sequence[str] = (),
) -> DeviceMapInfeasible:
    """Return the exception for a model, named by its class, that does not fit.

    The puzzle's limits are without the overhead. `extra` is what a traced step needed beyond the count; `merged` is
    what stays together because an operation met tensors of two devices, in words.
    """
    running = request.running
    shortages = {}
    for number, missing in puzzle.shortages().items():
        reserved = request.overhead.get(running[number], 0) + extra.get(running[number], 0)
        # what is kept free may itself be more than the limit
        shortages[running[number]] = missing + max(reserved - request.limits.get(running[number], 0), 0)
    device = min(shortages, key=lambda key: shortages[key])
    missing = shortages[device]
    needs = sum(group.resident for group in puzzle.groups)
    there = sum(request.limits.get(key, 0) for key in running)
    enough = request.limits.get(device, 0) + missing
    limits = ", ".join(f"{key}: {format_bytes(request.limits.get(key, 0))}" for key in running)
    problems = [f"max_memory[{key!r}] + {size} bytes ({format_bytes(size)})" for key, size in shortages.items()]
    sentences = [
        f"{name} for {request.workload!r} does not fit: {format_bytes(needs)} stay allocated, and the limits are "
        f"{{{limits}}}, {format_bytes(there)} in all. Device {device!r} is {missing} bytes ({format_bytes(missing)}) "
        f"short: the smallest change to a single limit that makes it fit is max_memory[{device!r}] = {enough}."
    ]
    largest = max(puzzle.groups, key=lambda group: group.resident, default=None)
    if largest is not None and needs <= there:
        sentences.append(f"No order of the devices works; the largest piece is {format_bytes(largest.resident)}.")
    if merged:
        sentences.append(f"Kept on one device, because an operation there met tensors of two: {', '.join(merged)}.")
    if extra:
        sentences.append(f"The traced step needed more than was counted: {dict(extra)} bytes by device.")
    sentences.append(_by_offloading(request, puzzle, away))
    message = " ".join(filter(None, sentences)) + " Any one of these changes is enough:"
    return DeviceMapInfeasible(message, problems, missing_bytes=missing, device=device, shortages=shortages)


def _by_offloading(request: PlanRequest, puzzle: Puzzle, away: Sequence[Away]) -> str:
    if not request.explains or request.running == ["cpu"]:
        return ""
    if request.offload == "never":
        if len(puzzle.groups) > _MOST_GROUPS:
            return ""
        split = offload(puzzle, away, [UNLIMITED], request.objective, request.main_of)
        return f"Or pass offload='cpu', which would keep {format_bytes(split.bytes)} on the host." if split else ""
    there = ", ".join(f"{host} {format_bytes(request.limits.get(host, 0))}" for host in request.hosts)
    search = OffloadPlan(puzzle, away, [UNLIMITED], request.objective, request.main_of)
    split = search.solve()
    parts = "blocks, embeddings and heads" + (" and experts" if any(each.pieces for each in away) else "")
    tried = "Every choice of" if search.complete else "Of the choices of"
    most = "was tried" if search.complete else "the most promising were tried"
    searched = f"{tried} {parts} to offload {most}, with each device as the one that runs them"
    if split is not None:
        return f"Offloading to {there} does not make it fit. {searched}: {format_bytes(split.bytes)} there would do."
    largest = max(each.transient for each in away)
    return (
        f"Offloading to {there} does not make it fit. {searched}: what stays on that device and what passes through, "
        f"up to {format_bytes(largest)} at once, are more than its limit."
    )
