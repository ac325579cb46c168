"""A checkpoint in a folder as the source of a wrap: which tensors it has, and reading this rank's ranges of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.hub import base_files, folder_here, resolve
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._checkpoint.other_things import is_adapter_alone, not_a_model
from safe_loading._core.names import canonical
from safe_loading._core.report import Finding, counted
from safe_loading._loading.folder_findings import base_findings
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.formats.four_bit import is_four_bit
from safe_loading._model.formats.four_bit_on_meta import packed_from
from safe_loading._model.layout.checkpoint_source import CheckpointSource, disk_tensors
from safe_loading._model.layout.reading import ShardTarget, differing, differing_targets, read_targets
from safe_loading._model.layout.window import Window
from safe_loading._model.tensors import ModelTensor
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import CheckpointError, CheckpointNotFound, RanksDisagree

from .added_after_wrap import is_adapter_layer
from .buffers import transformers_models
from .four_bit import FourBitWeight, differing_packed, four_bit_weights, read_packed
from .later_values import origin_of
from .local_shard import LocalShard
from .open_source import open_source
from .parameters import parameters_of
from .setup import Setup

_SAMPLES = 16  # of a file, its first and last tensors among them
_SAMPLE_BYTES = 4096

Rename = Callable[[str], "str | None"]


@dataclasses.dataclass(frozen=True)
class Folder:
    """The checkpoint in a folder as the source of a model's values."""

    source: CheckpointSource | None = None  # None without a folder
    # for each tensor that it has, by its first name in the model, its name in the checkpoint's class
    disk_name: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # of those that are rounded to a narrower dtype before they get the model's
    through: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict)
    # a hash of the headers and of samples of the files; ranks with different hashes have different files
    digest: str = ""
    findings: tuple[Finding, ...] = ()
    four_bit: Mapping[str, FourBitWeight] = dataclasses.field(default_factory=dict)  # those that are packed here

    @property
    def heads(self) -> Sequence[str]:
        """The tensors of another task's head that it has and the model does not."""
        return self.source.heads if self.source is not None else ()

    @property
    def names(self) -> Set[str]:
        """The tensors of the model that it has, by their first names."""
        return self.disk_name.keys()

    def without(self, names: frozenset[str]) -> Folder:
        """Return the folder without some tensors, which come from elsewhere."""
        kept = {name: disk for name, disk in self.disk_name.items() if name not in names}
        return dataclasses.replace(self, disk_name=kept)

    def compare(self, ranks: Ranks, digests: Sequence[str]) -> None:
        """Make sure that all ranks have the same files."""
        if len(set(digests)) > 1:
            sides = [f"rank {rank}: {digest}" for rank, digest in zip(ranks.ranks, digests, strict=True)]
            raise RanksDisagree(
                "The ranks would read different checkpoints; copy the same files to each node, or pin the revision:",
                sides,
            )

    def read(self, shard: LocalShard, device: torch.device) -> tuple[int, dict[str, torch.Tensor]]:
        """Read this rank's ranges into its memory; return how many bytes were read, and statistics of 4-bit weights.

        The statistics are those of the blocks of each weight that this rank has packed, on ``device``.
        """
        if self.source is None:
            return 0, {}
        bytes_read = read_targets(self.source, self._targets(shard))
        statistics, bytes_packed = read_packed(self.source, self.four_bit, shard, device)
        self.source.opened.require_unchanged()
        return bytes_read + bytes_packed, statistics

    def differing(self, shard: LocalShard, device: torch.device) -> list[str]:
        """Read a second time, and return the tensors of which this rank has other values than the folder."""
        if self.source is None:
            return []
        packed = differing_packed(self.source, self.four_bit, shard, device)
        return differing(self.source, self._targets(shard)) + packed

    def unlike(self, tensors: Sequence[ModelTensor]) -> list[ModelTensor]:
        """Return the tensors that have other values than the folder, which is read in blocks."""
        if self.source is None or not tensors:
            return []
        compared = [each for each in tensors if each.name in self.disk_name and not is_four_bit(each.tensor)]
        targets = [
            ShardTarget(self.disk_name[each.name], 0, each.tensor.numel(), each.tensor.detach().reshape(-1))
            for each in compared
        ]
        wrong = {id(target) for target in differing_targets(self.source, targets)}
        return [each for each, target in zip(compared, targets, strict=True) if id(target) in wrong]

    def _targets(self, shard: LocalShard) -> list[ShardTarget]:
        targets = [
            self._target(own.name, own.start, own.stop, shard.local[own.name], own.window)
            for own in shard.owned
            if own.name in self.disk_name and own.name not in self.four_bit
        ]
        targets += [
            self._target(name, 0, tensor.numel(), tensor)
            for name, tensor in shard.replicated.items()
            if name in self.disk_name
        ]
        return targets

    def _target(
        self, name: str, start: int, stop: int, tensor: torch.Tensor, window: Window | None = None
    ) -> ShardTarget:
        return ShardTarget(self.disk_name[name], start, stop, tensor.view(-1), self.through.get(name), window)


class OpenedFolder(os.PathLike[str]):
    """A folder that was matched with a model before a script renamed, cut or replaced parts of it."""

    def __init__(self, folder: Path, source: CheckpointSource) -> None:
        self.folder, self.source = folder, source

    def __fspath__(self) -> str:
        return str(self.folder)


def find_folder(setup: Setup, ranks: Ranks) -> Path | None:
    """Return the folder on this machine; on each node one rank resolves a hub id."""
    folder, timeout = setup.values.folder, setup.how.timeout
    if folder is None:
        return None
    if Path(folder).is_dir():
        here = folder_here(folder, "source")
        if is_adapter_alone(here):
            raise CheckpointNotFound(f"{here} holds no model. {not_a_model(here)}")
        return here
    leader = ranks.leader(timeout=timeout)
    with ranks.together("find the checkpoint", timeout=timeout) as phase:
        if ranks.rank == leader:
            phase.payload = str(resolve(folder, base_files({})).folder)
    return Path(phase.results[ranks.index(leader)])


def untie_as_in_folder(setup: Setup, path: Path | None) -> list[nn.Parameter]:
    """Untie weights on meta that the class ties and a folder holds as two values; return the new parameters."""
    if path is None or isinstance(setup.values.source, OpenedFolder):
        return []
    tied = [
        (base, prefix, each)
        for base, prefix in bases_of(setup)
        if getattr(base, "all_tied_weights_keys", None)
        for each in parameters_of(base)
        if len(each.names) > 1 and each.is_meta
    ]
    if not tied:
        return []
    source, name_in_folder = _matched(setup, path)
    apart = {pair.target for pair in source.two_values}
    made = []
    for base, prefix, each in tied:
        ties: Any = base.all_tied_weights_keys
        rename = _without_adapters(base)
        for name, (module, attribute) in zip(each.names, each.places, strict=True):
            own = name_in_folder(prefix + name)
            # A copy that an adapter saves has the adapter's values, and is tied as the adapter ties it.
            if own is None or own not in apart or ".modules_to_save." in name:
                continue
            if (own := rename(name)) in ties:
                made.append(nn.Parameter(torch.empty_like(each.tensor), each.tensor.requires_grad))
                module._parameters[attribute] = made[-1]
                del ties[own]
    return made


def open_folder(setup: Setup, path: Path | None) -> Folder:
    """Read the headers, and match them with the model; raises CheckpointError where they do not fit."""
    if path is None:
        return Folder()
    opened = setup.values.source
    source, name_in_folder = (opened.source, canonical) if isinstance(opened, OpenedFolder) else _matched(setup, path)
    disk_name = {}
    through = {}
    for tensor in setup.tensors.all:
        origin = origin_of(tensor.tensor) if isinstance(opened, OpenedFolder) else None
        if origin is not None and origin.through is not None:
            through[tensor.name] = origin.through
        for name in tensor.names:
            inside = name_in_folder(name)
            if isinstance(opened, OpenedFolder):
                inside = origin.name if origin is not None else None  # what has none is the script's own
            if inside is not None and tensor.persistent and source.stored_as(inside) is not None:
                disk_name[tensor.name] = inside
                break
    findings = (
        *base_findings(source.opened, source.checkpoint),
        *_dtype_findings(setup, source, disk_name),
        *_head_findings(source),
    )
    four_bit = four_bit_weights(setup.tensors.sharded, disk_name)
    # what the models of this rank say of themselves decides for which of them it is read
    digest = _digest(source, [prefix for _, prefix in bases_of(setup)])
    return Folder(source, disk_name, through, digest, findings, four_bit)


def _matched(setup: Setup, path: Path) -> tuple[CheckpointSource, Rename]:
    """Match a folder with the base inside a model, or with the model itself, of whose ``state_dict()`` it is.

    The function returned gives the name in the folder of a tensor of the model; None for what no folder has.
    """
    bases = bases_of(setup)
    base, prefix = bases[0]
    renames = {start: _without_adapters(each) for each, start in bases}
    rename = renames[prefix]
    if not prefix:
        return _opened(path, base, rename), rename
    own = {name for each in setup.tensors.all for name in each.names}
    try:
        source = _opened(path, base, rename)
    except CheckpointError:
        named = ModelFolder(path).read_checkpoint().tensors.keys()
        # names of both are those of the base, to which the error is
        if prefix == f"{getattr(base, 'base_model_prefix', '')}." or 2 * len(named & own) <= len(named):
            raise
        return _opened(path, setup.model, canonical), canonical
    if any(head.partition(":")[0] in own for head in source.heads):
        with contextlib.suppress(CheckpointError):  # a head of another task that has the name of the module's own
            return _opened(path, setup.model, canonical), canonical

    def name_in_folder(name: str) -> str | None:
        start = next((start for start in renames if name.startswith(start)), None)
        return None if start is None else renames[start](name.removeprefix(start))

    return source, name_in_folder


def _opened(path: Path, base: nn.Module, rename: Rename) -> CheckpointSource:
    source = open_source(path, base, is_new=lambda name: True, heads=True, names=rename)
    if source.layout.mismatched:
        # opened again to be refused: everything may be missing here, as rank 0 may have it, but no shape may differ
        mismatched = frozenset(source.layout.mismatched)
        open_source(path, base, is_new=lambda name: name not in mismatched, names=rename)
    return source


def _digest(source: CheckpointSource, read_for: Sequence[str] = ()) -> str:
    """Return a hash of all headers, of samples of each file, which tell two steps of one training apart, and more."""
    tensors = source.checkpoint.tensors.values()
    lines = sorted(f"{info.name} {info.dtype} {info.shape} {info.start}" for info in tensors)
    digest = hashlib.sha256("\n".join([*lines, *read_for]).encode())
    begins: dict[Path, int] = {}
    for info in source.checkpoint.tensors.values():
        path = source.checkpoint.file_of[info.name]
        begins[path] = min(info.start, begins.get(path, info.start))
    for path in sorted(begins):
        with open_regular(path) as file:
            # from the first byte of a tensor: the header before it is hashed already
            first, last = begins[path], max(begins[path], path.stat().st_size - _SAMPLE_BYTES)
            for number in range(_SAMPLES):
                file.seek(first + (last - first) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def bases_of(setup: Setup) -> list[tuple[nn.Module, str]]:
    """Return the models that a folder is read for, all alike, with the prefixes of their names.

    In a module of the user's they are those that were made from the folder. Where none was, it is the first one.
    """
    made = models_of_folder(setup.model, setup.values.folder)
    first = _structure(made[0][0]) if len(made) > 1 else set()
    return [each for each in made if len(made) == 1 or _structure(each[0]) == first] or [base_of(setup.model)]


def models_of_folder(model: nn.Module, folder: str | None) -> list[tuple[nn.Module, str]]:
    """Return the models of transformers in a module that say that they were made from a folder, with their prefixes."""
    return [
        (inner, f"{name}." if (name := canonical(path)) else "")
        for path, inner in transformers_models(model)
        if folder is not None and _is_same(inner.name_or_path or "", folder)
    ]


def _is_same(name: str, folder: str) -> bool:
    return name == folder or (bool(name) and all(map(os.path.isdir, (name, folder))) and Path(name).samefile(folder))


def _structure(base: nn.Module) -> set[tuple[object, ...]]:
    """Return the names that a class gives to each parameter of a model, ties among them, with its shape."""
    rename = _without_adapters(base)
    named = [(sorted(filter(None, map(rename, each.names))), each.tensor.shape) for each in parameters_of(base)]
    return {(type(base), *names, shape) for names, shape in named if names}


def base_of(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model that a checkpoint is made from, the outermost one of transformers, and the prefix of its names.

    It is inside a PeftModel or a wrapper with a value head; a model of no library is its own base.
    """
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            name = canonical(path)
            return module, f"{name}." if name else ""
    return model, ""


def _without_adapters(base: nn.Module) -> Rename:
    """Return the function from a name in the model to that of its class; None for an adapter's tensors."""
    # peft keeps the base's layer as base_layer, and the module of which modules_to_save has copies as original_module
    layers: set[str] = set()
    copied: set[str] = set()
    wrappers = sys.modules.get("peft.utils.other")
    for path, module in base.named_modules() if wrappers is not None else ():
        if is_adapter_layer(module):
            layers.add(canonical(path))
        elif wrappers is not None and isinstance(module, wrappers.AuxiliaryTrainingWrapper):
            copied.add(canonical(path))
    if not layers and not copied:
        return canonical

    def rename(name: str) -> str | None:
        kept: list[str] = []
        path = ""
        parts = iter(canonical(name).split("."))
        for part in parts:
            inside_layer, inside_copied = path in layers, path in copied
            path = f"{path}.{part}" if path else part
            if (inside_copied and part == "modules_to_save") or (inside_layer and part == "ln_tuning_layers"):
                # what is saved of the module is the copy, which the checkpoint has under the module's own name
                path = f"{path}.{next(parts, '')}"  # the adapter's name
            elif inside_copied and part == "token_adapter":  # whose base_layer is the module itself
                continue
            elif (inside_layer and part != "base_layer") or (inside_copied and part != "original_module"):
                return None
            elif not (inside_layer or inside_copied):
                kept.append(part)
        return ".".join(kept)

    return rename


def _head_findings(source: CheckpointSource) -> list[Finding]:
    """Return a finding for the head of another task, which stays where it is."""
    if not source.heads:
        return []
    return [
        Finding(
            "head-not-loaded",
            "info",
            source.heads[0].partition(":")[0],
            f"the checkpoint was saved with another head ({counted(len(source.heads), 'tensor')}).",
            "none needed when the model's own head is new, and init_new= gives it values.",
        )
    ]


def _dtype_findings(setup: Setup, source: CheckpointSource, disk_name: Mapping[str, str]) -> list[Finding]:
    """Return one finding for all tensors whose dtype on disk is not the model's."""
    cast = []
    for tensor in setup.tensors.all:
        name = source.stored_as(disk_name[tensor.name]) if tensor.name in disk_name else None
        infos = disk_tensors(source, name) if name is not None else []
        whole = packed_from(tensor.tensor)
        if any(DTYPES.get(info.dtype) != (whole.dtype if whole else tensor.tensor.dtype) for info in infos):
            cast.append((tensor, sorted({info.dtype for info in infos})))
    if not cast:
        return []
    first, dtypes = cast[0]
    return [
        Finding(
            "dtype-cast",
            "info",
            first.name,
            f"the checkpoint has {', '.join(dtypes)}, the model {first.tensor.dtype}, as for "
            f"{counted(len(cast), 'tensor')} in all; the model's dtype was kept.",
            "none needed; meta_model(folder) makes the model in the dtype of its checkpoint.",
            sum(tensor.nbytes for tensor, _ in cast),
        )
    ]
