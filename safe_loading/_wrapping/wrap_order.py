"""Wrappers in the wrong order: a plain module around the model hides it from everything that is applied later."""

from __future__ import annotations

from collections.abc import Iterator

from peft import PeftMixedModel, PeftModel
from torch import nn
from transformers import PreTrainedModel

from safe_loading.errors import WrapError

from .routing import generating_base

_KNOWN = (PreTrainedModel, PeftModel, PeftMixedModel)
# Attributes by which trainers and peft decide whether they can save memory.
_MEMORY_ATTRIBUTES = (
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
# Wrappers of engines, with the attribute that holds the model.
_ENGINE_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
}


def check_order(model: nn.Module, mixin: str) -> None:
    """Refuse a model that is inside an engine's wrapper, or that contains the real model in a plain wrapper.

    The message shows the two lines to write instead; ``mixin`` is the name of the class to wrap the model in.
    """
    kind = type(model).__name__
    if kind in _ENGINE_WRAPPERS and hasattr(model, _ENGINE_WRAPPERS[kind]):
        raise WrapError(
            f"The model is inside {kind} already, which calls the model by its class: wrap the model first:\n"
            f"    model = wrap_transparent(model.{_ENGINE_WRAPPERS[kind]}, {mixin})\n"
            f"    model = {'torch.compile' if kind == 'OptimizedModule' else kind}(model)"
        )
    peft_base = generating_base(model)
    base, received_by = (model, "wrap_transparent") if peft_base is None else (peft_base, "get_peft_model")
    inside = _hidden_in(base)
    if inside is not None:
        raise WrapError(_message(base, inside, mixin, received_by))


def _hidden_in(module: nn.Module) -> nn.Module | None:
    """Return the model of transformers or peft inside a plain module, if there is exactly one."""
    if isinstance(module, _KNOWN):
        return None
    models = list(_outermost(module))
    return models[0] if len(models) == 1 else None


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _KNOWN):
            yield child
        else:
            yield from _outermost(child)


def _message(wrapper: nn.Module, inside: nn.Module, mixin: str, received_by: str) -> str:
    path = next(path for path, module in wrapper.named_modules() if module is inside)
    hidden = [name for name in _MEMORY_ATTRIBUTES if hasattr(inside, name) and not hasattr(wrapper, name)]
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
    hides = f" It hides {', '.join(hidden)} from them." if hidden else ""
    return (
        f"{received_by} received a {type(wrapper).__name__} with the {type(inside).__name__} inside it ({path!r}). "
        f"Trainers and peft look at the outermost module, so nothing that saves memory is switched on.{hides} Start "
        f"from the {start} and write:\n" + "\n".join(lines)
    )
