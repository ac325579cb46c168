"""One thread trains, with dropout, while a verb runs in another: every gradient is what it is alone, bit for bit.

The two do not race: the thread of the verb waits, at many of the functions that it calls, until the training has made a
step. So steps are made inside everything that the verb replaces for a while, and the same steps in every run.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from models import SIZES, WIDE, Made
from peft import LoraConfig, PeftConfig, VeraConfig
from transformers import LlamaConfig, LlamaForCausalLM

import safe_loading
from safe_loading import (
    Spread,
    Transparent,
    Workload,
    audit_model,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    meta_model,
    plan_device_map,
    predict_memory,
    wrap_transparent,
)

Verb = Callable[[Made, Path], Callable[[], object]]  # what is called is made in the thread of the test
PACKAGE = str(Path(safe_loading.__file__).parent)
STEPS = 16  # that a training makes beside each verb, and alone


class Training:
    """A tiny Llama with dropout, trained step by step in the thread that makes it."""

    def __init__(self, attention: str) -> None:
        torch.manual_seed(11)
        config = config_of(SIZES, attn_implementation=attention)
        self._model = LlamaForCausalLM(config).train()
        self._model.gradient_checkpointing_enable()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        self.gradients: list[list[torch.Tensor]] = []

    def step(self) -> None:
        ids = torch.randint(3, 100, (2, 12))
        self._model(input_ids=ids, labels=ids).loss.backward()
        self.gradients.append([p.grad.clone() for p in self._model.parameters() if p.grad is not None])
        self._optimizer.step()
        self._optimizer.zero_grad()


class Turns:
    """Lets one thread make a step whenever another has called so many functions."""

    def __init__(self) -> None:
        self._step, self._made = threading.Semaphore(0), threading.Semaphore(0)
        self.calls, self.stops = 0, 0
        self.ended = False

    def run(self, verb: Callable[[], object], at: frozenset[int]) -> object:
        """Run a verb in this thread, and wait for a step at those calls."""

        def count(frame: FrameType, event: str, _: object) -> None:
            if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
                return
            self.calls += 1
            if self.calls in at:
                self.stops += 1
                self._step.release()
                self._made.acquire()

        sys.setprofile(count)
        try:
            return verb()
        finally:
            sys.setprofile(None)
            self.ended = True
            self._step.release()

    def make(self, step: Callable[[], object]) -> None:
        """Make a step in this thread whenever one is due, until the verb has ended."""
        try:
            while self._step.acquire() and not self.ended:
                step()
                self._made.release()
        finally:
            self._made.release(2 * STEPS)  # the verb waits no more, should a step have failed


@functools.cache
def gradients_alone(attention: str) -> list[list[torch.Tensor]]:
    training = Training(attention)
    for _ in range(STEPS):
        training.step()
    return training.gradients


class Code(Transparent):
    """The mixin of a user."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def config_of(sizes: dict[str, Any], **options: Any) -> LlamaConfig:
    return LlamaConfig(**sizes, **{"architectures": ["LlamaForCausalLM"], "attention_dropout": 0.1, **options})


def forecast(attention: str = "sdpa", adapter: PeftConfig | None = None, **options: Any) -> Verb:
    workload = Workload.train(2, 16, gradient_checkpointing=True, adapter=adapter)
    config = config_of(WIDE, attn_implementation=attention)
    return lambda *_: lambda: predict_memory(config, workload, capability=(8, 0), **options)


def planned(*_: object) -> Callable[[], object]:
    config, limits = config_of(WIDE), {0: "24MiB", 1: "24MiB"}
    return lambda: plan_device_map(config, limits, workload=Workload.generate(1, 16))


def audited(*_: object) -> Callable[[], object]:
    model = LlamaForCausalLM(config_of(SIZES))
    return lambda: audit_model(model, Workload.train(1, 8))


def loaded(made: Made, _: Path) -> Callable[[], object]:
    base, adapter = made.llama(), made.adapter(made.llama())
    return lambda: load_peft_on_rank(adapter, base, device="cpu")


def loaded_later(made: Made, tmp_path: Path) -> Callable[[], object]:
    model: Any = loaded(made, tmp_path)()
    adapter = made.adapter(made.llama(), seed=1)
    return lambda: load_adapter_on_rank(model, adapter, "later", device="cpu")


def wrapped(made: Made, tmp_path: Path) -> Callable[[], object]:
    model: Any = loaded(made, tmp_path)()
    return lambda: wrap_transparent(model, Code)


def merged(made: Made, tmp_path: Path) -> Callable[[], object]:
    base, adapter = made.llama(), made.adapter(made.llama())
    output = tmp_path / f"merged {len(list(tmp_path.iterdir()))}"
    return lambda: merge_lora_checkpoint(base, adapter, output)


def merged_inplace(made: Made, tmp_path: Path) -> Callable[[], object]:
    model: Any = loaded(made, tmp_path)()
    return lambda: merge_lora_inplace(model)


VERBS: dict[str, Verb] = {
    "meta_model": lambda *_: lambda: meta_model(config_of(SIZES), dtype=torch.bfloat16),
    "predict_memory": forecast(),
    "predict_memory, eager": forecast("eager"),
    "predict_memory, flash": forecast("flash_attention_2"),
    "predict_memory, LoRA": forecast(adapter=LoraConfig(target_modules="all-linear", lora_dropout=0.2)),
    "predict_memory, VeRA": forecast(adapter=VeraConfig(r=4, target_modules=["q_proj"])),
    "predict_memory, FSDP2": forecast(spread=Spread.fsdp2(2)),
    "predict_memory, FSDP1": forecast(spread=Spread.fsdp1(2)),
    "predict_memory, stage 3": forecast(spread=Spread.zero(2, stage=3)),
    "plan_device_map": planned,
    "audit_model": audited,
    "load_peft_on_rank": loaded,
    "load_adapter_on_rank": loaded_later,
    "wrap_transparent": wrapped,
    "merge_lora_checkpoint": merged,
    "merge_lora_inplace": merged_inplace,
}


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "sdpa") for name in VERBS), ("predict_memory", "eager"), ("audit_model", "eager")]
)
def test_a_training_beside_a_verb_has_the_gradients_that_it_has_alone(
    name: str, attention: str, made: Made, tmp_path: Path
) -> None:
    expected = gradients_alone(attention)
    verb, turns = VERBS[name](made, tmp_path), Turns()
    state = torch.get_rng_state()
    turns.run(verb, frozenset())
    assert torch.equal(torch.get_rng_state(), state)
    verb, beside = VERBS[name](made, tmp_path), Turns()
    training = Training(attention)
    at = frozenset(range(1, turns.calls, -(-turns.calls // STEPS)))
    filters = list(warnings.filters)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(beside.run, verb, at)
        beside.make(training.step)
        running.result()
    assert beside.stops >= min(STEPS // 2, turns.calls // 2)
    for number, (gradients, alone_) in enumerate(zip(training.gradients, expected, strict=False)):
        assert all(map(torch.equal, gradients, alone_)), f"step {number} differs"
    assert warnings.filters == filters
