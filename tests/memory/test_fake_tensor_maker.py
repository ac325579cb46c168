"""Fake tensors made without torch's constructor are those that it makes, and traces with them are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from tiny_models import skip_unless_buildable, tiny_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from safe_loading import Workload
from safe_loading._memory.trace.fake_tensor_maker import FakeTensorMaker
from safe_loading._memory.trace.operation_cache import OperationCache
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.trace_step import trace_step

LORA = LoraConfig(r=4, target_modules="all-linear")
STEPS = {
    "training": Workload.train(2, 16),
    "lora": Workload.train(2, 16, adapter=LORA, gradient_checkpointing=True, gradient_accumulation_steps=2),
    "generation": Workload.generate(2, 16),
}
# whose layers split, choose experts, alternate, share a cache, scan, and cross
CLASSES = (
    "DeepseekV3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Gemma3nForCausalLM",
    "GptOssForCausalLM",
    "Mamba2ForCausalLM",
    "T5ForConditionalGeneration",
)
CASES = [(name, step) for name in CLASSES for step in STEPS if (name, step) != ("Mamba2ForCausalLM", "lora")]
CHOSEN = random.Random(3).sample([case for case in CASES if case[0] != "Mamba2ForCausalLM"], 4)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "cpu:1"])
def test_a_fake_tensor_is_as_torch_makes_it(device: str) -> None:
    mode, place = FakeTensorMode(allow_non_fake_inputs=True), torch.device(device)
    maker = FakeTensorMaker(mode)
    meta = torch.empty_strided((3, 4), (1, 3), dtype=torch.bfloat16, device="meta")
    by_torch = FakeTensor(mode, meta, place)
    for made in [maker.fake(meta, place) for _ in range(3)]:
        assert type(made) is FakeTensor
        assert vars(made) == vars(by_torch)
        assert made.device == by_torch.device == place
        assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(by_torch)
        assert (made.shape, made.stride(), made.dtype) == (by_torch.shape, by_torch.stride(), by_torch.dtype)
        assert made.untyped_storage()._cdata == meta.untyped_storage()._cdata
        assert made.is_leaf
        assert not made.requires_grad


def traced(name: str, step: str) -> StepTrace:
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = getattr(transformers, name)(tiny_config(name))
    return trace_step(model, STEPS[step])


@pytest.mark.parametrize(
    ("name", "step"), [pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.slow) for case in CASES]
)
def test_a_trace_is_that_of_torchs_own_tensors(name: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_buildable(name)
    quick = traced(name, step)
    monkeypatch.setattr(OperationCache, "key", lambda *_: None)
    monkeypatch.setattr(FakeTensorMaker, "fake", lambda self, meta, device: FakeTensor(self.mode, meta, device))
    slow = traced(name, step)
    assert (quick.allocations, quick.events) == (slow.allocations, slow.events)
    assert (quick.devices, quick.calls, quick.assumptions) == (slow.devices, slow.calls, slow.assumptions)
    assert quick.first_update == slow.first_update
