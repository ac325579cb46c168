"""Checks of the trained parameters, the saved ones, and the optimizer's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper

from safe_loading._core.names import first_names
from safe_loading._core.report import Finding, Severity, counted, format_bytes
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._wrapping.heads import missing_heads

from .audited_model import AuditedModel, size_of
from .kept_memory import is_average, is_target
from .trainer_code import names_in_saving, runs_without_gradients

_OF_ALL = frozenset({"state_dict", "_modules", "named_children", "children"})  # names by which code reaches all parts


def check_trainable(audited: AuditedModel) -> Iterator[Finding]:
    """Yield findings where the trained parameters, the adapter's, and the saved ones differ."""
    if audited.adapted is None or not audited.training:
        return
    adapter = audited.adapter_parameters
    base = {name: p for name, p in audited.parameters.items() if name not in adapter}
    trainable = {name: p for name, p in base.items() if p.requires_grad}
    if base and len(trainable) == len(base):
        size = size_of(base.values())
        message = (
            f"no parameter of the base is frozen: {format_bytes(size)} of weights get gradients and optimizer state, "
            f"about {format_bytes(3 * size)} more with Adam."
        )
        fix = "freeze the base: get_peft_model does, so look for a later requires_grad_(True)."
        # a gradient and Adam's two moments
        yield Finding("SL109", "error", type(audited.inner).__name__, message, fix, 3 * size)
    # what is saved without being the adapter's own was asked for: the biases of bias="all", a method's other parts
    elif loose := {name: p for name, p in trainable.items() if name not in audited.saved}:
        found = counted(len(loose), "parameter outside the adapter is", "parameters outside the adapter are")
        message = f"{found} trainable."
        fix = "freeze them, or name them in modules_to_save so that they are saved with the adapter."
        yield Finding("SL103", "warning", first_names(loose), message, fix, 3 * size_of(loose.values()))
    yield from _check_saved(audited)


def _check_saved(audited: AuditedModel) -> Iterator[Finding]:
    saved = audited.saved
    unsaved = {name: p for name, p in audited.parameters.items() if p.requires_grad and name not in saved}
    if unsaved:
        found = counted(len(unsaved), "trained parameter")
        message = f"save_pretrained of the adapter does not write {found}."
        fix = "name their modules in modules_to_save, or attach new heads with attach_head."
        if _is_counted_by_peft(audited, unsaved.values()):
            fix = "freeze them with requires_grad_(False): peft writes them in no file, and counts them at each load."
        if audited.weighed:
            fix = (
                "write them into a file of your own, and load it again with load_state_dict(..., strict=False): peft "
                "numbers the LoRAs of an X-LoRA, and leaves out what has one of these numbers in its name."
            )
        yield Finding("SL104", "error", first_names(unsaved), message, fix, size_of(unsaved.values()))
    for adapter, told in audited.unsavable.items():  # peft saves all or none
        message = f"save_pretrained writes no adapter: of {adapter!r} it raises {told}."
        fix = "give each adapter a base of its own, where another one of them trains tokens."
        yield Finding("SL104", "error", adapter, message, fix, size_of(audited.saved_by[adapter].values()))
    # an adapter that is not active rests on purpose: a reference, or the other one of two that take turns
    active: Any = getattr(audited.adapted, "active_adapters", [])  # a property of peft, and a method of transformers
    active = active() if callable(active) else active
    used = {name: p for adapter in active for name, p in audited.saved_by.get(adapter, {}).items()}
    untrained = {name: p for name, p in used.items() if not p.requires_grad}
    at_rest = _frozen_by_method(audited, active, untrained) | _set_aside(audited) | _fixed_factors(audited, active)
    at_rest |= {id(p) for adapter in audited.weighed for p in audited.saved_by[adapter].values()}
    untrained = {name: p for name, p in untrained.items() if id(p) not in at_rest}
    if untrained:
        message = (
            f"{counted(len(untrained), 'parameter is', 'parameters are')} saved with the adapter, but not trained."
        )
        fix = "load the adapter with is_trainable=True, and make it the active one before training."
        yield Finding("SL105", "warning", first_names(untrained), message, fix, size_of(untrained.values()))


def _is_counted_by_peft(audited: AuditedModel, parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Return whether all are numbers that peft's layers keep as parameters: AdaLoRA's ranks, where they were moved."""
    layers = [m for m in audited.inner.modules() if isinstance(m, BaseTunerLayer)]
    kept = [getattr(layer, name, None) for layer in layers for name in layer.other_param_names]
    own = {id(p) for each in kept if isinstance(each, torch.nn.ParameterDict) for p in each.parameters()}
    return own.issuperset(map(id, parameters))


def _set_aside(audited: AuditedModel) -> set[int]:
    """Return the base's parameters of which an adapter trains a copy; with bias="all" peft saves their biases, too."""
    wrappers = [m for m in audited.inner.modules() if isinstance(m, ModulesToSaveWrapper)]
    return {id(p) for wrapper in wrappers for p in wrapper.original_module.parameters()}


def _fixed_factors(audited: AuditedModel, active: Sequence[str]) -> set[int]:
    """Return the first factors of these adapters, if all are frozen and all second ones trained: that is LoRA-FA."""
    modules: list[Any] = [m for m in audited.inner.modules() if isinstance(m, LoraLayer)]
    layers = [m for m in modules if isinstance(m.lora_A, torch.nn.ModuleDict)]  # AdaLoRA's factors are parameters
    pairs = [(layer.lora_A[name], layer.lora_B[name]) for layer in layers for name in active if name in layer.lora_A]
    first = [p for one, _ in pairs for p in one.parameters()]
    second = [p for _, two in pairs for p in two.parameters()]
    is_method = not any(p.requires_grad for p in first) and all(p.requires_grad for p in second)
    return {id(p) for p in first} if is_method else set()


def _frozen_by_method(
    audited: AuditedModel, active: Sequence[str], untrained: Mapping[str, torch.nn.Parameter]
) -> set[int]:
    """Return which frozen parameters peft leaves so when it trains these adapters, as MiCA does one of its factors."""
    layers: list[Any] = [m for m in audited.inner.modules() if isinstance(m, BaseTunerLayer)] if untrained else []
    own = {id(p) for layer in layers for p in layer.parameters()}
    flags = [(p, p.requires_grad) for p in audited.inner.parameters()]
    try:
        for layer in layers:
            layer.set_requires_grad(list(active))
        return {id(p) for p in untrained.values() if id(p) in own and not p.requires_grad}
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def check_heads(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each head that the adapter was saved with and that peft alone silently left out."""
    for problem in missing_heads(audited.inner):
        message, _, fix = problem.partition(": ")
        yield Finding("SL123", "error", type(audited.inner).__name__, f"{message}.", fix)


def check_outside(audited: AuditedModel, teachers: Collection[str] = ()) -> Iterator[Finding]:
    """Yield a finding for parameters of the wrapper that are trained, but not saved with the model.

    `teachers` are those of models beside it that should not be trained, as the step has shown (SL114).
    """
    if not audited.wrapped or not audited.training:
        return
    inside = {id(p) for p in audited.inner.parameters()}
    inside |= {id(p) for name, p in audited.outermost.named_parameters() if name in teachers}
    outside = {n: p for n, p in audited.model.named_parameters() if p.requires_grad and id(p) not in inside}
    names = names_in_saving(audited)
    if names is not None and names.isdisjoint(_OF_ALL):  # of which the user's code may write all
        outside = {name: p for name, p in outside.items() if names.isdisjoint(name.split("."))}
    elif names is not None:
        outside = {}
    if outside:
        trained = counted(len(outside), "trained parameter")
        message = f"save_pretrained of the {type(audited.inner).__name__} does not write {trained} around it"
        severity: Severity = "error"
        if names is not None:
            message += ", and your own code that saves does not name them"
        elif audited.trainer is not None:
            message += f"; the Trainer does, in a state dict that fits a {type(audited.outermost).__name__} only"
            severity = "warning"
        fix = "attach them to the model with attach_head."
        yield Finding("SL104", severity, first_names(outside), f"{message}.", fix, size_of(outside.values()))


def check_head(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding when the output layer has an adapter."""
    if audited.peft is None or audited.base is None:
        return
    ends = embeddings_and_head_of(audited.base)
    embeddings, head = ends
    if head is None or not issubclass(type(head), BaseTunerLayer):  # a mixin, which no Module is for type checkers
        return
    if getattr(head, "tied_adapter", None) is not None:  # the tokens of the embeddings, which peft gives to both
        return
    tied = ends.weights[0] is ends.weights[1]
    if issubclass(type(embeddings), BaseTunerLayer) and not tied:
        return  # both were named, for tokens that were added
    name = next((n for n, module in audited.base.named_modules() if module is head), "lm_head")
    own = [p for n, p in head.named_parameters() if "base_layer" not in n]
    message = f"{name} has an adapter like any other linear layer: the gradient of the logits is kept for it" + (
        ", and merging it would change the embeddings, which are tied to it." if tied else "."
    )
    fix = "use target_modules='all-linear', which leaves it out, or name the layers, or add it to exclude_modules."
    yield Finding("SL115", "warning", name, message, fix, size_of(own))


def check_optimizer(audited: AuditedModel) -> Iterator[Finding]:
    """Yield findings where the optimizer holds other parameters than the model trains."""
    yield from _check_beside(audited)
    optimizers = audited.torch_optimizers
    if not optimizers:
        return
    optimized = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
    own = {id(p): name for name, p in audited.model.named_parameters()}
    missing = {own[id(p)]: p for p in audited.model.parameters() if p.requires_grad and id(p) not in optimized}
    # sharding, casting and attaching an adapter may replace parameters; the optimizer then keeps the old ones alive
    stale = [p for key, p in optimized.items() if key not in own]
    if stale and not (own.keys() & optimized.keys() and not missing and _is_of_others(audited, stale, optimized)):
        states = [value for each in optimizers for p in stale for value in each.state.get(p, {}).values()]
        state = [value for value in states if isinstance(value, torch.Tensor)]
        message = (
            f"the optimizer holds {counted(len(stale), 'parameter that is', 'parameters that are')} no longer the "
            f"model's: memory is kept for nothing, and what came in the place is not trained."
        )
        fix = "make the optimizer after the model is wrapped, sharded, cast or given its adapter."
        gone = {id(p) for p in stale}
        holders = [each for each in optimizers if any(id(p) in gone for g in each.param_groups for p in g["params"])]
        where = ", ".join(type(each).__name__ for each in holders)
        yield Finding("SL118", "error", where, message, fix, size_of([*stale, *state]))
    if missing:
        message = f"{len(missing)} trainable parameters are not in the optimizer: they get gradients, but never change."
        fix = "make the optimizer after the model is complete, or freeze them."
        yield Finding("SL118", "error", first_names(missing), message, fix, size_of(missing.values()))


def _is_of_others(audited: AuditedModel, stale: Sequence[torch.Tensor], optimized: Collection[int]) -> bool:
    """Whether parameters of an optimizer are a loss's or another model's, which none of the model's has replaced."""
    others = {id(p) for _, other in audited.others() for p in other.parameters()}
    left_out = {p.shape for p in audited.model.parameters() if id(p) not in optimized}
    return all(id(p) in others or p.shape not in left_out for p in stale)


def _check_beside(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each part of a trainer beside the model, such as a loss with weights, that nothing steps."""
    makes_own = getattr(type(audited.trainer), "create_optimizer", None)
    if audited.optimizer is None and not getattr(makes_own, "__module__", "transformers").startswith("transformers"):
        return  # it may put them into the optimizer that it makes
    for where, trainable in audited.not_optimized():
        name = where.removeprefix("trainer.")
        average = is_average(where, getattr(audited.trainer, name))
        if is_target(name) or average or runs_without_gradients(audited, name):
            continue
        message = (
            f"{counted(len(trainable), 'parameter of it requires', 'parameters of it require')} gradients, and no "
            f"optimizer has {'it' if len(trainable) == 1 else 'them'}: a Trainer makes its own of the model's."
        )
        fix = (
            f"pass an optimizer of both, torch.optim.AdamW([*model.parameters(), *{where}.parameters()]); or "
            f"{where}.requires_grad_(False) if it is not trained."
        )
        yield Finding("SL118", "warning", where, message, fix, size_of(trainable))
