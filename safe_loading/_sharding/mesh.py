"""The ranks of a wrap as a mesh: which of its dimensions hold copies, shards, and the parts of layers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from safe_loading._ranks.device_guard import own_device
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.waiting import Waiting
from safe_loading.errors import ArgumentError

# What transformers and accelerate call the dimensions over which layers and experts are split, and that of the copies.
TENSOR, EXPERT, REPLICAS = "tp", "ep", "dp_replicate"


@dataclasses.dataclass(frozen=True)
class WrapPlace:
    """Where the shards go."""

    mesh_sizes: tuple[int, ...]  # of the mesh: (shards,) or (replicas, shards), and with tensor parallelism the parts
    given_mesh: DeviceMesh | None  # the caller's own mesh; None where one has to be made
    device: torch.device

    @property
    def parts(self) -> int:
        """Over how many ranks tensor parallelism splits a layer, whose parts are sharded in turn."""
        return self.mesh_sizes[-1] if is_tensor_parallel(self.given_mesh) else 1

    @property
    def shards(self) -> int:
        """Over how many ranks a parameter, or each part of one, is sharded."""
        return self.mesh_sizes[-2] if is_tensor_parallel(self.given_mesh) else self.mesh_sizes[-1]

    @property
    def owners(self) -> int:
        """How many ranks hold one copy of the model between them."""
        return self.shards * self.parts


@dataclasses.dataclass(frozen=True)
class WrapMesh:
    """The mesh of a wrap, and this rank's place in it."""

    whole: DeviceMesh
    fsdp: DeviceMesh  # its dimensions for FSDP: (shards,) or (replicas, shards)
    owners: dist.ProcessGroup  # the ranks that hold one copy of the model between them, this one among them
    copies: dist.ProcessGroup | None = None  # the ranks that hold what this one does, one of each replica
    tensor: DeviceMesh | None = None  # its dimension for tensor parallelism

    @property
    def root(self) -> int:
        """The global rank whose weights are taken."""
        return int(self.whole.mesh.flatten()[0])

    @property
    def position(self) -> int:
        """This rank's place among the owners."""
        return dist.get_rank(self.owners)

    @property
    def is_first_replica(self) -> bool:
        """Whether the root is among the owners around this rank."""
        return self.copies is None or self.whole.get_local_rank(0) == 0


def is_tensor_parallel(mesh: object) -> bool:
    """Return whether a mesh has a dimension for tensor parallelism."""
    return isinstance(mesh, DeviceMesh) and TENSOR in (mesh.mesh_dim_names or ())


def find_place(mesh: object, device: torch.device | str | int | None, ranks: Ranks, version: int) -> WrapPlace:
    """Return where the shards go."""
    given_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    # on a machine with accelerators device_for_rank would choose one
    if given_mesh is not None and device is None and given_mesh.device_type == "cpu":
        device = "cpu"
    own = own_device(device)
    return WrapPlace(_mesh_sizes(mesh, ranks, own, version), given_mesh, own)


def make_mesh(where: WrapPlace, waiting: Waiting) -> WrapMesh:
    """Return the mesh; making one is a collective, in which torch notices no dead rank and has no time limit."""
    whole = where.given_mesh
    if whole is None:
        if where.device.type != "cpu":
            # else DeviceMesh sets one itself, by LOCAL_RANK or by the global rank
            torch.accelerator.set_device_index(where.device)
        # transformers' names; peft takes the dimension "fsdp" for FSDP2, and any other for tensor parallelism
        names = (REPLICAS, "fsdp")[-len(where.mesh_sizes) :]
        whole = waiting.call(lambda: init_device_mesh(where.device.type, where.mesh_sizes, mesh_dim_names=names))
    if is_tensor_parallel(whole):
        of_fsdp = (whole.mesh_dim_names or ())[:-1]
        replica = whole.get_local_rank(0) if len(of_fsdp) == 2 else 0
        ranks = whole.mesh.reshape(-1, where.owners)[replica].tolist()
        make = functools.partial(dist.new_group, ranks, use_local_synchronization=True)
        # no process group only for ranks outside of it
        owners: Any = dist.group.WORLD if len(ranks) == dist.get_world_size() else waiting.call(make)
        copies = whole.get_group(0) if len(of_fsdp) == 2 else None
        return WrapMesh(whole, whole[of_fsdp], owners, copies, tensor=whole[TENSOR])
    copies = whole.get_group(0) if whole.ndim == 2 else None
    return WrapMesh(whole, whole, whole.get_group(whole.ndim - 1), copies)


def _mesh_sizes(mesh: object, ranks: Ranks, device: torch.device, version: int) -> tuple[int, ...]:
    if mesh is None:
        return (ranks.size,)
    if isinstance(mesh, DeviceMesh):
        sizes = tuple(mesh.shape)
        if mesh.device_type != device.type:
            raise ArgumentError(f"mesh is one of {mesh.device_type} devices, device={device}. Make them the same.")
        _check_dimensions(mesh, version)
    elif isinstance(mesh, Sequence) and all(isinstance(size, int) for size in mesh):
        sizes = tuple(mesh)
    else:
        raise ArgumentError(f"mesh={mesh!r}: pass a DeviceMesh, sizes as (replicas, shards), or None.")
    if len(sizes) not in (1, 2, 2 + is_tensor_parallel(mesh)) or math.prod(sizes) != ranks.size or min(sizes) < 1:
        raise ArgumentError(f"mesh={list(sizes)}: there are {ranks.size} ranks; pass (shards,) or (replicas, shards).")
    if version == 1 and len(sizes) == 2 and sizes[0] > sizes[1] == 1:
        # with a shard group of one rank torch falls back to NO_SHARD, which ignores the replicas' group
        raise ArgumentError(
            f"mesh={list(sizes)}: with one shard FSDP1 sums no gradients over the replicas, and each would train "
            f"alone. Use version=2, or DistributedDataParallel."
        )
    return sizes


def _check_dimensions(mesh: DeviceMesh, version: int) -> None:
    """Refuse the dimensions of a mesh that this call cannot use."""
    names = mesh.mesh_dim_names
    ranks = mesh.mesh.flatten().tolist()
    # torch's groups have their ranks in order, whatever the mesh says, and the first one of a group gives the values
    rises = all(bool((mesh.mesh.diff(dim=dimension) > 0).all()) for dimension in range(mesh.ndim))
    if not rises or (TENSOR in (names or ()) and ranks != sorted(ranks)):
        raise ArgumentError(f"mesh has its ranks in the order {ranks}: make it with init_device_mesh.")
    if names is None:
        if mesh.ndim == 2:
            raise ArgumentError("A mesh of two dimensions needs names: mesh_dim_names=('dp_replicate', 'fsdp').")
        return
    if EXPERT in names:
        raise ArgumentError(
            f"mesh has the dimensions {names}: experts are not split over ranks here. Leave {EXPERT!r} out, and FSDP "
            f"shards them as all weights; or load with from_pretrained(distributed_config=DistributedConfig(ep_size=))."
        )
    if TENSOR not in names:
        return
    if version == 1:
        raise ArgumentError(f"mesh has a dimension {TENSOR!r}, which FSDP1 does not know: take version=2.")
    # fully_shard takes the outer dimensions of a mesh, and torch splits its parts of layers again
    replicas = names[:-2]
    if mesh.ndim < 2 or names[-1] != TENSOR or replicas not in ((), (REPLICAS,)):
        raise ArgumentError(
            f"mesh has the dimensions {names}: tensor parallelism takes the shards and the parts, in this order, and "
            f"before them replicas. Make it with init_device_mesh(device, (shards, parts), mesh_dim_names=('fsdp', "
            f"{TENSOR!r})), or (replicas, shards, parts) with ({REPLICAS!r}, 'fsdp', {TENSOR!r})."
        )
