"""Plans, caps and free memory on CUDA devices, with torch's own caching allocator as the judge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
MiB = 1 << 20

ENFORCED = """
    import tempfile, transformers
    from plan_truth import step_of
    from safe_loading import Workload, limit_device_memory, plan_device_map

    scratch = 2 * 4096 * 1024 + 8 * 16 * 1024  # of cuBLAS on an A100
    llama = transformers.LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
                                     num_key_value_heads=4, vocab_size=4000)
    gpt2 = transformers.GPT2Config(n_embd=192, n_layer=6, n_head=6, vocab_size=4000, n_positions=512)
    generate = Workload.generate(2, 128, decode_steps=2)
    train = Workload.train(2, 128, optimizer="adamw_foreach")
    checkpointing = Workload.train(2, 128, optimizer="adamw_foreach", gradient_checkpointing=True)

    def run(config, workload, dtype):
        plan = plan_device_map(config, {0: "1GiB", 1: "1GiB"}, workload=workload, dtype=dtype)
        # limits as narrow as they may be
        for per_cent in (100, 103, 110, 120, 130):
            try:
                limits = {use.device: use.used * per_cent // 100 for use in plan.devices}
                plan = plan_device_map(config, limits, workload=workload, dtype=dtype)
                break
            except Exception:
                pass
        fractions = plan.enforce()
        before = contexts()
        with tempfile.TemporaryDirectory() as folder:
            transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=dict(plan), dtype=dtype)
        step = step_of(model, workload, torch.device("cuda", 0))
        for _ in range(3):
            step()
        threads = 1 if workload.kind == "generate" else 2
        rows = [[use.limit, torch.cuda.max_memory_allocated(use.device) - threads * scratch,
                 torch.cuda.max_memory_reserved(use.device),
                 int(fractions[use.device] * torch.cuda.get_device_properties(use.device).total_memory)]
                for use in plan.devices]
        return {"contexts": before, "rows": rows, "verified": plan.verified, "per_cent": per_cent}

    case(lambda: run(llama, generate, torch.bfloat16), "llama generate")
    case(lambda: run(gpt2, generate, torch.bfloat16), "gpt2 generate")
    case(lambda: run(gpt2, train, torch.bfloat16), "gpt2 train")
    case(lambda: run(llama, checkpointing, torch.float32), "llama float32 checkpointing")

    @case
    def caps():
        limit_device_memory({0: "100MiB"})
        seen = contexts()
        def fits(mib, device):
            try:
                return torch.empty(mib << 20, dtype=torch.uint8, device=f"cuda:{device}").numel() > 0
            except torch.OutOfMemoryError:
                return False
        return [seen, fits(98, 0), fits(102, 0), fits(102, 1)]
"""
CASES = ["llama generate", "gpt2 generate", "gpt2 train", "llama float32 checkpointing"]


@pytest.fixture(scope="module")
def enforced(simulated_cuda: CudaRunner) -> dict[str, Any]:
    # values only where they decide what runs: masks and lengths
    return simulated_cuda.run(ENFORCED, env={"SIMCUDA_GPU": "A100", "SIMCUDA_VALUES": "65536"}, timeout=900)


@pytest.mark.parametrize("name", CASES)
def test_an_enforced_plan_runs_under_its_caps(enforced: dict[str, Any], name: str) -> None:
    facts = enforced[name]
    assert "error" not in facts, facts["error"]
    assert facts["verified"]
    assert facts["contexts"] == []  # a cap makes none
    for limit, _, reserved, cap in facts["rows"]:
        assert reserved <= cap
        assert cap <= 2 * limit + 64 * MiB  # and little more runs: the models are tiny


@pytest.mark.parametrize("name", ["llama generate", "gpt2 generate"])
def test_tensors_stay_under_their_limit(enforced: dict[str, Any], name: str) -> None:
    for limit, allocated, _, _ in enforced[name]["rows"]:
        assert allocated <= limit + MiB  # a block of the allocator may be 1 MiB larger than its tensor


def test_a_cap_is_one_device_s(enforced: dict[str, Any]) -> None:
    assert enforced["caps"] == [[], True, False, True]


PLANNED = """
    from _cuda_plans import run_planned
    card = os.environ["SIMCUDA_GPU"]
    dtype = "float16" if card == "T4" else "bfloat16"

    def planned(name, cards, *row, **options):
        case(lambda: run_planned(Row(*row, card, "device_map", dtype=dtype, **options), cards), name)

    if card == "A100":
        planned("two cards", 2, "qwen3", "full", optimizer="adamw_foreach")
        planned("two cards, recomputed", 2, "qwen3", "lora", checkpointing=True)
        planned("two cards, and a buffer of the model itself", 2, "bart", "lora")
        planned("mixture", 1, "mixtral", "generate")
    elif card == "H100":
        planned("4 bits", 1, "llama", "nf4", checkpointing=True)
        planned("encoder and decoder", 1, "t5", "full", optimizer="sgd")
    else:
        planned("adafactor", 1, "mistral", "full", optimizer="adafactor", checkpointing=True)
"""


@pytest.mark.parametrize(
    "card", [pytest.param("T4", marks=pytest.mark.slow), pytest.param("A100", marks=pytest.mark.slow), "H100"]
)
def test_what_a_plan_calls_fitting_stays_under_its_limit(simulated_cuda: CudaRunner, card: str) -> None:
    """A sample of benchmarks/plan_on_cuda.py: the least limits that the planner calls fitting, and its caps."""
    found = simulated_cuda.run_rows(PLANNED, card)
    assert found
    for name, row in found.items():
        assert "error" not in row, f"{name}: {row['error']}"
        assert row["verified"], name
        assert len(row["cards"]) == (2 if "two cards" in name else 1)
        for use in row["cards"]:
            assert max(use["tensors"], use["loading"]) <= use["limit"], name
            assert use["reserved"] <= use["cap"], name
        assert max(use["tensors"] / use["limit"] for use in row["cards"]) > 0.98, name  # a least limit is no ample one


FREE = """
    import subprocess
    from safe_loading import Workload, plan_device_map
    from safe_loading._doctor.devices import read_devices
    holds = "import torch, time; x = [torch.empty(n << 20, dtype=torch.uint8, device=f'cuda:{d}') "
    holds += "for n, d in ((1000, 0), (2000, 1))]; print('on', flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE)
    other.stdout.readline()
    plan = plan_device_map("base")
    report(limits={use.device: use.limit for use in plan.devices}, overhead=[use.overhead for use in plan.devices],
           contexts=contexts())
    devices, findings = read_devices()
    report(seen=[[device.index, device.listed_as] for device in devices.seen],
           held=sorted(c.bytes for c in devices.contexts),
           codes=sorted(f.code for f in findings))
    other.kill()
"""


UUID = "GPU-fa4ec0da-0000-4000-8000-00000000000"


@pytest.mark.parametrize("visible", [pytest.param("2,0", marks=pytest.mark.slow), f"{UUID}2,{UUID}0"])
def test_free_memory_is_matched_to_the_devices_that_are_seen(
    simulated_cuda: CudaRunner, tiny_llama: Any, visible: str
) -> None:
    env = {"CUDA_VISIBLE_DEVICES": visible, "SIMCUDA_MEMORY": "10G", "SIMCUDA_CONTEXT": "500M"}
    facts = simulated_cuda.run(FREE.replace('"base"', repr(str(tiny_llama))), env=env)
    # the other process sees the same devices in the same order: 1000 MiB and a context on the first, 2000 on the second
    assert facts["limits"] == {"0": (10240 - 1500) * MiB, "1": (10240 - 2500) * MiB}
    assert facts["overhead"] == [600 * MiB, 600 * MiB]
    assert facts["contexts"] == []
    assert facts["seen"] == [[0, visible.split(",")[0]], [1, visible.split(",")[1]]]
    assert facts["held"] == [1500 * MiB, 2500 * MiB]
    assert facts["codes"] == ["devices-renumbered", "stray-context"]
