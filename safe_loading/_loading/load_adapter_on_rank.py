"""``load_adapter_on_rank``: load one more adapter into a model, or replace one, with the same guarantees."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from peft import PeftMixedModel, PeftModel

from safe_loading._core import progress as _progress
from safe_loading._core.engine_names import LATER, LaterNames
from safe_loading._core.engines import require_for
from safe_loading._core.log import logger
from safe_loading._core.walk import unordered_modules
from safe_loading._model.peft_layers import base_of, has_adapters, is_mixed, merged_adapters
from safe_loading._model.snapshot import Snapshot, take_idle_caches_off
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading._ranks.device_guard import check_contexts, contexts, guarded, own_device
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.launcher import local_rank
from safe_loading._ranks.rank_devices import RankDevices, devices_of
from safe_loading.errors import AdapterError, AdapterExists, ArgumentError, DeviceError

from .adapter_values import Adapter
from .agreed_sources import find_sources
from .alike import find_alike
from .attach import Attached, attach
from .attach_alike import attach_alike
from .base_arguments import as_dtype
from .hot_swap import StagedSwap, commit_swap, stage_swap
from .inject import check_adapter_name, prepare, to_add_one
from .load import adapter_part, current_device_findings, names_of_modules, restored_by, warn_of_errors
from .report import LoadReport
from .sources import LoadRequest
from .split_base import alone_findings, said_of_split_base

if TYPE_CHECKING:
    from typing_extensions import Unpack


@tensors_on_host()
def load_adapter_on_rank(
    model: PeftModel | PeftMixedModel,
    adapter: str | os.PathLike[str],
    adapter_name: str,
    *,
    device: torch.device | str | int | None = None,
    adapter_dtype: torch.dtype | str | None = None,
    is_trainable: bool = False,
    hotswap: bool = False,
    adapter_revision: str | None = None,
    adapter_subfolder: str | None = None,
    strict: bool = True,
    allow_pickle: bool = False,
    ranks: Literal["all", "self"] | Sequence[int] = "all",
    timeout: float = 1800.0,
    key_mapping: Mapping[str, str] | None = None,
    **other: Unpack[LaterNames],
) -> LoadReport:
    """Load one more adapter into a model, on the device that the model is on and on no other.

    The guarantees of :func:`load_peft_on_rank` hold: bit-exact, strict, all or nothing, the same on every rank. The
    new adapter is not made active (``model.set_adapter`` does that).

    Args:
        model: A model with adapters. A PeftMixedModel takes those of the methods that it can mix.
        adapter: A folder or hub id.
        adapter_name: The name that it gets; with ``hotswap`` the name of the adapter that it replaces.
        device: The device that the model is on, which is the only one accepted. None takes it from the model, which may
            be spread over several by its device map.
        adapter_dtype: Dtype of the adapter, or its name; None leaves each tensor exactly as it is on disk. A saved
            module (``modules_to_save``) has the dtype of the module that it replaces, whatever this is.
        is_trainable: Whether its parameters require grad. False puts the whole model in eval mode, as peft's
            ``load_adapter`` does.
        hotswap: Whether the adapter's values overwrite those of the adapter ``adapter_name`` in place. Tensors,
            compiled graphs and optimizers stay valid; the rank may be smaller, the targets must be the same (peft
            ``hotswap_adapter``).
        adapter_revision: Branch, tag or commit of an adapter on the hub.
        adapter_subfolder: Folder inside the adapter's repository.
        strict: As for :func:`load_peft_on_rank`; a hot swap is always strict.
        allow_pickle: Whether a ``.bin`` adapter may be read, with ``weights_only=True``.
        ranks: Which ranks load together, as for :func:`load_peft_on_rank`.
        timeout: Longest wait for the other ranks, in seconds.
        key_mapping: Regular expressions and replacements for the adapter's keys, as for :func:`load_peft_on_rank`.
        **other: Names of peft that mean one thing here: ``torch_device`` is ``device``; ``token``, ``cache_dir`` and
            ``local_files_only`` are those of the hub.

    Returns:
        What was loaded where, in which dtype and time.

    Raises:
        AdapterExists: The name is taken, and ``hotswap`` is False.
        AdapterError: The adapter does not fit; the model is unchanged.
        CheckpointError: The adapter is incomplete, damaged or not safe to read.
        DeviceError: The model is not on one device, or not on ``device``.
        RankError: Another rank failed, or the ranks read different files.
    """
    group = Ranks.resolve(ranks)
    with group.together("check the arguments", timeout=timeout):
        device, hub = LATER.placed(load_adapter_on_rank, other, {"device": device}, None)
        check_adapter_name(adapter_name)
        own_dtype = as_dtype(adapter_dtype, "adapter_dtype", None)
        own = _checked_model(model, adapter_name, hotswap=hotswap)
        if hotswap:
            _check_swap(is_trainable=is_trainable, strict=strict)
        devices = _devices_of(own, device)
        target = devices.main
    contexts_before = contexts()
    notes = current_device_findings(target, devices.by_module or target)
    request = LoadRequest(
        {adapter_name: adapter},
        base=None,
        adapter_revision=adapter_revision,
        adapter_subfolder=adapter_subfolder,
        allow_pickle=allow_pickle,
        base_kwargs=hub or {},
    )
    # Outermost, and the report is made inside, so that Ctrl-C in the last line is undone as well. A swap is staged
    # beside the model, and undoes itself.
    with restored_by([]) as undo, guarded(target, builds=False), _progress.engine_bars(local_rank()):
        facts = find_sources(request, group, timeout=timeout).adapters[adapter_name]
        start = time.perf_counter()
        with group.together("load the adapter", timeout=timeout):
            prepared = prepare(adapter_name, facts, is_trainable=is_trainable, key_mapping=key_mapping, dtype=own_dtype)
            outcome: StagedSwap | Attached
            if hotswap:
                outcome = stage_swap(own, prepared, dtype=own_dtype)
                devices.check(own)
            else:
                outcome = _attach(own, prepared, devices, undo, own_dtype, is_trainable=is_trainable, strict=strict)
            check_contexts(contexts_before, target, *devices.by_module.values())
            findings = [*outcome.findings, *notes, *(alone_findings(own) if is_trainable else ())]
            findings += [] if hotswap else names_of_modules(own)
            warn_of_errors(findings)
        # A swap overwrites values, and this rank could not undo that on the others: it waits until all ranks can.
        attached = commit_swap(own, outcome) if isinstance(outcome, StagedSwap) else outcome
        part = adapter_part(prepared, attached, devices, time.perf_counter() - start)
        report = LoadReport(group.index(group.rank), group.size, str(devices), (part,), tuple(findings))
        own.__dict__["load_report"] = report
        logger.info("%s", report)
        return report


def _check_swap(*, is_trainable: bool, strict: bool) -> None:
    """Refuse a hot swap that this peft cannot do, or with arguments that it does not have."""
    # before, peft exchanged the tensors instead of overwriting their values
    require_for("A hot swap", "peft", "0.20")
    if is_trainable or not strict:
        raise ArgumentError("A hot swap is always strict and leaves requires_grad alone; leave both arguments out.")


def _checked_model(model: torch.nn.Module, name: str, *, hotswap: bool) -> PeftModel:
    """Return the model; refuse one without adapters, and a name that is taken, or that cannot be swapped."""
    if not has_adapters(model):
        raise AdapterError(
            f"load_adapter_on_rank adds to a PeftModel, this is a {type(model).__name__}. {to_add_one(model)}"
        )
    if hotswap and is_mixed(model):
        raise AdapterError(
            f"A hot swap needs a PeftModel, this is a {type(model).__name__}. Call model.delete_adapter({name!r}) and "
            f"load without hotswap."
        )
    if hotswap and name not in model.peft_config:
        raise AdapterError(f"There is no adapter {name!r} to swap; the model has {sorted(model.peft_config)}.")
    if not hotswap and name in model.peft_config:
        raise AdapterExists(
            f"The model has an adapter {name!r} already (of {sorted(model.peft_config)}). Choose another name, call "
            f"model.delete_adapter({name!r}) first, or pass hotswap=True to overwrite its values."
        )
    return model


def _devices_of(model: torch.nn.Module, device: torch.device | str | int | None) -> RankDevices:
    """Return the devices that the model is on, and refuse another one."""
    current = devices_of(base_of(model))
    if device is not None and RankDevices(own_device(device)) != current:
        raise DeviceError(
            f"The model is on {current}, device is {own_device(device)}. Leave device out, or move the model."
        )
    return current


def _attach(
    model: PeftModel,
    adapter: Adapter,
    devices: RankDevices,
    undo: list[Snapshot],
    dtype: torch.dtype | None,
    *,
    is_trainable: bool,
    strict: bool,
) -> Attached:
    """Attach an adapter, after adding to ``undo`` a snapshot of the state that this changes."""
    # as PeftModel.load_adapter: what is loaded for inference puts the whole model in eval mode
    to_eval = not is_trainable and _is_training(model)
    alike = find_alike(model, adapter)
    if alike is None:
        _refuse_merged(model, adapter.name)
    take_idle_caches_off(model)
    undo.append(Snapshot(model) if alike is None or to_eval else alike.snapshot(model))
    if alike is not None:
        attached = attach_alike(model, adapter, alike, devices, dtype=dtype, strict=strict)
    else:
        with said_of_split_base(model, adapter):
            attached = attach(model, adapter, devices, undo=undo, keep_base=True, dtype=dtype, strict=strict)
        devices.check(model)
    if is_mixed(model):
        _activate_again(model)
    if is_trainable:
        model.set_requires_grad(adapter.name)
    elif to_eval or alike is None:
        model.eval()
    return attached


def _refuse_merged(model: PeftModel, name: str) -> None:
    """Refuse a model whose weights hold an adapter: peft takes it out of them while it adds another.

    That rounds the base, is not undone by a snapshot, and does nothing to weights that are on meta at that moment.
    """
    merged = merged_adapters(model)
    if merged:
        raise AdapterError(
            f"{name!r} cannot be loaded while {merged} are merged into the weights of this model; nothing was changed. "
            f"Call model.unmerge_adapter() first, or merge_lora_inplace(model) for a base without adapters."
        )


def _is_training(model: PeftModel) -> bool:
    """Return whether a module is in train mode; adapters for inference follow the base."""
    trained = any(not config.inference_mode for config in model.peft_config.values())
    return any(module.training for module in unordered_modules(model, adapters=trained))


def _activate_again(model: PeftModel) -> None:
    """Activate a mixed model's active adapters again, as its ``load_adapter`` does; ``requires_grad`` is kept."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.set_adapter(model.active_adapters)  # type: ignore[arg-type]  # a mixed model takes several
    for parameter, was_trained in trained:
        parameter.requires_grad_(was_trained)
