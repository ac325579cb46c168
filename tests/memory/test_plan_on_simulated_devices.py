"""Plans carried out by the engines on the simulated accelerator.

The script PLANS loads and dispatches models by their plans: same logits, and no byte beyond a limit. STEPS runs the
steps that were planned for, generation and training: what was counted is what is there. To add a case to STEPS, append
a class of transformers, an attention and one of KINDS to SAMPLE.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import save_llama
from peft import LoraConfig
from plan_truth import save_tiny

from safe_loading import Workload

if TYPE_CHECKING:
    from conftest import Simulated

ROWS, COLUMNS = 3, 48
KINDS = ("generate", "train", "train, checkpointing", "train, adapter", "train, adapter, checkpointing")
ARCHITECTURES = [
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
    "OPTForCausalLM",
    "GPTNeoXForCausalLM",
    "BloomForCausalLM",
    "CohereForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
]
EAGER_ONLY = {"Gemma2ForCausalLM", "BloomForCausalLM"}  # transformers has no other attention for them
# The sums must be equal, but for one case. Where attention drops out, torch takes the kernel apart, and its mask has
# four bytes an element on the host, as is counted, and one on an accelerator.
OVER = {"GPT2LMHeadModel sdpa train": 1.1}

SETUP = """
    import gc, sys, torch, torch_npu
    import accelerate
    import accelerate.utils.modeling

    # accelerate's own branch for NPUs stores a tied weight under "npu:1" and looks for it under 1, so that the lookup
    # fails and a second copy is made; these devices stand for those of CUDA, where the key stays an integer
    accelerate.utils.modeling.is_npu_available = accelerate.hooks.is_npu_available = lambda: False
"""

PLANS = """
    import tempfile
    from plan_truth import experts_as_generate_decodes
    from transformers import AutoModelForCausalLM
    from safe_loading import DeviceMapInfeasible, Workload, limit_device_memory, plan_device_map, smallest_limits

    untied, tied, wide, mixture = sys.argv[1:5]
    tokens = torch.arange(1, 33).reshape(2, 16)
    work = Workload.generate(2, 16, decode_steps=2)

    def steps(model, device="cpu"):
        with torch.no_grad():
            out = model(tokens.to(device), use_cache=True, logits_to_keep=1)
            logits, cache = [out.logits.cpu()], out.past_key_values
            del out  # as generate() does before the next token
            with experts_as_generate_decodes(model):
                for _ in range(2):
                    out = model(tokens[:, :1].to(device), past_key_values=cache, use_cache=True, logits_to_keep=1)
                    logits.append(out.logits.cpu())
                    del out
        return torch.cat(logits)

    def run(name, folder, plan, how, enforce=False):
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
            main = min(d for d in plan.values() if d not in ("cpu", "disk"))
            equal = torch.equal(steps(model, main), expected[folder])
            peaks = {str(n): s["peak"] for n, s in torch_npu.stats().items() if s["peak"]}
        del model
        gc.collect()
        for device in range(4):
            torch_npu.set_limit(device, None)
        report({name: {
            "equal": equal, "verified": plan.verified, "reason": plan.reason, "map": dict(plan), "peaks": peaks,
            "used": {str(use.device): use.used for use in plan.devices},
            "limits": {str(use.device): use.limit for use in plan.devices},
            "beyond": {str(use.device): max(use.reserved - use.used, 0) for use in plan.devices},
            "caps": {str(n): round(share * 2**36) for n, share in caps.items()},
            "offloaded": plan.offloaded_bytes, "text": str(plan)}})

    expected = {folder: steps(AutoModelForCausalLM.from_pretrained(folder)) for folder in sys.argv[1:5]}
    leasts = {folder: smallest_limits(folder, 2, workload=work) for folder in (untied, tied)}
    for name, folder in (("untied", untied), ("tied", tied)):
        least = leasts[folder]
        report({f"{name} least": {str(k): v for k, v in least.items()}})
        plan = plan_device_map(folder, least, workload=work)
        for how in ("load", "dispatch"):
            run(f"{name} two {how}", folder, plan, how)
        room = {0: max(least.values()) * 2 // 3, 3: max(least.values()) // 2}
        for where in ("cpu", "disk"):
            hosts = {"cpu": 10**9} if where == "cpu" else {"cpu": 0}
            plan = plan_device_map(folder, {**room, **hosts}, workload=work, offload=where)
            for how in ("load", "dispatch"):
                run(f"{name} {where} {how}", folder, plan, how)
    for name, folder, share in (("ends", wide, 0.55), ("experts", mixture, 0.8), ("experts-two", mixture, 0.7)):
        whole = plan_device_map(folder, {0: 10**9}, workload=work).devices[0].used
        room = {0: int(share * whole), **({3: whole // 4} if "two" in name else {})}
        plan = plan_device_map(folder, {**room, "cpu": 10**9}, workload=work, offload="cpu")
        for how in ("load", "dispatch"):
            run(f"{name} cpu {how}", folder, plan, how)
    limits = smallest_limits(untied, 3, workload=work)
    run("enforced", untied, plan_device_map(untied, limits, workload=work), "load", enforce=True)
    try:
        plan_device_map(untied, {k: v - 1 for k, v in leasts[untied].items()}, workload=work)
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


STEPS = """
    import json, traceback
    from accelerate import dispatch_model
    from peft import get_peft_model
    from plan_truth import step_of
    from test_plan_on_simulated_devices import COLUMNS, ROWS, workload
    from tiny_models import tiny_config
    import transformers
    from safe_loading import plan_device_map

    def run_step(name, attention, kind):
        work = workload(kind)
        torch.manual_seed(0)
        model = getattr(transformers, name)._from_config(
            tiny_config(name), dtype=torch.float32, attn_implementation=attention)
        limit = plan_device_map(model, {0: 10**12}, workload=work).devices[0].used - 1
        plan = plan_device_map(model, {0: limit, 2: limit}, workload=work)
        gc.collect()
        torch_npu.reset()
        model = dispatch_model(model, dict(plan), skip_keys=model._skip_keys_device_placement)
        if work.adapter is not None:
            model = get_peft_model(model, work.adapter)
        step = step_of(model, work, "npu:0" if 0 in plan.values() else "npu:2")
        step()  # the optimizer has its state from here on
        gc.collect()
        for device in (0, 2):
            torch_npu.reset_peak(device)
        step()
        peaks = {n: s["peak"] for n, s in torch_npu.stats().items() if s["peak"]}
        return {"verified": plan.verified, "reason": plan.reason, "limit": limit, "peaks": peaks,
                "used": {use.device: use.used for use in plan.devices}, "text": str(plan)}

    for case in json.loads(sys.argv[-1]):
        try:
            report({" ".join(case): run_step(*case)})
        except Exception:
            report({" ".join(case): {"error": traceback.format_exc()}})
        gc.collect()
"""


def workload(kind: str) -> Workload:
    if kind == "generate":
        return Workload.generate(ROWS, COLUMNS, decode_steps=2)
    adapter = LoraConfig(r=4, target_modules="all-linear") if "adapter" in kind else None
    return Workload.train(ROWS, COLUMNS, "checkpointing" in kind, optimizer="adamw_foreach", adapter=adapter)


def cases(name: str) -> list[tuple[str, str, str]]:
    attentions = ("eager",) if name in EAGER_ONLY else ("sdpa", "eager")
    return [(name, attention, kind) for attention in attentions for kind in KINDS]


SAMPLE = [
    ("LlamaForCausalLM", "sdpa", "generate"),
    ("MixtralForCausalLM", "sdpa", "train"),
    ("GPTNeoXForCausalLM", "eager", "generate"),
    ("GPTNeoXForCausalLM", "eager", "train, checkpointing"),
    ("Qwen3ForCausalLM", "sdpa", "train, adapter, checkpointing"),
]


@pytest.fixture(scope="module")
def runs(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plans")
    sizes: dict[str, Any] = {"num_hidden_layers": 6}
    untied = save_llama(folder / "untied", torch.float32, **sizes)
    tied = save_llama(folder / "tied", torch.float32, tie_word_embeddings=True, **sizes)
    wide = save_llama(folder / "wide", torch.float32, vocab_size=1000, **sizes)
    save_tiny("MixtralForCausalLM", folder / "mixture")
    args = [untied, tied, wide, folder / "mixture", json.dumps(SAMPLE)]
    return simulated.run_forked(SETUP + PLANS + STEPS, timeout=300, args=args)


def plans_of(runs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the script PLANS reports of each plan; other reports have no logits to compare."""
    return {name: facts for name, facts in runs.items() if isinstance(facts, dict) and "equal" in facts}


def test_every_plan_runs_and_gives_the_same_logits(runs: dict[str, Any]) -> None:
    assert len(plans_of(runs)) == 19
    for name, facts in plans_of(runs).items():
        assert facts["equal"], name
        assert facts["verified"], (name, facts["reason"])


def test_no_device_ever_has_more_than_its_limit(runs: dict[str, Any]) -> None:
    for name, facts in plans_of(runs).items():
        for device, peak in facts["peaks"].items():
            assert peak <= facts["limits"][device], (name, device, facts["text"])


def test_the_traced_peak_is_the_measured_one(runs: dict[str, Any]) -> None:
    for name, facts in plans_of(runs).items():
        for device, peak in facts["peaks"].items():
            assert facts["used"][device] >= peak, (name, device, facts["text"])
            assert facts["used"][device] <= peak * 1.1 + 2048, (name, device, facts["text"])


def test_what_is_offloaded_is_what_does_not_fit(runs: dict[str, Any]) -> None:
    for name, facts in plans_of(runs).items():
        away = {place for place in facts["map"].values() if place in ("cpu", "disk")}
        assert away == ({name.split()[1]} if "cpu" in name or "disk" in name else set()), name
        assert (facts["offloaded"] > 0) == bool(away), name


def test_embeddings_and_experts_are_offloaded_by_themselves(runs: dict[str, Any]) -> None:
    for how in ("load", "dispatch"):
        away = {path for path, place in runs[f"ends cpu {how}"]["map"].items() if place == "cpu"}
        assert away == {"model.embed_tokens", "model.layers"}  # and the norm between them and the head stays
        for name in ("experts", "experts-two"):
            facts = runs[f"{name} cpu {how}"]
            away = {path for path, place in facts["map"].items() if place == "cpu"}
            assert away
            assert all(path.endswith(".experts") for path in away), facts["map"]


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
        assert cap == facts["limits"][device] + facts["beyond"][device] + 22 * 2**20


def test_without_an_accelerator_there_is_nothing_to_cap() -> None:
    from safe_loading import DeviceError, limit_device_memory

    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(DeviceError, match="no accelerator"):
        limit_device_memory({0: "1GiB"})


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """What is wrong with each case."""
    wrong: dict[str, Any] = {}
    for case, facts in found.items():
        if "error" in facts:
            wrong[case] = facts["error"][-900:]
            continue
        over = next((more for start, more in OVER.items() if case.startswith(start)), 1.0)
        said = [] if facts["verified"] else [facts["reason"]]
        if len(facts["peaks"]) < 2:
            said.append("one device is enough")
        for device, peak in facts["peaks"].items():
            used = facts["used"][device]
            if peak > facts["limit"] or not peak <= used <= peak * over:
                said.append(f"device {device}: {used} counted, {peak} measured, limit {facts['limit']}")
        if said:
            wrong[case] = said
    return wrong


def test_what_is_counted_is_what_is_there(runs: dict[str, Any]) -> None:
    found = {case: facts for case, facts in runs.items() if tuple(case.split(" ", 2)) in SAMPLE}
    assert len(found) == len(SAMPLE)
    assert judge(found) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_for_twelve_architectures(simulated: Simulated, name: str) -> None:
    own = cases(name)
    found = simulated.run(SETUP + STEPS, count=3, timeout=900, args=[json.dumps(own)])
    assert len(found) == len(own)
    assert judge(found) == {}
