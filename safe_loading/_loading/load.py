"""The steps of a load after its sources are found: check, load the base, attach, finish, report."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from peft import PeftModel

from safe_loading._checkpoint.index import Checkpoint, read_checkpoint, require_unchanged
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.report import Finding
from safe_loading._model.snapshot import Snapshot
from safe_loading._ranks import contexts as verify
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import AdapterError

from . import base_model as bases
from .attach import Adapter, Attached, attach, check
from .report import LoadedPart, LoadReport
from .sources import LoadSources


@dataclasses.dataclass(frozen=True)
class Options:
    """How a base and its adapters are loaded; see ``load_peft_on_rank``."""

    device: torch.device
    dtype: torch.dtype | Literal["auto"]
    adapter_dtype: torch.dtype | None
    is_trainable: bool
    auto_class: Any
    active: str
    strict: bool
    base_kwargs: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the check before the load found: the class that loads the base, and its files where they were looked at."""

    auto_class: Any = None
    checkpoint: Checkpoint | None = None


def check_first(sources: LoadSources, ready: list[Adapter], options: Options) -> Chosen:
    """Check all that can be known before a weight of the base is read."""
    if sources.base is None:
        return Chosen()
    folder = sources.base.folder
    if (folder / ADAPTER_CONFIG).exists():
        raise AdapterError(
            f"The base folder {folder} holds an adapter too ({ADAPTER_CONFIG}), which transformers would load into the "
            f"base unasked. Move the adapter's files to a folder of their own."
        )
    config = bases.base_config(folder, options.base_kwargs)
    chosen = options.auto_class or bases.auto_class_for(ready[0].facts, config)
    checkpoint = None
    if options.base_kwargs.get("use_safetensors", True) and not options.base_kwargs.get("gguf_file"):
        checkpoint = read_checkpoint(folder, variant=options.base_kwargs.get("variant"), kind="model")
    outline = bases.skeleton(chosen, folder, options.dtype, options.base_kwargs)
    if outline is not None and options.strict:
        if checkpoint is not None:
            bases.check_fit(outline, checkpoint, ready)
        check(outline, ready)
    return Chosen(chosen, checkpoint)


def load(
    sources: LoadSources,
    ready: list[Adapter],
    chosen: Chosen,
    given: Any,
    options: Options,
    group: Ranks,
    noted: list[Finding],
    undo: Snapshot | None,
) -> tuple[PeftModel, LoadReport]:
    """Load the base (or take the given one), attach the adapters, and say what was done."""
    if sources.base is None:
        model, parts, findings = _onto_given(given, ready, options, undo)
    else:
        start = time.perf_counter()
        where = (sources.base.folder, options.device, options.dtype, options.base_kwargs)
        base, info = bases.load_base(chosen.auto_class, *where)
        if chosen.checkpoint is not None:
            require_unchanged(chosen.checkpoint)
        bases.name_base(base, sources.base.source)
        findings = bases.loading_findings(info, ready, sources.base.source)
        findings += bases.untied_findings(base, sources.base.source)
        errors = [str(finding) for finding in findings if finding.severity == "error"]
        if errors and options.strict:
            raise AdapterError(f"{sources.base.source!r} does not fill {type(base).__name__}:", errors)
        first = _base_part(base, sources.base.source, sources.base.commit, options, time.perf_counter() - start)
        model, others, found = _attach_all(base, ready, options)
        parts, findings = [first, *others], [*findings, *found]
    _finish(model, options, several=len(ready) > 1)
    findings += noted
    warn_once(findings)
    return model, LoadReport(group.index(group.rank), group.size, str(options.device), tuple(parts), tuple(findings))


def _onto_given(
    given: torch.nn.Module, ready: list[Adapter], options: Options, undo: Snapshot | None
) -> tuple[PeftModel, list[LoadedPart], list[Finding]]:
    """Attach to a model that the caller owns, then move it: most refusals come before it is moved."""
    moves = verify.one_device(given) != options.device
    first = _base_part(given, type(given).__name__, None, options, 0.0)
    model, parts, findings = _attach_all(given, ready, options, undo)
    start = time.perf_counter()
    if moves:
        model.to(options.device)
    first = dataclasses.replace(first, seconds=time.perf_counter() - start)
    return model, [first, *parts], findings


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[Snapshot]:
    """If the block raises, ``model``, which the caller owns, is put back to where and what it was."""
    home = verify.one_device(model)
    snapshot = Snapshot(model)
    try:
        yield snapshot
    except BaseException:
        snapshot.restore()
        model.to(home)
        raise


def _attach_all(
    base: torch.nn.Module, ready: list[Adapter], options: Options, undo: Snapshot | None = None
) -> tuple[PeftModel, list[LoadedPart], list[Finding]]:
    model = base
    parts: list[LoadedPart] = []
    findings: list[Finding] = []
    for number, adapter in enumerate(ready):
        start = time.perf_counter()
        now = Snapshot(model) if number or undo is None else undo
        done = attach(
            model,
            adapter,
            options.device,
            undo=[now] if undo is None or undo is now else [now, undo],
            dtype=options.adapter_dtype,
            strict=options.strict,
        )
        model = done.model
        parts.append(loaded_part(adapter, done, options.device, time.perf_counter() - start))
        findings += done.findings
    if not isinstance(model, PeftModel):
        raise AdapterError("There is no adapter to attach.")
    return model, parts, findings


def loaded_part(adapter: Adapter, done: Attached, device: torch.device, seconds: float) -> LoadedPart:
    """Return the report's line about an adapter."""
    facts = adapter.facts
    source = (adapter.name, facts.source, facts.commit, str(device))
    return LoadedPart(*source, done.dtypes, done.tensors, done.bytes, seconds, done.renamed)


def _base_part(base: torch.nn.Module, source: str, commit: str | None, options: Options, seconds: float) -> LoadedPart:
    count, size, dtypes = verify.totals((*base.parameters(), *base.buffers()))
    return LoadedPart("base", source, commit, str(options.device), dtypes, count, size, seconds)


def _finish(model: PeftModel, options: Options, *, several: bool) -> None:
    if several:
        model.set_adapter(options.active, inference_mode=not options.is_trainable)
    if not options.is_trainable:
        model.eval()


def current_device_findings(device: torch.device) -> list[Finding]:
    """Return a finding when the process's current device is another one: ``.to("cuda")`` goes there."""
    if device.type in ("cpu", "mps") or torch.accelerator.current_device_index() == device.index:
        return []
    current = f"{device.type}:{torch.accelerator.current_device_index()}"
    return [
        Finding(
            "current-device",
            "info",
            str(device),
            f"the current device of this process is {current}, so inputs sent to {device.type!r} without an index go "
            f"there.",
            f"call torch.accelerator.set_device_index({device.index}), or send inputs to model.device.",
        )
    ]


def warn_once(findings: list[Finding]) -> None:
    """Warn once of everything that ``strict=False`` let pass."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        lines = "\n".join(f"  - {finding}" for finding in errors)
        warnings.warn(f"safe_loading let pass with strict=False:\n{lines}", UserWarning, stacklevel=4)
