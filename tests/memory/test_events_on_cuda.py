"""Forecasts replay a run: the allocations and frees of PyTorch's own CUDA allocator, one by one, in its order.

What is reserved follows from that order, and a peak alone does not show where it differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
    import collections, itertools

    def of_forecast(events):
        sizes, found = {}, []
        for key, size in events:
            if size > 0:
                sizes[key] = size
            if size > 0 or key in sizes:
                found.append([size > 0, -(-sizes[key] // 512) * 512])
        return found

    def of_run(row):
        torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
        run(row)
        history = torch.cuda.memory._snapshot()["device_traces"][0]
        events = [event for event in history if event["action"] in ("alloc", "free_requested")]
        return [[event["action"] == "alloc", -(-event["size"] // 512) * 512] for event in events]

    def differences(row, *, in_order=True):
        wanted, have = of_forecast(forecast(row).events), of_run(row)
        if not any(made for made, _ in have[len(wanted):]):
            del have[len(wanted):]  # the end of the model
        if not in_order:
            made = [collections.Counter(size for made, size in events if made) for events in (wanted, have)]
            return [len(have), [*(made[0] - made[1]), *(made[1] - made[0])]]
        pairs = enumerate(itertools.zip_longest(wanted, have))
        return [len(have), [[place, *pair] for place, pair in pairs if pair[0] != pair[1]][:3]]

    half = {"dtype": "float16"}
    rows = {
        "gradients of transposed heads are added in place": Row("qwen3", "lora", "T4", "to", dtype="float32"),
        "unfused attention adds its mask in place":
            Row("qwen3", "full", "T4", "to", optimizer="sgd", checkpointing=True, **half),
        "DoRA's magnitudes are computed": Row("qwen3", "dora", "T4", "to", **half),
        "adapters are widened, indices copied": Row("qwen3", "lora", "T4", "to", "eager", **half),
    }
    for name, row in rows.items():
        case(lambda: differences(row), name)
    # transformers' threads bring the weights in an order that differs from run to run
    packed = Row("gpt2", "nf4", "T4", "device_map", checkpointing=True, **half)
    case(lambda: differences(packed, in_order=False), "codes are normed, and unpacked weights cast")
"""


def test_a_forecast_allocates_and_frees_what_a_run_does_in_its_order(simulated_cuda: CudaRunner) -> None:
    cases = simulated_cuda.run_rows(SCRIPT, "T4")
    assert len(cases) == 5
    for name, found in cases.items():
        assert "error" not in found, found
        number, differ = found
        assert number > 2000, name
        assert differ == [], name
