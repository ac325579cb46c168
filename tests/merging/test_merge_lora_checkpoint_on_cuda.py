"""merge_lora_checkpoint on a CUDA device that is not the first: the bytes of the merge on the CPU, and one context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import save_adapter, save_llama
from test_merge_lora_checkpoint_codes import save_fp8

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
    import threading
    from pathlib import Path
    from safetensors.torch import load_file
    from safe_loading import merge_lora_checkpoint

    values, run = sys.modules.get("simulated_cuda_values"), threading.Thread.run

    def followed(thread):  # simulated values are those of a thread
        values.install()
        run(thread)

    if values is not None:
        threading.Thread.run = followed

    root, own = Path(sys.argv[1]), int(sys.argv[2])
    torch.cuda.init()

    def merged(kind, name, **options):
        merge_lora_checkpoint(root / kind, root / f"{kind} {name}", root / "out", overwrite=True, **options)
        files = sorted((root / "out").glob("*.safetensors"))
        return {key: tensor.view(torch.uint8) for file in files for key, tensor in load_file(file).items()}

    for kind, name in (("float32", "lora"), ("float32", "dora"), ("bfloat16", "dora"), ("fp8", "lora")):
        expected = merged(kind, name)
        torch.cuda.reset_peak_memory_stats(own)
        found = merged(kind, name, device=own)
        differ = [key for key in expected.keys() | found if not torch.equal(expected[key], found[key])]
        report(**{f"{kind} {name}": [differ, torch.cuda.max_memory_allocated(own) > 0, contexts()]})
"""


def test_blocks_are_merged_on_the_device_that_is_named(cuda: CudaRunner, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base = save_llama(tmp_path / str(dtype).removeprefix("torch."), dtype)
        for name, dora in (("lora", False), ("dora", True)):
            save_adapter(tmp_path / f"{base.name} {name}", base, target_modules="all-linear", use_dora=dora)
    save_fp8(tmp_path / "fp8", [16, 16])
    save_adapter(tmp_path / "fp8 lora", tmp_path / "float32", target_modules=["q_proj", "down_proj"])
    facts = cuda.run(SCRIPT, args=[tmp_path, str(cuda.count - 1)])
    assert len(facts) == 5
    for case, (differ, used, contexts) in ((case, fact) for case, fact in facts.items() if case != "code"):
        if cuda.simulated:  # a real card adds up the product of A and B in another order
            assert differ == [], case
        assert used, case
        assert contexts == [cuda.count - 1], case
