"""Where each tensor's values come from, and their way into the local shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from safe_loading._core import progress as _progress
from safe_loading._core.names import canonical
from safe_loading._core.report import Finding
from safe_loading._model.tensors import ModelTensor
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.launcher import local_rank
from safe_loading._ranks.waiting import Waiting
from safe_loading.errors import CheckpointError

from .local_shard import LocalShard
from .scatter import ElementRange, broadcast, meet, scatter
from .setup import Setup


@dataclasses.dataclass
class RootValues:
    """What the root, the first rank of the mesh, gives to the others.

    Attributes:
        names: The tensors, on every rank the same.
        values: Their values, on the root; empty elsewhere.
        findings: What is worth knowing about them.
    """

    names: frozenset[str] = frozenset()
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)


def from_state_dict(setup: Setup, state: Mapping[str, torch.Tensor]) -> RootValues:
    """Match a state dict with the model, strictly.

    Raises:
        CheckpointError: Keys are unexpected, shapes differ, or values are not there or contradict each other.
    """
    by_name = {name: held for held in setup.everything() for name in held.names}
    given = RootValues()
    problems = []
    for key, tensor in state.items():
        held = by_name.get(canonical(key))
        if held is None:
            problems.append(f"{key}: the model has no such tensor")
        elif problem := _misfit(held, tensor, given.values.get(held.name)):
            problems.append(f"{key}: {problem}")
        elif held.name not in given.values:
            given.values[held.name] = tensor
            if tensor.dtype != held.tensor.dtype:
                given.findings.append(_cast(held, tensor.dtype, "the state dict"))
    if problems:
        raise CheckpointError("The state dict does not fit the model:", problems)
    return given


def _misfit(held: ModelTensor, value: object, first: torch.Tensor | None) -> str | None:
    """Return why a tensor cannot have a value; ``first`` is what it was given under another of its names."""
    if not isinstance(value, torch.Tensor):
        return f"the state dict has a {type(value).__name__}, which is no tensor"
    if isinstance(value, DTensor):
        return "the state dict has a DTensor, a part of the values: pass its full_tensor()"
    if value.is_meta:
        return "the state dict has it on meta, without values"
    if value.shape != held.tensor.shape:
        return f"the state dict has {list(value.shape)}, the model {list(held.tensor.shape)}"
    if first is None or first is value or torch.equal(first, value.to(first)):
        return None
    return f"{', '.join(held.names)} are one parameter of the model, and two values in the state dict"


def from_model(held: Sequence[ModelTensor]) -> RootValues:
    """Take the values that this rank's model has."""
    return RootValues(values={each.name: each.tensor for each in held if not each.is_meta})


def agree_on_names(
    ranks: Ranks, root: int, given: RootValues, held: Sequence[ModelTensor], *, timeout: float
) -> RootValues:
    """Tell every rank which tensors the root gives; an exchange of a bit a tensor."""
    bits = "".join("1" if each.name in given.values else "0" for each in held) if ranks.rank == root else ""
    told = ranks.exchange("learn what rank 0 gives", bits, timeout=timeout)[ranks.index(root)]
    names = frozenset(each.name for each, bit in zip(held, told, strict=True) if bit == "1")
    return dataclasses.replace(given, names=names)


def missing(
    held: Sequence[ModelTensor], given: RootValues, on_disk: Set[str], setup: Setup, *, heads: Sequence[str] = ()
) -> None:
    """Refuse a model of which something would stay without values.

    Raises:
        CheckpointError: Tensors that nothing fills; with them, what the folder holds of another head.
    """
    lacking = [_lacking(each) for each in held if each.name not in given.values and each.name not in on_disk]
    if setup.init_new is None and heads and not lacking:
        raise CheckpointError(
            f"The folder {setup.folder} holds a head that the model does not have. Build the model with it, or pass "
            f"init_new=fn(module) where the model has a new one of its own:",
            heads,
        )
    if lacking:
        fix = "init_new= left them out" if setup.init_new else "pass init_new=fn(module) if they are new"
        where = f"the folder {setup.folder}" if setup.folder is not None else "the source"
        raise CheckpointError(
            f"{len(lacking)} of {len(held)} tensors have no values: neither {where} has them nor rank 0; {fix}:",
            [*lacking, *heads],
        )


def _lacking(held: ModelTensor) -> str:
    return held.line() if isinstance(held.tensor, nn.Parameter) else f"{held.line()}, a buffer: set it on rank 0"


def deliver(setup: Setup, mesh: DeviceMesh, given: RootValues, part: LocalShard, waiting: Waiting) -> int:
    """Move what the root gives to the ranks that own it, and return the bytes that this rank sent.

    Within the root's shard group each rank is sent its own part; then, with several replicas, each of them hands its
    part to its copies. So a byte comes to a rank once.

    Args:
        setup: What is done.
        mesh: The mesh.
        given: What the root gives.
        part: What each rank owns, and where this rank's part goes.
        waiting: How to wait for one collective.
    """
    names = given.names
    if not names:
        return 0
    coordinate = mesh.get_coordinate() or [0]
    shard_group, device = mesh.get_group(mesh.ndim - 1), setup.device
    is_root = not any(coordinate)
    source = given.values.__getitem__ if is_root else None
    parts = [[stretch for stretch in part.owned(rank) if stretch.name in names] for rank in range(setup.shards)]
    entire = [
        ElementRange(held.name, 0, held.tensor.numel(), held.tensor.dtype)
        for held in (*setup.whole, *setup.buffers)
        if held.name in names
    ]
    mine = [ElementRange(each.name, 0, each.stop - each.start, each.dtype) for each in parts[part.at]]
    total = sum(stretch.nbytes for stretch in (*mine, *entire))
    sent = 0
    with _progress.bar_of_a_rank("scattering", total, local_rank()) as bar:
        first = len(coordinate) == 1 or coordinate[0] == 0
        if first:
            meet(shard_group, device, waiting)
            sent += scatter(parts, source, part.local.__getitem__, shard_group, device, waiting=waiting, bar=bar)
            sent += broadcast(entire, source, part.whole.__getitem__, shard_group, device, waiting=waiting, bar=bar)
        if len(coordinate) == 2:
            copies = mesh.get_group(0)
            meet(copies, device, waiting)
            moved = None if first else bar  # the first has its part already
            for stretches, tensors in ((mine, part.local), (entire, part.whole)):
                read = tensors.__getitem__ if first else None
                sent += broadcast(stretches, read, tensors.__getitem__, copies, device, waiting=waiting, bar=moved)
    return sent


def root_of(mesh: DeviceMesh) -> int:
    """Return the global rank whose weights are taken."""
    return int(mesh.mesh.flatten()[0])


def _cast(held: ModelTensor, dtype: torch.dtype, where: str) -> Finding:
    return Finding(
        "dtype-cast",
        "info",
        held.name,
        f"{where} has {dtype}, the model {held.tensor.dtype}; the model's dtype was kept.",
        "none needed; build the model in the dtype of the checkpoint to avoid the rounding.",
        held.nbytes,
    )
