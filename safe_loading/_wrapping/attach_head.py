"""``attach_head``: a module of your own, trained, saved, loaded and merged with the adapter."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from safe_loading._core.engines import is_integrated
from safe_loading._core.interrupts import undone_on_error
from safe_loading._core.names import method_name
from safe_loading._core.walk import walk_parameters
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.peft_layers import has_adapters, whose_layers
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.torch_state import undone_when_raised
from safe_loading.errors import ArgumentError, WrapError

from .heads import HEADS, as_head, base_and_path, head_problems
from .saved_head import saved_head

Model = TypeVar("Model", bound=nn.Module)


@undone_when_raised
def attach_head(
    model: Model,
    name: str,
    module: nn.Module | nn.Parameter,
    *,
    source: str | os.PathLike[str] | None = None,
    adapter_name: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> Model:
    """Attach a head to a model: a module that belongs to its adapter, as peft's ``modules_to_save`` do.

    peft trains it, saves it with the adapter, and keeps it in the merged model; ``model.<name>(hidden)`` calls it.
    ``PeftModel.from_pretrained`` and ``load_peft_on_rank`` load it only into a base that has a module of that name: so
    attach one like it to the base first, which is all that the call does to a base. ``load_peft_on_rank``,
    ``wrap_transparent`` and ``audit_model`` (SL123) report a head that was left out. peft itself leaves it out
    silently, and nothing in ``adapter_config.json`` changes that: peft 0.21 creates no modules, skips names in
    ``modules_to_save`` that the base does not have, and ignores keys of the file that match no module.

    Args:
        model: A PeftModel, or a base that becomes one.
        name: The name of the attribute, such as ``"value_head"``.
        module: The head. It is moved and cast in place, and is the module that is trained. Or a bare parameter, a
            temperature for example: then ``model.<name>.value`` is it, and ``model.<name>(x)`` is ``x`` times it.
        source: The folder of an adapter that was saved with this head and loaded without it; its values are read.
        adapter_name: The adapter that it belongs to; None means the active one.
        dtype: The dtype of the head; None means that of ``source``, or else that of the last hidden states.
        device: The device of the head; None means that of the last hidden states.

    Returns:
        The model.

    Raises:
        WrapError: The head cannot be attached so that it is trained, saved and loaded. The model is unchanged.
        AdapterError: ``source`` does not hold this head. The model is unchanged.
        CheckpointError: ``source`` is not an adapter, or is damaged. The model is unchanged.
        ArgumentError: There is no such adapter, or several are active and one must be named.
    """
    module = as_head(module)
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            f"{getattr(module, '__name__', type(module).__name__)} is not a head: pass a torch.nn.Module, such as "
            f"torch.nn.Linear(4096, 1)."
        )
    if not isinstance(model, nn.Module) or not isinstance(name, str):
        raise ArgumentError(
            f"attach_head({type(model).__name__}, {name!r:.80}, ...): pass a model and the head's name."
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype={dtype!r:.80}: pass a torch.dtype, such as torch.float32.")
    device = None if device is None else _device(device)
    base, path = base_and_path(model)
    adapter, config = "", None
    if isinstance(model, PeftModel):
        adapter, config = _adapter(model, adapter_name)
    problems = [*_adapters_elsewhere(model, name), *head_problems(model, base, name, module)]
    if config is not None:
        # If the model has an attribute of this name, head_problems has refused the name already.
        problems += _not_loaded(config, name) if source is None and not hasattr(model, name) else []
    elif source is not None:
        problems.append("source= is for a PeftModel; a base gets the values from PeftModel.from_pretrained.")
    if problems:
        raise WrapError(f"{name!r} cannot be attached to {type(model).__name__}; nothing was changed:", problems)
    state = None if source is None else saved_head(Path(source), path + name, module, config)
    with undone_on_error(_undo_of(module, config)):
        _move(module, base, state, dtype, device)
        if isinstance(model, PeftModel) and config is not None:
            wrapper = _with_peft_wrapper(module, adapter, active=adapter in model.active_adapters)
            # As peft does for an adapter that is loaded for inference.
            if source is not None and config.inference_mode:
                wrapper.requires_grad_(False)
            setattr(base, name, wrapper.train(model.training))
            if name not in (config.modules_to_save or ()):
                config.modules_to_save = [*(config.modules_to_save or ()), name]
        else:
            setattr(base, name, module.train(model.training))
        vars(base)[HEADS] = (*vars(base).get(HEADS, ()), name)
        # accelerate's dispatch_model refuses a map that leaves a module out.
        devices = getattr(base, "hf_device_map", None)
        if isinstance(devices, dict) and devices and "" not in devices:
            first = next(module.parameters(), None)
            devices[name] = _device_and_dtype_of_output(base)[0] if first is None else first.device
        return model


def _adapters_elsewhere(model: nn.Module, name: str) -> list[str]:
    """Return a problem when another model saves the adapters that this one has: the head would be in no file."""
    if has_adapters(model):
        return []
    if is_integrated(model):
        return [
            f"its adapters were put in by transformers, which saves no head that comes later: attach it before "
            f"model.add_adapter(LoraConfig(..., modules_to_save=[{name!r}]))."
        ]
    owner = whose_layers(model)
    if owner is None:
        return []
    return [f"its adapters are saved by {owner}, without the head: attach it to that one, before any wrapper."]


def _undo_of(module: nn.Module, config: Any) -> Callable[[], None]:
    """Return the function that puts the head and the adapter's config back into their present state."""
    before, saved = Snapshot(module), getattr(config, "modules_to_save", None)
    before.keep_whole(module)

    def undo() -> None:
        before.restore()
        if config is not None:
            config.modules_to_save = saved

    return undo


def _adapter(model: PeftModel, name: str | None) -> tuple[str, Any]:
    if name is None:
        active = list(model.active_adapters)
        if len(active) != 1:
            raise ArgumentError(f"The active adapters are {active}: name the one of the head with adapter_name=.")
        name = str(active[0])
    if name not in model.peft_config:
        raise ArgumentError(f"adapter_name={name!r}: the model has {list(model.peft_config)}.")
    if not hasattr(model.peft_config[name], "modules_to_save"):
        method = method_name(model.peft_config[name].peft_type)
        raise ArgumentError(f"{method} adapters save no modules, so they can have no head.")
    return name, model.peft_config[name]


def _device(device: torch.device | str | int) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device={device!r:.80} is not a device: {str(error).splitlines()[0]}") from error


def _not_loaded(config: Any, name: str) -> list[str]:
    """Return a problem if the adapter was saved with a head of this name, which a new one would silently replace."""
    if name not in (config.modules_to_save or ()):
        return []
    return [
        f"the adapter was saved with {name!r}, and this model was loaded without it. Pass source=, the adapter's "
        f"folder, so that its values are read; or attach it to the base before PeftModel.from_pretrained."
    ]


def _move(
    module: nn.Module,
    base: nn.Module,
    state: dict[str, torch.Tensor] | None,
    dtype: torch.dtype | None,
    device: torch.device | str | int | None,
) -> None:
    output_device, output_dtype = _device_and_dtype_of_output(base)
    saved = {tensor.dtype for tensor in (state or {}).values() if tensor.is_floating_point()}
    if dtype is None:
        dtype = next(iter(saved)) if len(saved) == 1 else output_dtype
    module.to(device=output_device if device is None else device, dtype=dtype)
    if state is not None:
        module.load_state_dict(state)


def _with_peft_wrapper(module: nn.Module, adapter: str, *, active: bool) -> nn.Module:
    """Return peft's wrapper, which trains the module itself and uses a frozen copy when adapters are disabled."""
    module.requires_grad_(True)
    wrapper = ModulesToSaveWrapper(copy.deepcopy(module), adapter)  # type: ignore[no-untyped-call]  # peft leaves it untyped
    # peft's wrapper trains a copy of its module. The caller holds this one, so it takes the copy's place.
    wrapper.modules_to_save[adapter] = module
    wrapper.set_adapter(adapter if active else [])
    module_of_peft: nn.Module = wrapper
    return module_of_peft


def _device_and_dtype_of_output(base: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype of the last hidden states of a model, which are those of its output layer."""
    layer: object = embeddings_and_head_of(base).head
    layer = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    # A model without an output layer, such as an encoder, ends in its last layer, whose parameters are usually last.
    of_base = {id(parameter) for parameter in walk_parameters(base, adapters=False)}
    last = reversed([parameter for parameter in base.parameters() if id(parameter) in of_base])
    weights = [*(layer.parameters() if isinstance(layer, nn.Module) else ()), *last]
    if not weights:
        return torch.device("cpu"), torch.get_default_dtype()
    # The weights of a layer that accelerate offloads are on meta; its hook tells where the layer computes.
    hook = getattr(layer, "_hf_hook", None)
    execution_device = getattr(hook, "execution_device", None)
    device = torch.device(weights[0].device if execution_device is None else execution_device)
    return device, next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
