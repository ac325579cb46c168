"""Plans carried out by the engines on the simulated accelerator: same logits, and no byte beyond a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import save_llama

if TYPE_CHECKING:
    from conftest import Simulated

RUNS = """
    import gc, sys, tempfile, torch, torch_npu
    import accelerate
    import accelerate.utils.modeling
    from transformers import AutoModelForCausalLM
    from safe_loading import DeviceMapInfeasible, Workload, limit_device_memory, plan_device_map, smallest_limits

    # accelerate's own branch for NPUs stores a tied weight under "npu:1" and looks for it under 1, so that the lookup
    # fails and a second copy is made; these devices stand for those of CUDA, where the key stays an integer
    accelerate.utils.modeling.is_npu_available = accelerate.hooks.is_npu_available = lambda: False

    untied, tied = sys.argv[1:]
    tokens = torch.arange(1, 33).reshape(2, 16)
    work = Workload.generate(2, 16, decode_steps=2)

    def steps(model, device="cpu"):
        with torch.no_grad():
            out = model(tokens.to(device), use_cache=True, logits_to_keep=1)
            logits, cache = [out.logits.cpu()], out.past_key_values
            for _ in range(2):
                out = model(tokens[:, :1].to(device), past_key_values=cache, use_cache=True, logits_to_keep=1)
                logits.append(out.logits.cpu())
        return torch.cat(logits)

    def run(name, folder, limits, how, enforce=False, **options):
        expected = steps(AutoModelForCausalLM.from_pretrained(folder))
        plan = plan_device_map(folder, limits, workload=work, **options)
        gc.collect()
        torch_npu.reset()
        with tempfile.TemporaryDirectory() as scratch:
            caps = plan.enforce() if enforce else {}
            if how == "load":
                model = AutoModelForCausalLM.from_pretrained(folder, device_map=plan, offload_folder=scratch)
            else:
                model = AutoModelForCausalLM.from_pretrained(folder)
                skip = model._skip_keys_device_placement
                model = accelerate.dispatch_model(model, plan, offload_dir=scratch, skip_keys=skip)
            torch_npu.reset_peak()
            equal = torch.equal(steps(model, min(d for d in plan.values() if d not in ("cpu", "disk"))), expected)
            peaks = {str(n): s["peak"] for n, s in torch_npu.stats().items() if s["peak"]}
        del model
        gc.collect()
        for device in range(4):
            torch_npu.set_limit(device, None)
        report({name: {
            "equal": equal, "verified": plan.verified, "reason": plan.reason, "map": dict(plan), "peaks": peaks,
            "used": {str(use.device): use.used for use in plan.devices},
            "limits": {str(use.device): use.limit for use in plan.devices},
            "caps": {str(n): round(share * 2**36) for n, share in caps.items()},
            "offloaded": plan.offloaded_bytes, "text": str(plan)}})

    for name, folder in (("untied", untied), ("tied", tied)):
        least = smallest_limits(folder, 2, workload=work)
        report({f"{name} least": {str(k): v for k, v in least.items()}})
        for how in ("load", "dispatch"):
            run(f"{name} two {how}", folder, least, how)
        room = {0: max(least.values()) * 2 // 3, 3: max(least.values()) // 2}
        for where in ("cpu", "disk"):
            for how in ("load", "dispatch"):
                hosts = {"cpu": 10**9} if where == "cpu" else {"cpu": 0}
                run(f"{name} {where} {how}", folder, {**room, **hosts}, how, offload=where)
    run("enforced", untied, smallest_limits(untied, 3, workload=work), "load", enforce=True)
    try:
        plan_device_map(untied, {k: v - 1 for k, v in smallest_limits(untied, 2, workload=work).items()}, workload=work)
    except DeviceMapInfeasible as error:
        report({"one byte less": {"text": str(error), "missing": error.missing_bytes}})
    torch_npu.reset()
    free = plan_device_map(untied)
    report({"free": {"map": dict(free), "contexts": torch_npu.contexts()}})
    report({"cap": limit_device_memory({1: "1GiB"})})
    try:
        torch.empty(2**30 + 1, dtype=torch.uint8, device="npu:1")
    except torch.OutOfMemoryError as error:
        report({"capped": True})
    torch.empty(2**20, dtype=torch.uint8, device="npu:1")
"""


@pytest.fixture(scope="module")
def runs(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plans")
    sizes: dict[str, Any] = {"num_hidden_layers": 6}
    untied = save_llama(folder / "untied", torch.float32, **sizes)
    tied = save_llama(folder / "tied", torch.float32, tie_word_embeddings=True, **sizes)
    return simulated.run(RUNS, count=4, timeout=300, args=[untied, tied])


def cases(runs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: facts for name, facts in runs.items() if isinstance(facts, dict) and "equal" in facts}


def test_every_plan_runs_and_gives_the_same_logits(runs: dict[str, Any]) -> None:
    assert len(cases(runs)) == 13
    for name, facts in cases(runs).items():
        assert facts["equal"], name
        assert facts["verified"], (name, facts["reason"])


def test_no_device_ever_has_more_than_its_limit(runs: dict[str, Any]) -> None:
    for name, facts in cases(runs).items():
        for device, peak in facts["peaks"].items():
            assert peak <= facts["limits"][device], (name, device, facts["text"])


def test_the_traced_peak_is_the_measured_one(runs: dict[str, Any]) -> None:
    for name, facts in cases(runs).items():
        for device, peak in facts["peaks"].items():
            assert facts["used"][device] >= peak, (name, device, facts["text"])
            assert facts["used"][device] <= peak * 1.1 + 2048, (name, device, facts["text"])


def test_what_is_offloaded_is_what_does_not_fit(runs: dict[str, Any]) -> None:
    for name, facts in cases(runs).items():
        away = {place for place in facts["map"].values() if place in ("cpu", "disk")}
        assert away == ({name.split()[1]} if "cpu" in name or "disk" in name else set()), name
        assert (facts["offloaded"] > 0) == bool(away), name


def test_tied_weights_stay_on_one_device_and_are_counted_once(runs: dict[str, Any]) -> None:
    facts = runs["tied two load"]
    assert facts["map"]["lm_head"] == facts["map"]["model.embed_tokens"]
    used = {name: sum(runs[f"{name} two load"]["used"].values()) for name in ("tied", "untied")}
    assert used["untied"] - used["tied"] == 101 * 32 * 4


def test_the_smallest_limits_cannot_be_smaller(runs: dict[str, Any]) -> None:
    assert runs["one byte less"]["missing"] >= 1


def test_limits_from_what_is_free_make_no_context(runs: dict[str, Any]) -> None:
    assert runs["free"]["contexts"] == []


def test_a_cap_holds(runs: dict[str, Any]) -> None:
    assert runs["cap"] == {"1": 1 / 64}
    assert runs["capped"] is True


def test_an_enforced_plan_runs_under_its_limits_and_what_the_allocator_adds(runs: dict[str, Any]) -> None:
    facts = runs["enforced"]
    assert sorted(facts["caps"]) == ["0", "1", "2"]
    for device, cap in facts["caps"].items():
        assert cap == facts["limits"][device] + 22 * 2**20


def test_without_an_accelerator_there_is_nothing_to_cap() -> None:
    from safe_loading import DeviceError, limit_device_memory

    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(DeviceError, match="no accelerator"):
        limit_device_memory({0: "1GiB"})
