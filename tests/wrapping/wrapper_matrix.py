"""Ways to put code around a PeftModel against what trainers and engines need of it; the table in docs/wrapping.md.

``python tests/wrapping/wrapper_matrix.py`` prints the table anew.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel, PeftModelForCausalLM
from wrapped_models import TOKENS, Count, Plain, peft_llama

from safe_loading import wrap_transparent

CALLS: list[int] = []


class Delegating(Plain):
    """A plain module that passes on what it does not know."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(1)
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class Counting(Plain):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(1)
        return self.model(*args, **kwargs)


class Noting(Count):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(1)
        return super().__call__(*args, **kwargs)


class ForwardSwapped(PeftModelForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(1)
        return super().forward(*args, **kwargs)


def instance_forward(model: Any) -> Any:
    original = model.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(1)
        return original(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return model


def class_forward(model: Any) -> Any:
    model.__class__ = ForwardSwapped
    return model


WAYS: dict[str, Callable[[Any], Any]] = {
    "`wrap_transparent`": lambda model: wrap_transparent(model, Noting),
    "forward of the object": instance_forward,
    "forward of the class": class_forward,
    "module that delegates": Delegating,
    "plain module": Counting,
}


def bare() -> Any:
    model = peft_llama().eval()
    base = model.get_base_model()
    base.is_loaded_in_8bit, base.hf_device_map = True, {"": "cpu"}
    return model


def _runs(call: Callable[[], Any]) -> bool:
    CALLS.clear()
    call()
    return bool(CALLS)


def _asked(model: Any) -> bool:
    names = ("config", "hf_device_map", "is_loaded_in_8bit", "_no_split_modules", "gradient_checkpointing_enable")
    return all(hasattr(model, name) for name in names)


def _saved(model: Any) -> bool:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        model.save_pretrained(one)
        bare().save_pretrained(two)
        name = "adapter_model.safetensors"
        return (Path(one) / name).read_bytes() == (Path(two) / name).read_bytes()


def _copied(model: Any) -> bool:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    return not twin(input_ids=TOKENS).logits.any() and _runs(lambda: twin(input_ids=TOKENS))


def _pickled(model: Any) -> bool:
    again = pickle.loads(pickle.dumps(model))
    return _runs(lambda: again(input_ids=TOKENS)) and type(again) is type(model)


def _compiled(model: Any) -> bool:
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager", fullgraph=True)(input_ids=TOKENS).logits
    return torch.equal(found, bare()(input_ids=TOKENS).logits)


def _replaced(model: Any) -> bool:
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        return PeftModelForCausalLM.forward(self, *args, **kwargs)

    model.forward = types.MethodType(fused, model)
    return _runs(lambda: model(input_ids=TOKENS))


def _columns(model: Any) -> bool:
    return "input_ids" in inspect.signature(model.forward).parameters


PROPERTIES: dict[str, Callable[[Any], bool]] = {
    "`isinstance(model, PeftModel)`": lambda model: isinstance(model, PeftModel) and is_peft_model(model),
    "`config`, `hf_device_map`, `is_loaded_in_8bit`, ...": _asked,
    "`signature(type(model).forward)`": lambda model: (
        inspect.signature(type(model).forward) == inspect.signature(PeftModelForCausalLM.forward)
    ),
    "`signature(model.forward)` names its inputs": _columns,
    "class name in checkpoints": lambda model: type(model).__name__ == "PeftModelForCausalLM",
    "`state_dict` keys": lambda model: list(model.state_dict()) == list(bare().state_dict()),
    "`save_pretrained` writes the adapter": _saved,
    "the code runs in a call": lambda model: _runs(lambda: model(input_ids=TOKENS)),
    "the code runs in `generate`": lambda model: _runs(
        lambda: model.generate(input_ids=TOKENS, max_new_tokens=1, pad_token_id=0)
    ),
    "the code runs when `model.forward` is replaced": _replaced,
    "a deep copy runs on its own weights": _copied,
    "pickle": _pickled,
    "`torch.compile`, no graph break": _compiled,
}


def matrix() -> dict[str, dict[str, bool]]:
    """{property: {way: whether it holds}}."""
    found: dict[str, dict[str, bool]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, holds in PROPERTIES.items():
            found[name] = {}
            for way, wrap in WAYS.items():
                model = wrap(bare())
                try:
                    found[name][way] = bool(holds(model))
                except Exception:
                    found[name][way] = False
    return found


def table(found: dict[str, dict[str, bool]]) -> str:
    """The table as Markdown."""
    lines = [f"| | {' | '.join(WAYS)} |", f"| --- |{' --- |' * len(WAYS)}"]
    lines += [
        f"| {name} | {' | '.join('yes' if row[way] else '**no**' for way in WAYS)} |" for name, row in found.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table(matrix()) + "\n")
