"""Values of parameters that no checkpoint has, made on one rank as one process would make them."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from safe_loading._checkpoint.hub import adapter_files, resolve
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.report import Finding
from safe_loading._loading.adapter_facts import AdapterFacts, read_adapter
from safe_loading._loading.adapter_values import read_tensors, value_findings
from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import AdapterError, ArgumentError

from .parameters import parameters_of

_SETTINGS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")

InitNew = Callable[[nn.Module], Any]


def initialized(model: nn.Module, lacking: Sequence[ModelTensor], init_new: InitNew) -> dict[str, torch.Tensor]:
    """Call ``init_new`` on each module that holds new parameters, and return their values.

    The modules come in the order of ``named_modules``; for the call the new parameters lie on the host, and nothing
    else is there. Numbers are drawn from the generator of the CPU, whose state is put back afterwards: the ranks that
    draw nothing must draw the same later on.

    Raises:
        ArgumentError: ``init_new`` left a parameter without values.
    """
    by_module: dict[nn.Module, list[tuple[str, ModelTensor]]] = defaultdict(list)
    for held in lacking:
        module, attribute = held.places[0]
        by_module[module].append((attribute, held))
    values: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for module in model.modules():
            if module in by_module:
                values.update(_called(module, by_module[module], init_new))
    left = [name for name, value in values.items() if value.is_floating_point() and bool(value.isnan().any())]
    if left:
        raise ArgumentError("init_new left parameters without values:", left)
    return values


def _called(module: nn.Module, held: Sequence[tuple[str, ModelTensor]], init_new: InitNew) -> dict[str, torch.Tensor]:
    before = dict(module._parameters)
    try:
        for attribute, each in held:
            tensor = each.tensor
            fill = float("nan") if tensor.is_floating_point() else 0
            empty = torch.full(tensor.shape, fill, dtype=tensor.dtype, device="cpu")
            module._parameters[attribute] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        init_new(module)
        return {each.name: getattr(module, attribute).detach() for attribute, each in held}
    finally:
        module._parameters.update(before)


def adapter_values(model: nn.Module, lacking: Sequence[ModelTensor]) -> dict[str, torch.Tensor]:
    """Return what peft gave to adapters that it then moved to meta with their base.

    peft makes an adapter on the host, initializes it, and moves it to the device of its base; on meta the values are
    lost. They are made again by peft itself, on a copy of the skeleton. Where the random generator stands as it would
    after these draws from its seed (``manual_seed``, ``get_peft_model``, this call), they are the very same values;
    otherwise they are drawn from where it stands now. The generator is left as it was.

    Raises:
        ArgumentError: The adapter is initialized from the weights of its base, which are not there yet.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not lacking or not isinstance(model, peft.PeftModel):
        return {}
    wanted = {held.name for held in lacking}
    now = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed())
        values = _attached_again(peft, model, wanted)
        if not torch.equal(torch.get_rng_state(), now):
            torch.set_rng_state(now)
            values = _attached_again(peft, model, wanted)
    return values


def loaded_adapters(model: nn.Module, sources: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the values of adapters, in the places that peft gives them.

    Args:
        model: The model that has the adapters.
        sources: Folders or hub ids, by the names of the adapters in the model.

    Raises:
        ArgumentError: The model has no such adapter.
        AdapterError: The files hold tensors that the model has no place for, or lack some, or scale them otherwise.
        CheckpointError: There is no such folder, the hub does not give it, or a file is damaged.
    """
    if not sources:
        return {}
    peft: Any = sys.modules.get("peft")
    configs = getattr(model, "peft_config", {})
    if peft is None or not set(sources) <= set(configs):
        raise ArgumentError(f"adapters= names {sorted(sources)}, the model has the adapters {sorted(configs)}.")
    folders = {name: resolve(source, adapter_files) for name, source in sources.items()}
    with torch.random.fork_rng(devices=[]):
        twin = _twin(peft, model)
    problems = []
    for name, found in folders.items():
        facts = read_adapter(found)
        problems += _other_settings(facts, configs[name])
        tensors = read_tensors(facts)
        problems += [str(each) for each in value_findings(facts, tensors) if each.severity == "error"]
        try:
            result = peft.set_peft_model_state_dict(twin, tensors, adapter_name=name)
        except (RuntimeError, ValueError, KeyError) as error:  # a shape, or a key that peft cannot map
            problems.append(f"{facts.weights}: {' '.join(str(error).split())}")
            continue
        problems += [f"{facts.folder}: {key} has no place in the model" for key in result.unexpected_keys]
        own = [key for key in result.missing_keys if f".{name}." in f"{key}."]
        problems += [f"{facts.folder} lacks {key}" for key in own]
    if problems:
        raise AdapterError("The adapters do not fit the model:", problems)
    # the weights of the base are one element each, and NaN
    return {
        held.name: held.tensor.detach()
        for held in parameters_of(twin)
        if held.tensor.is_contiguous() and any(f".{name}." in f"{held.name}." for name in folders)
    }


def _other_settings(facts: AdapterFacts, config: Any) -> list[str]:
    """Return the settings that decide what an adapter computes, where the file and the model differ."""
    return [
        f"{facts.folder / ADAPTER_CONFIG}: {field} is {facts.config[field]!r}, and the model's adapter has "
        f"{getattr(config, field)!r}"
        for field in _SETTINGS
        if field in facts.config and hasattr(config, field) and facts.config[field] != getattr(config, field)
    ]


def _attached_again(peft: Any, model: Any, wanted: Collection[str]) -> dict[str, torch.Tensor]:
    twin = _twin(peft, model)
    values = {held.name: held.tensor.detach() for held in parameters_of(twin) if held.name in wanted}
    # a copy of a module of the base is as new as the module itself
    values = {name: value for name, value in values.items() if ".modules_to_save." not in name}
    unknown = [name for name, value in values.items() if value.is_floating_point() and bool(value.isnan().any())]
    if unknown:
        raise _needs_base(model, f"{unknown[0]} is made from the weights of the base")
    return values


def _twin(peft: Any, model: Any) -> Any:
    """Return a model with the same adapters, initialized on the host, over a base whose weights take no memory."""
    base = copy.deepcopy(model).unload()
    for held in parameters_of(base):
        # what is made from a weight becomes NaN
        fill = float("nan") if held.tensor.is_floating_point() else 0
        one = torch.full((), fill, dtype=held.tensor.dtype, device="cpu")
        held.put(nn.Parameter(one.expand(held.tensor.shape), requires_grad=False))
    twin: Any = None
    try:
        for name, config in model.peft_config.items():
            own = copy.deepcopy(config)
            own.inference_mode = False
            if twin is None:
                twin = peft.get_peft_model(base, own, adapter_name=name)
            else:
                twin.add_adapter(name, own)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise _needs_base(model, str(error)) from error
    return twin


def initialized_adapters(made: Mapping[str, torch.Tensor]) -> list[Finding]:
    """Return a finding for adapter parameters that were initialized here."""
    if not made:
        return []
    return [
        Finding(
            "adapter-initialised",
            "info",
            next(iter(made)),
            f"{len(made)} parameters of adapters had no values; they have those that peft starts from.",
            "none for a new adapter; for a trained one pass adapters= with its folder.",
            sum(value.nbytes for value in made.values()),
        )
    ]


def _needs_base(model: Any, reason: str) -> ArgumentError:
    kinds = sorted({str(getattr(config, "init_lora_weights", None)) for config in model.peft_config.values()})
    return ArgumentError(
        f"The adapter cannot be initialized while its base is on meta (init_lora_weights={', '.join(kinds)}): "
        f"{reason}. Attach it to a base with weights on rank 0, or give it values there."
    )
