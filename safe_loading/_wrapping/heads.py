"""Heads, which peft trains, saves and loads with an adapter: where they go, in which dtype, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from safe_loading._checkpoint.hub import Resolved
from safe_loading._loading.adapter_facts import read_adapter
from safe_loading._loading.adapter_values import read_tensors, rename_keys
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading.errors import AdapterError

HEADS = "_attached_heads"  # in the __dict__ of a base: the names of its heads
# peft asks for both of every classifier, which has one of them
_EITHER = frozenset({"classifier", "score"})
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)


def base_and_path(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds the heads, and the path to it."""
    if not isinstance(model, PeftModel):
        return model, ""
    base: nn.Module = model.get_base_model()
    return base, next(path for path, module in model.named_modules() if module is base) + "."


def place_for(base: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype in which the last hidden states of a model come: those of its output layer."""
    layer: Any = embeddings_and_head_of(base).head
    layer = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    weights = [*(layer.parameters() if isinstance(layer, nn.Module) else ()), *reversed([*base.parameters()])]
    if not weights:
        return torch.device("cpu"), torch.get_default_dtype()
    hook = getattr(layer, "_hf_hook", None)  # an offloaded layer lies on meta; its hook knows where it computes
    where = getattr(hook, "execution_device", None)
    device = torch.device(weights[0].device if where is None else where)
    return device, next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)


def head_problems(model: nn.Module, base: nn.Module, name: str, module: nn.Module) -> list[str]:
    """Return what speaks against a head of this name."""
    if not name.isidentifier():
        return [f"{name!r} is no name of an attribute."]
    problems = []
    if hasattr(model, name):
        problems.append(f"the model has {name!r} already; choose another name.")
    # peft finds modules_to_save by the end of their path
    caught = [path for path, _ in base.named_modules() if path.endswith(name)]
    if caught and not hasattr(model, name):
        problems.append(
            f"peft finds {name!r} by the end of a path, and {caught[0]!r} ends so too: it would be trained and saved "
            f"with the head, and missed when it is loaded; choose another name."
        )
    if isinstance(module, (*_CONTAINERS, BaseTunerLayer, AuxiliaryTrainingWrapper)):
        problems.append(f"a {type(module).__name__} cannot be a head; put it into a module with a forward.")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in own for parameter in module.parameters()):
        problems.append("it shares a parameter with the model, which would be trained and saved under two names.")
    if any(parameter.is_meta for parameter in module.parameters()):
        problems.append("it lies on meta and has no values; make it on a device.")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        problems.append("the model is sharded already, so nobody would reduce its gradients; attach it before.")
    return problems


def missing_heads(model: nn.Module) -> list[str]:
    """Return what is wrong with the heads of a model: not there after loading, or neither trained nor saved."""
    if not isinstance(model, PeftModel):
        return []
    base, _ = base_and_path(model)
    paths = [path for path, _ in model.named_modules()]
    problems = []
    for adapter, config in model.peft_config.items():
        wanted = set(getattr(config, "modules_to_save", None) or ()) - _EITHER
        problems += [
            f"adapter {adapter!r} was saved with {name!r} (modules_to_save), which this model does not have, so it was "
            f"loaded without: attach_head(base, {name!r}, ...) before PeftModel.from_pretrained, or "
            f"attach_head(model, {name!r}, ..., source=FOLDER) now."
            for name in sorted(wanted)
            if not any(path.endswith(name) for path in paths)
        ]
    problems += [
        f"the head {name!r} was attached to the base, but no adapter has it in modules_to_save, so it is neither "
        f"trained nor saved: LoraConfig(..., modules_to_save=[{name!r}])."
        for name in vars(base).get(HEADS, ())
        if not isinstance(getattr(base, name, None), AuxiliaryTrainingWrapper)
    ]
    return problems


def saved_head(folder: Path, key: str, module: nn.Module, config: PeftConfig | None) -> dict[str, torch.Tensor]:
    """Return the state of a head from an adapter's folder.

    Args:
        folder: What ``save_pretrained`` wrote.
        key: The path of the head, as it stands in the file.
        module: A module like the one that was saved.
        config: The adapter's config.

    Raises:
        AdapterError: The folder does not hold exactly this head.
    """
    facts = read_adapter(Resolved(str(folder), folder, None))
    prompts = bool(config is not None and config.is_prompt_learning)
    tensors = rename_keys(facts, read_tensors(facts), prompt_learning=prompts, own_module=False).tensors
    found = {name.removeprefix(f"{key}."): tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}
    problems = list(_differences(found, module.state_dict()))
    if problems:
        raise AdapterError(f"{facts.weights} does not hold this head ({key}); nothing was changed:", problems)
    return found


def _differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> Iterator[str]:
    for name in sorted({*found, *wanted}):
        if name not in found:
            yield f"{name}: the module has it ({list(wanted[name].shape)}), the file does not."
        elif name not in wanted:
            yield f"{name}: the file has it ({list(found[name].shape)}), the module does not."
        elif found[name].shape != wanted[name].shape:
            yield f"{name}: the file has {list(found[name].shape)}, the module {list(wanted[name].shape)}."
