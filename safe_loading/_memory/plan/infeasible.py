"""Why there is no plan: what is missing, where, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safe_loading._core.parse_size import UNLIMITED, Device
from safe_loading._core.report import format_bytes
from safe_loading.errors import DeviceMapInfeasible

from .layer_groups import Puzzle
from .offload import Away, offload
from .request import PlanRequest

_MOST_BLOCKS = 400


def infeasible(
    request: PlanRequest,
    name: str,
    puzzle: Puzzle,
    away: Sequence[Away],
    extra: Mapping[Device, int],
    merged: Sequence[str] = (),
) -> DeviceMapInfeasible:
    """Return the exception for a model that does not fit.

    Args:
        request: What was asked.
        name: The class of the model.
        puzzle: The blocks and the limits, overhead taken off.
        away: What each block needs when it is offloaded.
        extra: What a traced step needed beyond the count, by device.
        merged: What stays together since an operation met tensors of two devices, in words.
    """
    running = request.running
    shortages = {}
    for number, missing in puzzle.shortages().items():
        kept = request.overhead.get(running[number], 0) + extra.get(running[number], 0)
        # what is kept free may itself be more than the limit
        shortages[running[number]] = missing + max(kept - request.limits.get(running[number], 0), 0)
    device = min(shortages, key=lambda key: shortages[key])
    missing = shortages[device]
    needs = sum(block.kept for block in puzzle.blocks)
    there = sum(request.limits.get(key, 0) for key in running)
    wanted = request.limits.get(device, 0) + missing
    limits = ", ".join(f"{key}: {format_bytes(request.limits.get(key, 0))}" for key in running)
    problems = [f"max_memory[{key!r}] + {size} bytes ({format_bytes(size)})" for key, size in shortages.items()]
    parts = [
        f"{name} for {request.workload!r} does not fit: it keeps {format_bytes(needs)}, the limits are {{{limits}}}, "
        f"{format_bytes(there)} in all. Device {device!r} is {missing} bytes ({format_bytes(missing)}) short; the "
        f"smallest change of one limit that would do: max_memory[{device!r}] = {wanted}."
    ]
    biggest = max(puzzle.blocks, key=lambda block: block.kept, default=None)
    if biggest is not None and needs <= there:
        parts.append(f"No order of the devices works; the largest piece is {format_bytes(biggest.kept)}.")
    if merged:
        parts.append(f"Kept on one device, for an operation there met tensors of two: {', '.join(merged)}.")
    if extra:
        parts.append(f"Traced while running, beyond the count: {dict(extra)} bytes.")
    parts.append(_by_offloading(request, puzzle, away))
    message = " ".join(part for part in parts if part) + " Any one of these would do:"
    return DeviceMapInfeasible(message, problems, missing_bytes=missing, device=device, shortages=shortages)


def _by_offloading(request: PlanRequest, puzzle: Puzzle, away: Sequence[Away]) -> str:
    if request.offload != "never":
        there = ", ".join(f"{host} {format_bytes(request.limits.get(host, 0))}" for host in request.hosts)
        return f"Offloading to {there or 'nowhere'} does not make it fit."
    if request.running == ["cpu"] or len(puzzle.blocks) > _MOST_BLOCKS:
        return ""
    split = offload(puzzle, away, [UNLIMITED], request.objective, request.main_of)
    return f"Or pass offload='cpu', which would keep {format_bytes(split.bytes)} on the host." if split else ""
