"""Checks of the base's weights: an adapter is loaded onto its checkpoint, and that may hold others than the memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import torch
from peft.tuners.adaption_prompt.layer import AdaptedAttention
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.log import quiet
from safe_loading._core.names import first_names, method_name
from safe_loading._core.report import Finding, counted
from safe_loading._loading.starts import starts_on_base
from safe_loading._model.dtypes import dtype_named
from safe_loading._model.layout.checkpoint_source import CheckpointSource, ExpectedTensor
from safe_loading._model.layout.convert import made_by
from safe_loading._model.layout.layout import Conversion, read_layout
from safe_loading._model.layout.reading import ShardTarget, differing
from safe_loading._model.meta_model import meta_model
from safe_loading._model.quantized.recognize import is_quantized
from safe_loading._wrapping.transparent import mixins_and_original
from safe_loading.errors import SafeLoadingError

from .audited_model import AuditedModel, by_value, has_values, size_of

_COMPARED = 2**16  # elements of each weight: a merge or another start changes nearly all
_RANDOM_START = "pissa_niter"  # what init_lora_weights begins with where peft draws random numbers for the base
# The module of the base inside a module of peft, by the name that it has there.
_INSIDE = ("base_layer", "original_module")
_FIX = (
    "save the base as it is, model.get_base_model().save_pretrained(folder) before the adapter is attached, and load "
    "it from there, so that name_or_path is that folder."
)


def check_random_start(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each adapter whose start changes the base by random numbers, which a load draws anew."""
    for adapter, config in audited.adapter_configs.items():
        start = str(getattr(config, "init_lora_weights", ""))
        if audited.training and start.lower().startswith(_RANDOM_START):
            message = (
                f"init_lora_weights={start!r} of adapter {adapter!r} takes a part out of the base that is found with "
                f"random numbers: a load of the adapter draws others, and so takes another part out."
            )
            yield Finding(
                "SL140", "warning", type(audited.inner).__name__, message, "init_lora_weights='pissa' is exact."
            )


def check_base_values(audited: AuditedModel, skipped: list[str]) -> Iterator[Finding]:
    """Yield a finding for frozen weights that the checkpoint has not, or has with other values.

    The checkpoint is what ``name_or_path`` names, if it is on this machine. Of each weight the beginning is read. A
    reason for which the base was not compared is added to `skipped`.
    """
    base: Any = audited.base
    folder = audited.checkpoint if audited.adapted is not None else None
    frozen = {} if folder is None else _frozen(audited)
    if folder is None or not frozen:
        return
    not_compared = _not_compared(audited)
    if not_compared:
        skipped.append(f"base values: {not_compared} It was not compared with {folder} (SL140).")
        return
    try:
        with quiet():
            source = _source(base, folder)
            wrong = _other_values(source, frozen, dtype_named(getattr(base.config, "dtype", None)))
    except SafeLoadingError as error:
        skipped.append(f"base values: {folder} could not be compared with the base (SL140): {error}")
        return
    if wrong:
        told = "; ".join(f"{first_names(names)} ({why})" for why, names in by_value(wrong).items())
        message = (
            f"{counted(len(wrong), 'weight')} of the frozen base {'is' if len(wrong) == 1 else 'are'} not what "
            f"{folder} holds, onto which the adapter will be loaded: {told}."
        )
        size = size_of(frozen[name] for name in wrong)
        yield Finding("SL140", "error", first_names(wrong), message, _FIX, size)


def _not_compared(audited: AuditedModel) -> str:
    """Return in a sentence why a base has no values to compare; nothing where it has."""
    base: Any = audited.base
    if any(is_quantized(module) for module in base.modules()):
        return "the base is quantized in memory, whose codes are no values of the checkpoint."
    configs = audited.adapter_configs.values()
    if any(getattr(config, "layer_replication", None) for config in configs):
        return "the adapter repeats layers of the base, which the checkpoint has by other numbers."
    if any(starts_on_base(config) or method_name(config.peft_type) == "OSF" for config in configs):
        return "the adapter's start changed the base, and does so again in a load."
    return ""


def _frozen(audited: AuditedModel) -> dict[str, torch.Tensor]:
    """Return the base's own weights that have values and are not trained, by the names that its class gives them."""
    base: Any = audited.base
    added = {id(p) for p in audited.adapter_parameters.values()} | {id(p) for p in audited.saved.values()}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in _own_parameters(base, "", audited.adapter_configs.keys()):
        if has_values(parameter) and not parameter.requires_grad and id(parameter) not in added:
            added.add(id(parameter))
            found[name] = parameter
    return found


def _own_parameters(module: torch.nn.Module, path: str, adapters: Set[str]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a base under their names without peft's modules, and none that those add or replace."""
    if isinstance(module, ModulesToSaveWrapper) and adapters <= module.modules_to_save.keys():
        return  # the base's own does not run with any adapter
    inside: str | None = "model" if isinstance(module, AdaptedAttention) else None
    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        inside = next((name for name in _INSIDE if name in module._modules), None)
    if inside is not None:
        yield from _own_parameters(module.get_submodule(inside), path, adapters)
        return
    for name, parameter in module.named_parameters(path.rstrip("."), recurse=False):
        yield name, parameter
    for name, child in module.named_children():
        yield from _own_parameters(child, f"{path}{name}.", adapters)


def _source(base: Any, folder: Path) -> CheckpointSource:
    """Return the checkpoint, matched with a model of the base's class on meta."""
    config = copy.deepcopy(base.config)
    plain = meta_model(config, mixins_and_original(type(base))[1])
    slots = {name: ExpectedTensor(tuple(value.shape), value.dtype) for name, value in plain.state_dict().items()}
    names_of: dict[int, list[str]] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    same = {name: tuple(names) for names in names_of.values() if len(names) > 1 for name in names}
    opened = ModelFolder(folder)
    checkpoint = opened.read_checkpoint()
    layout = read_layout(plain, checkpoint.tensors, slots)
    conversions: dict[str, Conversion] = {}
    for conversion in layout.conversions:
        made, _ = made_by(conversion, checkpoint.tensors, slots, config)
        conversions.update(dict.fromkeys(made, conversion))
    return CheckpointSource(opened, checkpoint, layout, slots, same, conversions, config)


def _other_values(
    source: CheckpointSource, frozen: dict[str, torch.Tensor], loaded_as: torch.dtype | None
) -> dict[str, str]:
    """Return why each weight is not the checkpoint's."""
    wrong, targets = {}, []
    for name, tensor in frozen.items():
        if name in source.layout.mismatched:
            wrong[name] = f"there of shape {list(source.layout.mismatched[name])}"
        elif source.stored_as(name) is None:
            wrong[name] = "not there"
        elif tensor.is_floating_point():
            begin = tensor.detach().reshape(-1)[:_COMPARED].cpu().contiguous()
            narrower = loaded_as is not None and loaded_as.itemsize < begin.dtype.itemsize
            through = loaded_as if narrower else None  # it was rounded by the load, and cast back
            targets.append(ShardTarget(name, 0, begin.numel(), begin, through))
    return wrong | dict.fromkeys(differing(source, targets), "there with other values")
