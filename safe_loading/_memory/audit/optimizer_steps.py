"""Checks of parameters that no step changes: their rate or their factors are zero, or the step is rounded away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from safe_loading._core.names import first_names, method_name
from safe_loading._core.report import Finding, counted
from safe_loading._model.quantized.kbit_preparation import preparation_of

from .audited_model import AuditedModel, has_values, size_of

_SAMPLED = 2**14  # elements of each weight
_SOME = 0.1  # of the weights: below that nine tenths of the way are gone, and more
_MANTISSA = {torch.bfloat16: 8, torch.float16: 11}  # bits, the first one that is always set among them
_OWN_COPIES = ("deepspeed", "fsdp")  # engines that train float32 copies of the weights


def check_rates(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for trained parameters whose group has a rate of zero, from which no schedule leads away."""
    rates = _rates(audited.torch_optimizers)
    own = {name: p for name, p in audited.model.named_parameters() if p.requires_grad and rates.get(id(p)) == 0}
    if own:
        are = "parameter is" if len(own) == 1 else "parameters are"
        message = f"{len(own)} trainable {are} in a group of the optimizer whose lr is 0: no step changes them."
        fix = "give the group its own lr, or freeze what is not to be trained."
        yield Finding("SL118", "error", first_names(own), message, fix, size_of(own.values()))


def check_rounded_steps(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding when trained weights in 16 bits are so large that a step of Adam is rounded away.

    A step of Adam is about as long as its rate, and a sum is rounded to the nearest number: what is less than half the
    distance between two numbers changes nothing, however often it is repeated. Where that is so for half of the weights
    two thirds of the way are lost, which is a warning; less is an info.
    """
    rates = _rates_of_adam(audited)
    still = total = 0.0
    where: list[str] = []
    for name, parameter in audited.model.named_parameters():
        rate = rates.get(id(parameter), 0.0)
        bits = _MANTISSA.get(parameter.dtype)
        if not parameter.requires_grad or bits is None or not rate or not has_values(parameter):
            continue
        values = parameter.detach().reshape(-1)[:_SAMPLED].float()
        half = torch.exp2(torch.frexp(values.cpu()).exponent.float() - 1 - bits)
        part = float(((half > rate) & (values.cpu() != 0)).float().mean())
        still += part * parameter.numel()
        total += parameter.numel()
        where += [name] if part > _SOME else []
    if still > total * _SOME:
        rate = max(rates[id(parameter)] for parameter in audited.model.parameters() if id(parameter) in rates)
        message = (
            f"{still / total:.0%} of the trained 16-bit weights do not change by a step of lr={rate:g}: it is less "
            f"than half the distance to the next number, and nothing keeps what is rounded away."
        )
        fix = "load what is trained in float32, and compute with bf16=True."
        if getattr(audited.base, "is_quantized", False) and preparation_of(audited.trainer) == "trl":
            fix = (
                "cast what is trained back to float32 once the trainer is made, which has cast it: for each that "
                "requires a gradient, parameter.data = parameter.data.float()."
            )
        yield Finding("SL143", "warning" if still > total / 2 else "info", first_names(where), message, fix)


def _rates(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, float]:
    """Return the rate of each parameter: its schedule's, where one begins at zero."""
    return {
        id(p): max(float(group.get("lr", 0.0)), float(group.get("initial_lr", 0.0)))
        for optimizer in optimizers
        for group in optimizer.param_groups
        if "lr" in group
        for p in group["params"]
    }


def _rates_of_adam(audited: AuditedModel) -> Mapping[int, float]:
    """Return the rate of each parameter whose optimizer is Adam's and writes to the weights themselves."""
    arguments: Any = audited.training_arguments
    if any(audited.uses(engine) for engine in _OWN_COPIES):
        return {}
    if audited.torch_optimizers:
        return _rates(filter(_rounds_as_adam, audited.torch_optimizers))
    named, rate = getattr(arguments, "optim", ""), getattr(arguments, "learning_rate", None)
    name = str(getattr(named, "value", named))
    if not isinstance(rate, float) or not name.startswith(("adamw", "paged_adamw")):
        return {}
    rounds = name == "adamw_anyprecision"  # which keeps what is rounded away
    return {} if rounds else {id(p): rate for p in audited.model.parameters() if p.requires_grad}


def _rounds_as_adam(optimizer: torch.optim.Optimizer) -> bool:
    rounds = any(getattr(optimizer, name, False) for name in ("bf16_stochastic_round", "master_weights"))
    return type(optimizer).__name__.lower().startswith(("adam", "pagedadam")) and not rounds


def check_scales(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for LoRA layers whose scale is not that of alpha and rank, which are saved."""
    other: dict[str, str] = {}
    known = {name for name, config in audited.adapter_configs.items() if method_name(config.peft_type) == "LORA"}
    for path, module in audited.inner.named_modules() if known else ():
        alpha, ranks = getattr(module, "lora_alpha", None), getattr(module, "r", None)
        if not isinstance(module, LoraLayer) or not isinstance(alpha, Mapping) or not isinstance(ranks, Mapping):
            continue
        for adapter, scale in module.scaling.items():
            if adapter not in known or not ranks.get(adapter) or not isinstance(scale, (int, float)):
                continue
            rooted = bool(getattr(module, "use_rslora", {}).get(adapter))
            expected = alpha[adapter] / (math.sqrt(ranks[adapter]) if rooted else ranks[adapter])
            if not math.isclose(scale, expected, rel_tol=1e-6):
                other[f"{path}.scaling.{adapter}"] = f"{scale:g} and not {expected:g}"
    if other:
        message = (
            f"{counted(len(other), 'layer multiplies', 'layers multiply')} the adapter by "
            f"{next(iter(other.values()))}, which the config gives: a checkpoint holds the config, and loads with "
            f"that scale."
        )
        fix = "write the scale into the config, LoraConfig(lora_alpha=...), in the place of set_scale or scale_layer."
        yield Finding("SL132", "error", first_names(other), message, fix)


def check_unmoved_factors(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for LoRA layers both of whose factors are zero: each one's gradient is the other, and so zero."""
    dead: dict[str, torch.nn.Parameter] = {}
    total = 0
    for path, module in audited.inner.named_modules() if audited.adapted is not None and audited.training else ():
        for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            pair: Any = (getattr(module, first, None), getattr(module, second, None))
            if not all(isinstance(part, (torch.nn.ModuleDict, torch.nn.ParameterDict)) for part in pair):
                continue
            for adapter in {*pair[0].keys()} & {*pair[1].keys()}:
                factors = [getattr(part[adapter], "weight", part[adapter]) for part in pair]
                if not all(isinstance(f, torch.nn.Parameter) and f.requires_grad for f in factors):
                    continue
                total += 1
                if all(map(has_values, factors)) and not any(bool(f.detach().any()) for f in factors):
                    dead[f"{path}.{first}.{adapter}"] = factors[0]
    if dead:
        message = (
            f"both factors of the adapter are 0 in {len(dead)} of {counted(total, 'layer')}: the gradient of each is "
            f"a multiple of the other, so that none of them ever changes."
        )
        fix = "make the first values anew: layer.reset_lora_parameters(adapter, True) for each of them."
        yield Finding("SL121", "error", first_names(dead), message, fix, 2 * size_of(dead.values()))
