"""Wrappers in the wrong order: a plain module around the model hides it from everything that is applied later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from peft import PeftMixedModel, PeftModel
from torch import nn
from transformers import PreTrainedModel

from safe_loading.errors import WrapError

from .heads import free_name
from .routing import generating_base

_KNOWN = (PreTrainedModel, PeftModel, PeftMixedModel)
_LIBRARIES_OF_WRAPPERS = ("sentence_transformers",)  # whose own trainers take such a module for the model
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


@dataclass(frozen=True, eq=False)
class HidingWrapper:
    """A plain module, or several around one another, that hides a model from the engines.

    Attributes:
        module: The outermost of them.
        path: Where it is in the model that was looked through; empty for that model itself.
        classes: Their names, outermost first.
        inside: The model of transformers or peft that they hide; of several the first.
        inside_path: Where that is in `module`.
        several: Whether `module` holds more than one such model.
        above: The model of peft that received `module` for a base; None if trainers receive it.
    """

    module: nn.Module
    path: str
    classes: tuple[str, ...]
    inside: nn.Module
    inside_path: str
    several: bool
    above: nn.Module | None

    @property
    def received_by(self) -> str:
        """The caller that took the wrapper for a model."""
        return "the trainer" if self.above is None else "get_peft_model"

    def right_order(self, mixin: str) -> tuple[str, list[str]]:
        """Return the starting point, ``"base"`` or ``"PeftModel"``, and the lines to write instead."""
        adapted = isinstance(self.inside, (PeftModel, PeftMixedModel))
        quantized = getattr(self.inside, "is_quantized", False)
        if adapted or (self.above is None and not quantized):  # such a base may be trained, or frozen, as it is
            lines = [f"    model = wrapper{accessed(self.inside_path)}"]
        else:
            base = "prepare_model_for_kbit_training(base)" if quantized else "base"
            lines = [f"    model = get_peft_model({base}, config)"]
        lines += [f"    {self._attached(name)}  # before it is wrapped" for name in self.own_parts()]
        return "PeftModel" if adapted else "base", [*lines, f"    model = wrap_transparent(model, {mixin})"]

    def _attached(self, name: str) -> str:
        """Return the line that attaches a part of the wrapper: of a list or dict each of its entries."""
        part, free = getattr(self.module, name), free_name(self.inside, name)
        if isinstance(part, (nn.ModuleList, nn.ParameterList)):
            entries = f"enumerate(wrapper{accessed(name)})"
        elif isinstance(part, (nn.ModuleDict, nn.ParameterDict)):
            entries = f"wrapper{accessed(name)}.items()"
        else:
            return f"model = attach_head(model, {free!r}, wrapper{accessed(name)})"
        return f'for key, head in {entries}: model = attach_head(model, f"{free}_{{key}}", head)'

    def own_parts(self) -> Iterator[str]:
        """Yield the names of the parameters and modules that the wrapper has beside the model."""
        yield from (name for name, parameter in self.module._parameters.items() if parameter is not None)
        for name, child in self.module.named_children():
            around = any(module is self.inside for module in child.modules())
            within = any(module is child for module in self.inside.modules())
            if not (around or within or isinstance(child, _KNOWN)) and any(True for _ in child.parameters()):
                yield name


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
    if type(model).__module__.partition(".")[0] in _LIBRARIES_OF_WRAPPERS:
        return  # it calls the forward of the model inside, past any code around that
    wrapper = next(find_wrappers(model), None)
    if wrapper is not None and not wrapper.several:
        raise WrapError(_message(wrapper, mixin))


def inside_engines(model: nn.Module) -> tuple[str, nn.Module]:
    """Return path and module inside engines' wrappers: ``DistributedDataParallel``, ``torch.compile`` and the like."""
    path: list[str] = []
    while True:
        attribute = _ENGINE_WRAPPERS.get(type(model).__name__)
        inside = None if attribute is None else getattr(model, attribute, None)
        if attribute is None or not isinstance(inside, nn.Module):
            return ".".join(path), model
        path.append(attribute)
        model = inside


def find_wrappers(model: nn.Module) -> Iterator[HidingWrapper]:
    """Yield the plain modules that hide a model of transformers or peft, outermost first, at any depth.

    What engines put around the whole model is no such module: they know where the model is.
    """
    at, above = inside_engines(model)[1], None
    while True:
        base = generating_base(at)
        if base is not None:
            at, above = base, at
            continue
        models = [] if isinstance(at, _KNOWN) else _apart(_outermost(at))
        if not models:
            return
        inside = next((m for m in models if any(p.requires_grad for p in m.parameters())), models[0])
        path, inside_path = _path(model, at), _path(at, inside)
        yield HidingWrapper(at, path, _classes(at, inside_path), inside, inside_path, len(models) > 1, above)
        at = inside


def _path(model: nn.Module, inside: nn.Module) -> str:
    path: str = next(path for path, module in model.named_modules() if module is inside)
    return path


def _classes(wrapper: nn.Module, inside_path: str) -> tuple[str, ...]:
    """Return the names of the classes on the way to the model, without containers."""
    parts = inside_path.split(".")
    on_the_way = [wrapper.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    names = [type(module).__name__ for module in on_the_way]
    return tuple(name for name in names if name not in ("ModuleList", "ModuleDict"))


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _KNOWN):
            yield child
        else:
            yield from _outermost(child)


def _apart(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the models that are in none of the others, each once: an adapter's base may have a second name."""
    each = list(dict.fromkeys(models))
    within = {module for model in each for module in model.modules() if module is not model}
    return [model for model in each if model not in within]


def accessed(path: str) -> str:
    """Return a path as it is written behind the name of a module: ``[0].model`` for ``0.model``."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))


def _message(wrapper: HidingWrapper, mixin: str) -> str:
    module, inside = wrapper.module, wrapper.inside
    hidden = [name for name in _MEMORY_ATTRIBUTES if hasattr(inside, name) and not hasattr(module, name)]
    start, lines = wrapper.right_order(mixin)
    hides = f" It hides {', '.join(hidden)} from them." if hidden else ""
    received_by = "wrap_transparent" if wrapper.above is None else "get_peft_model"
    return (
        f"{received_by} received a {type(module).__name__} with the {type(inside).__name__} inside it "
        f"({wrapper.inside_path!r}). Trainers and peft look at the outermost module, so nothing that saves memory is "
        f"switched on.{hides} Start from the {start} and write:\n" + "\n".join(lines)
    )
