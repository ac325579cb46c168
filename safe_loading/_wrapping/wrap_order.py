"""Wrappers in the wrong place: a plain module around the model hides it from all that comes after."""

from __future__ import annotations

from collections.abc import Iterator

from peft import PeftMixedModel, PeftModel
from torch import nn
from transformers import PreTrainedModel

from safe_loading.errors import WrapError

_KNOWN = (PreTrainedModel, PeftModel, PeftMixedModel)
# What trainers and peft ask a model for, to choose the road that costs less memory.
_ASKED_FOR = (
    "config",
    "hf_device_map",
    "is_loaded_in_8bit",
    "is_loaded_in_4bit",
    "gradient_checkpointing_enable",
    "enable_input_require_grads",
    "_no_split_modules",
    "get_input_embeddings",
    "save_pretrained",
    "generate",
)
_ENGINES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
}


def check_order(model: nn.Module, mixin: str) -> None:
    """Refuse a model that is not the outermost thing, or that lies inside a plain wrapper.

    Args:
        model: What is to be wrapped.
        mixin: The name of the class to wrap it in, for the text.

    Raises:
        WrapError: With the two lines that are right.
    """
    kind = type(model).__name__
    if kind in _ENGINES and hasattr(model, _ENGINES[kind]):
        raise WrapError(
            f"The model is inside {kind} already, which calls it by its class: wrap it first, then hand it on:\n"
            f"    model = wrap_transparent(model.{_ENGINES[kind]}, {mixin})\n"
            f"    model = {'torch.compile' if kind == 'OptimizedModule' else kind}(model)"
        )
    if isinstance(model, (PeftModel, PeftMixedModel)):
        base = model.get_base_model() if isinstance(model, PeftModel) else model.base_model.model
        inside = _hidden_in(base)
        if inside is not None:
            raise WrapError(_text(base, inside, mixin, "get_peft_model was given"))
        return
    inside = _hidden_in(model)
    if inside is not None:
        raise WrapError(_text(model, inside, mixin, "wrap_transparent was given"))


def _hidden_in(module: nn.Module) -> nn.Module | None:
    """Return the one model of transformers or peft inside a plain module, when there is one."""
    if isinstance(module, _KNOWN):
        return None
    found = list(_outermost(module))
    return found[0] if len(found) == 1 else None


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _KNOWN):
            yield child
        else:
            yield from _outermost(child)


def _text(wrapper: nn.Module, inside: nn.Module, mixin: str, given: str) -> str:
    path = next(path for path, module in wrapper.named_modules() if module is inside)
    hidden = [name for name in _ASKED_FOR if hasattr(inside, name) and not hasattr(wrapper, name)]
    lines, start = [], "base"
    if isinstance(inside, (PeftModel, PeftMixedModel)):
        lines.append(f"    model = wrapper.{path}")
        start = "PeftModel"
    else:
        quantized = getattr(inside, "is_quantized", False)
        base = "prepare_model_for_kbit_training(base)" if quantized else "base"
        lines.append(f"    model = get_peft_model({base}, config)")
    lines.append(f"    model = wrap_transparent(model, {mixin})")
    heads = [
        f"    model = attach_head(model, {name!r}, wrapper.{name})  # before it is wrapped"
        for name, child in wrapper.named_children()
        if not any(module is inside for module in child.modules()) and any(True for _ in child.parameters())
    ]
    lines[1:1] = heads
    lost = f" It hides {', '.join(hidden)} from them." if hidden else ""
    return (
        f"{given} a {type(wrapper).__name__} with the {type(inside).__name__} inside it ({path!r}). Trainers and peft "
        f"look at the outermost module, so nothing that saves memory is switched on.{lost} Start from the {start} "
        f"and write:\n" + "\n".join(lines)
    )
