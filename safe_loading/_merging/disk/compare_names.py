"""Which tensor of a merged folder is compared with which planned one: by name, by place, by tie, or not at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from safe_loading._checkpoint.header import BITS, TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._model.layout.disk_blocks import Whole, on_disk

from .changes import FLOATS, ChangedRows, Changes
from .compare_codes import fused_codes
from .compare_files import Pair
from .compare_lacking import has_fewer_experts, lacking_experts
from .compare_layouts import Gathered, expert_of
from .compare_report import CheckedTensor, MergeVerdict
from .compare_verdicts import UNREAD
from .output_plan import FilePlan, TensorPlan


def find_elsewhere(tensors: Mapping[str, TensorInfo], changes: Changes) -> dict[str, Gathered]:
    """Return the tensors of the output that the folder holds under other names, in other parts or turned around."""
    if changes.elsewhere is None:
        return {}
    shapes = {name: info.shape for name, info in tensors.items() if name not in changes.dropped}
    shapes |= {name: shapes[source] for name, source in changes.added.items() if source is not None}
    shapes |= {name: tuple(value.shape) for name, value in changes.values.items()}
    return changes.elsewhere.find_all(shapes)


def merged_dtypes(
    merged: Checkpoint, tensors: Mapping[str, TensorInfo], changes: Changes, elsewhere: Mapping[str, Gathered]
) -> dict[str, str]:
    """Return the dtype of each float tensor that the folder stores in another one than the base."""
    planned = {name: info.dtype for name, info in tensors.items()}
    planned |= {name: planned[source] for name, source in changes.added.items() if source is not None}
    found = {name: info.dtype for name, info in merged.tensors.items()}
    found |= {name: gathered.dtype for name, gathered in elsewhere.items()}
    return {name: dtype for name, dtype in found.items() if dtype in FLOATS and planned.get(name, "F32") in FLOATS}


def match_tensors(
    plans: Sequence[FilePlan],
    merged: Checkpoint,
    changes: Changes,
    elsewhere: Mapping[str, Gathered],
) -> tuple[list[Pair], list[CheckedTensor]]:
    """Return the tensors to compare, and the verdicts on those that need no value.

    ``elsewhere`` are those that the folder holds under another name or in other parts.
    """
    matching = _Matching(plans, merged, changes, elsewhere)
    matching.match_fused_codes()
    matching.match_planned()
    matching.match_codes()
    matching.match_rest()
    return matching.pairs, matching.checked


class _Matching:
    """The pairs of tensors to compare, and the verdicts on others, as they are found."""

    def __init__(
        self, plans: Sequence[FilePlan], merged: Checkpoint, changes: Changes, elsewhere: Mapping[str, Gathered]
    ) -> None:
        self.pairs: list[Pair] = []
        self.checked: list[CheckedTensor] = []
        self._planned = {tensor.target.name: tensor for plan in plans for tensor in plan.tensors}
        self._merged, self._changes, self._elsewhere = merged, changes, elsewhere
        self._fused: set[str] = set()  # planned codes and scales that lie in fused ones
        self._stand_ins = _stand_ins(changes.ties_of_judged, (*merged.tensors, *elsewhere))
        self._met: set[str] = set()  # tensors of the folder that other names stand for, but for those elsewhere

    def match_planned(self) -> None:
        """Match the tensors that the merge would write, but for codes that are there."""
        for name, plan in self._planned.items():
            info, gathered = self._info(name), self._elsewhere.get(name)
            if name in self._fused:
                continue
            if gathered is not None and plan.codes is None:
                self._match_parts(plan, gathered)
            elif info is None and self._has_another_shape(name):
                continue
            elif info is None:
                detail, target = UNREAD if self._is_unknown(plan) else "", plan.target
                verdict: MergeVerdict = "left out" if detail or self._has_twin(plan) else "missing"
                lacking = CheckedTensor(name, "", verdict, plan.action, target.dtype, target.nbytes, detail=detail)
                self.checked.append(lacking)
            elif plan.codes is None:
                self._match(plan, info)

    def match_fused_codes(self) -> None:
        """Match the experts whose codes and scales the folder holds as rows of fused ones."""
        for name, plan in self._planned.items():
            gathered = self._elsewhere.get(name)
            if plan.codes is None or gathered is None or name in self._merged.tensors:
                continue
            found = fused_codes(plan.codes, gathered, self._merged.tensors)
            if found is None:
                continue
            codes, scales, fused = found
            pair = Pair(dataclasses.replace(plan, target=codes), gathered.paths[0], gathered=gathered)
            self.pairs.append(dataclasses.replace(pair, scales=(self._merged.file_of[fused], scales)))
            self._met.add(fused)
            self._fused |= {name, scales.name}

    def _match_parts(self, plan: TensorPlan, gathered: Gathered) -> None:
        """Match a tensor with the parts that the folder has of it, and note those that it lacks."""
        absent = {} if self._changes.elsewhere is None else self._changes.elsewhere.absent
        for pair in _pairs_of_parts(plan, gathered):
            infos = (pair.plan.target,) if pair.gathered is None else pair.gathered.infos
            lacking = [info.name for info in infos if info.name in absent]
            if not lacking:
                self.pairs.append(pair)
                continue
            target, detail = pair.plan.target, ", ".join(dict.fromkeys(map(expert_of, lacking)))
            self.checked.append(
                CheckedTensor(target.name, "", "missing", plan.action, target.dtype, target.nbytes, detail=detail)
            )

    def _has_another_shape(self, name: str) -> bool:
        """Note the tensors of the folder that make another shape of the parameter that a tensor is a part of."""
        found = None if self._changes.elsewhere is None else self._changes.elsewhere.misshapen(name)
        if found is None:
            return False
        shape, names = found
        for info in (self._merged.tensors[other] for other in names if other not in self._met):
            detail = f"{list(info.shape)}"
            if len(names) == 1 and self._changes.elsewhere is not None:
                detail = _shapes(info.shape, shape) + self._lacking(self._changes.elsewhere.base_of(name), info)
            self._judge(info, "shape", "", detail)
        self._met.update(names)
        return True

    def _lacking(self, whole: Whole | None, info: TensorInfo) -> str:
        """Return which experts of the base a fused tensor lacks, in words; empty where that is not clear."""
        if whole is None or not has_fewer_experts(info.shape, whole.shape):
            return ""
        plans = [self._planned.get(piece.tensor) for piece in whole.pieces]
        parts = [(p.source, p.path) for p in plans if p is not None and p.source and p.path and not p.quantized]
        if len(parts) < len(plans):
            return ""
        base = Gathered(whole, tuple(source for source, _ in parts), tuple(path for _, path in parts))
        lacking = lacking_experts(base, info, self._merged.file_of[info.name])
        return f", without {', '.join(map(str, lacking))}" if lacking else ""

    def match_codes(self) -> None:
        """Match the weights that keep their codes, each with its scales."""
        for name, plan in self._planned.items():
            if plan.codes is None or name != plan.codes.weight.info.name or name in self._fused:
                continue
            other = self._planned[plan.codes.scales.name]
            both = [(each, info) for each in (plan, other) if (info := self._info(each.target.name)) is not None]
            wrong = [(each, info) for each, info in both if (info.dtype, info.shape) != each.target[1:3]]
            for each, info in wrong:
                detail = f"{info.dtype} {list(info.shape)} in place of {each.target.dtype} {list(each.target.shape)}"
                self._judge(info, "shape", each.action, detail)
            if wrong or len(both) < 2:
                for each, info in both:
                    if (each, info) not in wrong:
                        self._judge(info, "unchecked", each.action)
                continue
            (_, codes), (_, scales) = both
            found = self._merged.file_of[scales.name], scales
            self.pairs.append(Pair(dataclasses.replace(plan, target=codes), self._merged.file_of[codes.name], found))

    def match_rest(self) -> None:
        """Match the others: further names of tied weights, and tensors that belong nowhere."""
        used = {info.name for gathered in self._elsewhere.values() for info in gathered.infos} | self._met
        ties = self._changes.ties
        for name, info in self._merged.tensors.items():
            if name in self._planned or name in used:
                continue
            elsewhere = self._changes.elsewhere
            names = ties.get(name) or ties.get(name if elsewhere is None else elsewhere.key_of.get(name, name), ())
            twin = next((self._planned[other] for other in names if other in self._planned), None)
            if twin is None:
                self._judge(info, "extra", "")
            else:  # a name of a tied weight that the base leaves out
                self._match(twin, info)

    def _info(self, name: str) -> TensorInfo | None:
        """Return a planned tensor as the folder holds it, under its own name or as a whole under another one."""
        gathered = self._elsewhere.get(name)
        if gathered is not None and len(gathered.infos) == 1 and gathered.infos[0].shape == gathered.whole.shape:
            return gathered.infos[0]
        return self._merged.tensors.get(name)

    def _match(self, plan: TensorPlan, info: TensorInfo) -> None:
        """Add a tensor to those that are compared, or its verdict where no value is needed."""
        if info.shape != plan.target.shape:
            whole = None if plan.source is None else on_disk(plan.source.name, plan.source.shape)
            detail = _shapes(info.shape, plan.target.shape) + self._lacking(whole, info)
            self._judge(info, "shape", plan.action, detail)
        elif info.dtype != plan.target.dtype and not (info.dtype in FLOATS and plan.target.dtype in FLOATS):
            self._judge(info, "shape", plan.action, f"{info.dtype} in place of {plan.target.dtype}")
        else:
            self.pairs.append(Pair(dataclasses.replace(plan, target=info), self._merged.file_of[info.name]))

    def _judge(self, info: TensorInfo, verdict: MergeVerdict, action: str, detail: str = "") -> None:
        file = self._merged.file_of[info.name].relative_to(self._merged.folder).as_posix()
        self.checked.append(CheckedTensor(info.name, file, verdict, action, info.dtype, info.nbytes, detail=detail))

    def _is_unknown(self, plan: TensorPlan) -> bool:
        """Return whether the class does not know a tensor, so that a folder is whole without it."""
        return plan.target.name in self._changes.unknown and plan.is_copy

    def _has_twin(self, plan: TensorPlan) -> bool:
        """Return whether the tensor that stands for a tied one in the folder's model should have the same values."""
        name = self._stand_ins.get(plan.target.name, "")
        twin = self._planned.get(name)
        if twin is None:  # the base leaves this name out, under which the folder's tensor is compared with this one
            return name in self._merged.tensors
        return twin is not plan and _same_change(plan, twin)


def _stand_ins(ties: Iterable[tuple[str, str]], there: Iterable[str]) -> dict[str, str]:
    """Return the tensor that a model takes for each tied one: its own, or that which it is tied to."""
    held = {name: name for name in there}
    for one, other in ties:
        known = held.get(other) or held.get(one)
        held = held if known is None else {one: known, other: known, **held}
    return held


def _shapes(found: tuple[int, ...], right: tuple[int, ...]) -> str:
    """Return two shapes in words; of experts in one tensor, how many are there."""
    said = f"{list(found)} in place of {list(right)}"
    return f"{said}, {found[0]} of {right[0]} experts" if has_fewer_experts(found, right) else said


def _pairs_of_parts(plan: TensorPlan, gathered: Gathered) -> list[Pair]:
    """Return the pairs of a tensor that the folder holds elsewhere: one for each part, or one for all of it."""
    parts = [part for number in range(len(gathered.infos)) if (part := _part(plan, gathered, number)) is not None]
    if len(parts) == len(gathered.infos):
        return parts
    return [_pair(plan, gathered, plan.target.name, gathered.whole.shape)]


def _pair(plan: TensorPlan, gathered: Gathered, name: str, shape: tuple[int, ...]) -> Pair:
    nbytes = math.prod(shape) * BITS[gathered.dtype] // 8
    target = TensorInfo(name, gathered.dtype, shape, 0, nbytes)
    return Pair(dataclasses.replace(plan, target=target), gathered.paths[0], gathered=gathered)


def _part(plan: TensorPlan, gathered: Gathered, number: int) -> Pair | None:
    """Return the rows of a tensor that one tensor of the folder holds; None where they are no plan of their own."""
    piece, info, path, shape = (
        gathered.whole.pieces[number],
        gathered.infos[number],
        gathered.paths[number],
        gathered.whole.shape,
    )
    sizes = tuple(piece.extent(dim) for dim in range(len(shape)))
    lead = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    if sizes != shape:
        if sizes[lead + 1 :] != shape[lead + 1 :]:
            return None  # columns of it: its rows lie apart
        cut = _cut(plan, sum(at * math.prod(shape[dim + 1 :]) for dim, at in enumerate(piece.at)), sizes[lead:])
        if cut is None:
            return None
        plan, sizes = cut, sizes[lead:]
        piece = piece._replace(at=piece.at[lead:], dims=piece.dims[lead:])
    piece = piece._replace(at=(0,) * len(sizes))
    is_whole = piece.size == info.shape
    order = [dim for dim in piece.dims if dim >= 0]
    if is_whole and order == sorted(order):  # the tensor as it is, under another name or without the level of experts
        return Pair(dataclasses.replace(plan, target=info._replace(shape=sizes)), path)
    own = Gathered(Whole(sizes, (piece,)), (info,), (path,))
    return _pair(plan, own, info.name if is_whole else plan.target.name, sizes)


def _cut(plan: TensorPlan, first: int, shape: tuple[int, ...]) -> TensorPlan | None:
    """Return the plan of some whole rows of a tensor, from an element on; None where they cannot be had alone."""
    source, count = plan.source, math.prod(shape)
    columns = plan.columns if plan.rows else 1
    if source is None or plan.value is not None or plan.quantized is not None or plan.codes is not None:
        return None
    if first % columns or count % columns:
        return None
    rows: list[ChangedRows] = []
    begin, end = first // columns, (first + count) // columns
    for changed in plan.rows:
        low, high = max(begin, changed.start), min(end, changed.stop)
        needs_all = changed.inits or changed.by_peft or (changed.update is not None and changed.update.needs_norms)
        if low < high and needs_all and (low, high) != (changed.start, changed.stop):
            return None
        if low < high:
            value = None if changed.value is None else changed.value[low - changed.start : high - changed.start]
            at = changed.first + low - changed.start
            rows.append(dataclasses.replace(changed, start=low - begin, stop=high - begin, first=at, value=value))
    itemsize = BITS[source.dtype] // 8
    start = source.start + first * itemsize
    source = source._replace(shape=shape, start=start, stop=start + count * itemsize)
    return dataclasses.replace(plan, source=source, rows=tuple(rows))


def _same_change(one: TensorPlan, other: TensorPlan) -> bool:
    """Return whether two names of a tied weight get the same values."""
    rows = [[(row.start, row.update, row.by_peft) for row in plan.rows if row.value is None] for plan in (one, other)]
    values = [[row.value for row in plan.rows if row.value is not None] for plan in (one, other)]
    same_values = len(values[0]) == len(values[1]) and all(map(torch.equal, *values))
    if one.value is None or other.value is None:
        return rows[0] == rows[1] and same_values and one.value is other.value
    return rows[0] == rows[1] and same_values and torch.equal(one.value, other.value)
