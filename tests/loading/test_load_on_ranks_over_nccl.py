"""load_peft_on_rank by several ranks whose process group is NCCL, each on a CUDA device of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import save_adapter, save_llama

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

# The ranks compare their tensors over NCCL itself, so its collectives still work after what the load did.
SCRIPT = """
    import torch.distributed as dist
    from safe_loading import SafeLoadingError, load_adapter_on_rank, load_peft_on_rank

    base, adapter, second = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl")
    model = load_peft_on_rank(base, adapter)
    report(backend=dist.get_backend(), device=str(model.device), ranks=model.load_report.ranks, contexts=contexts())
    load_adapter_on_rank(model, second, "second")
    report(second=contexts())
    try:
        load_adapter_on_rank(model, second, "second" if rank else "third")
        report(refused=None)
    except SafeLoadingError as error:
        report(refused=[type(error).__name__, sorted(model.peft_config)])

    def on_each_rank(tensor):
        whole = torch.empty(world, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        dist.all_gather(list(whole.unbind()), tensor.detach().contiguous())
        return whole.cpu()

    alone = load_peft_on_rank(base, {"default": adapter, "second": second}, device="cpu", ranks="self").state_dict()
    differ = []
    for name, tensor in sorted(model.state_dict().items()):
        expected = alone.pop(name)
        differ += [[name, other] for other, held in enumerate(on_each_rank(tensor)) if not torch.equal(held, expected)]
    report(differ=differ, missing=sorted(alone), tensors=len(model.state_dict()), after=contexts())
    dist.destroy_process_group()
"""


def test_ranks_hold_the_same_bits_and_one_context_each(cuda: CudaRunner, tmp_path: Path) -> None:
    world = min(cuda.count, 3)
    if world < 2:
        pytest.skip("one CUDA device, and each rank of NCCL needs its own")
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.float32)
    second = save_adapter(tmp_path / "second", base, dtype=torch.bfloat16, seed=4)
    for rank, facts in enumerate(cuda.run_ranks(SCRIPT, world, args=[base, adapter, second])):
        assert facts["backend"] == "nccl"
        assert facts["device"] == f"cuda:{rank}"
        assert facts["ranks"] == world
        assert facts["contexts"] == facts["second"] == facts["after"] == [rank]
        assert facts["refused"] == ["AdapterExists" if rank else "RankError", ["default", "second"]]
        assert facts["differ"] == facts["missing"] == []
        assert facts["tensors"] > 30
