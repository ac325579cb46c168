"""Plans that offload, run by accelerate on a CUDA device: the values of the host, and no byte over a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import save_llama

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

# The device is not the first one, so that a stray context would show.
SCRIPT = """
    import tempfile, accelerate
    from transformers import AutoModelForCausalLM
    from safe_loading import Workload, plan_device_map

    folder, card = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    tokens = torch.arange(1, 33).reshape(2, 16)
    work = Workload.generate(2, 16, decode_steps=2)

    @torch.no_grad()
    def steps(model, device):
        found, cache = [], None
        for ids in (tokens, tokens[:, :1], tokens[:, 1:2]):
            out = model(ids.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1)
            found.append(out.logits.cpu())
            cache = out.past_key_values
            del out  # as generate() does before the next token
        return torch.cat(found)

    def requested():
        return torch.cuda.memory_stats(card)["requested_bytes.all.peak"]

    def run(offload, hosts, how):
        whole = plan_device_map(folder, {card: 10**9}, workload=work, attn_implementation="eager").devices[0].used
        limits = {card: whole * 6 // 10, **hosts}
        plan = plan_device_map(folder, limits, workload=work, offload=offload, attn_implementation="eager")
        planned = contexts()
        options = {"attn_implementation": "eager"}
        with tempfile.TemporaryDirectory() as scratch:
            expected = steps(AutoModelForCausalLM.from_pretrained(folder, **options), "cpu")
            plan.enforce()
            if how == "load":
                model = AutoModelForCausalLM.from_pretrained(folder, device_map=plan, offload_folder=scratch, **options)
            else:
                model = AutoModelForCausalLM.from_pretrained(folder, **options)
                skip = model._skip_keys_device_placement
                model = accelerate.dispatch_model(model, plan, offload_dir=scratch, skip_keys=skip)
            loaded = requested()
            found = steps(model, f"cuda:{card}")
            scratch_free = torch.cuda.memory_stats(card)["requested_bytes.all.current"]
            torch._C._cuda_clearCublasWorkspaces()
            scratch_free -= torch.cuda.memory_stats(card)["requested_bytes.all.current"]
        return {"equal": torch.equal(found, expected), "contexts": contexts(), "planned": planned,
                "verified": plan.verified, "homes": sorted(map(str, set(plan.values()))), "whole": whole,
                "limit": plan.devices[0].limit, "used": plan.devices[0].used, "loaded": loaded,
                "tensors": requested() - scratch_free, "offloaded": plan.offloaded_bytes}

    for offload, hosts in (("cpu", {"cpu": 10**9}), ("disk", {"cpu": 0})):
        for how in ("load", "dispatch"):
            case(lambda: run(offload, hosts, how), f"{offload} {how}")
"""


def test_what_is_offloaded_gives_the_values_of_the_host_within_the_limit(
    simulated_cuda: CudaRunner, tmp_path: Path
) -> None:
    base = save_llama(tmp_path / "base", torch.float32)
    facts = simulated_cuda.run(SCRIPT, args=[base, "2"], env={"SIMCUDA_VALUES": "all"})
    assert set(facts) == {"cpu load", "cpu dispatch", "disk load", "disk dispatch", "code"}
    for name in set(facts) - {"code"}:
        found = facts[name]
        assert "error" not in found, found["error"]
        assert found["verified"], name
        assert found["equal"], name
        assert found["planned"] == [], name
        assert found["contexts"] == [2], name
        assert found["homes"] == ["2", name.split()[0]], name
        assert found["offloaded"] > 0, name
        assert max(found["tensors"], found["loaded"]) <= found["limit"], name
        assert found["limit"] < found["whole"], name
