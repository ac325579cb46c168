"""Tied weights: those that the files hold as one, or as equal values; the config does not decide.

transformers (``PreTrainedModel.tie_weights``, 5.23) ties two weights of a class when the checkpoint lacks one of them,
or holds equal values for both. Two different values it leaves apart, though ``tie_word_embeddings`` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.faults import listed, note
from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.report import Finding, MiB
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.tensor_values import as_buffer

from .disk_blocks import Whole
from .layout import CheckpointLayout, read_layout

_BLOCK_BYTES = 4 * MiB  # of each of the two


class UntiedPair(NamedTuple):
    """Two weights that the class ties and the checkpoint holds with different values."""

    target: str
    source: str


def untie_as_on_disk(
    model: torch.nn.Module, checkpoint: Checkpoint, layout: CheckpointLayout | None = None
) -> list[UntiedPair]:
    """Give each weight of a model on meta that its checkpoint holds apart a parameter of its own; return the pairs."""
    if not getattr(model, "all_tied_weights_keys", None):
        return []
    pairs = held_apart(model, checkpoint, layout or read_layout(model, checkpoint.tensors))
    untie(model, pairs)
    return pairs


def untie_as_in_folder(model: torch.nn.Module, folder: ModelFolder | None) -> list[Finding]:
    """Untie as the weights of a folder say, or its index where they are elsewhere; return a finding for each pair."""
    if folder is None or not getattr(model, "all_tied_weights_keys", None):
        return []
    checkpoint, _ = folder.inspect_checkpoint(kind="model")
    if checkpoint is not None and checkpoint.index is not None and not checkpoint.tensors:
        pairs = _listed_apart(model, checkpoint.index.weight_map)
        untie(model, pairs)
        return [_listed_finding(checkpoint.index.path, pair) for pair in pairs]
    checkpoint = folder.whole_checkpoint
    pairs = [] if checkpoint is None else untie_as_on_disk(model, checkpoint)
    return [untied_finding(folder.path, pair) for pair in pairs]


def held_apart(model: torch.nn.Module, checkpoint: Checkpoint, layout: CheckpointLayout) -> list[UntiedPair]:
    """Return the pairs that the class ties and the checkpoint holds with different values, in the order of the class.

    Values are compared in the dtype of the model.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return pairs_apart(ties, lambda name: model.get_parameter(name).dtype, checkpoint, layout)


def pairs_apart(
    ties: Mapping[str, str], dtype_of: Callable[[str], torch.dtype], checkpoint: Checkpoint, layout: CheckpointLayout
) -> list[UntiedPair]:
    """Return those of some ties, each a name by another, that the checkpoint holds with different values.

    Codes are not equal to floats. A weight whose place in the files cannot be followed, and codes beside codes, count
    as tied.
    """
    held = {name: layout.of[name] for pair in ties.items() for name in pair if name in layout.of}
    pairs = []
    for target, source in ties.items():
        if target not in held or source not in held:  # one is filled from the other, which later pairs then meet
            known = held.get(source) or held.get(target)
            held |= {} if known is None else {target: known, source: known}
        elif not _are_equal(held[target], held[source], checkpoint, dtype_of(target)):
            pairs.append(UntiedPair(target, source))
    return pairs


def _listed_apart(model: torch.nn.Module, listed_names: Iterable[str]) -> list[UntiedPair]:
    """Return the pairs that the class ties and an index lists both: safetensors saves tied weights under one name."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))  # of which codes are none
    ties = {target: source for target, source in ties.items() if target in parameters and source in parameters}
    endings = {_ending(name): tuple(parameters[name].shape) for pair in ties.items() for name in pair}
    # older names of the two; all others, of experts for one, have shapes that an index does not tell
    found = {name: endings[_ending(name)] for name in listed_names if _ending(name) in endings}
    tensors = {name: TensorInfo(name, "F32", shape, 0, 0) for name, shape in found.items()}
    held = read_layout(model, tensors).of
    return [UntiedPair(*pair) for pair in ties.items() if all(name in held for name in pair)]


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def untie(model: torch.nn.Module, pairs: Sequence[UntiedPair]) -> None:
    """Give the first of each pair a parameter of its own, like the second, and strike the tie from the model's list."""
    for target, _ in pairs:
        path, _, attribute = target.rpartition(".")
        shared = model.get_parameter(target)
        own = torch.nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
        setattr(model.get_submodule(path), attribute, own)
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        ties.pop(target, None)


def untied_finding(where: object, names: Sequence[str]) -> Finding:
    """Return the finding of weights that the config ties and the files hold with different values."""
    message = (
        f"the config says tie_word_embeddings=True, and the checkpoint has two weights with different values "
        f"({listed(names)}), which transformers leaves apart"
    )
    fix = "set tie_word_embeddings to false in config.json if both are intended; otherwise delete the wrong one"
    return note("warning", "base-untied", where, message, fix)


def _listed_finding(index: Path, names: Sequence[str]) -> Finding:
    message = (
        f"the config says tie_word_embeddings=True, and {index.name} lists two weights ({listed(names)}), which count "
        f"as two: transformers ties them only if their values are equal"
    )
    return note("warning", "base-untied", index, message, "download the weights, which say whether they are equal")


def _are_equal(one: Whole, other: Whole, checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Return whether two weights have equal values in a dtype, as far as each is one tensor on disk."""
    first, second = (_tensor_of(whole, checkpoint) for whole in (one, other))
    if first is None or second is None or first.name == second.name:
        return True
    if not (_is_plain(first) and _is_plain(second)):
        return _is_plain(first) == _is_plain(second)
    if first.shape != second.shape:
        return False
    blocks = (_blocks(checkpoint.file_of[info.name], info, dtype) for info in (first, second))
    return all(torch.equal(block, counterpart) for block, counterpart in zip(*blocks, strict=True))


def _tensor_of(whole: Whole, checkpoint: Checkpoint) -> TensorInfo | None:
    """Return the one tensor that holds all of a weight; None where it is in parts or turned."""
    first, *others = whole.pieces
    info = checkpoint.tensors.get(first.tensor)
    if info is None or others or first.size != info.shape or first.dims != tuple(range(len(info.shape))):
        return None
    return info


def _is_plain(info: TensorInfo) -> bool:
    """Return whether a tensor holds floats, and not codes."""
    kind = DTYPES.get(info.dtype)
    return kind is not None and kind.is_floating_point and kind.itemsize > 1


def _blocks(path: Path, info: TensorInfo, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield a tensor in blocks of the same number of elements, cast to a dtype."""
    stored = DTYPES[info.dtype]
    count = _BLOCK_BYTES // torch.float64.itemsize * stored.itemsize
    buffer = torch.empty(min(count, info.nbytes), dtype=torch.uint8, device="cpu")
    memory = as_buffer(buffer)
    with open_regular(path) as file:
        for at in range(0, info.nbytes, max(1, len(memory))):
            size = min(len(memory), info.nbytes - at)
            read_into(file.fileno(), memory[:size], info.start + at)
            yield buffer[:size].view(stored).to(dtype)
