"""What an optimizer makes in its first step, put before the steps of a run: each allocation is made and freed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from safe_loading import Workload, predict_memory


class KeepsBuffers(torch.optim.SGD):
    """Keeps tensors that are not in its ``state``, from the first step on."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # without overloads
        if not hasattr(self, "kept"):
            self.kept = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        super().step()


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw_8bit", torch.optim.Adafactor, KeepsBuffers])
def test_a_run_makes_nothing_twice(optimizer: str | type[torch.optim.Optimizer]) -> None:
    sizes: dict[str, Any] = SIZES
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    alive: set[int] = set()
    for key, size in predict_memory(model, Workload.train(1, 16, optimizer=optimizer)).events:
        assert size < 0 or key not in alive
        (alive.discard if size < 0 else alive.add)(key)


class Weights(torch.nn.Module):
    """Matrices that a step reads, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(64, 32)] * 8
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        return torch.stack([weight.sum() * values.sum() for weight in self.weights]).sum()


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    # beside the parameters while torch's own classes step on a GPU, as its allocator counts them
    [
        (torch.optim.AdamW, 1),
        ("adamw_foreach", 1),
        (torch.optim.NAdam, 1),
        (torch.optim.Adamax, 1),
        (torch.optim.RMSprop, 1),
        ("rmsprop", 1),
        (torch.optim.Adagrad, 2),
        ("adagrad", 2),
        (torch.optim.Adadelta, 2),
    ],
)
def test_a_step_takes_whole_lists_as_torch_does_on_a_gpu(optimizer: str | type, copies: int) -> None:
    model, values = Weights(), {"values": torch.empty(1)}
    found = predict_memory(model, Workload.train(1, 1, optimizer=optimizer), inputs=values)
    assert found.peak_at == "optimizer's step"
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert found.components["temporary"] == pytest.approx(copies * weights, rel=0.01)


def kept_by(optimizer: Any) -> int:
    """The bytes that an optimizer of bitsandbytes keeps on a card, without the table of its codes."""
    optimizer.check_overrides()
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, number, place)
    states = [state.items() for state in optimizer.state.values()]
    tensors = [value for items in states for name, value in items if not name.startswith("qmap")]
    return sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))


OF_BITSANDBYTES = ["adamw_bnb_8bit", "lion_8bit", "lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"]


@pytest.mark.parametrize("name", [*OF_BITSANDBYTES, "ademamix", "ademamix_8bit"])
def test_moments_are_those_of_the_trainer(name: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes: dict[str, Any] = {**SIZES, "hidden_size": 64, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, dtype="bfloat16")).bfloat16()
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True, report_to=[])
    kept = kept_by(Trainer(model, arguments).create_optimizer())
    assert predict_memory(model, Workload.train(1, 8, optimizer=name)).components["optimizer"] == kept


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_moments_of_torchao_are_those_of_the_trainer(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    sizes: dict[str, Any] = {**SIZES, "hidden_size": 64, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, dtype="bfloat16")).bfloat16()
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True, report_to=[])
    optimizer: Any = Trainer(model, arguments).create_optimizer()
    moments = [optimizer._new_buffer(parameter, signed) for parameter in model.parameters() for signed in (True, False)]
    parts = [[getattr(each, part) for part in getattr(each, "tensor_attrs", ())] or [each] for each in moments]
    kept = sum(part.nbytes for each in parts for part in each)
    assert {len(each) for each in parts} == {1, 3}
    assert predict_memory(model, Workload.from_training_args(arguments, 8)).components["optimizer"] == kept


class Paged(torch.Tensor):
    """Stands for memory of the driver."""

    nbytes = 0


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "AdEMAMix"])
@pytest.mark.parametrize(("name", "bits"), [("paged_{}_8bit", 8), ("paged_{}_32bit", 32), ("paged_adamw", 32)])
def test_small_moments_of_a_paged_optimizer_stay_on_the_card(
    kind: str, name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pytest.importorskip("bitsandbytes")
    paged = torch.empty(0).as_subclass(Paged)
    monkeypatch.setattr("bitsandbytes.functional.get_paged", lambda *_, **__: paged)
    monkeypatch.setattr("bitsandbytes.functional.fill", lambda *_: None)
    with torch.device("meta"):
        layers = [
            torch.nn.Linear(16, 64),
            torch.nn.Linear(64, 1024),
            torch.nn.Linear(1024, 100),
            torch.nn.Linear(100, 999),
        ]
    model = torch.nn.Sequential(*layers)
    made = engine.optim.AdamW if name == "paged_adamw" else getattr(engine.optim, kind)
    kept = kept_by(made(model.parameters(), optim_bits=bits, is_paged=True))
    assert kept > 2 * 64 * 1024
    workload = Workload.train(1, 1, optimizer=name.format(kind.lower()))
    assert predict_memory(model, workload, inputs={"input": torch.empty(1, 16)}).components["optimizer"] == kept
