"""From edits of parameters to changes of tensors on disk."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.report import Finding
from safe_loading._merging.weights.update import Term, Update
from safe_loading._model.layout.disk_blocks import DiskBlock, Moved, Whole, take
from safe_loading._model.layout.layout import CheckpointLayout

from .changes import FLOATS, NAMES, ChangedRows, Changes
from .edits import Edit

_BY_HAND = "Load the model, merge it with merge_lora_inplace and save it with save_pretrained"
Parts = dict[str, list[ChangedRows]]


def place_edits(edits: Iterable[Edit], layout: CheckpointLayout, tensors: Mapping[str, TensorInfo]) -> Changes:
    """Find the tensors on disk that each edit changes."""
    changes = Changes()
    parts: Parts = {}
    for edit in edits:
        found = [name for name in edit.names if name in layout.of]
        moved = [name for name in edit.names if name in layout.moved]
        if edit.own:
            _untie_values(edit, layout, changes)
        elif edit.apart or edit.each:
            _untie(edit, found, layout, tensors, parts, changes)
        elif found:
            for name in found:
                _place(edit, layout.of[name], tensors, parts, changes)
            first = layout.of[found[0]].pieces
            for name in found[1:]:
                changes.tied |= {p.tensor: first[0].tensor for p in layout.of[name].pieces}
        elif len(moved) == len(edit.names) == 1:
            try:
                _place(*_as_on_disk(edit, layout.moved[moved[0]]), tensors, parts, changes)
            except _CannotPlaceError as reason:
                changes.problems.append(f"{edit.names[0]}: {reason}")
        elif edit.value is not None and not any(name in layout.opaque for name in edit.names):
            changes.added[edit.names[0]] = None  # a new head, which the checkpoint cannot have
            _replace(edit, edit.value, edit.names[0], parts, changes)
        else:
            changes.problems.append(_nowhere(edit.names[0], layout, tensors))
    _settle(parts, tensors, changes)
    return changes


def _settle(parts: Parts, tensors: Mapping[str, TensorInfo], changes: Changes) -> None:
    """Put the parts of each tensor in order, and refuse those that cannot be."""
    for name, own in parts.items():
        value = changes.values.get(name)
        info = tensors[changes.added.get(name) or name] if value is None else _info(name, value)
        own.sort(key=lambda part: part.start)
        if any(one.stop > other.start for one, other in itertools.pairwise(own)):
            changes.problems.append(f"{name}: two changes of the same rows")
        if info.dtype not in FLOATS:
            changes.problems.append(
                f"{name}: it is {info.dtype} on disk, to which nothing can be added. Dequantize the base first: load "
                f"it with from_pretrained, call dequantize(), and save it"
            )
        changes.merges[name] = (tuple(own), _columns(info, own))


def _nowhere(name: str, layout: CheckpointLayout, tensors: Mapping[str, TensorInfo]) -> str:
    if name in layout.opaque:
        return f"{name}: {layout.opaque[name]}. {_BY_HAND}"
    near = difflib.get_close_matches(name, [*layout.of, *tensors], n=3, cutoff=0.5)
    return f"{name}: the checkpoint has no tensor for it (nearest: {', '.join(near) or 'none'})"


def _untie(
    edit: Edit,
    found: list[str],
    layout: CheckpointLayout,
    tensors: Mapping[str, TensorInfo],
    parts: Parts,
    changes: Changes,
) -> None:
    """Change a parameter under some of its names alone: each name gets a tensor of its own."""
    if not found:
        changes.problems.append(_nowhere(edit.names[0], layout, tensors))
        return
    whole = layout.of[found[0]]
    if len(whole.pieces) != 1 or whole.pieces[0].size != whole.shape:
        changes.problems.append(f"{edit.names[0]}: it is tied, and {_BY_HAND[0].lower()}{_BY_HAND[1:]}")
        return
    held = whole.pieces[0].tensor
    for name in edit.names:
        own = layout.of.get(name)
        if own is None:
            changes.added[name] = held
            own = _renamed(whole, name)
        if name not in edit.apart:
            here = {**tensors, name: tensors.get(name, tensors[held])}
            _place(edit.each.get(name, edit), own, here, parts, changes)
    changes.config["tie_word_embeddings"] = False
    why = f"the adapter changes {', '.join(sorted(edit.said))} " + ("each in its own way" if edit.each else "alone")
    changes.findings.append(_no_longer_tied(edit, why, tensors[held].nbytes))


def _untie_values(edit: Edit, layout: CheckpointLayout, changes: Changes) -> None:
    """Give each name of a tied parameter the content that the adapter has for it."""
    for name, value in edit.own.items():
        pieces = layout.of[name].pieces if name in layout.of else ()
        if len(pieces) > 1 or (pieces and pieces[0].dims != tuple(range(value.dim()))):
            changes.problems.append(f"{name}: the disk holds it in parts or another layout, and it is replaced")
            continue
        held = pieces[0].tensor if pieces else name
        if not pieces:  # it begins as the tensor that it was tied to, so it is no new head
            changes.added[held] = next(layout.of[n].pieces[0].tensor for n in edit.names if n in layout.of)
        changes.values[held] = value.contiguous()
    changes.config["tie_word_embeddings"] = False
    size = sum(value.nbytes for value in edit.own.values())
    changes.findings.append(_no_longer_tied(edit, "the adapter brings different content for each", size))


def _no_longer_tied(edit: Edit, why: str, size: int) -> Finding:
    return Finding(
        "no-longer-tied",
        "info",
        ", ".join(edit.names),
        f"they are one weight in the base, and {why}; in the output each has a tensor of its own, and "
        f"tie_word_embeddings of its config is false.",
        "none; an adapter trained with ensure_weight_tying=True leaves them tied.",
        size,
    )


def _renamed(whole: Whole, name: str) -> Whole:
    (piece,) = whole.pieces
    return Whole(whole.shape, (DiskBlock(name, piece.at, piece.dims, piece.begin, piece.size),))


def _place(edit: Edit, whole: Whole, tensors: Mapping[str, TensorInfo], parts: Parts, changes: Changes) -> None:
    if whole.shape != edit.shape:
        _resize(edit, whole, tensors, parts, changes)
        return
    for piece in whole.pieces:
        info = tensors[piece.tensor]
        if edit.value is not None and piece.size != info.shape:
            changes.problems.append(f"{edit.names[0]}: it is a part of {piece.tensor} on disk, and replaced whole")
            continue
        if edit.value is not None:
            changes.values[piece.tensor] = _block(edit.value, piece)
        _add_parts(edit, piece, info, parts, changes)


def _add_parts(edit: Edit, piece: DiskBlock, info: TensorInfo, parts: Parts, changes: Changes) -> None:
    if not edit.updates and not edit.rows:
        return
    try:
        parts.setdefault(piece.tensor, []).extend(_parts(edit, piece, info))
    except _CannotPlaceError as reason:
        changes.problems.append(f"{edit.names[0]}: {reason}")


def _replace(edit: Edit, value: torch.Tensor, name: str, parts: Parts, changes: Changes) -> None:
    """Give a tensor the content that an adapter has, as it is, and what is added to that."""
    changes.values[name] = value.contiguous()
    shape, nothing = tuple(value.shape), (0,) * value.dim()
    piece = DiskBlock(name, nothing, tuple(range(value.dim())), nothing, shape)
    _add_parts(edit, piece, _info(name, value), parts, changes)


def _info(name: str, value: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, NAMES[value.dtype], tuple(value.shape), 0, value.nbytes)


def _resize(edit: Edit, whole: Whole, tensors: Mapping[str, TensorInfo], parts: Parts, changes: Changes) -> None:
    """Give a tensor on disk the rows that the adapter's vocabulary has."""
    piece = whole.pieces[0]
    if edit.value is None:
        return  # named with all the others that the adapter lacks, once the vocabulary is known
    if len(whole.pieces) != 1 or piece.dims != tuple(range(len(tensors[piece.tensor].shape))):
        changes.problems.append(f"{edit.names[0]}: {piece.tensor} holds it in another layout, and it is resized")
    else:
        _replace(edit, edit.value, piece.tensor, parts, changes)


class _CannotPlaceError(Exception):
    pass


def _as_on_disk(edit: Edit, moved: Moved) -> tuple[Edit, Whole]:
    """Return an edit of the rows in the order in which the disk holds them, and where they are there."""
    if moved.order is None:
        return edit, moved.whole
    if moved.shape != moved.whole.shape:  # rows of other weights lie between them, so each is a piece of its own
        return edit, take(moved.whole, moved.order, moved.dim)
    if edit.rows or edit.starts:
        raise _CannotPlaceError(f"its rows have another order on disk. {_BY_HAND}")
    order = torch.tensor(moved.order)
    value = None if edit.value is None else torch.empty_like(edit.value).index_copy_(moved.dim, order, edit.value)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    updates = {index: _reordered(update, moved.dim - len(index), back) for index, update in edit.updates.items()}
    return dataclasses.replace(edit, value=value, updates=updates), moved.whole


def _reordered(update: Update, axis: int, order: torch.Tensor) -> Update:
    """Return the update of a weight whose rows (``axis`` 0) or columns (1) are taken in another order."""
    if not 0 <= axis <= 1 or update.shape[axis] != len(order):
        raise _CannotPlaceError(f"its elements have another order on disk. {_BY_HAND}")
    if update.has_magnitude and update.axis != axis:  # the norms would be summed in another order, to other bits
        raise _CannotPlaceError(f"a DoRA whose norms run along what has another order on disk. {_BY_HAND}")
    terms = []
    for term in update.terms:
        left, right = (term.left[order], term.right) if axis == 0 else (term.left, term.right[:, order])
        magnitude = None if term.magnitude is None else term.magnitude.reshape(-1)[order]
        terms.append(dataclasses.replace(term, left=left, right=right, magnitude=magnitude))
    return dataclasses.replace(update, terms=tuple(terms))


def _parts(edit: Edit, piece: DiskBlock, info: TensorInfo) -> list[ChangedRows]:
    if edit.rows:
        if edit.updates:
            raise _CannotPlaceError("single tokens are trained and a LoRA is on the same weight")
        return _token_parts(edit, piece, info)
    if len(edit.shape) != 2 and not any(edit.updates):
        # one matrix over all of the parameter (a bias, a convolution): only where the disk holds it as it is
        if piece.size != info.shape or piece.dims != tuple(range(len(edit.shape))) or piece.size != edit.shape:
            raise _CannotPlaceError(f"{piece.tensor} holds it in another layout")
        return [ChangedRows(0, info.shape[0], edit.updates[()])]
    found = []
    for index, update in edit.updates.items():
        if any(not at <= i < at + piece.extent(d) for d, (at, i) in enumerate(zip(piece.at, index, strict=False))):
            continue
        found.append(_part(index, update, piece, info))
    if edit.starts:
        if len(found) != 1 or piece.size != edit.shape or piece.dims != (0, 1):
            raise _CannotPlaceError(f"{edit.starts[0].kind} needs the weight that the disk holds in parts. {_BY_HAND}")
        found = [dataclasses.replace(found[0], starts=tuple(edit.starts))]
    return found


def _part(index: tuple[int, ...], update: Update, piece: DiskBlock, info: TensorInfo) -> ChangedRows:
    """Return the rows of a disk tensor that belong to the matrix at ``index`` of a parameter."""
    lead = len(index)
    row, column = piece.dims[lead], piece.dims[lead + 1]
    first, left = piece.at[lead], piece.at[lead + 1]
    if row > column:
        update, first, left = _turned(update), left, first
        row, column = column, row
    if column != len(info.shape) - 1 or row != column - 1 or piece.size[column] != info.shape[column]:
        raise _CannotPlaceError(f"{piece.tensor} holds it in another layout")
    if (left, piece.size[column]) != (0, update.shape[1]):
        update = _narrowed(update, left, piece.size[column])
    if update.needs_norms and piece.size[row] != update.shape[0]:
        raise _CannotPlaceError(f"a DoRA needs the norms of columns that the disk holds in parts. {_BY_HAND}")
    start = piece.begin[row]
    stride = info.shape[row]
    for dim, i in zip(reversed(piece.dims[:lead]), reversed(index), strict=True):
        if dim >= 0:
            start += (piece.begin[dim] + i - piece.at[piece.dims.index(dim)]) * stride
            stride *= info.shape[dim]
    return ChangedRows(start, start + piece.size[row], update, first)


def _token_parts(edit: Edit, piece: DiskBlock, info: TensorInfo) -> list[ChangedRows]:
    if piece.size != info.shape or piece.dims != (0, 1):
        raise _CannotPlaceError(f"{piece.tensor} holds it in another layout")
    return [ChangedRows(row, row + 1, value=value.unsqueeze(0)) for row, value in sorted(edit.rows.items())]


def _block(value: torch.Tensor, piece: DiskBlock) -> torch.Tensor:
    """Return what a piece holds of a parameter's value, in the disk's order of dimensions."""
    part = value[tuple(slice(at, at + piece.extent(dim)) for dim, at in enumerate(piece.at))]
    stacked = [dim for dim, source in enumerate(piece.dims) if source < 0]
    for dim in reversed(stacked):
        part = part.squeeze(dim)
    runs = [source for source in piece.dims if source >= 0]
    return part.permute([runs.index(dim) for dim in range(len(runs))]).contiguous()


def _turned(update: Update) -> Update:
    """Return the update of the transposed weight; DoRA's norms stay those of the weight as the model has it."""
    terms = tuple(Term(t.right.T, t.left.T, t.scaling, t.magnitude, t.name) for t in update.terms)
    return Update((update.shape[1], update.shape[0]), terms, 1 - update.axis)


def _narrowed(update: Update, left: int, columns: int) -> Update:
    if update.has_magnitude:
        raise _CannotPlaceError(f"a DoRA on a weight whose columns the disk holds apart. {_BY_HAND}")
    terms = tuple(Term(t.left, t.right[:, left : left + columns], t.scaling, name=t.name) for t in update.terms)
    return Update((update.shape[0], columns), terms)


def _columns(info: TensorInfo, parts: Iterable[ChangedRows]) -> int:
    """Return the columns of the matrix that a tensor is seen as: those of its updates (a whole filter is one row)."""
    return next((part.update.shape[1] for part in parts if part.update is not None), math.prod(info.shape[1:]))
