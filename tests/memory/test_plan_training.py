"""Plans beside steps that are really run on simulated devices: what was counted is what is there, and limits hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from peft import LoraConfig

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

RUNS = """
    import gc, json, sys, traceback, torch, torch_npu
    import accelerate.utils.modeling
    from accelerate import dispatch_model
    from peft import get_peft_model
    from plan_truth import step_of
    from test_plan_training import COLUMNS, ROWS, workload
    from tiny_models import tiny_config
    import transformers
    from safe_loading import plan_device_map

    # as in test_plan_on_simulated_devices.py: these devices stand for those of CUDA
    accelerate.utils.modeling.is_npu_available = accelerate.hooks.is_npu_available = lambda: False

    def run(name, attention, kind):
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

    for case in json.loads(sys.argv[1]):
        try:
            report({" ".join(case): run(*case)})
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


def test_what_is_counted_is_what_is_there(simulated: Simulated) -> None:
    found = simulated.run(RUNS, count=3, timeout=300, args=[json.dumps(SAMPLE)])
    assert len(found) == len(SAMPLE)
    assert judge(found) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_for_twelve_architectures(simulated: Simulated, name: str) -> None:
    own = cases(name)
    found = simulated.run(RUNS, count=3, timeout=900, args=[json.dumps(own)])
    assert len(found) == len(own)
    assert judge(found) == {}
