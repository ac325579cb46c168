"""The load of a model in 4 bits as transformers 5.0 and peft 0.19 did it, for rows that were measured with them.

transformers 5.0 copied weights to the GPU with four threads that did not wait for the quantization
(``convert_and_load_state_dict_in_model``), and peft 0.19 left the cache as it was. From transformers 5.17 on there is
one tensor at a time, and from peft 0.20 on an empty cache in the end. How far the threads were ahead depended on the
machine, so each draw has speeds of its own.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence

from safe_loading._memory.trace.allocator import EMPTY_CACHE
from safe_loading._memory.trace.timeline import _UNPACKED

Event = tuple[int, int]
THREADS = 4  # GLOBAL_WORKERS
RATES = 8.5, 9.5  # of one thread: from 0.3 to 3 GB/s, as powers of ten
COSTS = -4.0, -2.5  # of one quantization: from 0.1 to 3 ms
UNEVEN = 0.3  # sigma of the logarithm of each time


def in_threads(events: Sequence[Event], seed: int) -> list[Event]:
    """Return the events of a forecast in 4 bits with the load that transformers 5.0 and peft 0.19 made of it."""
    # what is cast afterwards is freed one tensor after the other, each behind its copy in float32
    cast = next(at for at, (key, size) in enumerate(events) if size == -1 and _UNPACKED < key < -1) - 1
    draw = random.Random(seed)
    rate, cost = 10 ** draw.uniform(*RATES), 10 ** draw.uniform(*COSTS)
    threads, now, timed = [0.0] * THREADS, 0.0, []
    for staged, quantized in _tensors(events[2:cast]):
        start = heapq.heappop(threads)
        end = start + (1e-4 + staged[1] / rate) * draw.lognormvariate(0, UNEVEN)
        heapq.heappush(threads, end)
        now = max(now, end) + (cost * draw.lognormvariate(0, UNEVEN) if quantized else 0.0)
        timed += [(start, [staged]), (now, quantized)]
    timed.sort(key=lambda entry: entry[0])
    loaded = [event for _, several in timed for event in several]
    return [*events[:2], *loaded, *(event for event in events[cast:] if event != EMPTY_CACHE)]


def _tensors(events: Sequence[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yield each tensor as it comes to the GPU, and what its quantization does then: new blocks, and its own end."""
    at = 0
    for place, (key, size) in enumerate(events):
        if place < at:
            continue
        at = place + 1
        if key > _UNPACKED:
            yield (key, size), []
            continue
        at = events.index((key, -1), place) + 1
        own = _UNPACKED - 1000 - place  # in the events of one tensor at a time, all have the same key
        yield (own, size), [*events[place + 1 : at - 1], (own, -1)]
