"""Optimizers whose own code a forecast runs: what they keep, what they need, and what cannot be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from safe_loading import TraceError, Workload, predict_memory
from safe_loading._memory.trace.trace_step import trace_step

STEP = Workload.train(1, 16)


def made(**sizes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"])
def test_the_state_of_schedule_free_is_that_of_the_trainers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    model = made().bfloat16()
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to=[])
    optimizer: Any = Trainer(model, arguments).create_optimizer()
    optimizer.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    expected = sum(tensor.nbytes for tensor in kept)
    forecast = predict_memory(model, Workload.from_training_args(arguments, 16))
    assert forecast.components["optimizer"] == expected
    assert forecast.workload.optimizer == name


@pytest.mark.parametrize(
    ("name", "options"),
    [("sgd", {}), ("sgd", {"momentum": 0.9}), ("sgd", {"momentum": 0.9, "nesterov": True}), ("rmsprop", {})],
)
def test_weights_that_decay_take_a_copy_of_their_gradients(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    said = ",".join(f"{option}={value}" for option, value in options.items())
    arguments = TrainingArguments(str(tmp_path), optim=name, optim_args=said or None, use_cpu=True, report_to=[])
    arguments.weight_decay = 0.1
    step, model = Workload.from_training_args(arguments, 16), made()
    kind = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[name]
    optimizer: Any = kind(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=True, **options)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        taken = peak_above_start(optimizer.step)
    traced = above_start(trace_step(model, step), "optimizer")
    assert traced == pytest.approx(taken, abs=64)
    assert traced >= sum(parameter.nbytes for parameter in model.parameters())
    kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    assert predict_memory(model, step).components.get("optimizer", 0) == pytest.approx(kept, abs=256)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "schedulefree", None)
    with pytest.raises(TraceError, match=r"optimizer='schedule_free_sgd' is run by its own code.*pip install sched"):
        predict_memory(made(), STEP.replace(optimizer="schedule_free_sgd"))


class NeedsRate(torch.optim.SGD):
    """Has no default, as many optimizers outside of torch."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9, foreach=False)


class WithRate(NeedsRate):
    """Gives it one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 1e-3)


def test_an_optimizer_that_needs_more_is_refused_and_its_subclass_is_run() -> None:
    model = made()
    with pytest.raises(TraceError, match=r"NeedsRate cannot be made: .*'lr'\..* pass a subclass") as caught:
        predict_memory(model, STEP.replace(optimizer=NeedsRate))
    assert "inputs=" not in str(caught.value)
    kept = predict_memory(model, STEP.replace(optimizer=WithRate)).components["optimizer"]
    assert kept == sum(parameter.nbytes for parameter in model.parameters())


def test_an_optimizer_that_refuses_a_vector_says_so_itself() -> None:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip("this torch has no Muon")
    with pytest.raises(TraceError, match=r"Muon cannot be made: Muon only supports 2D parameters"):
        predict_memory(made(), STEP.replace(optimizer=muon))


def test_a_step_that_cannot_be_traced_is_told_from_the_model() -> None:
    with pytest.raises(TraceError, match=r"A step of LBFGS cannot be traced: .*closure.*optimizer='none'"):
        predict_memory(made(), STEP.replace(optimizer=torch.optim.LBFGS))
    assert predict_memory(made(), STEP.replace(optimizer="none")).components.get("optimizer", 0) == 0
