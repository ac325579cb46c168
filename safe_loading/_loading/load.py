"""The steps of a load once its sources are found: check, load the base, attach the adapters, put back on failure."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from peft import PeftModel
from transformers import PreTrainedConfig

from safe_loading._checkpoint.base_config import quantization_of
from safe_loading._checkpoint.faults import note
from safe_loading._checkpoint.hub import Resolved
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._checkpoint.unread_codes import refuse_unread_codes
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.collector import young_collections_put_off
from safe_loading._core.engines import is_older, set_adapter
from safe_loading._core.interrupts import undone_on_error
from safe_loading._core.protocols import EngineKwargs, ModelClass
from safe_loading._core.report import Finding, errors_of
from safe_loading._core.walk import unordered_modules
from safe_loading._model.formats.four_bit import reordering_findings
from safe_loading._model.layout.layout import read_layout
from safe_loading._model.layout.packed_modules import corrected_by_headers
from safe_loading._model.layout.ties import UntiedPair, untie_as_on_disk
from safe_loading._model.model_config import read_generation_config
from safe_loading._model.peft_layers import has_adapters
from safe_loading._model.quantized.on_disk import refuse_quantization
from safe_loading._model.size_limit import refuse_out_of_proportion
from safe_loading._model.snapshot import Snapshot, take_idle_caches_off
from safe_loading._model.torch_state import TorchState
from safe_loading._ranks.device_guard import make_current, one_device
from safe_loading._ranks.rank_devices import DeviceMap, RankDevices, devices_of
from safe_loading.errors import AdapterError, ArgumentError

from .adapter_values import Adapter
from .alike import find_alike
from .attach import Attached, Checked, attach, attach_checked, check_on_meta
from .attach_alike import attach_alike
from .base_arguments import advice_on_class, advice_on_part, checked_class
from .base_model import base_config, base_on_meta, check_fit, refuse_unknown_arguments
from .choose_class import ChosenClass, choose_class, class_of_auto_mapping, fitting_class
from .folder_findings import base_findings, refuse_index_without_metadata
from .into_place import NOT_COMPARED, IntoPlace, Method, plan_into_place
from .load_base import (
    decoding_findings,
    load_base,
    loading_findings,
    name_base,
    refuse_missing_weights,
    untied_findings,
)
from .report import LoadedPart
from .sources import other_base_findings
from .split_base import alone_findings, said_of_split_base
from .vocabulary import LABELS, labels_of_heads, resize_to_adapters


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a base and its adapters are loaded; the arguments of ``load_peft_on_rank`` that have these names."""

    devices: RankDevices
    dtype: torch.dtype | Literal["auto"]
    adapter_dtype: torch.dtype | None
    is_trainable: bool
    auto_class: ModelClass | None
    active: str
    strict: bool
    base_kwargs: EngineKwargs


@dataclasses.dataclass(frozen=True)
class BaseOnDisk:
    """A base that passed the checks before the load."""

    resolved: Resolved
    opened: ModelFolder  # what was read of the folder
    config: PreTrainedConfig
    auto_class: ModelClass  # its from_pretrained loads the base
    findings: tuple[Finding, ...] = ()  # what check_checkpoint says of the folder
    corrected: Mapping[str, object] | None = None  # the entries of its quantization that its headers correct
    checked: Checked | None = None  # what peft built for the check, to be moved to the base
    built_as: str | None = None  # the class of the model on meta that was checked; None where none could be built
    untied: tuple[UntiedPair, ...] = ()  # what the class ties and the files hold with different values
    labels: int | None = None  # of the adapters' heads, where config.json has another number
    replaces_weights: bool = False  # whether its files have weights of other shapes, which an adapter replaces
    # the weights that need not go through transformers' loader, or why all of them do
    planned: IntoPlace | Method = NOT_COMPARED


class Loaded(NamedTuple):
    """A model with its adapters, and the entry of each part in its report."""

    model: PeftModel
    parts: list[LoadedPart]
    findings: list[Finding]


@young_collections_put_off()
def check_before_load(
    base: Resolved, adapters: Sequence[Adapter], options: LoadOptions, opened: ModelFolder | None = None
) -> BaseOnDisk:
    """Check everything that can be known before a weight of the base is read; ``opened`` is its folder, if read."""
    folder = base.folder
    is_model = (folder / CONFIG).exists() or bool(options.base_kwargs.get("gguf_file"))
    if is_model and (folder / ADAPTER_CONFIG).exists():
        raise AdapterError(
            f"The base folder {folder} holds an adapter too ({ADAPTER_CONFIG}), which transformers would load into the "
            f"base without being asked. Move the adapter's files to a folder of their own."
        )
    opened = opened or ModelFolder(folder)
    config = base_config(folder, options.base_kwargs, opened.config)
    build = functools.partial(base_on_meta, folder=opened, dtype=options.dtype, base_kwargs=options.base_kwargs)
    if options.auto_class is None:
        chosen = choose_class(adapters[0], config, options.base_kwargs, build)
    else:
        chosen = ChosenClass(checked_class(options.auto_class, config))
    auto_class = chosen.auto_class
    refuse_unknown_arguments(auto_class, opened, options.base_kwargs)
    # Pickles and GGUF files have no safetensors header to check; transformers reads them if it is told to.
    checkpoint = None
    if options.base_kwargs.get("use_safetensors", True) and not options.base_kwargs.get("gguf_file"):
        checkpoint = opened.read_checkpoint(variant=options.base_kwargs.get("variant"))
        refuse_quantization(checkpoint, opened.config or {})
        refuse_unread_codes(opened)
        refuse_missing_weights(opened, checkpoint.tensors, adapters, options.base_kwargs)
        refuse_index_without_metadata(opened, checkpoint)
    read_generation_config(folder, opened.generation_config)
    meta_model, labels = chosen.model or build(auto_class), None
    if meta_model is not None and (LABELS | {"config"}).isdisjoint(options.base_kwargs):
        labels = labels_of_heads(meta_model, adapters, lambda number: _with_labels(build, options, number)(auto_class))
    if labels is not None:
        build = _with_labels(build, options, labels)
        meta_model = build(auto_class)
    if meta_model is not None and checkpoint is not None:
        on_disk = sum(info.nbytes for info in checkpoint.tensors.values())
        refuse_out_of_proportion(meta_model, folder / CONFIG, on_disk)
    if meta_model is not None:
        _require_devices(options.devices, meta_model)
    findings = [*chosen.findings]
    if checkpoint is not None:
        findings += base_findings(opened, checkpoint)
        findings += other_base_findings(adapters, checkpoint)
    found = BaseOnDisk(base, opened, config, auto_class, tuple(findings), labels=labels)
    return found if meta_model is None else _checked_on_meta(found, meta_model, checkpoint, adapters, options, build)


def _with_labels(
    build: functools.partial[torch.nn.Module | None], options: LoadOptions, labels: int
) -> functools.partial[torch.nn.Module | None]:
    return functools.partial(build, base_kwargs={**options.base_kwargs, "num_labels": labels})


def _checked_on_meta(
    base: BaseOnDisk,
    meta_model: torch.nn.Module,
    checkpoint: Checkpoint | None,
    adapters: Sequence[Adapter],
    options: LoadOptions,
    build: Callable[[ModelClass], torch.nn.Module | None],
) -> BaseOnDisk:
    """Return the base with the findings of its model on meta, on which the adapters were tried."""
    untied = list[UntiedPair]()
    if checkpoint is not None:
        layout = read_layout(meta_model, checkpoint.tensors, key_mapping=options.base_kwargs.get("key_mapping"))
        refuse_missing_weights(base.opened, layout.key_of.values(), adapters, options.base_kwargs)
        settings = quantization_of(base.opened.config or {})
        findings = [*base.findings]
        if (by_headers := corrected_by_headers(meta_model, checkpoint, settings, layout, mends=True)) is not None:
            findings.append(by_headers.finding)
            base = dataclasses.replace(base, corrected=by_headers.entries)
        findings += decoding_findings(checkpoint, settings, options.base_kwargs.get("quantization_config"))
        base = dataclasses.replace(base, findings=tuple(findings))
        planned = plan_into_place(base.opened, checkpoint, layout, meta_model, options.devices, options.base_kwargs)
        base = dataclasses.replace(base, planned=planned)
        if options.strict:
            check_fit(meta_model, checkpoint, adapters, layout, options.base_kwargs)
            base = dataclasses.replace(base, replaces_weights=bool(layout.mismatched))  # all others are refused
            untied = untie_as_on_disk(meta_model, checkpoint, layout)  # as the load will
    base = dataclasses.replace(base, built_as=type(meta_model).__name__, untied=tuple(untied))
    if not options.strict:
        return base
    if checkpoint is not None and not untied:
        resize_to_adapters(meta_model, adapters)
    given = options.auto_class

    def advise() -> list[str]:
        if given is None:
            part = advice_on_part(class_of_auto_mapping(adapters[0]), base.config)
            return part or advice_on_class(type(meta_model).__name__, base.config)
        return fitting_class(adapters[0], given, base.config, options.base_kwargs, build)

    return dataclasses.replace(base, checked=check_on_meta(meta_model, adapters, advise))


def _require_devices(devices: RankDevices, meta_model: torch.nn.Module) -> None:
    """Refuse a device map that leaves a parameter of the base out."""
    left_out = devices.without_device(name for name, _ in meta_model.named_parameters())
    if left_out:
        raise ArgumentError(
            f"device_map= maps no module around these parameters of {type(meta_model).__name__}; add the modules, or "
            f"'' for all others:",
            left_out,
        )


def load(
    base: BaseOnDisk | torch.nn.Module, adapters: Sequence[Adapter], options: LoadOptions, undo: Sequence[Snapshot]
) -> Loaded:
    """Load the base, unless it is the caller's model with its snapshot in ``undo``; attach the adapters in order."""
    if isinstance(base, BaseOnDisk):
        loaded = _load_base_and_attach(base, adapters, options)
    else:
        loaded = _attach_and_move(base, adapters, options, undo)
    # With one adapter peft has done this. set_adapter also decides which adapter's parameters require grad.
    if len(adapters) > 1:
        set_adapter(loaded.model, options.active, trainable=options.is_trainable)
    if not options.is_trainable:
        loaded.model.eval()
    after = [*reordering_findings(loaded.model), *alone_findings(loaded.model)]
    return loaded._replace(findings=[*loaded.findings, *after])


def _load_base_and_attach(base: BaseOnDisk, adapters: Sequence[Adapter], options: LoadOptions) -> Loaded:
    start = time.perf_counter()
    source = base.resolved.source
    config, kwargs = base.config, options.base_kwargs
    if base.labels is not None:
        kwargs = {**kwargs, "num_labels": base.labels}
    if base.replaces_weights:
        kwargs = {"ignore_mismatched_sizes": True, **kwargs}
    model, info, method = load_base(
        base.auto_class,
        base.opened,
        options.devices,
        options.dtype,
        kwargs,
        config,
        corrected=base.corrected,
        planned=base.planned,
    )
    # transformers reads the files after they were checked here: what changed in between was not checked.
    base.opened.require_unchanged()
    for adapter in adapters:
        adapter.facts.require_unchanged()
    name_base(model, source)
    findings = [*loading_findings(info, adapters, source, base.opened), *untied_findings(model, source)]
    errors = [finding.problem for finding in errors_of(findings)]
    if errors and options.strict:
        raise AdapterError(f"{source!r} does not fill {type(model).__name__}:", errors)
    if not any(finding.code == "base-untied" for finding in findings):  # a resize would tie the weights again
        findings += resize_to_adapters(model, adapters)
    part = _base_part(model, source, base.resolved.commit, options.devices, time.perf_counter() - start)
    part = dataclasses.replace(part, method=method.name, method_reason=method.why)
    attached = _attach_all(model, adapters, options, [], base.checked)
    findings = [*base.findings, *findings, *attached.findings]
    return Loaded(attached.model, [part, *attached.parts], findings)


def _attach_and_move(
    base: torch.nn.Module, adapters: Sequence[Adapter], options: LoadOptions, undo: Sequence[Snapshot]
) -> Loaded:
    """Attach to a model that the caller owns, and only then move it: most refusals come before it is moved."""
    # Counted now: after the injection the base's parameters include the adapter's.
    moves = not options.devices.are_several and one_device(base) != options.devices.main
    part = _base_part(base, type(base).__name__, None, options.devices, 0.0)
    attached = _attach_all(base, adapters, options, undo)
    start = time.perf_counter()
    if moves:
        attached.model.to(options.devices.main)
    part = dataclasses.replace(part, seconds=time.perf_counter() - start)
    return attached._replace(parts=[part, *attached.parts])


@contextmanager
def restored_on_error(model: torch.nn.Module | None) -> Iterator[list[Snapshot]]:
    """If the block raises, restore torch's state, and the caller's ``model`` and its devices; yield its snapshot.

    An empty list is yielded when there is no such model.
    """
    if model is None:
        with restored_by([]) as nothing:
            yield nothing
        return
    take_idle_caches_off(model)
    devices = devices_of(model)

    def move_back() -> None:
        if not devices.are_several:  # otherwise it was not moved
            model.to(devices.main)

    with undone_on_error(move_back), restored_by([Snapshot(model)]) as undo:
        yield undo


@contextmanager
def restored_by(undo: list[Snapshot]) -> Iterator[list[Snapshot]]:
    """If the block raises, restore torch's state and the snapshots that are in the list by then; yield the list."""
    state = TorchState()

    def restore() -> None:
        state.restore()
        for snapshot in undo:
            snapshot.restore()

    with undone_on_error(restore):
        yield undo


def _attach_all(
    base: torch.nn.Module,
    adapters: Sequence[Adapter],
    options: LoadOptions,
    undo: Sequence[Snapshot],
    checked: Checked | None = None,
) -> Loaded:
    model = base
    parts: list[LoadedPart] = []
    findings: list[Finding] = []
    for adapter in adapters:
        start = time.perf_counter()
        attached = attach_checked(base, checked, options.devices, dtype=options.adapter_dtype) if checked else None
        checked = None
        attached = attached or _attach(model, adapter, options, undo, is_first=not parts)
        model = attached.model
        parts.append(adapter_part(adapter, attached, options.devices, time.perf_counter() - start))
        findings += attached.findings
    if not isinstance(model, PeftModel):
        raise AdapterError("There is no adapter to attach.")
    return Loaded(model, parts, [*findings, *names_of_modules(model)])


def _attach(
    model: torch.nn.Module, adapter: Adapter, options: LoadOptions, undo: Sequence[Snapshot], *, is_first: bool
) -> Attached:
    dtype, strict = options.adapter_dtype, options.strict
    alike = find_alike(model, adapter)
    if alike is not None and has_adapters(model):
        return attach_alike(model, adapter, alike, options.devices, dtype=dtype, strict=strict)
    # The first adapter can be undone with the caller's snapshot. A later one needs a snapshot with the earlier
    # adapters in it, and what it overwrites of the base is kept in the caller's too.
    snapshots = undo if undo and is_first else [Snapshot(model), *undo]
    with said_of_split_base(model, adapter):
        return attach(model, adapter, options.devices, undo=snapshots, keep_base=bool(undo), dtype=dtype, strict=strict)


def adapter_part(adapter: Adapter, attached: Attached, devices: RankDevices, seconds: float) -> LoadedPart:
    """Return the report's line about an adapter."""
    return LoadedPart(
        name=adapter.name,
        source=adapter.facts.source,
        commit=adapter.facts.commit,
        device=str(devices),
        dtypes=attached.dtypes,
        tensors=attached.tensors,
        bytes=attached.bytes,
        seconds=seconds,
        renamed=attached.renamed,
    )


def _base_part(
    base: torch.nn.Module, source: str, commit: str | None, devices: RankDevices, seconds: float
) -> LoadedPart:
    # Tensors that share a storage count once.
    tensors = {tensor.untyped_storage()._cdata: tensor for tensor in (*base.parameters(), *base.buffers())}.values()
    dtypes = dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
    # a DTensor says the bytes of all ranks
    size = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)
    return LoadedPart("base", source, commit, str(devices), dtypes, len(tensors), size, seconds)


def current_device_findings(device: torch.device, given: torch.device | str | int | DeviceMap | None) -> list[Finding]:
    """Make the device of a rank the current one (`make_current`); return a finding where another one stays current."""
    # With a map, accelerate's hooks move the inputs, and set the current device around each block.
    if isinstance(given, Mapping) or make_current(device, given):
        return []
    current = f"{device.type}:{torch.accelerator.current_device_index()}"
    message = (
        f"the current device of this process is {current}: inputs sent to {device.type!r} without an index go there, "
        f"and the step of most of torch's optimizers makes a context on it"
    )
    fix = f"call torch.accelerator.set_device_index({device.index}), and send inputs to model.device"
    return [note("info", "current-device", device, message, fix)]


def names_of_modules(model: PeftModel) -> list[Finding]:
    """Return a finding for each of several adapters whose name modules of the base have."""
    if len(model.peft_config) < 2 or is_older("peft", "0.20"):  # before, it saved all of them
        return []
    parts: set[str] = set().union(*(module._modules for module in unordered_modules(model, adapters=False)))
    message = (
        "modules of the base have the name of this adapter, and peft's save_pretrained leaves out of the files of the "
        "others what they adapt in them"
    )
    return [
        note("warning", "adapter-named-as-module", f"adapter {name!r}", message, "load it under another name")
        for name in sorted(parts & model.peft_config.keys())
    ]


def warn_of_errors(findings: Sequence[Finding]) -> None:
    """Warn once, at the line that called the verb, of every error that ``strict=False`` let through."""
    errors = errors_of(findings)
    if errors:
        lines = "\n".join(f"  - {finding}" for finding in errors)
        # 1 is this function, 2 the verb, 3 the call of its decorator, 4 its caller
        warnings.warn(f"strict=False: loaded despite these problems:\n{lines}", UserWarning, stacklevel=4)
