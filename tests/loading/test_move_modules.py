"""What peft builds for the check before a load goes to the base: the model is the one that peft builds around it."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from loaded_models import logits
from models import KINDS, Made, save_adapter
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from tiny_models import saved, skip_unless_buildable

from safe_loading import load_peft_on_rank
from safe_loading._loading import attach, load, move_modules

# Those of which peft builds nothing but layers with two factors, all of them in the file.
MOVED = {
    "all linear",
    "rank and alpha patterns",
    "rslora",
    "excluded",
    "some layers",
    "orthogonal start",
    "trained bias",  # of which a Llama has none
}
CLASSES = ("GPT2LMHeadModel", "Gemma2ForCausalLM", "OPTForCausalLM", "BertLMHeadModel", "BloomForCausalLM")


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the modules were moved, for each load that tried."""
    found: list[bool] = []

    def record(*arguments: Any) -> bool:
        found.append(move_modules.move_modules(*arguments))
        return found[-1]

    monkeypatch.setattr(attach, "move_modules", record)
    return found


@pytest.fixture
def injections(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """The models that peft's injection was called for."""
    found: list[torch.nn.Module] = []
    inject = BaseTuner.inject_adapter

    def record(self: Any, model: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        found.append(model)
        inject(self, model, *arguments, **options)

    monkeypatch.setattr(BaseTuner, "inject_adapter", record)
    return found


def _plain(value: Any) -> Any:
    """What can be compared of an attribute in two models."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return sorted(map(repr, map(_plain, value))) if isinstance(value, set) else [_plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.requires_grad, value.device
    if isinstance(value, torch.nn.Module):
        return type(value)
    if isinstance(value, MethodType):
        return value.__func__, type(value.__self__)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return value if isinstance(value, (bool, int, float, str, type(None), torch.dtype)) else type(value)


def _facts(model: PeftModel) -> dict[str, Any]:
    """Every attribute of every module, but for the report and what identifies objects."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = {name: _plain(value) for name, value in vars(module).items() if name != "load_report"}
        found[path] = type(module), own
    return found


def _both(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[PeftModel, PeftModel]:
    """The model as it is loaded, and as it is when peft builds its modules again around the loaded base."""
    moved = load_peft_on_rank(base, adapter, **options)
    with monkeypatch.context() as patch:
        patch.setattr(attach, "move_modules", lambda *_: False)
        return moved, load_peft_on_rank(base, adapter, **options)


@pytest.mark.parametrize("kind", [*KINDS, "trainable"])
def test_the_model_is_what_peft_builds(
    made: Made, monkeypatch: pytest.MonkeyPatch, moves: list[bool], injections: list[torch.nn.Module], kind: str
) -> None:
    base = made.llama()
    adapter = made.adapter(base, **KINDS.get(kind, {}))
    injections.clear()
    ours, twice = _both(base, adapter, monkeypatch, is_trainable=kind == "trainable")
    assert any(moves) == (kind in MOVED or kind == "trainable")
    if any(moves):
        assert len(injections) == 3  # one for ours; of the other, one for the check and one for the base
    assert _facts(ours) == _facts(twice)
    assert torch.equal(logits(ours.eval()), logits(twice.eval()))


@pytest.mark.parametrize("name", CLASSES)
def test_other_classes_are_what_peft_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: list[bool], name: str
) -> None:
    skip_unless_buildable(name)
    saved(name, tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", target_modules="all-linear")
    ours, twice = _both(tmp_path / "base", adapter, monkeypatch)
    assert moves == [True]
    assert _facts(ours) == _facts(twice)
    states = ours.state_dict(), twice.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


def test_nothing_of_the_model_on_meta_is_left(made: Made, moves: list[bool]) -> None:
    base = made.llama(torch.bfloat16)
    model = load_peft_on_rank(base, made.adapter(base))
    loaded = model.get_base_model()
    assert moves == [True]
    assert model.base_model_prepare_inputs_for_generation.__self__ is loaded
    assert model.base_model.model is loaded
    assert loaded.peft_config is model.peft_config
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.generate(input_ids=torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


@pytest.mark.parametrize("what", ["a class", "a marker", "a dtype", "more from peft"])
def test_another_base_is_left_to_peft(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    moves: list[bool],
    injections: list[torch.nn.Module],
    what: str,
) -> None:
    """What is not as in the model on meta may make peft build something else, so that it is asked again."""
    base = made.llama(torch.bfloat16)
    adapter = made.adapter(base)

    class Another(torch.nn.Linear):
        pass

    def change(model: Any) -> None:
        layer = model.model.layers[1].self_attn.q_proj
        if what == "a class":
            layer.__class__ = Another
        elif what == "a marker":
            layer.compute_kind = "int8"
        elif what == "a dtype":
            layer.to(torch.float32)

    def build(self: Any, model: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        inject(self, model, *arguments, **options)
        if what == "more from peft":
            model.model.norm.register_forward_hook(lambda *_: None)

    inject = BaseTuner.inject_adapter
    monkeypatch.setattr(BaseTuner, "inject_adapter", build)
    load_base = load.load_base

    def load_changed(*arguments: Any, **options: Any) -> Any:
        model, *others = load_base(*arguments, **options)
        change(model)
        return model, *others

    monkeypatch.setattr(load, "load_base", load_changed)
    model = load_peft_on_rank(base, adapter)
    assert moves == [False]
    assert [each for each in injections if each is model.get_base_model()]
