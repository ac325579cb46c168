"""The replay of allocations beside torch's own allocator: what any program allocates and reserves is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
    import random
    from safe_loading._memory.trace.allocator import EMPTY_CACHE, replay
    KiB, MiB = 1 << 10, 1 << 20

    def size(draw):
        low, high = draw.choice([(1, 4 * KiB), (100 * KiB, 1100 * KiB), (MiB, 24 * MiB), (24 * MiB, 80 * MiB)])
        return draw.randint(low, high)

    def compare(seed):
        draw, live, events = random.Random(seed), {}, []
        for key in range(400):
            if draw.random() < 0.01:
                torch.cuda.empty_cache()
                events.append(EMPTY_CACHE)
            elif live and draw.random() < 0.48:
                gone = draw.choice(list(live))
                del live[gone]
                events.append((gone, -1))
            else:
                events.append((key, size(draw)))
                live[key] = torch.empty(events[-1][1], dtype=torch.uint8, device="cuda:0")
        found = replay(events, expandable_segments="PYTORCH_CUDA_ALLOC_CONF" in os.environ)
        return [
            [found.allocated_peak_bytes, found.reserved_peak_bytes, found.reserved_bytes],
            [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()],
        ]

    for seed in range(3 if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else 20):
        case(lambda: compare(seed), f"seed {seed}")
"""


@pytest.mark.parametrize("settings", [None, "expandable_segments:True"])
def test_any_program_reserves_what_it_does_in_torch(simulated_cuda: CudaRunner, settings: str | None) -> None:
    facts = simulated_cuda.run(SCRIPT, env={"PYTORCH_CUDA_ALLOC_CONF": settings, "SIMCUDA_VALUES": None})
    pairs = {name: pair for name, pair in facts.items() if name != "code"}
    assert len(pairs) == (20 if settings is None else 3)
    for name, (replayed, real) in pairs.items():
        assert replayed == real, name
