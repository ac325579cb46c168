"""Weights that a merged folder holds in blocks of codes: the pairs to compare, and the verdicts on their statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from safe_loading._checkpoint.header import BITS, TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._model.formats.stored import QuantizedTensor

from .compare_files import Pair
from .compare_report import CheckedTensor
from .output_plan import FilePlan

_WIDE = "F64"  # of the sums that codes are held against


def are_transposed(plans: Sequence[FilePlan], found: Mapping[str, QuantizedTensor]) -> bool:
    """Return whether a folder has codes of transposed weights: the layers of GPT-2 are turned around."""
    shapes = {tensor.target.name: tensor.target.shape for plan in plans for tensor in plan.tensors}
    pairs = [(shapes.get(name, weight.shape), weight.shape) for name, weight in found.items()]
    return any(planned == (*reversed(own),) for planned, own in pairs if planned != own)


def with_blocks(pairs: Sequence[Pair], found: Mapping[str, QuantizedTensor]) -> tuple[list[Pair], list[CheckedTensor]]:
    """Return the pairs, those of codes with them, and the verdicts on codes that are not compared.

    ``found`` are the folder's, by the name of the plain weight that they stand for.
    """
    new: list[Pair] = []
    unchecked = []
    for pair in pairs:
        target = pair.plan.target
        names = {target.name} if pair.gathered is None else {info.name for info in pair.gathered.infos}
        held = names & found.keys()
        if not held:
            new.append(pair)
        elif pair.gathered is None and _is_one_section(pair):
            nbytes = math.prod(target.shape) * BITS[_WIDE] // 8
            wide = TensorInfo(target.name, _WIDE, target.shape, 0, nbytes)
            plan = dataclasses.replace(pair.plan, target=wide)
            new.append(dataclasses.replace(pair, plan=plan, blocks=found[target.name]))
        else:
            info = found[min(held)].info
            detail = "codes of a part of a tensor of the base, or of several"
            unchecked.append(
                CheckedTensor(target.name, "", "unchecked", pair.plan.action, info.dtype, info.nbytes, detail=detail)
            )
    return new, unchecked


def _is_one_section(pair: Pair) -> bool:
    rows, shape = pair.plan.rows, pair.plan.target.shape
    return not rows or (len(rows) == 1 and (rows[0].start, rows[0].stop) == (0, math.prod(shape[:-1])))


def verdicts_of_parts(
    checked: Sequence[CheckedTensor], found: Mapping[str, QuantizedTensor], merged: Checkpoint, plain: Checkpoint
) -> list[CheckedTensor]:
    """Return the verdicts on the statistics of codes: those of the codes, which are right under them or not."""
    if not found:
        return []
    codes = {tensor.name: tensor for tensor in checked}
    return [*_of_parts(codes, found, merged, plain)]


def _of_parts(
    codes: Mapping[str, CheckedTensor], found: Mapping[str, QuantizedTensor], merged: Checkpoint, plain: Checkpoint
) -> Iterator[CheckedTensor]:
    modules = {name.rpartition(".")[0]: name for name in found}
    for name, info in merged.tensors.items():
        if name in plain.tensors:
            continue
        owner = next((each for each in _parents(name) if each in found), None) or modules.get(name.rpartition(".")[0])
        judged = codes.get(owner or "")
        if judged is not None:
            file = merged.file_of[name].relative_to(merged.folder).as_posix()
            action = "copied" if judged.expected == "copied" else "rescaled"
            yield CheckedTensor(name, file, judged.verdict, action, info.dtype, info.nbytes, scale=judged.scale)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
