"""Checks of where the tensors are and who shares the device: device map, CUDA contexts, FSDP's units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from safe_loading._core.names import first_names, nearest
from safe_loading._core.report import Finding, counted, format_bytes
from safe_loading._model.tensors import trained_alone
from safe_loading._ranks.device_guard import contexts

from .audited_model import AuditedModel, size_of

_FEW_UNITS = 2  # the root alone, or the root and one submodule


def check_device_map(audited: AuditedModel) -> Iterator[Finding]:
    """Yield findings where ``hf_device_map`` and the devices of the tensors differ."""
    device_map: Mapping[str, object] | None = getattr(audited.base, "hf_device_map", None)
    if audited.base is None or not device_map:
        return
    missing, misplaced = {}, {}
    for name, parameter in audited.base.named_parameters():
        # the map was made before peft put the layer into a wrapper
        entry = nearest(name.replace(".base_layer.", "."), device_map)
        place = None if entry is None else device_map[entry]
        if place is None:
            missing[name] = parameter
        elif place != "disk" and not parameter.is_meta and not _is_on(parameter.device, place):
            misplaced[name] = parameter
    if missing:
        message = f"hf_device_map has no device for {len(missing)} of {len(audited.parameters)} parameters."
        fix = "add the missing modules to it, or let plan_device_map make the map."
        yield Finding("SL110", "error", next(iter(missing)), message, fix, size_of(missing.values()))
    if misplaced:
        name, parameter = next(iter(misplaced.items()))
        message = (
            f"{counted(len(misplaced), 'parameter is', 'parameters are')} not on the device that hf_device_map gives; "
            f"this one is on {parameter.device}."
        )
        fix = "do not call .to(), .cuda() or .cpu() on a model that was dispatched."
        yield Finding("SL110", "error", name, message, fix, size_of(misplaced.values()))


def check_contexts(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each GPU on which this process has a context and the model has no tensor."""
    own = {p.device for p in audited.model.parameters()}
    for index in sorted(contexts()):
        device = torch.device("cuda", index)
        if device not in own:
            yield Finding(
                "SL116",
                "warning",
                str(device),
                f"this process has a CUDA context on {device}, where the model has no tensor: it takes some hundred "
                f"MiB from every other process on that GPU.",
                "call torch.cuda.set_device(device_for_rank()) before anything else, and give map_location= and "
                "device= with an index.",
            )


def check_data_parallel(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for ``DataParallel``, by hand or as the Trainer puts it around a model on several GPUs."""
    around = next((m for m in audited.model.modules() if isinstance(m, torch.nn.DataParallel)), None)
    gpus = len(around.device_ids) if around is not None else _gpus_of(audited.training_arguments)
    if around is None and gpus < 2:  # one GPU needs no copies
        return
    size = size_of(audited.model.parameters()) * max(0, gpus - 1)
    message = (
        f"DataParallel copies the whole model to {counted(gpus, 'GPU') if gpus else 'every GPU'} at each step and "
        f"gathers the outputs on the first; what a forward pass keeps in self is lost with the copies, and quantized "
        f"bases fail."
    )
    fix = (
        "start a process for each GPU: torchrun --nproc-per-node=gpu, or CUDA_VISIBLE_DEVICES=0; without DataParallel."
    )
    yield Finding("SL136", "warning" if gpus > 1 else "info", type(audited.model).__name__, message, fix, size)


def _gpus_of(arguments: object) -> int:
    """Return over how many GPUs a Trainer would spread a model by itself."""
    mode = getattr(getattr(arguments, "parallel_mode", None), "name", "")
    return int(getattr(arguments, "n_gpu", 0)) if mode == "NOT_DISTRIBUTED" else 0


def check_sharding(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding when FSDP gathers (nearly) the whole model at once."""
    units = fsdp_units(audited.model)
    if not units:
        return
    name, largest = max(units.items(), key=lambda item: item[1])
    layer_classes = set(getattr(audited.base, "_no_split_modules", None) or ())
    layers = sum(type(module).__name__ in layer_classes for module in audited.model.modules())
    if len(units) <= _FEW_UNITS and layers > len(units):
        message = (
            f"FSDP has {counted(len(units), 'unit')} for {layers} layers: each step gathers "
            f"{format_bytes(largest)} at once."
        )
        fix = "shard each layer (fully_shard, or wrap_fsdp_meta_safe), then the root."
        yield Finding("SL117", "error", name or type(audited.model).__name__, message, fix, largest)


def check_outside_units(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for parameters that were attached after FSDP sharded the model, and are trained."""
    alone = trained_alone(audited.model) if audited.training else {}
    if alone:
        found = counted(len(alone), "trained parameter is", "trained parameters are")
        message = f"{found} outside of FSDP's units: nothing reduces their gradients, and each rank trains its own."
        fix = "attach before FSDP shards."
        if any(isinstance(module, FSDPModule) for module in audited.model.modules()):  # FSDP1 takes nothing later
            fix = "attach before FSDP shards, or call wrap_fsdp_meta_safe(model), which shards what was attached since."
        yield Finding("SL148", "error", first_names(alone), message, fix, size_of(alone.values()))


def fsdp_units(model: torch.nn.Module) -> dict[str, int]:
    """Return the name of each unit of FSDP1 or FSDP2 and the unsharded bytes that it gathers."""
    units = {n: m for n, m in model.named_modules() if isinstance(m, (FSDPModule, FullyShardedDataParallel))}
    sizes = dict.fromkeys(units, 0)
    for name, parameter in model.named_parameters():
        owner = nearest(name, units)
        if owner is not None:
            sizes[owner] += parameter.numel() * parameter.itemsize  # a DTensor's numel is that of the whole tensor
    return sizes


def _is_on(device: torch.device, place: object) -> bool:
    """Whether a device is the one that an entry of a device map names: ``0``, ``"cuda:0"``, ``"cuda"``, ``"cpu"``."""
    if isinstance(place, int):  # an accelerator of any kind
        return device.index == place and device.type != "cpu"
    expected = place if isinstance(place, torch.device) else torch.device(str(place))
    return expected.type == device.type and expected.index in (None, device.index)
