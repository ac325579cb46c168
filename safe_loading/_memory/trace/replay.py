"""A list of allocations and frees through the caching allocator, and what its counters would say. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .allocator import CachingAllocator, CannotAllocate

EMPTY_CACHE = (0, -2)  # the event of `torch.cuda.empty_cache`


@dataclass(frozen=True)
class Replay:
    """What the allocator's counters say after, or when it failed during, a list of events. All sizes in bytes.

    Attributes:
        allocated_peak_bytes: ``torch.cuda.max_memory_allocated``.
        reserved_peak_bytes: ``torch.cuda.max_memory_reserved``.
        allocated_bytes: ``torch.cuda.memory_allocated`` at the end.
        reserved_bytes: ``torch.cuda.memory_reserved`` at the end.
        retries: How often the cache was emptied for a request that did not fit (``num_alloc_retries``).
        failed_at: The index of the event that was out of memory, or None.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    retries: int
    failed_at: int | None


def replay(events: Iterable[tuple[int, int]], *, limit: int | None = None, expandable_segments: bool = False) -> Replay:
    """Return what the allocator's counters would say after `events`.

    Args:
        events: In order: ``(key, size)`` takes `size` bytes under a key of the caller's choice, ``(key, -1)`` gives
            them back. A size of 0 takes nothing, as in torch. `EMPTY_CACHE` gives free segments back to the driver.
        limit: The most bytes that may be reserved, such as the card's memory less its context; None for no limit.
        expandable_segments: The setting of that name in ``PYTORCH_ALLOC_CONF``.
    """
    allocator = CachingAllocator(limit=limit, expandable_segments=expandable_segments)
    addresses: dict[int, int] = {}
    failed_at = None
    for index, (key, size) in enumerate(events):
        if (key, size) == EMPTY_CACHE:
            allocator.empty_cache()
        elif size > 0:
            try:
                addresses[key] = allocator.malloc(size)
            except CannotAllocate:
                failed_at = index
                break
        elif size < 0 and key in addresses:
            allocator.free(addresses.pop(key))
    return Replay(
        allocator.allocated_peak,
        allocator.reserved_peak,
        allocator.allocated,
        allocator.reserved,
        allocator.retries,
        failed_at,
    )
