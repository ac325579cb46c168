"""The CUDA caching allocator, simulated: its counters after a list of allocations. Imports no torch.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` from torch 2.1 to 2.13 on one stream, with the default
settings and with ``expandable_segments:True``. One has changed: of free blocks of one size torch 2.13 takes that of
the oldest segment, and earlier releases took that with the lowest address. Statistics count blocks, not requests: a
request is rounded up to a multiple of 512 B, and a large block is only split if more than 1 MiB would be left over, so
an unsplit remainder counts as allocated too.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from safe_loading._core.engines import is_older

MIN_BLOCK_SIZE = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_SIZE = 1048576  # kSmallSize: the largest request that is served from the pool of small blocks
SMALL_BUFFER = 2097152  # kSmallBuffer: the size of the segments that small blocks are cut from
LARGE_BUFFER = 20971520  # kLargeBuffer (large_segment_size): the segment size for requests below kMinLargeAlloc
MIN_LARGE_ALLOC = 10485760  # kMinLargeAlloc: a request of at least this size gets a segment of its own
ROUND_LARGE = 2097152  # kRoundLarge: the size of such a segment is rounded up to a multiple of it
# Of one expandable segment. torch reserves 1.125 times the card's memory; any size that never runs out will do.
ADDRESS_SPACE = LARGE_BUFFER << 20
TOP_ADDRESS = ADDRESS_SPACE << 20
EMPTY_CACHE = (0, -2)  # the event of `replay` that stands for `torch.cuda.empty_cache`


class CannotAllocate(MemoryError):
    """There is no room under the limit, even after every cached segment was released."""


@dataclass(frozen=True)
class Replay:
    """The allocator's counters after a list of events, or at the event that failed. All sizes in bytes."""

    allocated_peak_bytes: int  # ``torch.cuda.max_memory_allocated``
    reserved_peak_bytes: int  # ``torch.cuda.max_memory_reserved``
    reserved_bytes: int  # ``torch.cuda.memory_reserved`` at the end
    retries: int  # how often the cache was emptied because a request did not fit (``num_alloc_retries``)
    failed_at: int | None  # the index of the event that ran out of memory


@dataclass(eq=False)
class _Block:
    """A contiguous part of a segment; `before` and `after` are its neighbors in the segment."""

    address: int
    size: int
    pool: _Pool
    segment: int = 0  # counted from the oldest on, where torch looks at it
    allocated: bool = False
    mapped: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(eq=False)
class _Pool:
    """The free blocks of one kind, and the unmapped address space that expandable segments may grow into.

    Free blocks are sorted by size, then by segment and address (``BlockComparatorSizeCounterAddress``). No two have one
    address, so no comparison reaches the block, and a search needs only the beginning of an entry, and no key function.
    """

    small: bool
    free: list[tuple[int, int, int, _Block]] = field(default_factory=list)
    unmapped: list[tuple[int, _Block]] = field(default_factory=list)

    def add(self, block: _Block) -> None:
        if block.mapped:
            bisect.insort(self.free, (block.size, block.segment, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect.bisect_left(self.free, (block.size, block.segment, block.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]


def round_size(size: int) -> int:
    """Return the size of the block that serves a request of `size` bytes (``round_size``)."""
    return max(MIN_BLOCK_SIZE, -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE)


def segment_size(size: int) -> int:
    """Return the bytes requested from the driver when no cached block fits (``get_allocation_size``)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def replay(
    events: Iterable[tuple[int, int]],
    *,
    limit: int | None = None,
    expandable_segments: bool = False,
    oldest_first: bool | None = None,
) -> Replay:
    """Return the counters that the allocator would show after `events`.

    In the events ``(key, size)`` allocates `size` bytes under a key of the caller's choice (a size of 0 nothing, as in
    torch), ``(key, -1)`` frees them, and `EMPTY_CACHE` returns free segments to the driver. The limit is the most bytes
    that may be reserved, such as the card's memory less its context. `oldest_first` is the rule of torch 2.13, and None
    that of the torch that is installed.
    """
    allocator = CachingAllocator(limit=limit, expandable_segments=expandable_segments, oldest_first=oldest_first)
    addresses: dict[int, int] = {}
    failed_at = None
    for index, (key, size) in enumerate(events):
        # a free without an address is that of an empty allocation
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
    peaks = allocator.allocated_peak, allocator.reserved_peak
    return Replay(*peaks, allocator.reserved, allocator.retries, failed_at)


class CachingAllocator:
    """The allocator of one device and one stream, which reserves at most `limit` bytes."""

    def __init__(
        self, *, limit: int | None = None, expandable_segments: bool = False, oldest_first: bool | None = None
    ) -> None:
        self.allocated = self.allocated_peak = self.reserved = self.reserved_peak = self.retries = 0
        self._limit = limit
        self._expandable = expandable_segments
        self._pools = _Pool(small=True), _Pool(small=False)
        self._live: dict[int, _Block] = {}
        self._lowest = TOP_ADDRESS
        self._oldest_first = not is_older("torch", "2.13") if oldest_first is None else oldest_first
        self._segments = 0

    def malloc(self, request: int) -> int:
        """Allocate a block for `request` bytes and return its address; `CannotAllocate` if there is no room."""
        size = round_size(request)
        pool = self._pools[0] if size <= SMALL_SIZE else self._pools[1]
        block = self._take_cached(pool, size) or self._grow(pool, size)
        if block is None:
            # release_cached_blocks, and one more attempt
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, size)
        if block is None:
            raise CannotAllocate(f"no room for {size} B: {self.reserved} B of {self._limit} B are reserved")
        self._split(block, size)
        block.allocated = True
        self._live[block.address] = block
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block.address

    def free(self, address: int) -> None:
        """Return the block at `address` to the cache, merged with its free neighbors."""
        block = self._live.pop(address)
        block.allocated = False
        self.allocated -= block.size
        self._merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Release every segment without a live block, as ``torch.cuda.empty_cache`` and a failed request do."""
        for pool in self._pools:
            for *_, block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                # a block without neighbors is a whole segment; a split one has live parts, or it would be merged
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _take_cached(self, pool: _Pool, size: int) -> _Block | None:
        """Take the smallest free block that fits out of the pool (``get_free_block``)."""
        # best fit: lower_bound of the size
        at = bisect.bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        if self._expandable:
            # get_free_block counts a block that can grow with the size that it can grow to, so that blocks which
            # cannot grow are filled first
            while at + 1 < len(pool.free) and _size_when_grown(pool.free[at + 1][-1]) < _size_when_grown(
                pool.free[at][-1]
            ):
                at += 1
        return pool.free.pop(at)[-1]

    def _split(self, block: _Block, size: int) -> None:
        # should_split: a large block without expandable segments is handed out whole unless much would be left
        left = block.size - size
        if left >= MIN_BLOCK_SIZE if block.pool.small or self._expandable else left > SMALL_SIZE:
            _cut(block, size)
            block.pool.add(_after(block))

    def _merge(self, block: _Block) -> None:
        """Absorb the free neighbors in the same mapping state (``try_merge_blocks``). The block is in no pool list."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            other.pool.remove(other)
            if other is block.before:
                block.address, block.before = other.address, other.before
                if other.before is not None:
                    other.before.after = block
            else:
                block.after = other.after
                if other.after is not None:
                    other.after.before = block
            block.size += other.size

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """Reserve a new segment from the driver, or map more pages at the end of an expandable one."""
        if self._expandable:
            return self._grow_expandable(pool, size)
        size = segment_size(size)
        return self._new_segment(pool, size) if self._reserve(size) else None

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        # Drivers hand out addresses downwards, which decides where torch is older than 2.13. With upward addresses
        # other blocks would be split there, and steps would reserve up to 7 % less than was measured.
        self._lowest -= size
        self._segments += self._oldest_first
        return _Block(self._lowest, size, pool, self._segments)

    def _reserve(self, size: int) -> bool:
        if self._limit is not None and self.reserved + size > self._limit:
            return False
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def _grow_expandable(self, pool: _Pool, size: int) -> _Block | None:
        # find_expandable_block and try_allocate_expandable_block
        start = next((block for _, entry in pool.unmapped if (block := _growable_run(entry, size)) is not None), None)
        if start is None:
            start = self._new_segment(pool, ADDRESS_SPACE)
            start.mapped = False
            pool.add(start)
        while not start.mapped or start.size < size:
            target = _after(start) if start.mapped else start
            missing = size - (start.size if start.mapped else 0)
            if not self._map(target, min(missing, target.size)):
                return None
            start = target  # mapping it merged the free block before it into it
        pool.remove(start)
        return start

    def _map(self, block: _Block, size: int) -> bool:
        # expandable segments are mapped in pages as large as the segments of their pool
        page = SMALL_BUFFER if block.pool.small else LARGE_BUFFER
        size = -(-size // page) * page
        if not self._reserve(size):
            return False
        block.pool.remove(block)
        if size < block.size:
            _cut(block, size)
            block.pool.add(_after(block))
        block.mapped = True
        self._merge(block)
        block.pool.add(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Release the whole pages of a free block (``unmap_block``); partial pages at its ends stay mapped."""
        page = SMALL_BUFFER if block.pool.small else LARGE_BUFFER
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        block.pool.remove(block)
        if start > block.address:
            _cut(block, start - block.address)
            block.pool.add(block)
            block = _after(block)
        if end < block.address + block.size:
            _cut(block, end - block.address)
            block.pool.add(_after(block))
        self.reserved -= block.size
        block.mapped = False
        self._merge(block)
        block.pool.add(block)


def _after(block: _Block) -> _Block:
    if block.after is None:
        raise CannotAllocate("the address space of an expandable segment is used up")
    return block.after


def _cut(block: _Block, size: int) -> None:
    """Shorten a block to `size`; the rest becomes a new block after it, which is in no pool list yet."""
    rest = _Block(block.address + size, block.size - size, block.pool, block.segment, mapped=block.mapped, before=block)
    rest.after = block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after, block.size = rest, size


def _size_when_grown(block: _Block) -> int:
    """Return the size that a free block of an expandable segment has or can grow to."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _growable_run(block: _Block, size: int) -> _Block | None:
    """Return the first block of the run of free address space around `block`, if the run has `size` bytes."""
    start = block.before if block.before is not None and not block.before.allocated else block
    at: _Block | None = start
    run = 0
    while run < size and at is not None and not at.allocated:
        run += at.size
        at = at.after
    return start if run >= size else None
