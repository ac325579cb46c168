"""A checkpoint in a folder as the source of a wrap: which tensors it has, and reading what this rank owns of them."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.hub import base_files, resolve
from safe_loading._checkpoint.index import require_unchanged
from safe_loading._core.names import canonical
from safe_loading._core.report import Finding, counted
from safe_loading._loading.folder_findings import base_findings
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.quantized.four_bit_on_meta import packed_from
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import RanksDisagree

from .added_after_wrap import is_adapter_layer
from .checkpoint_source import CheckpointSource, disk_tensors, open_source
from .four_bit import FourBitWeight, differing_packed, four_bit_weights, read_packed
from .local_shard import LocalShard
from .reading import ShardTarget, differing, read_targets
from .setup import Setup

_SAMPLE_BYTES = 4096

Rename = Callable[[str], "str | None"]


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a folder gives to a model."""

    source: CheckpointSource | None = None  # None without a folder
    # for each tensor that it has, by its first name in the model, its name in the checkpoint's class
    disk_name: Mapping[str, str] = dataclasses.field(default_factory=dict)
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
        """Read what this rank owns into its memory; return how many bytes were read, and statistics of 4-bit weights.

        The statistics are those of the blocks of each weight that this rank has packed, on ``device``.
        """
        if self.source is None:
            return 0, {}
        bytes_read = read_targets(self.source, self._targets(shard))
        statistics, bytes_packed = read_packed(self.source, self.four_bit, shard, device)
        require_unchanged(self.source.checkpoint)
        return bytes_read + bytes_packed, statistics

    def differing(self, shard: LocalShard, device: torch.device) -> list[str]:
        """Read a second time, and return the tensors of which this rank has other values than the folder."""
        if self.source is None:
            return []
        packed = differing_packed(self.source, self.four_bit, shard, device)
        return differing(self.source, self._targets(shard)) + packed

    def _targets(self, shard: LocalShard) -> list[ShardTarget]:
        targets = [
            ShardTarget(self.disk_name[own.name], own.start, own.stop, shard.local[own.name].view(-1))
            for own in shard.owned
            if own.name in self.disk_name and own.name not in self.four_bit
        ]
        targets += [
            ShardTarget(self.disk_name[name], 0, tensor.numel(), tensor.view(-1))
            for name, tensor in shard.replicated.items()
            if name in self.disk_name
        ]
        return targets


def find_folder(setup: Setup, ranks: Ranks) -> Path | None:
    """Return the folder on this machine; on each node one rank resolves a hub id."""
    folder, timeout = setup.values.folder, setup.how.timeout
    if folder is None:
        return None
    if Path(folder).is_dir():
        return Path(folder)
    leader = ranks.leader(timeout=timeout)
    with ranks.together("find the checkpoint", timeout=timeout) as phase:
        if ranks.rank == leader:
            phase.payload = str(resolve(folder, base_files({})).folder)
    return Path(phase.results[ranks.index(leader)])


def open_folder(setup: Setup, path: Path | None) -> Folder:
    """Read the headers, and match them with the model; raises CheckpointError where they do not fit."""
    if path is None:
        return Folder()
    base, prefix = base_of(setup.model)
    rename = _without_adapters(base)
    source = open_source(path, base, is_new=lambda name: True, heads=True, names=rename)
    if source.layout.mismatched:
        # opened again to be refused: everything may be missing here, as rank 0 may have it, but no shape may differ
        mismatched = frozenset(source.layout.mismatched)
        open_source(path, base, is_new=lambda name: name not in mismatched, names=rename)
    disk_name = {}
    for tensor in setup.tensors.all:
        for name in tensor.names:
            inside = rename(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if inside is not None and tensor.persistent and source.stored_as(inside) is not None:
                disk_name[tensor.name] = inside
                break
    findings = (*base_findings(source.checkpoint), *_dtype_findings(setup, source, disk_name), *_head_findings(source))
    four_bit = four_bit_weights(setup.tensors.sharded, disk_name)
    return Folder(source, disk_name, _digest(source), findings, four_bit)


def _digest(source: CheckpointSource) -> str:
    """Return a hash of all headers and of a few bytes of each file, which tell two fine-tunings of one base apart."""
    tensors = source.checkpoint.tensors.values()
    lines = sorted(f"{info.name} {info.dtype} {info.shape} {info.start}" for info in tensors)
    digest = hashlib.sha256("\n".join(lines).encode())
    for path in source.checkpoint.files:
        with open_regular(path) as file:
            # in the middle: the start is the header, which is hashed already
            file.seek(path.stat().st_size // 2)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


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
    """Return what turns a name in the model into that of its class, and into None for what an adapter added."""
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
            if inside_copied and part == "modules_to_save":
                # what is saved of the module is the copy, which the checkpoint has under the module's own name
                path = f"{path}.{next(parts, '')}"  # the adapter's name
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
