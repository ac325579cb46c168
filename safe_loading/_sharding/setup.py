"""What is to be done, worked out on each rank alone before anything is touched."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from safe_loading._core.paths import path_text
from safe_loading._model.tensors import ModelTensor, walk_modules
from safe_loading._ranks.device_guard import own_device
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.waiting import Waiting
from safe_loading.errors import ArgumentError

from . import fsdp1, fsdp2
from .added_after_wrap import Wrapped, attached, attached_units, wrapped_before
from .fsdp_units import ShardingUnit, Wrap, plan_units
from .parameters import buffers_of, described, ignored_parameters, parameters_of

Verify = Literal["off", "structure", "bytes"]
WrapSource = str | os.PathLike[str] | Mapping[str, torch.Tensor] | None


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a rank was asked for, checked.

    Attributes:
        model: The model.
        source: Where the weights come from.
        version: 1 or 2.
        device: Where the shards go when nothing is offloaded.
        mesh: The sizes of the mesh: ``(shards,)`` or ``(replicas, shards)``.
        given_mesh: The caller's own.
        units: What is gathered together, the root last.
        sharded: The parameters that are split.
        whole: The parameters that every rank keeps whole (``ignored``).
        buffers: The buffers, which every rank keeps whole.
        mixed_precision: The policy of the version's FSDP.
        offload: The policy of the version's FSDP.
        adapters: Folders or hub ids of adapters, by the names that they have in the model.
        init_new: What gives new parameters their values.
        verify: How much is checked at the end.
        timeout: Longest wait for the other ranks, in seconds.
        left: What an earlier call wrapped or kept whole, and this one leaves alone.
    """

    model: nn.Module
    source: WrapSource
    version: int
    device: torch.device
    mesh: tuple[int, ...]
    given_mesh: DeviceMesh | None
    units: tuple[ShardingUnit, ...]
    sharded: tuple[ModelTensor, ...]
    whole: tuple[ModelTensor, ...]
    buffers: tuple[ModelTensor, ...]
    mixed_precision: Any
    offload: Any
    adapters: Mapping[str, str]
    init_new: Any
    verify: Verify
    timeout: float
    left: tuple[ModelTensor, ...] = ()

    @property
    def shards(self) -> int:
        """Over how many ranks a parameter is split."""
        return self.mesh[-1]

    @property
    def host(self) -> torch.device:
        """Where the local shards lie: the device, or the host when they are offloaded."""
        return torch.device("cpu") if fsdp2.offloads(self.offload) else self.device

    @property
    def folder(self) -> str | None:
        """The source when it is a folder or a hub id."""
        return os.fspath(self.source) if isinstance(self.source, (str, os.PathLike)) else None

    def everything(self) -> tuple[ModelTensor, ...]:
        """Return all tensors."""
        return (*self.sharded, *self.whole, *self.buffers)

    def arguments(self) -> dict[str, str]:
        """Return what the ranks must agree on, beside the tensors and the units."""
        return {
            "version": str(self.version),
            "source": "a folder" if self.folder is not None else "rank 0",
            "mesh": f"{list(self.mesh)} {self.given_mesh.mesh.tolist() if self.given_mesh is not None else ''}".strip(),
            "mixed_precision": str(self.mixed_precision),
            "cpu_offload": str(self.offload),
            "device": self.device.type,
            "ignored": str([held.name for held in self.whole]),
            "adapters": str(sorted(self.adapters)),
            "init_new": "given" if self.init_new is not None else "None",
            "verify": self.verify,
        }

    def lines(self) -> list[str]:
        """Return a line for each tensor."""
        return described((*self.sharded, *self.whole), self.buffers)


def ranks_of(mesh: object) -> Ranks:
    """Return who wraps together.

    Raises:
        ArgumentError: ``torch.distributed`` is not initialized, or this rank is not in the mesh.
    """
    if not dist.is_initialized():
        raise ArgumentError(
            "torch.distributed is not initialized. Start the ranks with torchrun and call "
            "torch.distributed.init_process_group() first; gloo is enough on the CPU."
        )
    return Ranks.resolve(mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else "all")


def prepare(
    model: nn.Module,
    source: WrapSource,
    ranks: Ranks,
    *,
    version: int,
    mesh: DeviceMesh | Sequence[int] | None,
    wrap: Wrap | None,
    mixed_precision: Any,
    cpu_offload: Any,
    device: torch.device | str | int | None,
    ignored: Any,
    adapters: Any,
    init_new: Any,
    verify: Verify,
    timeout: float,
) -> Setup:
    """Check the arguments against the model, and return what is to be done.

    Raises:
        ArgumentError: They contradict each other or the model; what FSDP would refuse is found here.
    """
    _check_words(model, source, version, init_new, verify)
    before = wrapped_before(model)
    if before is not None:
        _check_attached(source, version, mesh, wrap, adapters, before)
        mesh, wrap = before.mesh, None
        mixed_precision = before.mixed_precision if mixed_precision is None else mixed_precision
        cpu_offload = before.offload if cpu_offload is False and before.offload is not None else cpu_offload
    if isinstance(mesh, DeviceMesh) and device is None and mesh.device_type == "cpu":
        device = "cpu"
    own = own_device(device)
    sizes = _sizes(mesh, ranks, own, version)
    kept = ignored_parameters(model, ignored)
    everything = parameters_of(model)
    parameters = everything if before is None else attached(model, before)
    taken = {id(held.tensor) for held in parameters}
    sharded = tuple(held for held in parameters if held.tensor not in kept)
    kind: Any = fsdp2 if version == 2 else fsdp1
    problems = kind.check(sharded)
    if problems:
        raise ArgumentError(f"FSDP{version} cannot shard this {type(model).__name__}:", problems)
    return Setup(
        model=model,
        source=source,
        version=version,
        device=own,
        mesh=sizes,
        given_mesh=mesh if isinstance(mesh, DeviceMesh) else None,
        units=attached_units(model, sharded) if before else plan_units(model, wrap, ignored=kept, flat=version == 1),
        sharded=sharded,
        whole=tuple(held for held in parameters if held.tensor in kept),
        buffers=buffers_of(model) if before is None else (),
        mixed_precision=kind.mixed_precision_policy(mixed_precision),
        offload=kind.offload_policy(cpu_offload, own),
        adapters=_adapters(model, adapters),
        init_new=init_new,
        verify=verify,
        timeout=timeout,
        left=tuple(held for held in everything if id(held.tensor) not in taken),
    )


def make_mesh(setup: Setup, waiting: Waiting) -> DeviceMesh:
    """Return the mesh; a collective where it has to be made, in which torch itself knows no dead rank and no limit.

    Raises:
        RankError: A rank failed or ended meanwhile.
        RankTimeout: It took too long.
    """
    if setup.given_mesh is not None:
        return setup.given_mesh
    if setup.device.type != "cpu":
        torch.accelerator.set_device_index(setup.device)
    # transformers' names; peft takes the dimension "fsdp" for FSDP2, and any other for tensor parallelism
    names = ("dp_replicate", "fsdp")[-len(setup.mesh) :]
    return waiting.call(lambda: init_device_mesh(setup.device.type, setup.mesh, mesh_dim_names=names))


def _check_words(model: object, source: object, version: object, init_new: object, verify: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}: pass a torch.nn.Module; meta_model makes one.")
    if source is not None and not isinstance(source, (str, os.PathLike, Mapping)):
        raise ArgumentError(f"source is a {type(source).__name__}: pass a folder, a hub id, a state dict or None.")
    if version not in (1, 2):
        raise ArgumentError(f"version={version!r}: 2 is fully_shard, 1 is FullyShardedDataParallel.")
    if verify not in ("off", "structure", "bytes"):
        raise ArgumentError(f"verify={verify!r}: pass 'off', 'structure' or 'bytes'.")
    if init_new is not None and not callable(init_new):
        raise ArgumentError(f"init_new is a {type(init_new).__name__}: pass a function that initializes a module.")
    if any(fsdp1.is_unit(module) for _, module in walk_modules(model)):
        raise ArgumentError(
            f"This {type(model).__name__} is wrapped by FSDP1 already. What was attached after that (an adapter) is "
            f"plain tensors, which every rank would train alone: attach it first, then wrap; or use version=2."
        )


def _check_attached(
    source: WrapSource, version: int, mesh: object, wrap: object, adapters: object, before: Wrapped
) -> None:
    """Refuse what a second call, which shards what was attached since, has no use for."""
    problems = []
    if version == 1:
        problems.append("version=1: the model is wrapped by FSDP2")
    if isinstance(source, (str, os.PathLike)):
        problems.append(f"source={os.fspath(source)!r}: its weights are there; the new ones are taken from rank 0")
    if mesh is not None and mesh != before.mesh:
        problems.append(f"mesh={mesh}: the units have {before.mesh}")
    if wrap is not None:
        problems.append("wrap=: what was attached is gathered beside the unit that it is in")
    if adapters is not None:
        problems.append("adapters=: read the adapter with PeftModel.from_pretrained or load_adapter, then call this")
    if problems:
        raise ArgumentError("The model is wrapped already, and this call shards what was attached since:", problems)


def _adapters(model: nn.Module, adapters: Any) -> dict[str, str]:
    if adapters is None:
        return {}
    if isinstance(adapters, (str, os.PathLike)):
        name = next(iter(getattr(model, "peft_config", {})), "default")
        adapters = {name: adapters}
    if not isinstance(adapters, Mapping):
        raise ArgumentError(f"adapters={adapters!r:.80}: pass a folder or hub id, or {{name: folder}} for several.")
    return {name: path_text(each, f"adapters[{name!r}]") for name, each in adapters.items()}


def _sizes(mesh: object, ranks: Ranks, device: torch.device, version: int) -> tuple[int, ...]:
    if mesh is None:
        return (ranks.size,)
    if isinstance(mesh, DeviceMesh):
        sizes = tuple(mesh.shape)
        if mesh.device_type != device.type:
            raise ArgumentError(f"mesh is one of {mesh.device_type} devices, device={device}. Make them the same.")
        if len(sizes) == 2 and mesh.mesh_dim_names is None:
            raise ArgumentError("A mesh of two dimensions needs names: mesh_dim_names=('dp_replicate', 'fsdp').")
    elif isinstance(mesh, Sequence) and all(isinstance(size, int) for size in mesh):
        sizes = tuple(mesh)
    else:
        raise ArgumentError(f"mesh={mesh!r}: pass a DeviceMesh, sizes as (replicas, shards), or None.")
    if len(sizes) not in (1, 2) or math.prod(sizes) != ranks.size or min(sizes) < 1:
        raise ArgumentError(f"mesh={list(sizes)}: there are {ranks.size} ranks; pass (shards,) or (replicas, shards).")
    if version == 1 and len(sizes) == 2 and sizes[0] > sizes[1] == 1:
        # torch takes NO_SHARD where a shard group has one rank, and that knows no other group
        raise ArgumentError(
            f"mesh={list(sizes)}: with one shard FSDP1 sums no gradients over the replicas, and each would train "
            f"alone. Use version=2, or DistributedDataParallel."
        )
    return sizes
