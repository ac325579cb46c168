"""From edits of parameters to changes of tensors on disk."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._lora.update import Term, Update, merge_matrix
from safe_loading._merge_checkpoint.edits import Edit
from safe_loading._merge_checkpoint.layout import Layout
from safe_loading._merge_checkpoint.pieces import Piece, Whole
from safe_loading._merge_checkpoint.plan import DTYPES, Part

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass
class Changes:
    """What changes on disk.

    Attributes:
        merges: The parts of each tensor, and the columns of the matrix that they are parts of.
        values: The new content of each tensor that is replaced whole.
        problems: What has no place, a line each.
    """

    merges: dict[str, tuple[tuple[Part, ...], int]] = dataclasses.field(default_factory=dict)
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def place_edits(edits: Iterable[Edit], layout: Layout, tensors: Mapping[str, TensorInfo]) -> Changes:
    """Find the tensors on disk that each edit changes."""
    changes = Changes()
    parts: dict[str, list[Part]] = {}
    for edit in edits:
        found = [name for name in edit.names if name in layout.of]
        if not found:
            changes.problems.append(_nowhere(edit, layout, tensors))
        for name in found:
            _place(edit, layout.of[name], tensors, parts, changes)
    for name, own in parts.items():
        info = tensors[name]
        own.sort(key=lambda part: part.start)
        if any(one.stop > other.start for one, other in itertools.pairwise(own)):
            changes.problems.append(f"{name}: two changes of the same rows")
        if info.dtype not in _FLOATS:
            changes.problems.append(
                f"{name}: it is {info.dtype} on disk, to which nothing can be added. Dequantise the base first: load "
                f"it with from_pretrained, call dequantize(), and save it"
            )
        changes.merges[name] = (tuple(own), _columns(info))
    return changes


def _nowhere(edit: Edit, layout: Layout, tensors: Mapping[str, TensorInfo]) -> str:
    name = edit.names[0]
    if name in layout.opaque:
        return (
            f"{name}: {layout.opaque[name]}. Load the model, merge it with merge_lora_inplace and save it with "
            f"save_pretrained"
        )
    near = difflib.get_close_matches(name, [*layout.of, *tensors], n=3, cutoff=0.5)
    return f"{name}: the checkpoint has no tensor for it (nearest: {', '.join(near) or 'none'})"


def _place(
    edit: Edit, whole: Whole, tensors: Mapping[str, TensorInfo], parts: dict[str, list[Part]], changes: Changes
) -> None:
    value = None if edit.value is None else _edited_value(edit)
    for piece in whole.pieces:
        info = tensors[piece.tensor]
        if value is not None:
            block = _block(value, piece)
            if piece.size == info.shape:
                changes.values[piece.tensor] = block
            else:
                changes.problems.append(f"{edit.names[0]}: it is a part of {piece.tensor} on disk, and replaced whole")
            continue
        try:
            parts.setdefault(piece.tensor, []).extend(_parts(edit, piece, info))
        except _CannotPlaceError as reason:
            changes.problems.append(f"{edit.names[0]}: {reason}")


class _CannotPlaceError(Exception):
    pass


def _parts(edit: Edit, piece: Piece, info: TensorInfo) -> list[Part]:
    if edit.rows:
        if edit.updates:
            raise _CannotPlaceError("single tokens are trained and a LoRA is on the same weight")
        return _token_parts(edit, piece, info)
    if len(edit.shape) != 2 and not any(edit.updates):
        # one matrix over all of the parameter (a bias, a convolution): only where the disk holds it as it is
        if piece.size != info.shape or piece.dims != tuple(range(len(edit.shape))) or piece.size != edit.shape:
            raise _CannotPlaceError(f"{piece.tensor} holds it in another layout")
        return [Part(0, info.shape[0], edit.updates[()])]
    found = []
    for index, update in edit.updates.items():
        if any(not at <= i < at + piece.extent(d) for d, (at, i) in enumerate(zip(piece.at, index, strict=False))):
            continue
        found.append(_part(index, update, piece, info))
    return found


def _part(index: tuple[int, ...], update: Update, piece: Piece, info: TensorInfo) -> Part:
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
    start = piece.begin[row]
    stride = info.shape[row]
    for dim, i in zip(reversed(piece.dims[:lead]), reversed(index), strict=True):
        if dim >= 0:
            start += (piece.begin[dim] + i - piece.at[piece.dims.index(dim)]) * stride
            stride *= info.shape[dim]
    return Part(start, start + piece.size[row], update, first)


def _token_parts(edit: Edit, piece: Piece, info: TensorInfo) -> list[Part]:
    if piece.size != info.shape or piece.dims != (0, 1):
        raise _CannotPlaceError(f"{piece.tensor} holds it in another layout")
    dtype = DTYPES[info.dtype]
    return [Part(row, row + 1, value=value.to(dtype).unsqueeze(0)) for row, value in sorted(edit.rows.items())]


def _edited_value(edit: Edit) -> torch.Tensor:
    """Return the new content of a parameter that is replaced, with what is added on top."""
    if edit.value is None:
        raise ValueError("there is no new content")
    value = edit.value
    if edit.updates or edit.rows:
        value = value.clone(memory_format=torch.contiguous_format)
        for index, update in edit.updates.items():
            merge_matrix(update, value[index].view(update.shape))
        for row, new in edit.rows.items():
            value[row] = new.to(value.dtype)
    return value


def _block(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return what a piece holds of a parameter's value, in the disk's order of dimensions."""
    part = value[tuple(slice(at, at + piece.extent(dim)) for dim, at in enumerate(piece.at))]
    stacked = [dim for dim, source in enumerate(piece.dims) if source < 0]
    for dim in reversed(stacked):
        part = part.squeeze(dim)
    runs = [source for source in piece.dims if source >= 0]
    return part.permute([runs.index(dim) for dim in range(len(runs))]).contiguous()


def _turned(update: Update) -> Update:
    if update.has_magnitude:
        raise _CannotPlaceError("a DoRA on a weight that the disk holds transposed")
    terms = tuple(Term(term.right.T, term.left.T, term.scaling) for term in update.terms)
    return Update((update.shape[1], update.shape[0]), terms)


def _narrowed(update: Update, left: int, columns: int) -> Update:
    if update.has_magnitude:
        raise _CannotPlaceError("a DoRA on a weight whose columns the disk holds apart")
    terms = tuple(Term(term.left, term.right[:, left : left + columns], term.scaling) for term in update.terms)
    return Update((update.shape[0], columns), terms)


def _columns(info: TensorInfo) -> int:
    """Return the columns of the matrix that a tensor is seen as: a vector is one column, a filter one row."""
    if len(info.shape) == 3:
        return info.shape[-1]
    return math.prod(info.shape[1:])
