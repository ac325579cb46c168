"""wrap_fsdp_meta_safe on CUDA devices, over NCCL: one rank for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from models import save_llama

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from safe_loading import device_for_rank, meta_model, wrap_fsdp_meta_safe

folder, version = sys.argv[1], int(sys.argv[2])
own = device_for_rank()
torch.accelerator.set_device_index(own)
dist.init_process_group(device_id=own)
start = torch.accelerator.memory_allocated(own)
torch.accelerator.reset_peak_memory_stats(own)
model = wrap_fsdp_meta_safe(meta_model(folder), folder, version=version)
peak = torch.accelerator.max_memory_allocated(own) - start
units = [unit.bytes for unit in model.fsdp_report.units]
report(peak=peak, local=model.fsdp_report.local_bytes, largest=max(units), name=torch.cuda.get_device_name(own))
snapshot = torch.cuda.memory._snapshot(own.index)
report(segments=sum(each["total_size"] for each in snapshot["segments"]), contexts=contexts())
one = AutoModelForCausalLM.from_pretrained(folder, device_map={"": own})
tokens = torch.arange(1, 25, device=own).reshape(2, 12)
with torch.no_grad():
    report(equal=torch.equal(model(input_ids=tokens).logits, one(input_ids=tokens).logits))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("version", [2, 1])
def test_each_device_holds_its_part_and_never_more_than_one_unit_besides(
    cuda: CudaRunner, tmp_path: Path, version: int, record_property: Callable[[str, object], None]
) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    found = cuda.run_ranks(SCRIPT, cuda.count, args=[base, str(version)], fresh=version == 2)
    record_property("ranks", found)  # the figures that docs/benchmarks.md records
    for rank, facts in enumerate(found):
        assert facts["equal"]
        assert facts["contexts"] == [rank]
        assert facts["peak"] <= facts["local"] + facts["largest"] + (1 << 20)
