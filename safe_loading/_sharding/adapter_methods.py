"""Methods of peft that would fail on a sharded model, or lose a merge without a word: refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from peft import AdaLoraModel, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule

from safe_loading._core.names import canonical, method_name
from safe_loading.errors import ArgumentError

from .moved_units import units_stay

# Layers, and variants of LoRA, that read the weights of the modules in a layer, by the names that users know.
_READ_PAST_FORWARD = {
    "DoraLinearVariant": "DoRA",
    "_DoraConvNdVariant": "DoRA",
    "VeloraLinearVariant": "VeLoRA",
    "MontecloraLinearVariant": "MonteCLoRA",
    "PeanutLayer": "PEANuT",
}
_MERGES = ("merge_and_unload", "merge_adapter")
_ROAD = (
    "Save the adapter with save_pretrained on every rank, and merge it on disk with merge_lora_checkpoint(base, "
    "adapter, output)"
)


def refused_adapters(model: nn.Module, version: int) -> list[str]:
    """Return the adapters that a model whose parameters are shards does not run, each with a fix."""
    return [*past_hooks(model), *(past_flat_units(model) if version == 1 else ())]


def past_hooks(model: nn.Module) -> list[str]:
    """Return the modules that compute with shards because peft calls the base past FSDP's hooks, each with a fix.

    ``AdaLoraModel.forward`` does, and multiplies whole factors for its loss. Only the models of a task call it: a plain
    ``PeftModel`` calls the base itself.
    """
    of_task = [(n, m) for n, m in model.named_modules() if isinstance(m, PeftModel) and type(m) is not PeftModel]
    return [
        f"{name or type(module).__name__} trains AdaLoRA: peft calls its base past FSDP's hooks, and multiplies whole "
        f"factors for the loss. Train a LoraConfig, or AdaLoRA on one device or under DistributedDataParallel."
        for name, module in of_task
        if isinstance(module.base_model, AdaLoraModel)
    ]


def tied_factors(model: nn.Module) -> list[str]:
    """Return the layers whose LoRA is that of the embeddings, seen from the other side, each with a fix.

    ``ensure_weight_tying`` makes two parameters of one memory for a tied head. As shards they would be two memories.
    """
    return [
        f"{canonical(name)}.lora_A and .lora_B share their memory with the LoRA of the embeddings "
        f"(ensure_weight_tying=True), and FSDP would train the two apart. Train it on one device or under "
        f"DistributedDataParallel, or attach an adapter with ensure_weight_tying=False"
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer) and (getattr(layer, "kwargs", None) or {}).get("tied_adapter")
    ]


def past_flat_units(model: nn.Module) -> list[str]:
    """Return the adapters that fail in the first forward pass under FSDP1, each with a fix.

    An adapter of another dtype than its base becomes a unit, and nothing gathers what peft reads past its forward.
    LoRA of parameters puts another tensor in the place of one that is a view of a flat parameter.
    """
    found: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        if (reason := _reason_against_flat_units(layer)) is not None:
            found.setdefault(reason, []).append(canonical(name))
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}. Use version=2 (Spread.fsdp2)."
        for reason, names in found.items()
    ]


def _reason_against_flat_units(layer: nn.Module) -> str | None:
    if not isinstance(layer, BaseTunerLayer):
        return None
    if type(layer).__name__ == "ParamWrapper":
        return "target_parameters replaces a parameter while the layer runs, and FSDP1's are views of a flat one"
    kind = _kind_read_past_forward(layer)
    base = {id(each): each.dtype for each in layer.get_base_layer().parameters()}
    apart = {each.dtype for each in layer.parameters() if id(each) not in base} - {*base.values()}
    if kind is None or not apart:
        return None
    return (
        f"peft reads the weights of {kind} past their forward, and as {', '.join(sorted(map(str, apart)))} over a base "
        f"of another dtype they are FSDP1 units of their own"
    )


def _kind_read_past_forward(layer: BaseTunerLayer) -> str | None:
    variants: Mapping[str, object] = getattr(layer, "lora_variant", None) or {}
    classes = [each.__name__ for inside in (layer, *variants.values()) for each in type(inside).__mro__]
    return next((_READ_PAST_FORWARD[name] for name in classes if name in _READ_PAST_FORWARD), None)


def guard_merges(model: nn.Module, version: int) -> None:
    """Replace the merging methods of a model with adapters that FSDP has wrapped, on the instance.

    With FSDP2, peft merges plain LoRA in place, which is right. What it assigns as ``weight.data`` (with safe_merge, of
    DoRA, of the other methods) never reaches the shard, without a word. FSDP1 has flat parameters.
    """
    for module in model.modules():  # a module of the user's may hold the model with adapters
        tuner = getattr(module, "base_model", None)
        if not hasattr(module, "peft_config") or not isinstance(tuner, nn.Module):
            continue
        for name in (*_MERGES, "unload"):
            if callable(method := getattr(tuner, name, None)):
                refused = functools.partial(_refuse_flat, name)
                tuner.__dict__[name] = refused if version == 1 else _guarded(model, tuner, name, method)


def _refuse_flat(name: str, *args: object, **options: object) -> None:
    raise ArgumentError(f"{name}() of a model that FSDP1 wrapped: its weights are flat. {_ROAD}; or use version=2.")


def _guarded(model: nn.Module, tuner: Any, name: str, method: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(method)
    def guarded(*args: Any, **options: Any) -> object:
        problems = _problems(tuner, args, options) if name in _MERGES else []
        if problems:
            raise ArgumentError(
                f"{name}() of a model that FSDP2 wrapped: peft would assign merged weights that never reach the "
                f"shards. {_ROAD}. The reasons:",
                problems,
            )
        for unit in model.modules():  # a merge into what a pass has gathered would never reach the shards
            if isinstance(unit, FSDPModule):
                unit.reshard()
        with units_stay(tuner.model):
            return method(*args, **options)

    return guarded


def _problems(tuner: Any, args: Sequence[object], options: Mapping[str, object]) -> list[str]:
    # merge_and_unload(progressbar, safe_merge, adapter_names), merge_adapter(adapter_names, safe_merge)
    safe = options.get("safe_merge", args[1] if len(args) > 1 else False)
    return [*(["safe_merge=True"] if safe else []), *sorted(set(_assigned_kinds(tuner)))]


def _assigned_kinds(tuner: Any) -> Iterator[str]:
    """Yield the adapters that peft merges by assigning ``weight.data``, with their kinds."""
    for name, config in tuner.peft_config.items():
        kind = method_name(config.peft_type)
        if kind != "LORA":
            yield f"{name} is {kind}"
        if getattr(config, "trainable_token_indices", None):
            yield f"{name} has trainable tokens"
    for module in tuner.modules():
        for name in getattr(module, "lora_variant", None) or {}:
            yield f"{name} is a variant of LoRA ({type(module.lora_variant[name]).__name__})"
