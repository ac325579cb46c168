"""The place in a merged folder of tensors that the base has under other names or in other parts, by its class.

Experts are fused in one folder and lie apart in the other; a tree was renamed between two versions of transformers.
Both are seen in the layouts of the two folders, which lead to the same parameters of the model.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.layout.disk_blocks import Whole, in_terms_of, on_disk, take
from safe_loading._model.layout.file_ranges import blocks_of_range
from safe_loading._model.layout.layout import CheckpointLayout, read_layout
from safe_loading._model.layout.read_blocks import read_in_order, staged

from .thread_buffers import Buffers

_EXPERT = re.compile(r"(.*\.)(\d+)(\.[^.\d][^.]*(?:\.\D[^.]*)*)")  # the last number in a name is the expert's
FUSED_DIMS = 3  # of experts in one tensor, the first of which is their number


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """A tensor of the base, or a part of one, as the merged folder holds it: in other tensors, of one dtype."""

    whole: Whole
    infos: tuple[TensorInfo, ...]  # of the pieces
    paths: tuple[Path, ...]  # the file of each

    @property
    def dtype(self) -> str:
        """The dtype in which the folder stores it."""
        return self.infos[0].dtype

    def read(self, files: Mapping[Path, int], memory: memoryview, first: int, buffers: Buffers) -> None:
        """Read elements from ``first`` on; ``files`` are descriptors."""
        dtype = DTYPES[self.dtype]
        count, sizes = len(memory) // dtype.itemsize, [dtype.itemsize] * len(self.infos)
        flat, path_of = torch.frombuffer(memory, dtype=dtype), dict(zip(self.infos, self.paths, strict=True))
        for block in blocks_of_range(self.whole, self.infos, sizes, first, first + count):
            descriptor = files[path_of[block.info]]
            if block.in_order:
                read_in_order(descriptor, block, memory)
                continue
            for place, value in staged(
                descriptor, block, flat, dtype, lambda size: buffers.tensor("gather", torch.uint8, 1, size)[0]
            ):
                place.copy_(value)


class OtherLayout:
    """Where a merged folder holds the parameters of the tensors of the base."""

    def __init__(
        self, base: CheckpointLayout, model: torch.nn.Module, names: Iterable[str], merged: Checkpoint
    ) -> None:
        """Read the layout of the folder for ``model`` (on meta); ``names`` are those of the base on disk."""
        there = read_layout(model, merged.tensors)
        self.absent = absent_experts(there, merged.tensors, model)
        self._tensors: Mapping[str, TensorInfo] = {**merged.tensors, **self.absent}
        if self.absent:
            there = read_layout(model, self._tensors)
        self._merged = merged
        self._misshapen: dict[str, list[str]] = defaultdict(list)  # the tensors of parameters of another shape
        for name in merged.tensors if there.mismatched else ():
            if there.key_of.get(name) in there.mismatched:
                self._misshapen[there.key_of[name]].append(name)
        self._shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        self._base, self._there = _wholes(base), _wholes(there)
        self._keys: dict[str, list[str]] = defaultdict(list)  # the parameters that a tensor of the base is a part of
        for key, whole in self._base.items():
            for name in {piece.tensor for piece in whole.pieces}:
                self._keys[name].append(key)
        self._renamed = _one_to_one({name: base.key_of.get(name, name) for name in names}, there.key_of)
        self._modules = _renamed_modules(self._base, self._there)
        self.key_of: Mapping[str, str] = there.key_of

    def find(self, name: str, shape: tuple[int, ...]) -> Gathered | None:
        """Return the tensors of the folder that make one of the base, or one that the merge adds; None if none do."""
        whole = self._find(name, shape)
        if whole is None or whole.shape != shape:
            return None
        infos = tuple(self._tensors[piece.tensor] for piece in whole.pieces)
        paths = tuple(self._merged.file_of.get(info.name, self._merged.folder) for info in infos)
        if len({info.dtype for info in infos}) != 1 or infos[0].dtype not in DTYPES:
            return None
        return Gathered(whole, infos, paths)

    def find_all(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Gathered]:
        """Return the tensors that the folder holds otherwise than under their name and in their shape."""
        there = self._merged.tensors
        absent = {n: shape for n, shape in shapes.items() if n not in there or there[n].shape != shape}
        found = {name: self.find(name, shape) for name, shape in absent.items()}
        return {name: gathered for name, gathered in found.items() if gathered is not None}

    def misshapen(self, name: str) -> tuple[tuple[int, ...], list[str]] | None:
        """Return the shape that a tensor of the base makes, and the folder's tensors that make another of it."""
        for key in self._keys.get(name, ()):
            if key in self._misshapen:
                return self._shapes[key], self._misshapen[key]
        return None

    def base_of(self, name: str) -> Whole | None:
        """Return the parameter that a tensor of the base is a part of, of tensors of the base."""
        return next((self._base[key] for key in self._keys.get(name, ()) if key in self._misshapen), None)

    def _find(self, name: str, shape: tuple[int, ...]) -> Whole | None:
        keys = self._keys.get(name, [])
        parameters = [(self._base[key], self._there[key]) for key in keys if key in self._there]
        if not keys:  # new in the output, or nothing that the class knows
            module, _, leaf = name.rpartition(".")
            renamed = self._renamed.get(name, f"{self._modules.get(module, module)}.{leaf}")
            info = self._merged.tensors.get(renamed)
            return self._there.get(name) if info is None else on_disk(renamed, info.shape)
        for here, there in parameters:
            if _is_as_it_is(here) and _is_as_it_is(there):  # the rows of a vocabulary may be more than the base's
                return there
        return in_terms_of(name, shape, parameters)


def absent_experts(
    layout: CheckpointLayout, tensors: Mapping[str, TensorInfo], model: torch.nn.Module
) -> dict[str, TensorInfo]:
    """Return the tensors of experts that a folder lacks of parameters that the class fuses, as they should be."""
    shapes = model.state_dict()
    found: dict[tuple[str, str], dict[int, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        key, match = layout.key_of.get(name, name), _EXPERT.fullmatch(name)
        if match is not None and key != name and (key in layout.mismatched or key in layout.opaque):
            found[key, f"{match[1]}{{}}{match[3]}"][int(match[2])] = info
    absent: dict[str, TensorInfo] = {}
    for (key, pattern), own in found.items():
        count = len(shapes[key]) if key in shapes and shapes[key].dim() == FUSED_DIMS else 0
        if len({info[1:3] for info in own.values()}) == 1 and max(own) < count:
            first = next(iter(own.values()))
            names = (pattern.format(number) for number in range(count) if number not in own)
            absent |= {name: first._replace(name=name, start=0, stop=first.nbytes) for name in names}
    return absent


def expert_of(name: str) -> str:
    """Return which expert of which layer a tensor belongs to, in words."""
    match = _EXPERT.fullmatch(name)
    return "" if match is None else f"expert {match[2]} of {match[1].rstrip('.')}"


def _is_as_it_is(whole: Whole) -> bool:
    """Return whether a parameter is one tensor on disk, element for element."""
    (piece, *rest), dims = whole.pieces, tuple(range(len(whole.shape)))
    return not rest and piece.dims == dims and piece.size == whole.shape


def _wholes(layout: CheckpointLayout) -> dict[str, Whole]:
    moved = {
        key: moved.whole if moved.order is None else take(moved.whole, moved.order, moved.dim)
        for key, moved in layout.moved.items()
    }
    return {**moved, **layout.of}


def _renamed_modules(base: Mapping[str, Whole], merged: Mapping[str, Whole]) -> dict[str, str]:
    """Return the names in the folder of modules on disk, which hold tensors that the class does not know (scales)."""
    modules: dict[str, str] = {}
    for key in base.keys() & merged.keys():
        if _is_as_it_is(base[key]) and _is_as_it_is(merged[key]):
            (own, _, leaf), (other, _, last) = (
                wholes[key].pieces[0].tensor.rpartition(".") for wholes in (base, merged)
            )
            if leaf == last:
                modules[own] = other
    return modules


def _one_to_one(base: Mapping[str, str], merged: Mapping[str, str]) -> dict[str, str]:
    """Return the names in the folder of tensors that have the same name at run time, which no other tensor has."""
    there = {key: name for name, key in merged.items()}
    counts, own = Counter(merged.values()), Counter(base.values())
    return {name: there[key] for name, key in base.items() if own[key] == counts[key] == 1}
