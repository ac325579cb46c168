"""Heads that peft trains, saves and loads with an adapter: where they go, in which dtype, and which are missing."""

from __future__ import annotations

import itertools

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.tensor import DTensor

HEADS = "_attached_heads"  # in the __dict__ of a base: the names of its heads
# peft lists both in modules_to_save of every sequence classifier, which has one of them.
_EITHER_NAME = frozenset({"classifier", "score"})
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)


class ParameterHead(nn.Module):
    """A head that is one parameter, such as a temperature or a scale of logits; its call multiplies by it."""

    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times the parameter."""
        return x * self.value


def as_head(head: nn.Module | nn.Parameter) -> nn.Module:
    """Return a bare parameter in a module, and anything else as it is."""
    return ParameterHead(head) if isinstance(head, nn.Parameter) else head


def base_and_path(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds the heads, and the path to it."""
    if not isinstance(model, PeftModel):
        return model, ""
    base: nn.Module = model.get_base_model()
    return base, next(path for path, module in model.named_modules() if module is base) + "."


def head_problems(model: nn.Module, base: nn.Module, name: str, module: nn.Module) -> list[str]:
    """Return the reasons why a head of this name cannot be attached, one per line."""
    if not name.isidentifier():
        return [f"{name!r} is not a valid name of an attribute."]
    problems = []
    if hasattr(model, name):
        problems.append(f"the model has {name!r} already; choose another name: {free_name(model, name)!r} is free.")
    # peft matches modules_to_save against the ends of module paths.
    matched = [path for path, _ in base.named_modules() if path.endswith(name)]
    if matched and not hasattr(model, name):
        problems.append(
            f"peft matches {name!r} against the ends of module paths, and {matched[0]!r} ends in it too: that module "
            f"would be trained and saved with the head, and missing when it is loaded; choose another name: "
            f"{free_name(model, name)!r} is free."
        )
    if isinstance(module, (*_CONTAINERS, BaseTunerLayer, AuxiliaryTrainingWrapper)):
        problems.append(f"a {type(module).__name__} cannot be a head; put it into a module with a forward.")
    model_parameters = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in model_parameters for parameter in module.parameters()):
        problems.append("it shares a parameter with the model, which would be trained and saved under two names.")
    if any(parameter.is_meta for parameter in module.parameters()):
        problems.append("it is on meta and has no values; create it on a device.")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        problems.append("the model is sharded already, so nothing would reduce the head's gradients; attach it before.")
    return problems


def free_name(model: nn.Module, name: str) -> str:
    """Return a name under which a head can be attached: its own, or one made of it that peft takes for no other."""
    paths = [path for path, _ in model.named_modules()]
    tried = itertools.chain((name, f"{name}_head"), (f"{name}_head_{number}" for number in itertools.count(2)))
    return next(each for each in tried if not hasattr(model, each) and not any(p.endswith(each) for p in paths))


def missing_heads(model: nn.Module) -> list[str]:
    """Return which heads of a model are missing after loading, or are neither trained nor saved, one per line."""
    if not isinstance(model, PeftModel):
        return []
    base, _ = base_and_path(model)
    paths = [path for path, _ in model.named_modules()]
    problems = []
    for adapter, config in model.peft_config.items():
        expected = set(getattr(config, "modules_to_save", None) or ()) - _EITHER_NAME
        problems += [
            f"adapter {adapter!r} was saved with {name!r} (modules_to_save), which this model does not have, so it was "
            f"loaded without it: attach_head(base, {name!r}, ...) before PeftModel.from_pretrained, or "
            f"attach_head(model, {name!r}, ..., source=FOLDER) now."
            for name in sorted(expected)
            if not any(path.endswith(name) for path in paths)
        ]
    problems += [
        f"the head {name!r} was attached to the base, but no adapter has it in modules_to_save, so it is neither "
        f"trained nor saved: LoraConfig(..., modules_to_save=[{name!r}])."
        for name in vars(base).get(HEADS, ())
        if not isinstance(getattr(base, name, None), AuxiliaryTrainingWrapper)
    ]
    return problems
