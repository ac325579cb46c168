"""Hot swap: another adapter's values into the tensors of one that is loaded, so that compiled graphs stay valid."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import check_hotswap_configs_compatible, hotswap_adapter_from_state_dict

from safe_loading._core.report import Finding
from safe_loading.errors import AdapterError

from . import adapter_values as values
from .attach import Adapter, Attached, quiet, title
from .slots import AdapterSlot, adapter_slots, route


@dataclasses.dataclass(frozen=True)
class Staged:
    """A swap that can no longer fail: the new values are on the device, beside the old ones.

    Attributes:
        adapter: The new adapter.
        slots: The loaded adapter's places.
        values: The new value of each.
        findings: What is worth knowing.
        renamed: Keys that were renamed.
    """

    adapter: Adapter
    slots: dict[str, AdapterSlot]
    values: dict[str, torch.Tensor]
    findings: list[Finding]
    renamed: dict[str, str]


def stage(model: PeftModel, adapter: Adapter, *, dtype: torch.dtype | None) -> Staged:
    """Check that an adapter can take the place of the loaded ``adapter.name``, and move its values to the device.

    Until the swap is done the new adapter takes its size in device memory once more; nothing of the model changes.

    Raises:
        AdapterError: The two adapters differ in more than their values, rank and scaling.
    """
    name, config = adapter.name, adapter.config
    try:
        check_hotswap_configs_compatible(model.peft_config[name], config)
    except ValueError as error:
        raise AdapterError(
            f"{adapter.facts.source!r} cannot be swapped into adapter {name!r}: {error}. Load it under another name."
        ) from error
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"{adapter.facts.source!r} is {config.peft_type}; peft can hot-swap LoRA only.")
    tensors, renamed, said = values.rename(adapter.facts, adapter.tensors, prompt_learning=False, own_module=False)
    with quiet():
        there = route(model, name, get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
        new = route(model, name, tensors)
    slots = adapter_slots(model, there.tensors)
    findings = [*adapter.findings, *said, *_differences(adapter, slots, new.tensors, dtype)]
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    padded = any(key in slots and slots[key].tensor.shape != value.shape for key, value in new.tensors.items())
    errors += [*new.missing, *_refused(model, adapter, config, padded), *_other_rank(adapter, config)]
    if errors:
        raise AdapterError(title([adapter], f"the loaded adapter {name!r}"), errors)
    moved = {key: value.to(slots[key].tensor) for key, value in new.tensors.items()}
    return Staged(adapter, slots, moved, findings, renamed)


def commit(model: PeftModel, staged: Staged) -> Attached:
    """Overwrite the loaded adapter's values and scaling, in place."""
    name, config = staged.adapter.name, staged.adapter.config
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"{staged.adapter.facts.source!r} is no LoRA adapter.")
    lora = {key: value for key, value in staged.values.items() if ".lora_" in key}
    before = model.peft_config[name]
    values = {key: slot.tensor.detach().to("cpu", copy=True) for key, slot in staged.slots.items()}
    scalings = [(layer, layer.scaling[name]) for layer in _layers(model) if name in layer.scaling]
    try:
        hotswap_adapter_from_state_dict(model, lora, name, config)
        with torch.no_grad():
            for key in staged.values.keys() - lora.keys():
                staged.slots[key].tensor.copy_(staged.values[key])
    except BaseException:  # Ctrl-C: half of one adapter and half of another would be left
        with torch.no_grad():
            for key, value in values.items():
                staged.slots[key].tensor.copy_(value)
        for layer, scaling in scalings:
            layer.scaling[name] = scaling
        raise
    config.inference_mode = before.inference_mode
    if any(slot.tensor.shape != staged.values[key].shape for key, slot in staged.slots.items()):
        _as_padded(config, before)
    model.peft_config[name] = config
    return Attached.of(model, staged.findings, [slot.tensor for slot in staged.slots.values()], staged.renamed)


def _layers(model: PeftModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _as_padded(config: LoraConfig, loaded: Any) -> None:
    """Say in the config what the tensors are now: the loaded adapter's rank, and the same scaling."""
    ratio = loaded.r / config.r
    settings = vars(config)  # lora_alpha is declared an int, and may be any number
    settings["lora_alpha"] = config.lora_alpha * (math.sqrt(ratio) if config.use_rslora else ratio)
    settings["r"] = loaded.r


def _refused(model: PeftModel, adapter: Adapter, config: LoraConfig, padded: bool) -> list[str]:
    problems = []
    if any(adapter.name in layer.merged_adapters for layer in _layers(model)):
        problems.append(f"adapter {adapter.name!r} is merged into the base. Call model.unmerge_adapter() first.")
    old = model.peft_config[adapter.name]
    patterns = any(getattr(each, name, None) for each in (config, old) for name in ("rank_pattern", "alpha_pattern"))
    if padded and patterns:
        problems.append("the ranks differ and one of the configs has patterns. Load it under another name.")
    embeddings = [layer for layer in _layers(model) if adapter.name in layer.lora_embedding_A]
    if embeddings:  # hotswap_adapter_from_state_dict ends in an AttributeError
        problems.append("peft cannot swap a LoRA on an embedding. Load it under another name.")
    return problems


def _other_rank(adapter: Adapter, config: LoraConfig) -> list[str]:
    """Return the factors whose rank is not the config's: the scaling would be that of another rank."""
    if config.rank_pattern or getattr(config, "target_parameters", None):  # other ranks; the experts' are stacked
        return []
    return [
        f"{adapter.where}: {key} has rank {tensor.shape[0]}, and r in adapter_config.json is {config.r}"
        for key, tensor in adapter.tensors.items()
        if ".lora_A." in key and tensor.dim() and tensor.shape[0] != config.r
    ]


def _differences(
    adapter: Adapter, slots: dict[str, AdapterSlot], new: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> list[Finding]:
    findings = []
    for key in sorted(slots.keys() | new.keys()):
        where = f"{adapter.where}: {key}"
        if key not in new:
            fix = "load it under another name; peft would fill the rest with zeros."
            findings.append(_error("adapter-key-missing", where, "the loaded adapter has it, the new one not.", fix))
            continue
        if key not in slots:
            fix = "load it under another name."
            findings.append(_error("adapter-key-unexpected", where, "the loaded adapter has no such tensor.", fix))
            continue
        old, value = slots[key].tensor, new[key]
        if (dtype or value.dtype) != old.dtype:
            text = f"the new adapter is {dtype or value.dtype}, the loaded one {old.dtype}; writing it would round it."
            findings.append(
                _error("adapter-dtype", where, text, f"pass adapter_dtype={old.dtype}, or load under another name.")
            )
        if not _fits(key, old.shape, value.shape):
            text = f"the loaded adapter has {list(old.shape)}, the new one {list(value.shape)}."
            findings.append(_error("shape-mismatch", where, text, "load it under another name."))
    return findings


def _fits(key: str, old: torch.Size, new: torch.Size) -> bool:
    """Whether peft can copy it: the same shape, or a smaller rank, which it pads with zeros."""
    if old == new:
        return True
    rank = {".lora_A.": 0, ".lora_B.": 1}.get(next((part for part in (".lora_A.", ".lora_B.") if part in key), ""))
    if rank is None or len(old) != len(new) or new[rank] > old[rank]:
        return False
    return all(o == n for index, (o, n) in enumerate(zip(old, new, strict=True)) if index != rank)


def _error(code: str, where: str, message: str, fix: str) -> Finding:
    return Finding(code, "error", where, message, fix)
