"""merge_lora_inplace on a CUDA device that is not the first: the same bits as on the CPU, and a bounded peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import save_adapter, save_llama

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
    from safe_loading import load_peft_on_rank, merge_lora_inplace
    base, adapter, own, scratch = *sys.argv[1:3], int(sys.argv[3]), 1 << 20
    expected = merge_lora_inplace(load_peft_on_rank(adapter, base, device="cpu"), scratch_bytes=scratch).state_dict()
    model = load_peft_on_rank(adapter, base, device=own)
    pointers = {name: p.data_ptr() for name, p in model.named_parameters() if "lora_" not in name}
    torch.cuda.reset_peak_memory_stats(own)
    before = torch.cuda.memory_allocated(own)
    merged = merge_lora_inplace(model, scratch_bytes=scratch)
    report(peak=torch.cuda.max_memory_allocated(own) - before, contexts=contexts())
    state = merged.state_dict()
    report(equal=[n for n, t in expected.items() if not torch.equal(t, state[n].cpu())], names=len(expected),
           moved=len({p.data_ptr() for p in merged.parameters()} - set(pointers.values())))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_another_device(cuda: CudaRunner, tmp_path: Path, dtype: torch.dtype) -> None:
    base = save_llama(tmp_path / "base", dtype)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=dtype)
    facts = cuda.run(SCRIPT, args=[base, adapter, str(cuda.count - 1)])
    if cuda.simulated:
        assert facts["equal"] == []
    assert facts["names"] > 10
    assert facts["moved"] == 0
    assert facts["contexts"] == [cuda.count - 1]
    scratch, workspace = 1 << 20, 64 << 20  # cuBLAS takes up to 32 MiB a handle
    assert facts["peak"] <= scratch + workspace
