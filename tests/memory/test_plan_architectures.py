"""Every causal language model of transformers: planned over two devices, and run where the plan puts it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_truth import STEP, generation, save_tiny
from tiny_models import causal_lm_classes
from transformers.integrations.accelerate import expand_device_map

from safe_loading import plan_device_map
from safe_loading._memory.plan.map_keys import device_of
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading.errors import DeviceMapInfeasible

# What no placement helps, and why.
WHOLE: dict[str, str] = {
    "ProphetNetForCausalLM": "its decoder itself computes two streams, from tensors that several layers read",
    "XLMWithLMHeadModel": "its forward adds the output of each attention to that of the layer before it, by itself",
}
# What transformers and accelerate compute wrongly from disk, with any map.
NOT_FROM_DISK: dict[str, str] = {
    "JetMoeForCausalLM": "its attention calls map() and reduce() of a module, where no hook of accelerate is",
    "LongcatFlashForCausalLM": "NaN, with a map made by hand too",
}
# What does not run here, split or not, and why.
NOT_RUN: dict[str, str] = {
    "BltForCausalLM": "its own forward asks its config for num_hidden_layers, which it has not",
    "CpmAntForCausalLM": "it puts 32 tokens before the prompt, for which the attention mask of the next token is short",
    "MusicgenForCausalLM": "it reads codes of sound, several a step, and no tokens",
    "MusicgenMelodyForCausalLM": "it reads codes of sound, several a step, and no tokens",
    "Zamba2ForCausalLM": "the sizes of its layers hang together in ways that this size does not keep",
    "xLSTMForCausalLM": "its cache has the wrong shape in this size",
}
EVERY = [name for name in causal_lm_classes() if name not in NOT_RUN]
# transformers' own plan for these does not run: their embeddings are added outside of what it keeps whole
ADDED = [
    "BigBirdForCausalLM",
    "BioGptForCausalLM",
    "BlenderbotSmallForCausalLM",
    "MarianForCausalLM",
    "MvpForCausalLM",
    "PegasusForCausalLM",
]
# one weight under three or four names: shared, the tokens of the encoder and of the decoder, the head
TIED = ["BartForConditionalGeneration", "T5ForConditionalGeneration"]
SAMPLE = sorted({*ADDED, *TIED, "CamembertForCausalLM", *random.Random(5).sample(EVERY, 3)})
REST = [pytest.param(name, marks=pytest.mark.slow) for name in EVERY if name not in SAMPLE]


def least(model: Any) -> int:
    """What one device takes for the step."""
    return trace_step(model, STEP).devices[0].peak_bytes


@pytest.mark.parametrize("name", [*SAMPLE, *REST])
def test_a_plan_is_complete_and_runs_to_the_same_logits(name: str, tmp_path: Path) -> None:
    kind = save_tiny(name, tmp_path / "model")
    model: Any = kind.from_pretrained(tmp_path / "model", dtype=torch.float32)
    expected = generation(model)
    limit = least(model) - 1  # one device is a byte too small
    if name in WHOLE:
        with pytest.raises(DeviceMapInfeasible, match="Kept on one device"):
            plan_device_map(model, {0: limit, 1: limit}, workload=STEP)
        return
    plan = plan_device_map(model, {0: limit, 1: limit}, workload=STEP)
    assert plan.verified, plan.reason
    assert set(plan.values()) == {0, 1}
    assert all(use.free >= 0 for use in plan.devices)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = [key for key, _ in named]
    assert expand_device_map(dict(plan), names) == {key: device_of(key, plan) for key in names}
    homes: dict[int, set[Any]] = {}
    for key, tensor in named:
        homes.setdefault(tensor.untyped_storage().data_ptr(), set()).add(device_of(key, plan))
    assert all(len(places) == 1 and places <= {0, 1} for places in homes.values()), "a tensor has no place, or two"
    if name in NOT_FROM_DISK:
        return
    where = {key: ("cpu", "disk")[int(device)] for key, device in plan.items()}
    split = kind.from_pretrained(tmp_path / "model", dtype=torch.float32, device_map=where, offload_folder=tmp_path)
    found = generation(split)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
