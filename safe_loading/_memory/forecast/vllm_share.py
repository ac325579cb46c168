"""A card that training shares with vLLM: the memory that vLLM takes of it, and the largest share that a step leaves.

vLLM's engine takes ``gpu_memory_utilization`` of the whole card, whatever else is on it: weights of its own, its
activations, and a cache of keys and values that fills the rest (``request_memory`` in ``vllm/v1/worker/utils.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from safe_loading._core.search import Search
from safe_loading.errors import ArgumentError

_PARTS = 100  # people write hundredths


def vllm_bytes(memory: int, gpu_memory_utilization: float) -> int:
    """Return the bytes that vLLM takes of a card's memory, or raise `ArgumentError`."""
    share = gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise ArgumentError(f"vllm_gpu_memory_utilization={share!r:.80}: pass a part of the card, such as 0.3.")
    return math.ceil(memory * share)


def largest_share(fits: Callable[[int], bool], memory: int) -> float:
    """Return the largest share of a card, in hundredths, beside which a step fits; 0.0 where it leaves none."""

    def leaves(part: int) -> bool:
        return fits(memory - vllm_bytes(memory, part / _PARTS))

    return Search(leaves, lambda *_: None).last(0, _PARTS) / _PARTS
