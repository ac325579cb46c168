"""From edits of parameters to changes of tensors on disk, by the layout of the checkpoint."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.report import Finding
from safe_loading._merging.weights.update import Term, Update
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.layout.disk_blocks import DiskBlock, Moved, Whole, take
from safe_loading._model.layout.layout import CheckpointLayout

from .changes import FLOATS, IN_MEMORY, ChangedRows, Changes, Edit, WeightChange, info_of


def place_edits(
    edits: Iterable[Edit], layout: CheckpointLayout, tensors: Mapping[str, TensorInfo], *, keeps_tie_flag: bool = False
) -> Changes:
    """Find the tensors on disk that each edit changes.

    With ``keeps_tie_flag`` the config keeps ``tie_word_embeddings`` where weights are untied.
    """
    placer = _Placer(layout, tensors, keeps_tie_flag=keeps_tie_flag)
    for edit in edits:
        placer.place(edit)
    placer.finish()
    return placer.changes


class _CannotPlaceError(Exception):
    """Why a change cannot be made on disk; it becomes a problem of the parameter."""


class _Placer:
    """Places edits one after the other; ``changes`` holds their changes on disk so far."""

    def __init__(self, layout: CheckpointLayout, tensors: Mapping[str, TensorInfo], *, keeps_tie_flag: bool) -> None:
        self.changes = Changes()
        self._layout, self._keeps_tie_flag = layout, keeps_tie_flag
        self._tensors = dict(tensors)  # of the base, and those that names get which are no longer tied
        self._rows: dict[str, list[ChangedRows]] = {}

    def place(self, edit: Edit) -> None:
        """Find the tensors that an edit changes."""
        layout, first = self._layout, edit.names[0]
        on_disk = [name for name in edit.names if name in layout.of]
        if edit.untied_because:
            self._place_untied(edit, on_disk)
            return
        change = edit.changes[first]
        if on_disk:
            for name in on_disk:
                self._place_on(first, edit.shape, change, layout.of[name])
            merged = layout.of[on_disk[0]].pieces[0].tensor
            self.changes.tied |= {piece.tensor: merged for name in on_disk[1:] for piece in layout.of[name].pieces}
        elif first in layout.moved and len(edit.names) == 1:
            try:
                self._place_on(first, edit.shape, *_in_disk_order(change, layout.moved[first]))
            except _CannotPlaceError as reason:
                self.changes.problems.append(f"{first}: {reason}")
        elif change.value is not None and not any(name in layout.opaque for name in edit.names):
            self.changes.added[first] = None  # a new head, which the checkpoint cannot have
            self._replace_whole(first, change, change.value, first)
        elif change.value is not None and (tensor := self._of_another_size(edit.names)) is not None:
            self._replace_whole(first, change, change.value, tensor)
        else:
            self.changes.problems.append(self._not_on_disk(first))

    def finish(self) -> None:
        """Put the changed rows of each tensor in order, and refuse those that cannot be merged."""
        for name, rows in self._rows.items():
            value = self.changes.values.get(name)
            info = self._tensors[name] if value is None else info_of(name, value)
            rows.sort(key=lambda changed: changed.start)  # the writer goes through a tensor once, from its first row
            if any(one.stop > following.start for one, following in itertools.pairwise(rows)):
                self.changes.problems.append(f"{name}: two changes of the same rows")
            if info.dtype not in FLOATS:
                fix = (
                    "Widen the base first: from_pretrained(base, dtype=torch.bfloat16).save_pretrained(new_base)"
                    if info.dtype.startswith("F8")
                    else "If these are codes, merge into the base that they were made from"
                )
                self.changes.problems.append(
                    f"{name}: it is {info.dtype} on disk, to which nothing can be added. {fix}"
                )
            self.changes.merges[name] = (tuple(rows), _columns(info, rows))

    def _of_another_size(self, names: Sequence[str]) -> str | None:
        """Return the tensor on disk of a head that has other labels; None where another conversion makes it."""
        found = [name for name, key in self._layout.key_of.items() if key in names]
        is_whole = len(found) == 1 and self._tensors[found[0]].shape == self._layout.mismatched.get(names[0])
        return found[0] if is_whole else None

    def _not_on_disk(self, name: str) -> str:
        if name in self._layout.opaque:
            return f"{name}: {self._layout.opaque[name]}. {IN_MEMORY}"
        near = difflib.get_close_matches(name, [*self._layout.of, *self._tensors], n=3, cutoff=0.5)
        return f"{name}: the checkpoint has no tensor for it (nearest: {', '.join(near) or 'none'})"

    def _place_untied(self, edit: Edit, on_disk: Sequence[str]) -> None:
        """Give each name of a tied parameter a tensor of its own, and change those that an adapter changes."""
        if not on_disk:
            self.changes.problems.append(self._not_on_disk(edit.names[0]))
            return
        shared = self._layout.of[on_disk[0]]
        if not is_one_tensor(shared):
            self.changes.problems.append(
                f"{edit.names[0]}: it is tied, and the checkpoint does not hold it in one tensor. {IN_MEMORY}"
            )
            return
        source = shared.pieces[0].tensor
        for name in edit.names:
            own = self._layout.of.get(name)
            if own is None:  # the tie filled it from the shared tensor, so that is what it starts from
                self.changes.added[name] = source
                self._tensors.setdefault(name, self._tensors[source])
                own = Whole(shared.shape, (shared.pieces[0]._replace(tensor=name),))
            if name in edit.changes:
                self._place_on(name, edit.shape, edit.changes[name], own)
        flag = "is false"
        if self._keeps_tie_flag:
            flag = "stays as it is, because this class computes by it (from_pretrained leaves different weights apart)"
        else:
            self.changes.config["tie_word_embeddings"] = False
        why = (
            f"they are one weight in the base, and {edit.untied_because}; in the output each has a tensor of its own, "
            f"and tie_word_embeddings of its config {flag}."
        )
        fix = "none; an adapter trained with ensure_weight_tying=True leaves them tied."
        where, nbytes = ", ".join(edit.names), self._tensors[source].nbytes
        values = [change.value for change in edit.changes.values() if change.value is not None]
        if len(values) == len(edit.names):  # all that the adapter brings, which may have other rows than the base
            nbytes = sum(value.nbytes for value in values)
        self.changes.findings.append(Finding("no-longer-tied", "info", where, why, fix, nbytes))

    def _place_on(self, name: str, shape: tuple[int, ...], change: WeightChange, whole: Whole) -> None:
        """Make a change in the blocks of disk tensors that a parameter of that name and shape is made of."""
        if whole.shape != shape:
            self._resize(name, change, whole)
            return
        for block in whole.pieces:
            info = self._tensors[block.tensor]
            if change.value is not None and block.size != info.shape:
                try:
                    self._rows.setdefault(block.tensor, []).append(_replaced_rows(change, block, info))
                except _CannotPlaceError as reason:
                    self.changes.problems.append(f"{name}: {reason}")
                continue
            if change.value is not None:
                self.changes.values[block.tensor] = _widened(_cut_value(change.value, block), info)
            self._add_rows(name, shape, change, block, info)

    def _resize(self, name: str, change: WeightChange, whole: Whole) -> None:
        """Give a tensor on disk the rows that the adapter's vocabulary has."""
        block = whole.pieces[0]
        if change.value is None:
            return  # reported with all others that are missing from the adapter, once the vocabulary is known
        if len(whole.pieces) != 1 or block.dims != tuple(range(len(self._tensors[block.tensor].shape))):
            self.changes.problems.append(f"{name}: {block.tensor} holds it in another layout, and it is resized")
        else:
            self._replace_whole(name, change, change.value, block.tensor)

    def _replace_whole(self, name: str, change: WeightChange, value: torch.Tensor, tensor: str) -> None:
        """Give a tensor the value that an adapter has, as it is, and add to that."""
        if tensor in self._tensors:
            value = _widened(value, self._tensors[tensor])
        self.changes.values[tensor] = value.contiguous()
        shape, zeros = tuple(value.shape), (0,) * value.dim()
        block = DiskBlock(tensor, zeros, tuple(range(value.dim())), zeros, shape)
        self._add_rows(name, shape, change, block, info_of(tensor, value))

    def _add_rows(
        self, name: str, shape: tuple[int, ...], change: WeightChange, block: DiskBlock, info: TensorInfo
    ) -> None:
        if change.by_peft is None and not change.updates and not change.rows:
            return
        try:
            self._rows.setdefault(block.tensor, []).extend(_changed_rows(shape, change, block, info))
        except _CannotPlaceError as reason:
            self.changes.problems.append(f"{name}: {reason}")


def is_one_tensor(whole: Whole) -> bool:
    """Return whether one tensor on disk holds all of a parameter."""
    return len(whole.pieces) == 1 and whole.pieces[0].size == whole.shape


def _in_disk_order(change: WeightChange, moved: Moved) -> tuple[WeightChange, Whole]:
    """Return a change with its rows in the order in which the disk holds them, and where they are there."""
    if moved.order is None:
        return change, moved.whole
    if moved.shape != moved.whole.shape:  # rows of other weights lie between them, so each run is a block of its own
        return change, take(moved.whole, moved.order, moved.dim)
    if change.by_peft is not None:
        raise _CannotPlaceError(f"its rows have another order on disk. {IN_MEMORY}")
    if change.rows and moved.dim != 0:
        raise _CannotPlaceError(f"its columns have another order on disk. {IN_MEMORY}")
    order = torch.tensor(moved.order)
    rows = {moved.order[row]: value for row, value in change.rows.items()}
    inits = tuple(dataclasses.replace(init, order=order, dim=moved.dim) for init in change.inits)
    value = None if change.value is None else torch.empty_like(change.value).index_copy_(moved.dim, order, change.value)
    inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    updates = {index: _reordered(update, moved.dim - len(index), inverse) for index, update in change.updates.items()}
    return WeightChange(value, inits, updates, rows), moved.whole


def _reordered(update: Update, axis: int, order: torch.Tensor) -> Update:
    """Return the update of a weight whose rows (``axis`` 0) or columns (1) are taken in another order."""
    if not 0 <= axis <= 1 or update.shape[axis] != len(order):
        raise _CannotPlaceError(f"its elements have another order on disk. {IN_MEMORY}")
    if update.has_magnitude and update.axis != axis:  # the norms would be summed in another order, to other bits
        raise _CannotPlaceError(f"the norms of its DoRA run along what has another order on disk. {IN_MEMORY}")
    terms = []
    for term in update.terms:
        left, right = (term.left[order], term.right) if axis == 0 else (term.left, term.right[:, order])
        magnitude = None if term.magnitude is None else term.magnitude.reshape(-1)[order]
        terms.append(dataclasses.replace(term, left=left, right=right, magnitude=magnitude))
    return dataclasses.replace(update, terms=tuple(terms))


def _changed_rows(
    shape: tuple[int, ...], change: WeightChange, block: DiskBlock, info: TensorInfo
) -> list[ChangedRows]:
    """Return the rows of a disk tensor that a change of a parameter of that shape changes."""
    other_layout = f"{block.tensor} holds it in another layout"
    if change.by_peft is not None:
        if block.size != info.shape or block.dims != tuple(range(len(shape))) or block.size != shape:
            raise _CannotPlaceError(f"{other_layout}, and the method needs the whole weight. {IN_MEMORY}")
        return [ChangedRows(0, info.shape[0], by_peft=change.by_peft)]
    if change.rows:
        if change.updates:
            raise _CannotPlaceError("single tokens are trained and a LoRA is on the same weight")
        if block.size != info.shape or block.dims != (0, 1):
            raise _CannotPlaceError(other_layout)
        return [ChangedRows(row, row + 1, value=value.unsqueeze(0)) for row, value in sorted(change.rows.items())]
    if len(shape) != 2 and not any(change.updates):
        # One matrix over all of the parameter (a bias, a convolution): only where the disk holds it as it is.
        if block.size != info.shape or block.dims != tuple(range(len(shape))) or block.size != shape:
            raise _CannotPlaceError(other_layout)
        return [ChangedRows(0, info.shape[0], change.updates[()])]
    # The block may hold some of the experts only.
    rows = [
        _rows_of_matrix(index, update, block, info)
        for index, update in change.updates.items()
        if all(at <= i < at + block.extent(dim) for dim, (at, i) in enumerate(zip(block.at, index, strict=False)))
    ]
    if change.inits:
        if len(rows) != 1 or block.size != shape or block.dims != (0, 1):
            raise _CannotPlaceError(
                f"{change.inits[0].kind} needs the whole weight, of which {block.tensor} holds a part. {IN_MEMORY}"
            )
        rows = [dataclasses.replace(rows[0], inits=change.inits)]
    return rows


def _rows_of_matrix(index: tuple[int, ...], update: Update, block: DiskBlock, info: TensorInfo) -> ChangedRows:
    """Return the rows of a disk tensor that belong to the matrix at ``index`` of a parameter."""
    lead = len(index)
    row, column = block.dims[lead], block.dims[lead + 1]
    first_row, first_column = block.at[lead], block.at[lead + 1]
    if row > column:  # the disk holds the matrix transposed
        update, first_row, first_column = transposed(update), first_column, first_row
        row, column = column, row
    if column != len(info.shape) - 1 or row != column - 1 or block.size[column] != info.shape[column]:
        raise _CannotPlaceError(f"{block.tensor} holds it in another layout")
    if (first_column, block.size[column]) != (0, update.shape[1]):
        update = _narrowed(update, first_column, block.size[column])
    if update.needs_norms and block.size[row] != update.shape[0]:
        raise _CannotPlaceError(f"a DoRA needs the norms of columns that the disk holds in parts. {IN_MEMORY}")
    # Of a tensor with more than two dimensions, the rows are counted through all of its matrices.
    start = block.begin[row]
    stride = info.shape[row]
    for dim, i in zip(reversed(block.dims[:lead]), reversed(index), strict=True):
        if dim >= 0:
            start += (block.begin[dim] + i - block.at[block.dims.index(dim)]) * stride
            stride *= info.shape[dim]
    return ChangedRows(start, start + block.size[row], update, first_row)


def _replaced_rows(change: WeightChange, block: DiskBlock, info: TensorInfo) -> ChangedRows:
    """Return the rows of a disk tensor that a parameter is replaced in, of which the tensor holds others too."""
    if change.value is None or change.updates or change.rows or change.inits or block.size[1:] != info.shape[1:]:
        raise _CannotPlaceError(f"it is a part of {block.tensor} on disk, and replaced. {IN_MEMORY}")
    value, start = _cut_value(change.value, block), block.begin[0]
    return ChangedRows(start, start + block.size[0], value=value.reshape(len(value), -1))


def _cut_value(value: torch.Tensor, block: DiskBlock) -> torch.Tensor:
    """Return the part of a parameter's value that a disk block holds, in the disk's order of dimensions."""
    cut = value[tuple(slice(at, at + block.extent(dim)) for dim, at in enumerate(block.at))]
    # A stacked dimension of the parameter (the experts) has no counterpart in the tensor of one expert.
    stacked = [dim for dim, source in enumerate(block.dims) if source < 0]
    for dim in reversed(stacked):
        cut = cut.squeeze(dim)
    disk_dims = [source for source in block.dims if source >= 0]
    return cut.permute([disk_dims.index(dim) for dim in range(len(disk_dims))]).contiguous()


def transposed(update: Update) -> Update:
    """Return the update of the transposed weight; DoRA's norms stay those of the weight as the model has it."""
    terms = tuple(Term(t.right.T, t.left.T, t.scaling, t.magnitude, t.name) for t in update.terms)
    return Update((update.shape[1], update.shape[0]), terms, 1 - update.axis)


def _narrowed(update: Update, first_column: int, columns: int) -> Update:
    if update.has_magnitude:
        raise _CannotPlaceError(f"a DoRA on a weight whose columns the disk holds in several tensors. {IN_MEMORY}")
    cut = slice(first_column, first_column + columns)
    terms = tuple(Term(t.left, t.right[:, cut], t.scaling, name=t.name) for t in update.terms)
    return Update((update.shape[0], columns), terms)


def _widened(value: torch.Tensor, base: TensorInfo) -> torch.Tensor:
    """Return an adapter's own tensor in the base's dtype where that is wider: sums with it are rounded to that."""
    dtype = DTYPES.get(base.dtype)
    wider = dtype is not None and base.dtype in FLOATS and torch.promote_types(dtype, value.dtype) == dtype
    return value.to(dtype) if wider else value


def _columns(info: TensorInfo, rows: Iterable[ChangedRows]) -> int:
    """Return the columns of the matrix that a tensor is seen as: those of its updates (a whole filter is one row)."""
    return next((changed.update.shape[1] for changed in rows if changed.update is not None), math.prod(info.shape[1:]))
