"""A request for adapters and their base, found on this machine or in a hub, by one rank alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from safe_loading._checkpoint.adapter_folder import AdapterFolder, read_adapter
from safe_loading._checkpoint.copy_bytes import range_of
from safe_loading._checkpoint.faults import note
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.hub import Chooser, Resolved, adapter_files, base_files, is_revision, resolve, small_files
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.paths import is_there
from safe_loading._core.protocols import EngineKwargs
from safe_loading._core.report import Finding
from safe_loading.errors import AdapterError, ArgumentError, CheckpointNotFound, SafeLoadingError

from .adapter_values import Adapter
from .starts import WHOLE_VALUES, a_few, start_in_base

Source = str | os.PathLike[str]
_OTHER_LIBRARIES = frozenset({"diffusers", "lerobot", "timm", "torchvision", "open_clip"})
_COMPARED_BYTES = 1 << 16
HUB_OPTIONS = frozenset({"token", "cache_dir", "local_files_only"})


@dataclasses.dataclass(frozen=True)
class BaseRequest:
    """The base model that a caller asked for."""

    source: Source | None = None  # a folder or hub id; None takes the base that the first adapter names
    revision: str | None = None  # branch, tag or commit; None takes the one in the adapter's config
    subfolder: str | None = None


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """A caller's request: the adapters and the base to load, with their options."""

    adapters: Mapping[str, Source]  # the folder or hub id of each, by the adapter's name
    base: BaseRequest | None  # None when the caller passed a model
    adapter_revision: str | None = None  # branch, tag or commit
    adapter_subfolder: str | None = None
    allow_pickle: bool = False  # whether adapters saved as .bin are read
    base_kwargs: EngineKwargs = dataclasses.field(default_factory=dict)  # of the base's from_pretrained


@dataclasses.dataclass(frozen=True)
class LoadSources:
    """The adapters by name, and the base, found on this machine."""

    adapters: dict[str, AdapterFolder]
    base: Resolved | None  # None when the caller passed a model

    def require_base(self) -> Resolved:
        """Return the base's folder; raise if none was asked for."""
        if self.base is None:
            raise ArgumentError("base_model is missing; pass a folder or a hub id.")
        return self.base


def resolve_all(
    request: LoadRequest, *, choose_adapter: Chooser = adapter_files, choose_base: Chooser | None = None
) -> LoadSources:
    """Find everything that was asked for, on this rank alone; the choosers pick the files of a hub's repository."""
    hub = {name: value for name, value in request.base_kwargs.items() if name in HUB_OPTIONS}
    revision, subfolder = request.adapter_revision, request.adapter_subfolder
    adapters = {}
    for name, source in request.adapters.items():
        resolved = resolve(source, choose_adapter, revision=revision, subfolder=subfolder, hub=hub)
        adapters[name] = read_adapter(resolved, allow_pickle=request.allow_pickle)
    if request.base is None:
        return LoadSources(adapters, None)
    chooser, first = choose_base or base_files(request.base_kwargs), next(iter(adapters.values()))
    gguf = bool(request.base_kwargs.get("gguf_file"))
    return LoadSources(adapters, resolve_base(request.base, first, chooser, hub, gguf=gguf))


def resolve_base(
    asked: BaseRequest, adapter: AdapterFolder, choose: Chooser, hub: EngineKwargs, *, gguf: bool = False
) -> Resolved:
    """Return the base that was asked for, or else the one that the adapter's config names."""
    _refuse_other_library(adapter)
    named, file = adapter.config.get("base_model_name_or_path"), adapter.config_file
    source = asked.source or named
    if not source:
        raise AdapterError(f"{file} names no base model. Pass base_model=.")
    if asked.source is None and not isinstance(named, str):
        raise AdapterError(f"{file}: base_model_name_or_path is {named!r:.80}, which names no model. Pass base_model=.")
    revision = asked.revision
    if revision is None and asked.source is None and not is_there(Path(source).expanduser()):
        # "revision" in an adapter's config is that of its base: peft's AutoPeftModel passes it to the base's
        # from_pretrained. A base that the caller chose, or a folder, has nothing to do with it.
        revision = adapter.config.get("revision") or None
        if revision is not None and not is_revision(revision):
            raise AdapterError(
                f"{file}: revision is {revision!r:.80}, which cannot be a branch, a tag or a commit. Pass base_model= "
                f"and base_revision=."
            )
    try:
        return resolve(source, choose, revision=revision, subfolder=asked.subfolder, hub=hub, gguf=gguf)
    except CheckpointNotFound as error:
        if asked.source is not None:
            raise
        of_file = "" if asked.revision is not None or revision is None else f" at the revision {revision!r}"
        other = ", or base_revision='main' if that revision is not the base's" if of_file else ""
        raise CheckpointNotFound(
            f"{error} {file} names this base{of_file}; if it lies elsewhere now, pass base_model={other}."
        ) from error


def _refuse_other_library(adapter: AdapterFolder) -> None:
    """Refuse an adapter that was trained on a model of a library whose models are not loaded here."""
    mapping = adapter.config.get("auto_mapping")
    library = str(mapping.get("parent_library")).partition(".")[0] if isinstance(mapping, Mapping) else ""
    if library in _OTHER_LIBRARIES:
        kind = f"{mapping.get('base_model_class')!s:.80}"  # type: ignore[union-attr]  # a mapping, as was asked above
        raise AdapterError(
            f"{adapter.config_file}: it was trained on a {kind} of {library}, which is not loaded here. Load that "
            f"model with {library}, and pass it as base_model to load_peft_on_rank."
        )


def other_base_findings(adapters: Iterable[Adapter], base: Checkpoint) -> list[Finding]:
    """Return the findings of adapters that were trained on other weights than those of this base, as its values show.

    So it is with an adapter that was trained on a merged model, or is merged already, whose config names a base that is
    on this machine; and with one that was trained on what its start left of a base. Nothing is downloaded, and of each
    of a few weights that the adapter changes the first bytes are compared.
    """
    findings = []
    for adapter in adapters:
        named = _named_checkpoint(adapter.facts, base)
        different = None if named is None else _different_weight(adapter.facts, named, base)
        if named is None or different is None:
            added = start_in_base(adapter, base)
            findings += [] if added is None else [_start_added_again(adapter.facts, base, added)]
        # the rest of a base, without what the adapter's start took out of it, is the right one
        elif start_in_base(adapter, named) is None:
            source = adapter.facts.config["base_model_name_or_path"]
            message = (
                f"its config names {source!r} as its base, which is on this machine and has other weights than "
                f"{base.folder}, as {different} shows: it was trained on another model than this one"
            )
            fix = "pass the base that it names; keep this one where you want the adapter on another model"
            findings.append(note("warning", "base-differs", adapter.facts.path, message, fix))
    return findings


def _start_added_again(adapter: AdapterFolder, base: Checkpoint, weight: str) -> Finding:
    """Return the finding of a base that still has the part which the start of an adapter took out of its own."""
    message = (
        f"what it adds to {weight} is a part of that weight in {base.folder}: PiSSA, OLoRA or CorDA took that out of "
        f"the base of its training, so the model would have it twice"
    )
    around = adapter.path.parent
    beside = f" ({str(around)!r}, it seems)" if (around / "config.json").is_file() and around != base.folder else ""
    fix = f"pass the model that was saved without that part as base_model{beside}"
    return note("warning", "base-holds-start", adapter.path, message, fix)


def _named_checkpoint(adapter: AdapterFolder, base: Checkpoint) -> Checkpoint | None:
    """Return the headers of the base that an adapter names; None where it is not here, or is this base."""
    named = adapter.config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return None
    revision = None if is_there(Path(named).expanduser()) else adapter.config.get("revision") or None
    try:
        folder = resolve(named, small_files, revision=revision, hub={"local_files_only": True}).folder
        return None if folder.samefile(base.folder) else ModelFolder(folder).whole_checkpoint
    except (SafeLoadingError, OSError):
        return None


def _different_weight(adapter: AdapterFolder, named: Checkpoint, base: Checkpoint) -> str | None:
    """Return the first weight of a few that two bases hold with other values, of the layers that an adapter has."""
    words = {word for name in (adapter.header.tensors if adapter.header else ()) for word in name.split(".")}
    both = [
        (info, other)
        for name, info in base.tensors.items()
        if name.endswith(".weight") and name.split(".")[-2] in words and info.dtype in WHOLE_VALUES
        if (other := named.tensors.get(name)) is not None and (other.dtype, other.shape) == (info.dtype, info.shape)
    ]
    for info, other in a_few(both):
        file, of_named = base.file_of[info.name], named.file_of[info.name]
        if not _is_copy(file, of_named) and _first_bytes(file, info) != _first_bytes(of_named, other):
            return info.name
    return None


def _is_copy(file: Path, other: Path) -> bool:
    """Whether two files have the size and the time of one another, as copies by rsync and ``cp -a`` do."""
    one, two = file.stat(), other.stat()
    return (one.st_size, one.st_mtime_ns) == (two.st_size, two.st_mtime_ns)


def _first_bytes(path: Path, info: TensorInfo) -> bytearray:
    return range_of(path, info.start, min(info.nbytes, _COMPARED_BYTES))
