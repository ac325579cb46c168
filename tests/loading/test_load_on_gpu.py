"""load_peft_on_rank on CUDA devices, each case in a process of its own since a context lasts as long as one."""

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
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from safe_loading import load_adapter_on_rank, load_peft_on_rank

    base, adapter, second, index = *sys.argv[1:4], int(sys.argv[4])
    tokens = torch.arange(1, 25, device=f"cuda:{index}").reshape(2, 12)
    states = lambda: (torch.get_rng_state(), torch.cuda.get_rng_state(index))
    before = states()
    torch.cuda.reset_peak_memory_stats(index)
    start = torch.cuda.memory_allocated(index)
    model = load_peft_on_rank(base, adapter, device=index)
    report(
        peak=torch.cuda.max_memory_allocated(index) - start,
        tensors=[t.nbytes for t in (*model.parameters(), *model.buffers())],
        devices=sorted({str(t.device) for t in (*model.parameters(), *model.buffers())}),
        rng=all(map(torch.equal, before, states())),
    )
    load_adapter_on_rank(model, second, "second")
    load_adapter_on_rank(model, second, "default", hotswap=True)
    load_adapter_on_rank(model, adapter, "default", hotswap=True)
    report(contexts=contexts())
    plain = AutoModelForCausalLM.from_pretrained(base, device_map={"": index})
    plain = PeftModel.from_pretrained(plain, adapter, torch_device=f"cuda:{index}", autocast_adapter_dtype=False)
    with torch.no_grad():
        report(equal=torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits))
"""


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_one_device_one_context_and_no_more_memory_than_needed(
    cuda: CudaRunner, tmp_path: Path, dtype: torch.dtype
) -> None:
    index = cuda.count - 1
    base = save_llama(tmp_path / "base", dtype)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=dtype)
    second = save_adapter(tmp_path / "second", base, dtype=dtype, seed=4)
    facts = cuda.run(SCRIPT, args=[base, adapter, second, str(index)])
    assert facts["devices"] == [f"cuda:{index}"]
    assert facts["contexts"] == [index]
    assert facts["equal"]
    assert facts["rng"]
    rounded = [-(-size // 512) * 512 for size in facts["tensors"]]  # the caching allocator's unit
    assert facts["peak"] <= sum(rounded) + max(rounded)


ELSEWHERE = """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from safe_loading import DeviceError, load_peft_on_rank

    base, adapter = sys.argv[1:]
    there = torch.cuda.device_count() - 1
    tokens = torch.arange(1, 25, device=f"cuda:{there}").reshape(2, 12)
    elsewhere = AutoModelForCausalLM.from_pretrained(base, device_map={"": there})
    names = [name for name, _ in elsewhere.named_modules()]
    try:
        load_peft_on_rank(elsewhere, adapter, device=0)
    except DeviceError as error:
        report(refused=str(error))
    report(kept=names == [name for name, _ in elsewhere.named_modules()])
    model = load_peft_on_rank(elsewhere, adapter, device=f"cuda:{there}")
    report(contexts=contexts())  # the plain call leaves one on the first card
    expected = AutoModelForCausalLM.from_pretrained(base, device_map={"": there})
    expected = PeftModel.from_pretrained(expected, adapter, autocast_adapter_dtype=False)
    with torch.no_grad():
        logits = [each(input_ids=tokens).logits for each in (model, expected)]
    report(equal=torch.equal(*logits), devices=sorted({str(p.device) for p in model.parameters()}))
"""


def test_a_base_on_another_card_is_left_as_it_was_and_loads_as_advised(
    simulated_cuda: CudaRunner, tmp_path: Path
) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    facts = simulated_cuda.run(ELSEWHERE, args=[base, adapter], env={"SIMCUDA_VALUES": "all"})
    last = simulated_cuda.count - 1
    assert f"Pass device='cuda:{last}', or load the base on cuda:0." in facts["refused"]
    assert facts["kept"]
    assert facts["contexts"] == [last]
    assert facts["equal"]
    assert facts["devices"] == [f"cuda:{last}"]
