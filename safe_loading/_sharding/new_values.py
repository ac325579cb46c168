"""Values of parameters that no checkpoint has, made on one rank as one process would make them."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from safe_loading._checkpoint.adapter_config import start_changes_base
from safe_loading._checkpoint.adapter_folder import AdapterFolder, read_adapter
from safe_loading._checkpoint.hub import adapter_files, resolve
from safe_loading._core.names import canonical, method_name
from safe_loading._core.report import Finding, counted, errors_of
from safe_loading._loading.adapter_file import read_tensors, value_findings
from safe_loading._model.formats.four_bit import is_four_bit
from safe_loading._model.tensors import ModelTensor
from safe_loading._ranks.own_generators import own_copy_of_generators
from safe_loading.errors import AdapterError, ArgumentError

from .parameters import parameters_of

# The settings of an adapter that decide what its tensors compute.
_SETTINGS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")

InitNew = Callable[[nn.Module], object]


def initialized(model: nn.Module, new: Sequence[ModelTensor], init_new: InitNew) -> dict[str, torch.Tensor]:
    """Call ``init_new`` on each module that has new parameters, and return their values.

    The modules come in the order of ``named_modules``. During the call the new parameters are on the host, and every
    other tensor is as it was. Numbers are drawn from the generator of the CPU, whose state is restored afterwards: the
    other ranks draw nothing here, and all ranks must draw the same later on.
    """
    by_module: dict[nn.Module, list[tuple[str, ModelTensor]]] = defaultdict(list)
    names = {parameter.name for parameter in new}
    # In one process peft copies a module after it was initialized: the copy has its values, and takes no draws.
    copies = {name: original for name in names if (original := _original_of(name)) in names}
    for parameter in new:
        module, attribute = parameter.places[0]
        if parameter.name not in copies:
            by_module[module].append((attribute, parameter))
    values: dict[str, torch.Tensor] = {}
    with own_copy_of_generators(), torch.no_grad():
        for module in model.modules():
            if module in by_module:
                values.update(_initialized_module(module, by_module[module], init_new))
    unwritten = [name for name, value in values.items() if _has_nan(value)]
    if unwritten:
        raise ArgumentError("init_new left parameters without values:", unwritten)
    return values | {name: values[original] for name, original in copies.items()}


def _original_of(name: str) -> str | None:
    """Return the parameter of which ``modules_to_save`` made a copy of this name."""
    before, inside, after = name.partition(".modules_to_save.")
    return f"{before}.original_module.{after.partition('.')[2]}" if inside else None


def _initialized_module(
    module: nn.Module, new: Sequence[tuple[str, ModelTensor]], init_new: InitNew
) -> dict[str, torch.Tensor]:
    before = dict(module._parameters)
    try:
        for attribute, parameter in new:
            tensor = parameter.tensor
            poisoned = torch.full(tensor.shape, _poison(tensor), dtype=tensor.dtype, device="cpu")
            module._parameters[attribute] = nn.Parameter(poisoned, requires_grad=tensor.requires_grad)
        init_new(module)
        return {parameter.name: getattr(module, attribute).detach() for attribute, parameter in new}
    finally:
        module._parameters.update(before)


def _poison(tensor: torch.Tensor) -> float:
    """Return the mark of an element that nobody has written; integers have none."""
    return float("nan") if tensor.is_floating_point() else 0


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())


def remade_adapters(model: nn.Module, missing: Sequence[ModelTensor]) -> dict[str, torch.Tensor]:
    """Return the values that peft gave to adapters before it moved them to meta with their base.

    peft makes an adapter on the host, initializes it, and moves it to the device of its base; on meta the values are
    lost. peft itself makes them again here, on a copy of the model without weights. They are the very same values if
    the random generator is where these draws from its seed would leave it (``manual_seed``, ``get_peft_model``, this
    call); otherwise they are drawn from its present state. The generator is left as it was. Raises ArgumentError when
    the adapter is initialized from the weights of its base, which are not there yet. A module of the user's may hold
    the PeftModel, or several.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not missing:
        return {}
    names = {parameter.name for parameter in missing}
    adapted: dict[str, tuple[nn.Module, set[str]]] = {}  # by the beginning of their names
    for start, module in adapted_models(model).items():
        if inside := {name.removeprefix(start) for name in names if name.startswith(start)}:
            adapted[start] = (module, inside)
    if not adapted:
        return {}

    def attached_again() -> dict[str, torch.Tensor]:
        made = {start: _attached_again(peft, *of_one) for start, of_one in adapted.items()}
        return {start + name: value for start, values in made.items() for name, value in values.items()}

    state = torch.get_rng_state()
    with own_copy_of_generators():
        # first as if the program had seeded, called get_peft_model and drawn nothing else
        torch.manual_seed(torch.initial_seed())
        values = attached_again()
        if not torch.equal(torch.get_rng_state(), state):
            torch.set_rng_state(state)
            values = attached_again()
    return values


def adapted_models(model: nn.Module) -> dict[str, Any]:
    """Return the PeftModels in a module, the outermost ones, by the beginning of their names."""
    peft: Any = sys.modules.get("peft")
    found: dict[str, Any] = {}
    if peft is None:
        return found
    for path, module in model.named_modules():
        start = f"{name}." if (name := canonical(path)) else ""
        if isinstance(module, (peft.PeftModel, peft.PeftMixedModel)) and not start.startswith(tuple(found)):
            found[start] = module
    return found


def loaded_adapters(model: nn.Module, sources: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the values of adapters, by parameter; ``sources`` are their folders or hub ids, by adapter.

    Raises CheckpointError when there is no such folder, the hub does not give it, or a file is damaged.
    """
    if not sources:
        return {}
    peft: Any = sys.modules.get("peft")
    adapted = adapted_models(model)
    if len(adapted) > 1:
        inside = ", ".join(start.removesuffix(".") for start in adapted)
        raise ArgumentError(
            f"adapters= is for one model with adapters, and {inside} of this {type(model).__name__} have some. Load "
            f"them on rank 0, with PeftModel.from_pretrained, and leave adapters= out."
        )
    prefix, adapted_model = next(iter(adapted.items()), ("", None))
    configs = getattr(adapted_model, "peft_config", {})
    if peft is None or not set(sources) <= set(configs):
        raise ArgumentError(f"adapters= names {sorted(sources)}, the model has the adapters {sorted(configs)}.")
    folders = {name: resolve(source, adapter_files) for name, source in sources.items()}
    with own_copy_of_generators():
        weightless, of_base = _copy_without_weights(peft, adapted_model)
    given = set[str]()  # weights of the base that adapters bring, as peft saves those of adapted embeddings and heads
    problems = []
    for name, folder in folders.items():
        facts = read_adapter(folder)
        problems += _other_settings(facts, configs[name])
        stored = read_tensors(facts)
        problems += [finding.problem for finding in errors_of(value_findings(facts, stored))]
        tensors = {canonical(key): tensor for key, tensor in stored.items()}  # it may be of a compiled model
        given |= _made_writable(weightless, of_base, tensors.keys())
        try:
            result = peft.set_peft_model_state_dict(weightless, tensors, adapter_name=name)
        except (RuntimeError, ValueError, KeyError) as error:  # a shape, or a key that peft cannot map
            problems.append(f"{facts.weights}: {' '.join(str(error).split())}")
            continue
        problems += [f"{facts.path}: {key} has no place in the model" for key in result.unexpected_keys]
        problems += [f"{facts.path} has no {key}" for key in _missing(weightless, name, result.missing_keys)]
    if problems:
        raise AdapterError("The adapters do not fit the model:", problems)
    # the other weights of the base are expanded from one element each, which is not contiguous
    return {
        prefix + parameter.name: parameter.tensor.detach()
        for parameter in parameters_of(weightless)
        if parameter.tensor.is_contiguous()
        and (parameter.name in given or any(f".{name}." in f"{parameter.name}." for name in folders))
    }


def _missing(model: nn.Module, adapter: str, keys: Sequence[str]) -> list[str]:
    """Return the keys of an adapter's own tensors that its file has under none of their names.

    peft lists the base's weights as missing, too, and of a tensor with two names, as the trained rows of a tied head,
    the one that it does not save.
    """
    found = {name for each in parameters_of(model) if not {*each.names} <= {*keys} for name in each.names}
    return [key for key in keys if f".{adapter}." in f"{key}." and key not in found]


def _made_writable(weightless: nn.Module, of_base: set[torch.Tensor], keys: Set[str]) -> set[str]:
    """Give memory to the weights of a base without any for which there are keys, and return their names."""
    found = [each for each in parameters_of(weightless) if each.tensor in of_base and not keys.isdisjoint(each.names)]
    for each in found:
        each.put(nn.Parameter(torch.empty(each.tensor.shape, dtype=each.tensor.dtype, device="cpu"), False))
    return {each.name for each in found}


def _other_settings(facts: AdapterFolder, config: object) -> list[str]:
    """Return the settings that differ between an adapter's file and the model, one per line."""
    start = facts.config.get("init_lora_weights")
    if start_changes_base(start) and start != getattr(config, "init_lora_weights", None):
        return [
            f"{facts.config_file}: init_lora_weights={start!r} changed the base before training, and the base of this "
            f"model is as it was. Load the two with load_peft_on_rank, and wrap what it returns, without source= and "
            f"adapters="
        ]
    return [
        f"{facts.config_file}: {field} is {facts.config[field]!r}, and the model's adapter has "
        f"{getattr(config, field)!r}"
        for field in _SETTINGS
        if field in facts.config and hasattr(config, field) and facts.config[field] != getattr(config, field)
    ]


def _attached_again(peft: Any, model: Any, names: Collection[str]) -> dict[str, torch.Tensor]:
    weightless, of_base = _copy_without_weights(peft, model)
    made = [each for each in parameters_of(weightless) if each.name in names and each.tensor not in of_base]
    values = {each.name: each.tensor.detach() for each in made}
    # a copy of a module of the base has values only where the base has them
    values = {name: value for name, value in values.items() if ".modules_to_save." not in name}
    unknown = [name for name, value in values.items() if _has_nan(value)]
    if unknown:
        raise _needs_base(model, f"{unknown[0]} is made from the weights of the base")
    return values


def _copy_without_weights(peft: Any, model: Any) -> tuple[Any, set[torch.Tensor]]:
    """Return a model with the same adapters, initialized on the host, over a base whose weights take no memory.

    And the parameters of that base.
    """
    copied = copy.deepcopy(model)
    learns_prompts = any(config.is_prompt_learning for config in model.peft_config.values())
    base = copied.get_base_model() if learns_prompts else copied.unload()
    for parameter in parameters_of(base):
        tensor = parameter.tensor
        # NaN, so that whatever peft computes from a weight of the base is NaN too and can be told
        one = torch.full((), _poison(tensor), dtype=tensor.dtype, device="cpu")
        kind = type(tensor) if is_four_bit(tensor) else nn.Parameter
        placeholder = torch.Tensor._make_subclass(kind, one.expand(tensor.shape), False)
        vars(placeholder).update(vars(tensor))  # what peft asks a 4-bit weight
        parameter.put(placeholder)
    of_base: set[torch.Tensor] = set(base.parameters())
    weightless: Any = None
    try:
        for name, config in model.peft_config.items():
            own = copy.deepcopy(config)
            own.inference_mode = False
            if weightless is None:
                weightless = peft.get_peft_model(base, own, adapter_name=name)
            else:
                weightless.add_adapter(name, own)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise _needs_base(model, str(error)) from error
    return weightless, of_base


def initialized_adapters(made: Mapping[str, torch.Tensor]) -> list[Finding]:
    """Return a finding for adapter parameters that were initialized here."""
    if not made:
        return []
    return [
        Finding(
            "adapter-initialised",
            "info",
            next(iter(made)),
            f"{counted(len(made), 'parameter')} of adapters had no values, and got those that peft starts from.",
            "none for a new adapter; for a trained one pass adapters= with its folder.",
            sum(value.nbytes for value in made.values()),
        )
    ]


def _needs_base(model: Any, reason: str) -> ArgumentError:
    kinds = [(config, getattr(config, "init_lora_weights", None)) for config in model.peft_config.values()]
    said = [method_name(config.peft_type) if kind is None else f"init_lora_weights={kind}" for config, kind in kinds]
    where = "on every rank" if ".trainable_tokens_" in reason else "on rank 0"
    return ArgumentError(
        f"The adapter cannot be initialized while its base is on meta ({', '.join(sorted(set(said)))}): "
        f"{reason}. Attach it to a base with weights {where}, or give it values there."
    )
