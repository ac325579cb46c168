"""The advice of errors about wrapping and heads, taken: what a message names is done, and the code runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel
from wrapped_models import TOKENS, Count, Plain, Second, llama, lora, peft_llama

from safe_loading import (
    ArgumentError,
    Transparent,
    WrapError,
    attach_head,
    prepare_and_wrap,
    unwrap_transparent,
    wrap_transparent,
)


class Scaled(Transparent):
    """What a mixin is told to be: its code in __call__, its state by keywords, no layers of its own."""

    factor: float

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        out.logits = out.logits * self.factor
        return out


class WithInit(Scaled):
    def __init__(self, factor: float) -> None:
        self.factor = factor


class WithForward(Transparent):
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


class ForwardAndCall(Count):
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


class Nothing(Transparent):
    pass


class WithModule(Scaled, nn.Module):
    pass


class Hiding(Count):
    config = None


class Unhiding(Count):
    settings = None


class Case(NamedTuple):
    """A call that is refused, the advice, and the call that takes it."""

    refused: Callable[[Any], Any]
    advice: str
    taken: Callable[[Any], Any]


def scaled(model: Any) -> Any:
    return wrap_transparent(model, Scaled, factor=2.0)


def counted(model: Any) -> Any:
    return wrap_transparent(model, Count)


def any_of(wrong: object) -> Any:
    """Return what a type checker would refuse."""
    return wrong


def linear() -> nn.Linear:
    return nn.Linear(32, 1)


WRAPS: dict[str, Case] = {
    "init": Case(lambda m: wrap_transparent(m, WithInit), "pass the state as keywords of wrap_transparent", scaled),
    "forward": Case(lambda m: wrap_transparent(m, ForwardAndCall), "write __call__", counted),
    "forward alone": Case(lambda m: wrap_transparent(m, WithForward), "write it there.*rename it to __call__", counted),
    "nothing": Case(lambda m: wrap_transparent(m, Nothing), "has no __call__, .*: write it there", counted),
    "a module": Case(
        lambda m: wrap_transparent(m, any_of(Plain)),
        r"write `class Plain\(Transparent\)` with your code in __call__",
        scaled,
    ),
    "two bases": Case(
        lambda m: wrap_transparent(m, WithModule),
        r"derive it from Transparent alone, .* Attach layers of your own with attach_head\.",
        lambda m: scaled(attach_head(m, "value_head", linear())),
    ),
    "twice": Case(
        lambda m: counted(counted(m)), "call unwrap_transparent first", lambda m: counted(unwrap_transparent(m))
    ),
    "a name of the model": Case(
        lambda m: wrap_transparent(m, Hiding), "choose another name", lambda m: wrap_transparent(m, Unhiding)
    ),
    "state of a name of the model": Case(
        lambda m: wrap_transparent(m, Second, config=[]),
        "choose another name",
        lambda m: wrap_transparent(m, Second, order=[]),
    ),
    "state of a name of the mixin": Case(
        lambda m: wrap_transparent(m, type("Sized", (Count,), {"size": property(lambda self: 1)}), size=1),
        "choose another name",
        lambda m: wrap_transparent(m, type("Sized", (Count,), {"size": property(lambda self: 1)}), width=1),
    ),
    "a module as state": Case(
        lambda m: wrap_transparent(m, Count, value_head=linear()),
        r"Call attach_head\(model, 'value_head', \.\.\.\) instead",
        lambda m: counted(attach_head(m, "value_head", linear())),
    ),
    "a wrapper of torch": Case(
        lambda m: counted(nn.DataParallel(m)),
        r"wrap the model first:\n    model = wrap_transparent\(model.module, Count\)\n",
        lambda m: nn.DataParallel(wrap_transparent(nn.DataParallel(m).module, Count)).module,
    ),
    "no module": Case(lambda m: counted(m.state_dict()), r"pass a PeftModel or another torch\.nn\.Module", counted),
    "no head": Case(
        lambda m: attach_head(m, "value_head", any_of(torch.ones(2))),
        r"pass a torch\.nn\.Module",
        lambda m: counted(attach_head(m, "value_head", linear())),
    ),
    "head and name exchanged": Case(
        lambda m: attach_head(m, any_of(3), linear()),
        "pass a model and the head's name",
        lambda m: counted(attach_head(m, "value_head", linear())),
    ),
    "a dtype by name": Case(
        lambda m: attach_head(m, "value_head", linear(), dtype=any_of("float32")),
        r"pass a torch\.dtype, such as torch\.float32",
        lambda m: counted(attach_head(m, "value_head", linear(), dtype=torch.float32)),
    ),
    "a head of a name that is there": Case(
        lambda m: attach_head(m, "lm_head", linear()),
        "choose another name",
        lambda m: counted(attach_head(m, "value_head", linear())),
    ),
    "a head of the end of a name": Case(
        lambda m: attach_head(m, "head", linear()),
        "choose another name",
        lambda m: counted(attach_head(m, "value_head", linear())),
    ),
    "a head of the end of other names": Case(
        lambda m: attach_head(m, "proj", linear()),
        "choose another name: 'proj_head' is free",
        lambda m: counted(attach_head(m, "proj_head", linear())),
    ),
    "a list of heads": Case(
        lambda m: attach_head(m, "value_head", nn.ModuleList([linear()])),
        "put it into a module with a forward",
        lambda m: counted(attach_head(m, "value_head", nn.Sequential(linear()))),
    ),
}


@pytest.mark.parametrize("kind", WRAPS)
def test_a_model_is_wrapped_once_the_advice_is_taken(kind: str) -> None:
    case = WRAPS[kind]
    model = peft_llama()
    with torch.no_grad():
        plain = model(input_ids=TOKENS).logits
    with pytest.raises((ArgumentError, WrapError), match=case.advice):
        case.refused(model)
    with torch.no_grad():
        wrapped = case.taken(model)
        out = wrapped(input_ids=TOKENS).logits
    assert wrapped is model
    assert torch.equal(out, plain * getattr(wrapped, "factor", 1.0))
    assert getattr(wrapped, "calls", 1) == 1
    if hasattr(wrapped, "value_head"):
        assert any("value_head" in name for name, p in wrapped.named_parameters() if p.requires_grad)


def test_the_adapter_of_a_head_is_named() -> None:
    model = peft_llama()
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ArgumentError, match="name the one of the head with adapter_name="):
        attach_head(model, "value_head", linear())
    attach_head(model, "value_head", linear(), adapter_name="second")
    assert model.peft_config["second"].modules_to_save == ["value_head"]


def test_a_head_whose_values_are_in_the_folder_is_attached_either_way(tmp_path: Path, tiny_llama: Path) -> None:
    base: Any = LlamaForCausalLM
    saved = attach_head(peft_llama(base.from_pretrained(tiny_llama)), "value_head", linear())
    saved.save_pretrained(tmp_path)
    silent: Any = PeftModel.from_pretrained(base.from_pretrained(tiny_llama), tmp_path)
    with pytest.raises(
        WrapError, match=r"Pass source=, .*; or attach it to the base before PeftModel\.from_pretrained"
    ):
        attach_head(silent, "value_head", linear())
    attach_head(silent, "value_head", linear(), source=tmp_path)
    attached = attach_head(base.from_pretrained(tiny_llama), "value_head", linear())
    early: Any = PeftModel.from_pretrained(attached, tmp_path)
    for model in (silent, early):
        assert torch.equal(model.value_head.weight, saved.value_head.weight)


class NoCheckpointing(PreTrainedModel):
    config_class = type(AutoConfig.for_model("llama"))
    supports_gradient_checkpointing = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.q_proj = nn.Linear(4, 4)
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x)


def test_what_is_prepared_and_wrapped_once_the_advice_is_taken() -> None:
    with pytest.raises(ArgumentError, match=r"has an adapter already: call wrap_transparent\(model, \.\.\.\)"):
        prepare_and_wrap(peft_llama(), lora(), Count)
    counted(peft_llama())
    heads = {"value_head": linear()}
    with pytest.raises(ArgumentError, match=r"pass modules by name: \{'value_head': torch\.nn\.Linear\(64, 1\)\}"):
        prepare_and_wrap(llama(), lora(), Count, heads=[linear()])  # type: ignore[arg-type]
    with pytest.raises(WrapError, match="is the name of a head and of a state: rename one of them"):
        prepare_and_wrap(llama(), lora(), Count, heads=heads, value_head=3)
    assert prepare_and_wrap(llama(), lora(), Count, heads=heads, value=3).wrap_report.ok
    config = AutoConfig.for_model("llama")
    task = lora(target_modules=["q_proj"], task_type=None)
    with pytest.raises(ArgumentError, match=r"has no gradient checkpointing: pass gradient_checkpointing=False\."):
        prepare_and_wrap(NoCheckpointing(config), task, Count)
    prepare_and_wrap(NoCheckpointing(config), task, Count, gradient_checkpointing=False)(torch.ones(1, 4))
