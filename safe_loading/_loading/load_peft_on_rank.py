"""``load_peft_on_rank``: a base model and its adapters on exactly one device, on every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from transformers import PreTrainedModel

from safe_loading._core import progress as _progress
from safe_loading._core.engine_names import LOAD, LoadNames
from safe_loading._core.log import logger
from safe_loading._core.paths import path_text
from safe_loading._model.peft_layers import has_adapters, is_tuner_layer
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading._ranks.device_guard import (
    check_contexts,
    check_not_shared,
    contexts,
    guarded,
    one_device,
    owned_device,
)
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.launcher import local_rank
from safe_loading._ranks.rank_devices import RankDevices, devices_of, rank_devices
from safe_loading._ranks.same_on_ranks import check_same_arguments
from safe_loading.errors import AdapterError, ArgumentError, DeviceError

from .adapter_values import Adapter
from .agreed_sources import find_sources
from .base_and_adapter import named_sources
from .base_arguments import as_dtype, as_model_class, checked_base_kwargs
from .inject import check_adapter_name, prepare, to_add_one
from .load import (
    BaseOnDisk,
    LoadOptions,
    check_before_load,
    current_device_findings,
    load,
    restored_on_error,
    warn_of_errors,
)
from .report import LoadReport
from .sources import HUB_OPTIONS, BaseRequest, LoadRequest, LoadSources, Source

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .report import LoadedPeftModel


@tensors_on_host()
def load_peft_on_rank(
    *sources: Source | PreTrainedModel | Mapping[str, Source],
    base_model: Source | PreTrainedModel | None = None,
    adapter: Source | Mapping[str, Source] | None = None,
    device: torch.device | str | int | None = None,
    device_map: Mapping[str, torch.device | str | int] | None = None,
    dtype: torch.dtype | str = "auto",
    adapter_dtype: torch.dtype | str | None = None,
    is_trainable: bool = False,
    auto_class: type | str | None = None,
    active: str | None = None,
    adapter_revision: str | None = None,
    adapter_subfolder: str | None = None,
    base_revision: str | None = None,
    base_subfolder: str | None = None,
    strict: bool = True,
    allow_pickle: bool = False,
    ranks: Literal["all", "self"] | Sequence[int] = "all",
    timeout: float = 1800.0,
    base_kwargs: Mapping[str, Any] | None = None,
    key_mapping: Mapping[str, str] | None = None,
    **other: Unpack[LoadNames],
) -> LoadedPeftModel:
    """Load a base model and its adapter(s) onto this rank's device, and onto no other.

    Adapter tensors keep their dtype on disk, whatever the base's dtype is. No number is drawn from the global random
    generators. Everything that can be checked from headers and configs is checked before the base is loaded. When
    ``torch.distributed`` is initialized, either all ranks load or all ranks raise. The :class:`LoadReport` is the
    model's attribute ``load_report``, and is logged at level INFO to the logger ``safe_loading``.

    Args:
        *sources: ``base_model`` and ``adapter``, in this order; the other one is understood where the folders or their
            types say which is which. A single one is the adapter, as for peft's ``AutoPeftModel``.
        base_model: A folder, a hub id, or a model that is loaded already (moved to ``device`` if it is on the CPU).
            None takes ``base_model_name_or_path`` of the (first) adapter's config.
        adapter: A folder or hub id of an adapter, or ``{name: adapter}`` for several on one base.
        device: Where everything goes: a device, its name, or an index of the accelerator. None, or an accelerator
            without an index, takes :func:`device_for_rank`, and makes it the current device where a launcher gave it
            and no other was chosen: torch's optimizers use the current device.
        device_map: The base's modules on several accelerators, such as a plan of :func:`plan_device_map`, in the place
            of ``device``. It spreads the base as ``from_pretrained(device_map=...)`` does, and each tensor of the
            adapter goes where its layer is.
        dtype: Dtype of the base, or its name; "auto" leaves it as it is in the checkpoint.
        adapter_dtype: Dtype of the adapter, or its name; None leaves each tensor exactly as it is on disk. A saved
            module (``modules_to_save``) has the dtype of the module that it replaces, whatever this is.
        is_trainable: Whether the active adapter's parameters require grad (those of the base never do). A model that
            was passed as the base keeps its train or eval mode then.
        auto_class: The class whose ``from_pretrained`` loads the base, or its name in transformers. None takes it from
            the adapter's config and the base's, as its tensors fit.
        active: The name of the adapter that is active afterwards. None takes the first.
        adapter_revision: Branch, tag or commit of adapters on the hub; never used for the base.
        adapter_subfolder: Folder inside the adapter's repository; never used for the base.
        base_revision: Branch, tag or commit of the base. None takes the one in the adapter's config if the base is
            the one that the config names.
        base_subfolder: Folder inside the base's repository.
        strict: Whether an adapter that does not fit is refused. With False, what does not fit becomes a finding of
            the report and part of one warning, and the rest is loaded.
        allow_pickle: Whether an adapter saved as ``.bin`` may be read, with ``weights_only=True``.
        ranks: Which ranks load together: "all" of the default process group, a list of global ranks, or "self" for
            this one alone, without any communication.
        timeout: Longest wait for the other ranks, in seconds.
        base_kwargs: More arguments of the base's ``from_pretrained``, such as ``attn_implementation``,
            ``quantization_config`` or ``trust_remote_code``, and of the model's constructor. ``token``, ``cache_dir``
            and ``local_files_only`` are used for the adapters too.
        key_mapping: Regular expressions and their replacements, for the keys of the adapters without peft's prefix
            ``base_model.model.``; the first that matches a key is used, as in peft. Names that transformers itself
            gave to modules of the base need none.
        **other: Names of transformers and peft that mean one thing here: ``torch_dtype`` is ``dtype``, and
            ``torch_device`` is ``device``; ``attn_implementation``, ``quantization_config``,
            ``trust_remote_code``, ``token``, ``cache_dir`` and ``local_files_only`` go into ``base_kwargs``.

    Returns:
        The model, of peft's class for the task, in eval mode (with ``is_trainable`` the adapter is in train mode).

    Raises:
        AdapterError: An adapter does not fit; every reason is listed, and a model that was passed is unchanged.
        CheckpointError: A folder or file is incomplete, damaged or not safe to read (:class:`CheckpointNotFound`,
            :class:`PickleRefused`).
        DeviceError: There is no device for this rank, or something landed on another one.
        RankError: Another rank failed, or the ranks read different files or were called with different arguments.
        ArgumentError: Arguments contradict each other.
    """
    group = Ranks.resolve(ranks)
    with group.together("check the arguments", timeout=timeout) as phase:
        source, given = named_sources(sources, base_model, adapter, adapter_subfolder)
        loaded_base = _loaded(source)
        own, named = {"device": _one_place(device), "dtype": dtype}, {"device_map": device_map, **other}
        place, dtype, base_kwargs = LOAD.placed(load_peft_on_rank, named, own, base_kwargs)
        base_kwargs = checked_base_kwargs(base_kwargs or {})
        adapters, devices = _by_name(given, active), _devices(place, loaded_base)
        target = devices.main
        options = LoadOptions(
            devices=devices,
            dtype=as_dtype(dtype, "dtype", "auto") or "auto",
            adapter_dtype=as_dtype(adapter_dtype, "adapter_dtype", None),
            is_trainable=is_trainable,
            auto_class=as_model_class(auto_class),
            active=active or next(iter(adapters)),
            strict=strict,
            base_kwargs=base_kwargs,
        )
        phase.payload = [owned_device(target, place), _same_on_all(adapters, options)]
        of_base = {"dtype": None if dtype == "auto" else dtype, "auto_class": auto_class, **base_kwargs}
        _check_base(source, devices, {**of_base, "base_revision": base_revision, "base_subfolder": base_subfolder})
    check_not_shared(group.ranks, [device_of_rank for device_of_rank, _ in phase.results])
    check_same_arguments("load_peft_on_rank", group.ranks, [arguments for _, arguments in phase.results])
    of_disk = BaseRequest(source, base_revision, base_subfolder) if loaded_base is None else None
    request = LoadRequest(adapters, of_disk, adapter_revision, adapter_subfolder, allow_pickle, base_kwargs)
    contexts_before = contexts()
    # The snapshot is outermost and the report is made inside: a failure of another rank, which arrives when the ranks
    # meet, is undone as well, and so is Ctrl-C in the last line.
    with restored_on_error(loaded_base) as undo:
        with guarded(target), _progress.engine_bars(local_rank()):
            found = find_sources(request, group, timeout=timeout)
            with group.together("check the adapter against its base", timeout=timeout):
                base, prepared = _checked(found, loaded_base, options, key_mapping)
            with group.together("load", timeout=timeout):
                model, parts, findings = load(base, prepared, options, undo)
                devices.check(model)
                check_contexts(contexts_before, target, *devices.by_module.values())
                warn_of_errors(findings)
        # After the guard, which puts the current device back.
        findings = [*findings, *current_device_findings(target, place)]
        report = LoadReport(group.index(group.rank), group.size, str(devices), tuple(parts), tuple(findings))
        model.__dict__["load_report"] = report
        logger.info("%s", report)
        return cast("LoadedPeftModel", model)


def _loaded(base: object) -> PreTrainedModel | None:
    return cast("PreTrainedModel", base) if isinstance(base, torch.nn.Module) else None


def _same_on_all(adapters: Mapping[str, Source], options: LoadOptions) -> dict[str, str]:
    """Return the arguments that must be the same on all ranks, as text."""
    names = ("dtype", "adapter_dtype", "strict", "is_trainable", "active")
    return {"adapter": str(list(adapters)), **{name: str(getattr(options, name)) for name in names}}


def _checked(
    sources: LoadSources,
    loaded_base: PreTrainedModel | None,
    options: LoadOptions,
    key_mapping: Mapping[str, str] | None,
) -> tuple[BaseOnDisk | PreTrainedModel, list[Adapter]]:
    """Read the adapters and check them against the base, of which no weight is read yet."""
    prepared = [
        prepare(name, facts, is_trainable=options.is_trainable, key_mapping=key_mapping, dtype=options.adapter_dtype)
        for name, facts in sources.adapters.items()
    ]
    base = check_before_load(sources.require_base(), prepared, options) if loaded_base is None else loaded_base
    return base, prepared


def _one_place(device: object) -> Any:
    if isinstance(device, Mapping):
        raise ArgumentError("device= is one device; pass the map of several as device_map=.")
    return device


def _by_name(adapter: Source | Mapping[str, Source], active: str | None) -> dict[str, Source]:
    adapters = dict(adapter) if isinstance(adapter, Mapping) else {"default": adapter}
    if not adapters:
        raise ArgumentError("adapter is an empty mapping; pass {name: folder or hub id}.")
    for name, source in adapters.items():
        check_adapter_name(name)
        if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
            raise ArgumentError(
                f"adapter={source!r:.80} is no adapter: pass a folder or hub id, or a mapping of names to them."
            )
    if isinstance(active, (list, tuple)):
        raise ArgumentError(
            f"active={active!r}: one adapter is active after a load. Pass its name; for several at a time call "
            f"model.base_model.set_adapter({list(active)!r}) on the loaded model."
        )
    if active is not None and active not in adapters:
        raise ArgumentError(f"active={active!r} is none of the adapters {sorted(adapters)}.")
    return adapters


def _devices(
    device: torch.device | str | int | Mapping[str, torch.device | str | int] | None, base: torch.nn.Module | None
) -> RankDevices:
    """Return where everything goes; a base that is spread over several devices already stays there."""
    spread = devices_of(base) if isinstance(getattr(base, "hf_device_map", None), Mapping) and base else None
    if spread is None or not spread.are_several:
        return rank_devices(device)
    if device is not None and rank_devices(device) != spread:
        raise DeviceError(
            f"base_model is on several devices, {spread}, by its own device map, and device={device!r} is another "
            f"place. Leave device out."
        )
    return spread


def _check_base(base: object, devices: RankDevices, arguments: Mapping[str, object]) -> None:
    """Refuse a value that is no base, and for a model that is loaded already the ``arguments`` of loading one."""
    if not isinstance(base, torch.nn.Module):
        if base is not None:
            path_text(base, "base_model")
        return
    ignored = sorted(name for name in arguments.keys() - HUB_OPTIONS if arguments[name] is not None)
    if ignored:
        raise ArgumentError(
            f"base_model is a model that is loaded already, so {', '.join(ignored)} would have no effect; leave it out."
        )
    if has_adapters(base) or any(is_tuner_layer(module) for module in base.modules()):
        raise AdapterError(f"base_model is a {type(base).__name__} that has adapters already. {to_add_one(base)}")
    if devices.are_several and devices_of(base) == devices:
        return
    current = one_device(base)
    if devices.are_several:
        raise DeviceError(
            f"base_model is on {current}, and device_map= is for one that is not loaded yet. Pass the folder or "
            f"id of the base, or load the base with from_pretrained(device_map=...) and leave device_map out."
        )
    if current.type != "cpu" and current != devices.main:
        raise DeviceError(
            f"base_model is on {current}, this rank's device is {devices}. Pass device='{current}', or load the base "
            f"on {devices}."
        )
