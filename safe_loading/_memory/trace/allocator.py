"""The CUDA caching allocator's arithmetic, for a list of allocations and frees. Imports no torch.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``, the same from torch 2.1 to 2.13 on one stream with the
default settings, and with ``expandable_segments:True``. Its statistics count blocks, not requests: a request is
rounded to 512 B, and the tail of a large block that is not worth a split (up to 1 MiB) is counted with it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

MIN_BLOCK_SIZE = 512  # kMinBlockSize: all sizes are rounded up to its multiples
SMALL_SIZE = 1048576  # kSmallSize: the largest request of the pool of small blocks
SMALL_BUFFER = 2097152  # kSmallBuffer: small blocks are cut out of segments of this size
LARGE_BUFFER = 20971520  # kLargeBuffer (large_segment_size): requests below kMinLargeAlloc are cut out of it
MIN_LARGE_ALLOC = 10485760  # kMinLargeAlloc: requests from here on get segments of their own size
ROUND_LARGE = 2097152  # kRoundLarge: which is rounded up to its multiples
ADDRESS_SPACE = LARGE_BUFFER << 20  # of one expandable segment; torch takes 1.125 times the card
TOP_ADDRESS = ADDRESS_SPACE << 20


class CannotAllocate(MemoryError):
    """No room under the limit, even after every cached segment was given back."""


@dataclass(eq=False)
class _Block:
    """A part of a segment; `before` and `after` are its neighbors there."""

    address: int
    size: int
    pool: _Pool
    allocated: bool = False
    mapped: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(eq=False)
class _Pool:
    """The free blocks of one kind, smallest first, then lowest address; and what expandable segments may grow into."""

    small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    unmapped: list[tuple[int, _Block]] = field(default_factory=list)

    def add(self, block: _Block) -> None:
        if block.mapped:
            bisect.insort(self.free, (block.size, block.address, block), key=lambda entry: entry[:2])
        else:
            bisect.insort(self.unmapped, (block.address, block), key=lambda entry: entry[0])

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect.bisect_left(self.free, (block.size, block.address), key=lambda entry: entry[:2])]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, block.address, key=lambda entry: entry[0])]


def round_size(size: int) -> int:
    """Return the bytes of the block for a request of `size` bytes (``round_size``)."""
    return max(MIN_BLOCK_SIZE, -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE)


def segment_size(size: int) -> int:
    """Return the bytes asked of the driver when no cached block holds `size` bytes (``get_allocation_size``)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """The allocator of one device and one stream.

    Args:
        limit: The most bytes that it may reserve; None for no limit.
        expandable_segments: The setting of that name in ``PYTORCH_ALLOC_CONF``.
    """

    def __init__(self, *, limit: int | None = None, expandable_segments: bool = False) -> None:
        self.allocated = self.allocated_peak = self.reserved = self.reserved_peak = self.retries = 0
        self._limit = limit
        self._expandable = expandable_segments
        self._pools = _Pool(small=True), _Pool(small=False)
        self._live: dict[int, _Block] = {}
        self._lowest = TOP_ADDRESS

    def malloc(self, request: int) -> int:
        """Take a block of `request` bytes and return its address.

        Raises:
            CannotAllocate: There is no room under the limit.
        """
        size = round_size(request)
        pool = self._pools[0] if size <= SMALL_SIZE else self._pools[1]
        block = self._cached(pool, size) or self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, size)
        if block is None:
            raise CannotAllocate(f"{size} B do not fit: {self.reserved} B of {self._limit} B are reserved")
        self._split(block, size)
        block.allocated = True
        self._live[block.address] = block
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block.address

    def free(self, address: int) -> None:
        """Give the block at `address` back to the cache, merged with its free neighbors."""
        block = self._live.pop(address)
        block.allocated = False
        self.allocated -= block.size
        self._merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment back that holds no live block, as ``torch.cuda.empty_cache`` and a failed request do."""
        for pool in self._pools:
            for _, _, block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        at = bisect.bisect_left(pool.free, size, key=lambda entry: entry[0])
        if at == len(pool.free):
            return None
        if self._expandable:  # a block that can grow counts with what it can grow to, so that others are filled first
            while at + 1 < len(pool.free) and _room(pool.free[at + 1][2]) < _room(pool.free[at][2]):
                at += 1
        return pool.free.pop(at)[2]

    def _split(self, block: _Block, size: int) -> None:
        left = block.size - size
        worth_it = left >= MIN_BLOCK_SIZE if block.pool.small or self._expandable else left > SMALL_SIZE
        if worth_it:
            _cut(block, size)
            block.pool.add(_after(block))

    def _merge(self, block: _Block) -> None:
        """Swallow the neighbors that are as free and as mapped as the block, which is in no list itself."""
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
        """Ask the driver: a segment of its own, or more pages at the end of an expandable one."""
        if self._expandable:
            return self._grow_expandable(pool, size)
        bytes_ = segment_size(size)
        if not self._reserve(bytes_):
            return None
        return self._new_segment(pool, bytes_)

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        # Drivers hand out addresses downwards, and among blocks of one size the lowest address is taken: upwards, the
        # same steps reserve up to 7 % less than measured, since other blocks are split.
        self._lowest -= size
        return _Block(self._lowest, size, pool)

    def _reserve(self, size: int) -> bool:
        if self._limit is not None and self.reserved + size > self._limit:
            return False
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def _grow_expandable(self, pool: _Pool, size: int) -> _Block | None:
        start = next((block for _, entry in pool.unmapped if (block := _run(entry, size)) is not None), None)
        if start is None:
            start = self._new_segment(pool, ADDRESS_SPACE)
            start.mapped = False
            pool.add(start)
        while not start.mapped or start.size < size:
            target = _after(start) if start.mapped else start
            missing = size - (start.size if start.mapped else 0)
            if not self._map(target, min(missing, target.size)):
                return None
            start = target  # it has swallowed the free block before it
        pool.remove(start)
        return start

    def _map(self, block: _Block, size: int) -> bool:
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
        """Give the whole pages of a free block back; what is left of it at either end stays mapped."""
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
    """Shorten a block to `size`; the rest becomes a block of its own after it, in no list yet."""
    rest = _Block(block.address + size, block.size - size, block.pool, mapped=block.mapped, before=block)
    rest.after = block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after, block.size = rest, size


def _room(block: _Block) -> int:
    """What a free block of an expandable segment has or can grow to."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _run(block: _Block, size: int) -> _Block | None:
    """The first block of a run of free address space that holds `size` bytes and begins at or just before `block`."""
    start = block.before if block.before is not None and not block.before.allocated else block
    at: _Block | None = start
    found = 0
    while found < size and at is not None and not at.allocated:
        found += at.size
        at = at.after
    return start if found >= size else None
