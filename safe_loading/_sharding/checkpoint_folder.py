"""A checkpoint in a folder as the source of a wrap: which tensors it has, and reading what this rank owns of them."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.hub import base_files, resolve
from safe_loading._checkpoint.index import require_unchanged
from safe_loading._core.names import canonical
from safe_loading._core.report import Finding
from safe_loading._model.dtypes import DTYPES
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import RanksDisagree

from .checkpoint_source import CheckpointSource, disk_tensors, open_source
from .local_shard import LocalShard
from .reading import ShardTarget, differing, read_targets
from .setup import Setup

_SAMPLE_BYTES = 4096

Rename = Callable[[str], "str | None"]


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a folder gives to a model.

    Attributes:
        source: The checkpoint, opened.
        disk_name: For each tensor that it holds, by its first name in the model, its name in the checkpoint's class.
        digest: A hash of the headers and of samples; two ranks with another one have other files.
        findings: What is worth knowing.
    """

    source: CheckpointSource | None = None
    disk_name: Mapping[str, str] = dataclasses.field(default_factory=dict)
    digest: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def heads(self) -> Sequence[str]:
        """The tensors of another task's head that it holds, which the model does not know."""
        return self.source.heads if self.source is not None else ()

    @property
    def names(self) -> Set[str]:
        """The tensors of the model that it holds, by their first names."""
        return self.disk_name.keys()

    def without(self, names: frozenset[str]) -> Folder:
        """Return it without tensors that come from elsewhere."""
        kept = {name: disk for name, disk in self.disk_name.items() if name not in names}
        return dataclasses.replace(self, disk_name=kept)

    def compare(self, ranks: Ranks, digests: Sequence[str]) -> None:
        """Make sure that all ranks have the same files.

        Raises:
            RanksDisagree: They have not; each kind of folder is named with its ranks.
        """
        if len(set(digests)) > 1:
            sides = [f"rank {rank}: {digest}" for rank, digest in zip(ranks.ranks, digests, strict=True)]
            raise RanksDisagree(
                "The ranks would read different checkpoints; copy the same files to each node, or pin the revision:",
                sides,
            )

    def read(self, shard: LocalShard) -> int:
        """Read what this rank owns into its memory, and return how many bytes were read.

        Raises:
            CheckpointError: A file changed meanwhile, or cannot be read.
        """
        if self.source is None:
            return 0
        bytes_read = read_targets(self.source, self._targets(shard))
        require_unchanged(self.source.checkpoint)
        return bytes_read

    def differing(self, shard: LocalShard) -> list[str]:
        """Return the tensors of which this rank does not hold what the folder does, by a second read."""
        return [] if self.source is None else differing(self.source, self._targets(shard))

    def _targets(self, shard: LocalShard) -> list[ShardTarget]:
        targets = [
            ShardTarget(self.disk_name[own.name], own.start, own.stop, shard.local[own.name].view(-1))
            for own in shard.owned
            if own.name in self.disk_name
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
    """Read the headers, and match them with the model.

    Raises:
        CheckpointError: The folder is not whole, or holds something that does not fit.
    """
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
    findings = (*source.checkpoint.findings, *_dtype_findings(setup, source, disk_name), *_head_findings(source))
    return Folder(source, disk_name, _digest(source), findings)


def _digest(source: CheckpointSource) -> str:
    """Return a hash of all headers and of a few bytes of each file, which tell two fine-tunings of one base apart."""
    told = sorted(f"{info.name} {info.dtype} {info.shape} {info.start}" for info in source.checkpoint.tensors.values())
    digest = hashlib.sha256("\n".join(told).encode())
    for path in source.checkpoint.files:
        with open_regular(path) as file:
            file.seek(path.stat().st_size // 2)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def base_of(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model that a checkpoint is of, and the prefix of its names: the outermost one of transformers.

    A PeftModel and wrappers with a value head hold it inside; a model of no library is its own base.
    """
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            name = canonical(path)
            return module, f"{name}." if name else ""
    return model, ""


def _without_adapters(base: nn.Module) -> Rename:
    """Return what turns a name in the model into that of its class, and None for what an adapter added."""
    peft: Any = sys.modules.get("peft")
    layers: set[str] = set()
    copies: set[str] = set()
    if peft is not None:
        for path, module in base.named_modules():
            if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                layers.add(canonical(path))
            elif isinstance(module, peft.utils.other.AuxiliaryTrainingWrapper):
                copies.add(canonical(path))

    if not layers and not copies:
        return canonical

    def rename(name: str) -> str | None:
        parts, kept = canonical(name).split("."), []
        path = ""
        skip = 0
        for number, part in enumerate(parts):
            inside_layer, inside_copy = path in layers, path in copies
            path = f"{path}.{part}" if path else part
            if skip:
                skip -= 1
            elif inside_layer and part != "base_layer":
                return None
            elif inside_copy and part == "modules_to_save":
                skip = 1  # the adapter's name
            elif inside_copy and part != "original_module":
                return None
            elif not (inside_layer or inside_copy):
                kept.append(parts[number])
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
            f"the checkpoint was saved with another head, whose {len(source.heads)} tensors this model does not have.",
            "none needed when the model's own head is new, and init_new= gives it values.",
        )
    ]


def _dtype_findings(setup: Setup, source: CheckpointSource, disk_name: Mapping[str, str]) -> list[Finding]:
    """Return one finding for all tensors whose dtype on disk is not the model's."""
    cast = []
    for tensor in setup.tensors.all:
        name = source.stored_as(disk_name[tensor.name]) if tensor.name in disk_name else None
        infos = disk_tensors(source, name) if name is not None else []
        if any(DTYPES.get(info.dtype) != tensor.tensor.dtype for info in infos):
            cast.append((tensor, sorted({info.dtype for info in infos})))
    if not cast:
        return []
    first, dtypes = cast[0]
    return [
        Finding(
            "dtype-cast",
            "info",
            first.name,
            f"the checkpoint has {', '.join(dtypes)}, the model {first.tensor.dtype}, as for {len(cast)} tensors in "
            f"all; the model's dtype was kept.",
            "none needed; meta_model(folder) makes the model in the dtype of its checkpoint.",
            sum(tensor.nbytes for tensor, _ in cast),
        )
    ]
