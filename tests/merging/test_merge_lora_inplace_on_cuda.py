"""merge_lora_inplace on a CUDA device that is not the first: the same bits as on the CPU, and a bounded peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import save_adapter, save_llama

from safe_loading._merging.weights.update import LEFT_BYTES, SPARE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
    from safe_loading import load_peft_on_rank, merge_lora_inplace
    from safe_loading._memory.trace.timeline import workspaces_of
    base, adapter, own, scratch = *sys.argv[1:3], int(sys.argv[3]), 1 << 20
    expected = merge_lora_inplace(load_peft_on_rank(base, adapter, device="cpu"), scratch_bytes=scratch).state_dict()
    model = load_peft_on_rank(base, adapter, device=own)
    pointers = {name: p.data_ptr() for name, p in model.named_parameters() if "lora_" not in name}
    torch.cuda.reset_peak_memory_stats(own)
    before = torch.cuda.memory_allocated(own)
    merged = merge_lora_inplace(model, scratch_bytes=scratch)
    report(peak=torch.cuda.max_memory_allocated(own) - before, contexts=contexts(),
           workspace=workspaces_of(torch.cuda.get_device_capability(own), training=False)[0])
    state = merged.state_dict()
    report(equal=[n for n, t in expected.items() if not torch.equal(t, state[n].cpu())], names=len(expected),
           moved=len({p.data_ptr() for p in merged.parameters()} - set(pointers.values())))
"""


# Each weight is a few times as large in float64 as the scratch, so the scratch is what bounds a block.
WIDTH, INNER, RANK, SCRATCH = 256, 2048, 8, 1 << 20


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16))],
)
def test_on_another_device(cuda: CudaRunner, tmp_path: Path, dtype: torch.dtype) -> None:
    base = save_llama(tmp_path / "base", dtype, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=dtype, r=RANK, target_modules="all-linear")
    facts = cuda.run(SCRIPT, args=[base, adapter, str(cuda.count - 1)])
    if cuda.simulated:
        assert facts["equal"] == []
    assert facts["names"] > 10
    assert facts["moved"] == 0
    assert facts["contexts"] == [cuda.count - 1]
    factors = 8 * RANK * (WIDTH + INNER)
    beside = LEFT_BYTES + SPARE_BYTES + (16 << 10)  # and what the search for middles finds: a few elements
    assert facts["peak"] <= facts["workspace"] + SCRATCH + factors + beside
    # The bound is tight: without the scratch of one block the peak would not be reached.
    assert facts["peak"] >= facts["workspace"] + SCRATCH * 9 // 10
