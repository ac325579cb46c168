"""Where the tensors are, and who else is there: device map, contexts, FSDP's units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from safe_loading._core.report import Finding, format_bytes
from safe_loading._ranks.contexts import contexts

from .subject import Subject, size_of

_FEW_UNITS = 2


def check_device_map(subject: Subject) -> Iterator[Finding]:
    """Yield findings where ``hf_device_map`` and the devices of the tensors differ."""
    table: dict[str, Any] | None = getattr(subject.base, "hf_device_map", None)
    if not table:
        return
    lost, wrong = {}, {}
    for name, parameter in subject.base.named_parameters():
        plain = name.replace(".base_layer.", ".")
        place = next((table[key] for key in _prefixes(plain) if key in table), None)
        if place is None:
            lost[name] = parameter
        elif place != "disk" and not parameter.is_meta and not _same(place, parameter.device):
            wrong[name] = parameter
    if lost:
        yield Finding(
            "SL110",
            "error",
            next(iter(lost)),
            f"hf_device_map places {len(subject.parameters) - len(lost)} parameters and leaves out {len(lost)}.",
            "give the missing modules a device, or let plan_device_map make the map.",
            size_of(lost.values()),
        )
    if wrong:
        name, parameter = next(iter(wrong.items()))
        yield Finding(
            "SL110",
            "error",
            name,
            f"hf_device_map and the tensors differ for {len(wrong)} parameters; this one is on {parameter.device}.",
            "do not call .to(), .cuda() or .cpu() on a model that was dispatched.",
            size_of(wrong.values()),
        )


def check_contexts(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for each GPU on which this process has a context and the model has nothing."""
    own = {p.device for p in subject.model.parameters()}
    for index in sorted(contexts()):
        device = torch.device("cuda", index)
        if device not in own:
            yield Finding(
                "SL116",
                "warning",
                str(device),
                f"this process has a CUDA context on {device}, where the model has no tensor: some hundred MiB that "
                f"every other process there misses.",
                "call torch.cuda.set_device(device_for_rank()) first of all, and pass map_location= and device= fully.",
            )


def check_sharding(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when FSDP gathers (nearly) the whole model at once."""
    units = fsdp_units(subject.model)
    if not units:
        return
    name, largest = max(units.items(), key=lambda item: item[1])
    layers = sum(type(m).__name__ in _block_names(subject) for m in subject.model.modules())
    if len(units) <= _FEW_UNITS and layers > len(units):
        yield Finding(
            "SL117",
            "error",
            name or type(subject.model).__name__,
            f"FSDP has {len(units)} unit{'s' if len(units) > 1 else ''} for {layers} layers: each step gathers "
            f"{format_bytes(largest)} at once.",
            "shard each layer (fully_shard, or wrap_fsdp_meta_safe), then the root.",
            largest,
        )


def fsdp_units(model: torch.nn.Module) -> dict[str, int]:
    """Return the name of each unit of FSDP1 or FSDP2 and the unsharded bytes that it gathers."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    roots = {n: m for n, m in model.named_modules() if isinstance(m, (FSDPModule, FullyShardedDataParallel))}
    sizes = dict.fromkeys(roots, 0)
    for name, parameter in model.named_parameters():
        owner = next((key for key in _prefixes(name) if key in roots), None)
        if owner is not None:
            sizes[owner] += parameter.numel() * parameter.itemsize  # a DTensor's numel is the whole tensor's
    return sizes


def _block_names(subject: Subject) -> set[str]:
    return set(getattr(subject.base, "_no_split_modules", None) or ())


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _same(place: Any, device: torch.device) -> bool:
    if isinstance(place, int):
        return device.index == place and device.type != "cpu"
    wanted = torch.device(place)
    return wanted.type == device.type and wanted.index in (None, device.index)
