"""Ways to put code around a PeftModel, against what trainers and engines need of it: the table in docs/wrapping.md.

A new way is an entry of `WAYS`: a function that takes a model and returns the wrapped one. Its code must append to
`CALLS` when it runs. A new property is an entry of `PROPERTIES`: a function that takes a wrapped model and returns
whether the property holds; raising counts as no. Each property of each way gets a model of its own.

``python tests/wrapping/wrapper_matrix.py`` prints the table anew; paste it into docs/wrapping.md, which
``test_wrapper_matrix.py`` compares. ``wrap_transparent`` must have every property.
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
from wrapped_models import TOKENS, Count, Plain, llama, peft_llama

from safe_loading import wrap_transparent

CALLS: list[int] = []  # one entry for each call of the code that was put around the model


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
    """A plain module, as people write it first."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(1)
        return self.model(*args, **kwargs)


class Noting(Count):
    """The code of `wrap_transparent`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(1)
        return super().__call__(*args, **kwargs)


class ForwardSwapped(PeftModelForCausalLM):
    """The code in a subclass that overrides forward."""

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
    """A PeftModel that claims to be quantized and dispatched; one layer, since `torch.compile` takes most time."""
    model = peft_llama(llama(num_hidden_layers=1)).eval()
    base = model.get_base_model()
    base.is_loaded_in_8bit, base.hf_device_map = True, {"": "cpu"}
    return model


def _runs(call: Callable[[], Any]) -> bool:
    CALLS.clear()
    call()
    return bool(CALLS)


def _has_memory_attributes(model: Any) -> bool:
    names = ("config", "hf_device_map", "is_loaded_in_8bit", "_no_split_modules", "gradient_checkpointing_enable")
    return all(hasattr(model, name) for name in names)


def _saves_the_adapter(model: Any) -> bool:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        model.save_pretrained(one)
        bare().save_pretrained(two)
        name = "adapter_model.safetensors"
        return (Path(one) / name).read_bytes() == (Path(two) / name).read_bytes()


def _copies(model: Any) -> bool:
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    return not duplicate(input_ids=TOKENS).logits.any() and _runs(lambda: duplicate(input_ids=TOKENS))


def _pickles(model: Any) -> bool:
    again = pickle.loads(pickle.dumps(model))
    return _runs(lambda: again(input_ids=TOKENS)) and type(again) is type(model)


def _compiles(model: Any) -> bool:
    torch._dynamo.reset()
    logits = torch.compile(model, backend="eager", fullgraph=True)(input_ids=TOKENS).logits
    return torch.equal(logits, bare()(input_ids=TOKENS).logits)


def _survives_replaced_forward(model: Any) -> bool:
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        return PeftModelForCausalLM.forward(self, *args, **kwargs)

    model.forward = types.MethodType(fused, model)
    return _runs(lambda: model(input_ids=TOKENS))


def _names_its_inputs(model: Any) -> bool:
    return "input_ids" in inspect.signature(model.forward).parameters


PROPERTIES: dict[str, Callable[[Any], bool]] = {
    "`isinstance(model, PeftModel)`": lambda model: isinstance(model, PeftModel) and is_peft_model(model),
    "`config`, `hf_device_map`, `is_loaded_in_8bit`, ...": _has_memory_attributes,
    "`signature(type(model).forward)`": lambda model: (
        inspect.signature(type(model).forward) == inspect.signature(PeftModelForCausalLM.forward)
    ),
    "`signature(model.forward)` names its inputs": _names_its_inputs,
    "class name in checkpoints": lambda model: type(model).__name__ == "PeftModelForCausalLM",
    "`state_dict` keys": lambda model: list(model.state_dict()) == list(bare().state_dict()),
    "`save_pretrained` writes the adapter": _saves_the_adapter,
    "the code runs in a call": lambda model: _runs(lambda: model(input_ids=TOKENS)),
    "the code runs in `generate`": lambda model: _runs(
        lambda: model.generate(input_ids=TOKENS, max_new_tokens=1, pad_token_id=0)
    ),
    "the code runs when `model.forward` is replaced": _survives_replaced_forward,
    "a deep copy runs on its own weights": _copies,
    "pickle": _pickles,
    "`torch.compile`, no graph break": _compiles,
}


def matrix() -> dict[str, dict[str, bool]]:
    """{property: {way: whether it holds}}."""
    results: dict[str, dict[str, bool]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, holds in PROPERTIES.items():
            results[name] = {}
            for way, wrap in WAYS.items():
                model = wrap(bare())
                try:
                    results[name][way] = bool(holds(model))
                except Exception:
                    results[name][way] = False
    return results


def table(results: dict[str, dict[str, bool]]) -> str:
    """The table as Markdown."""
    lines = [f"| | {' | '.join(WAYS)} |", f"| --- |{' --- |' * len(WAYS)}"]
    lines += [
        f"| {name} | {' | '.join('yes' if row[way] else '**no**' for way in WAYS)} |" for name, row in results.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table(matrix()) + "\n")
