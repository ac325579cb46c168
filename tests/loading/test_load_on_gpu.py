"""load_peft_on_rank on real CUDA devices, each case in a process of its own since a context lasts as long as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.accelerator.device_count() == 0 or not torch.cuda.is_available(), reason="no CUDA device"),
]

SCRIPT = """
    import json, sys, torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from safe_loading import load_adapter_on_rank, load_peft_on_rank

    base, adapter, second, index = *sys.argv[1:4], int(sys.argv[4])
    tokens = torch.arange(1, 25, device=f"cuda:{index}").reshape(2, 12)
    states = lambda: (torch.get_rng_state(), torch.cuda.get_rng_state(index))
    before = states()
    torch.cuda.reset_peak_memory_stats(index)
    start = torch.cuda.memory_allocated(index)
    model = load_peft_on_rank(adapter, base, device=index)
    facts = {
        "peak": torch.cuda.max_memory_allocated(index) - start,
        "tensors": [t.nbytes for t in (*model.parameters(), *model.buffers())],
        "devices": sorted({str(t.device) for t in (*model.parameters(), *model.buffers())}),
        "rng": all(map(torch.equal, before, states())),
    }
    load_adapter_on_rank(model, second, "second")
    load_adapter_on_rank(model, second, "default", hotswap=True)
    load_adapter_on_rank(model, adapter, "default", hotswap=True)
    facts["contexts"] = [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]
    plain = AutoModelForCausalLM.from_pretrained(base, device_map={"": index})
    plain = PeftModel.from_pretrained(plain, adapter, torch_device=f"cuda:{index}", autocast_adapter_dtype=False)
    with torch.no_grad():
        facts["equal"] = torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    print("RESULT", json.dumps(facts))
"""


def run(index: int, tmp_path: Path, dtype: torch.dtype) -> dict[str, Any]:
    base = save_llama(tmp_path / "base", dtype)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=dtype)
    second = save_adapter(tmp_path / "second", base, dtype=dtype, seed=4)
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *map(str, (base, adapter, second, index))]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_device_one_context_and_no_more_memory_than_needed(tmp_path: Path, dtype: torch.dtype) -> None:
    index = torch.cuda.device_count() - 1
    facts = run(index, tmp_path, dtype)
    assert facts["devices"] == [f"cuda:{index}"]
    assert facts["contexts"] == [index]
    assert facts["equal"]
    assert facts["rng"]
    rounded = [-(-size // 512) * 512 for size in facts["tensors"]]  # the caching allocator's unit
    assert facts["peak"] <= sum(rounded) + max(rounded)
