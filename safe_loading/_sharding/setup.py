"""The setup of a wrap: its model, place and options, worked out on each rank alone, before anything is touched."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from safe_loading._core.engines import require_for
from safe_loading._core.names import with_stars
from safe_loading._core.paths import path_text
from safe_loading._core.report import counted
from safe_loading._model.formats.eight_bit import is_eight_bit
from safe_loading._model.formats.four_bit import FLOAT_STORAGE
from safe_loading._model.tensors import ModelTensor, walk_modules
from safe_loading._model.zero3 import split_weights
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.same_on_ranks import FolderSeen, folder_seen
from safe_loading.errors import ArgumentError, CheckpointError

from . import fsdp1, fsdp2
from .adapter_methods import refused_adapters, tied_factors
from .added_after_wrap import Wrapped, attached
from .fsdp_units import ShardingUnit
from .mesh import WrapPlace, is_tensor_parallel
from .new_values import InitNew, adapted_models
from .parameters import (
    Ignored,
    buffers_of,
    described,
    gradient_problems,
    ignored_parameters,
    parameters_of,
    scalars_of,
)
from .plain_attributes import refuse_attributes_on_meta
from .tensor_split import TensorSplit

WrapSource = str | os.PathLike[str] | Mapping[str, torch.Tensor] | None


@dataclasses.dataclass(frozen=True)
class ValueOrigin:
    """Where the values of the model come from."""

    source: WrapSource  # a folder or hub id, a state dict on rank 0, or None for rank 0's own model
    adapters: Mapping[str, str]  # folders or hub ids of adapters, by the names that they have in the model
    init_new: InitNew | None  # gives new parameters their values
    prefer: str | None  # "source" or "model": the values that are taken where a folder and rank 0's model differ

    @property
    def folder(self) -> str | None:
        """The source when it is a folder or a hub id."""
        return os.fspath(self.source) if isinstance(self.source, (str, os.PathLike)) else None


@dataclasses.dataclass(frozen=True)
class WrapOptions:
    """How FSDP wraps, and how much is checked."""

    version: int
    mixed_precision: Any  # the policy of that version's FSDP
    offload: Any  # the policy of that version's FSDP
    verify: str  # how much is checked at the end: "off", "structure" or "bytes"
    timeout: float  # longest wait for the other ranks, in seconds
    reshard_after_forward: bool | int | None = None  # whether units are freed after the forward pass; torch's default


@dataclasses.dataclass(frozen=True)
class TensorRoles:
    """The role of each tensor of the model: sharded, kept whole, or left alone."""

    sharded: tuple[ModelTensor, ...]  # the parameters that are split
    ignored: tuple[ModelTensor, ...]  # the parameters that every rank keeps whole: what the caller names, and scalars
    buffers: tuple[ModelTensor, ...]  # the buffers, which every rank keeps whole
    left_alone: tuple[ModelTensor, ...]  # what an earlier call wrapped or kept whole

    @property
    def parameters(self) -> tuple[ModelTensor, ...]:
        """The parameters that this call gives values."""
        return (*self.sharded, *self.ignored)

    @property
    def saved_buffers(self) -> tuple[ModelTensor, ...]:
        """The buffers that a checkpoint holds."""
        return tuple(buffer for buffer in self.buffers if buffer.persistent)

    @property
    def all(self) -> tuple[ModelTensor, ...]:
        """All tensors that this call is about."""
        return (*self.parameters, *self.buffers)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The checked arguments of a rank's wrap."""

    model: nn.Module
    values: ValueOrigin
    where: WrapPlace
    how: WrapOptions
    tensors: TensorRoles
    units: tuple[ShardingUnit, ...]  # what is gathered together, the root last
    split: TensorSplit  # of tensor parallelism

    @property
    def shard_device(self) -> torch.device:
        """Where the local shards are: the device of this rank, or the host when they are offloaded."""
        return torch.device("cpu") if fsdp2.offloads(self.how.offload) else self.where.device

    def arguments(self) -> dict[str, str]:
        """Return the settings that the ranks must agree on, besides the tensors and the units."""
        given_mesh = self.where.given_mesh
        ranks_of_mesh = given_mesh.mesh.tolist() if given_mesh is not None else ""
        return {
            "version": str(self.how.version),
            "source": "a folder" if self.values.folder is not None else "rank 0",
            "mesh": f"{list(self.where.mesh_sizes)} {ranks_of_mesh}".strip(),
            "tensor parallelism": str(
                sorted({with_stars(name): str(each) for name, each in self.split.placements.items()}.items())
            ),
            "mp_policy": str(self.how.mixed_precision),
            "offload_policy": str(self.how.offload),
            "reshard_after_forward": str(self.how.reshard_after_forward),
            "device": self.where.device.type,
            "ignored_params": str([tensor.name for tensor in self.tensors.ignored]),
            "adapters": str(sorted(self.values.adapters)),
            "init_new": "given" if self.values.init_new is not None else "None",
            "prefer": str(self.values.prefer),
            "verify": self.how.verify,
        }

    def lines(self) -> list[str]:
        """Return a line for each tensor."""
        return described(self.tensors.parameters, self.tensors.buffers)


def ranks_of(mesh: object) -> Ranks:
    """Return the ranks that wrap together."""
    if not dist.is_initialized():
        raise ArgumentError(
            "torch.distributed is not initialized. Start the ranks with torchrun and call "
            "torch.distributed.init_process_group() first; gloo is enough on the CPU."
        )
    return Ranks.resolve(mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else "all")


def check_kinds(
    model: object, source: object, version: object, init_new: object, verify: object, prefer: object
) -> None:
    """Refuse arguments of a wrong kind, and a model that FSDP1 wrapped."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is a {type(model).__name__}: pass a torch.nn.Module; meta_model makes one.")
    if isinstance(model, PeftModel):
        # Before, `BaseTuner.forward` called the forward of the base model past its hooks, which gather the weights.
        require_for("FSDP of a PeftModel", "peft", "0.21")
    if source is not None and not isinstance(source, (str, os.PathLike, Mapping)):
        raise ArgumentError(f"source is a {type(source).__name__}: pass a folder, a hub id, a state dict or None.")
    if version not in (1, 2):
        raise ArgumentError(f"version={version!r}: 2 is fully_shard, 1 is FullyShardedDataParallel.")
    if verify not in ("off", "structure", "bytes"):
        raise ArgumentError(f"verify={verify!r}: pass 'off', 'structure' or 'bytes'.")
    if prefer not in (None, "source", "model"):
        raise ArgumentError(f"prefer={prefer!r}: pass 'source', 'model' or None.")
    if prefer is not None and not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(f"prefer={prefer!r} chooses between a folder and the model: source is no folder or hub id.")
    if init_new is not None and not callable(init_new):
        raise ArgumentError(f"init_new is a {type(init_new).__name__}: pass a function that initializes a module.")
    if any(fsdp1.is_unit(module) for _, module in walk_modules(model)):
        raise ArgumentError(
            f"This {type(model).__name__} is wrapped by FSDP1 already. Anything attached since (an adapter) is plain "
            f"tensors, which every rank would train alone: attach it first, then wrap; or use version=2."
        )


def check_second_call(
    before: Wrapped, source: WrapSource, version: int, mesh: object, wrap: object, adapters: object
) -> None:
    """Refuse arguments that a second call, which shards the modules attached since the first, cannot use."""
    problems = []
    if is_tensor_parallel(before.mesh):
        raise ArgumentError(
            f"The layers of this model are split over {before.mesh}, and what was attached since is whole. Attach it "
            f"first, then wrap."
        )
    if version == 1:
        problems.append("version=1: the model is wrapped by FSDP2")
    if isinstance(source, (str, os.PathLike)):
        problems.append(f"source={os.fspath(source)!r}: its weights are there; the new ones are taken from rank 0")
    if mesh is not None and mesh != before.mesh:
        problems.append(f"mesh={mesh}: the units have {before.mesh}")
    if wrap is not None:
        problems.append(
            "auto_wrap_policy=: whatever was attached becomes units of its own, next to the unit that it is in"
        )
    if adapters is not None:
        problems.append("adapters=: read the adapter with PeftModel.from_pretrained or load_adapter, then call this")
    if problems:
        raise ArgumentError("The model is wrapped already; this call shards what was attached since:", problems)


def assign_roles(
    model: nn.Module, ignored: Iterable[Ignored], version: int, before: Wrapped | None
) -> tuple[TensorRoles, set[nn.Parameter]]:
    """Return the role of each tensor, and the ignored parameters.

    Where an earlier call wrapped the model (``before``), only what was attached since is sharded.
    """
    problems = tied_factors(model)
    if problems:  # first: what peft notes of them is on meta, too
        raise ArgumentError(f"FSDP{version} cannot shard this {type(model).__name__}:", problems)
    refuse_attributes_on_meta(model)
    every = parameters_of(model)
    kept = ignored_parameters(model, ignored) | scalars_of(every)
    parameters = every if before is None else attached(model, before)
    taken = {id(parameter.tensor) for parameter in parameters}
    roles = TensorRoles(
        sharded=tuple(parameter for parameter in parameters if parameter.tensor not in kept),
        ignored=tuple(parameter for parameter in parameters if parameter.tensor in kept),
        buffers=buffers_of(model) if before is None else (),
        left_alone=tuple(parameter for parameter in every if id(parameter.tensor) not in taken),
    )
    problems = [
        *refused_adapters(model, version),
        *gradient_problems(roles.parameters),
        *_in_eight_bits(roles.sharded),
        *_split_by_zero3(model),
        *(fsdp2.check if version == 2 else fsdp1.check)(roles.sharded),
    ]
    if problems:
        raise ArgumentError(f"FSDP{version} cannot shard this {type(model).__name__}:", problems)
    return roles, kept


def _in_eight_bits(parameters: Sequence[ModelTensor]) -> list[str]:
    """Return the problem of weights in 8 bits, whose first forward fails for want of their scales."""
    names = [each.name for each in parameters if is_eight_bit(each.tensor)]
    if not names:
        return []
    return [
        f"{counted(len(names), 'weight')} in 8 bits, such as {names[0]}: FSDP splits the codes and loses the scales of "
        f"their rows. Load the base in 4 bits, with {FLOAT_STORAGE}"
    ]


def _split_by_zero3(model: nn.Module) -> list[str]:
    """Return the problem of weights that DeepSpeed keeps: those in the model are empty."""
    split = split_weights(model)
    road = "Make it with meta_model, which ZeRO-3 does not split, and pass the folder as source="
    return [] if split is None else [f"{split}. {road}"]


def resolve_options(
    version: int,
    mp_policy: object,
    offload_policy: object,
    where: WrapPlace,
    before: Wrapped | None,
    *,
    verify: str,
    timeout: float,
    reshard_after_forward: object,
) -> WrapOptions:
    """Return how FSDP wraps; options that a second call leaves open are those of the first."""
    if before is not None:
        mp_policy = before.mixed_precision if mp_policy is None else mp_policy
        offload_policy = before.offload if offload_policy is None else offload_policy
        reshard_after_forward = before.reshard_after_forward if reshard_after_forward is None else reshard_after_forward
    if not isinstance(reshard_after_forward, int | None) or not _divides(reshard_after_forward, where.shards):
        raise ArgumentError(
            f"reshard_after_forward={reshard_after_forward!r}: pass a bool, a number of ranks or None. A number must "
            f"divide {where.shards}, the number of ranks over which a parameter is sharded."
        )
    if version == 1 and reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ArgumentError(f"reshard_after_forward={reshard_after_forward}: FSDP1 takes a bool or None.")
    fsdp = fsdp2 if version == 2 else fsdp1
    precision, offload = fsdp.mixed_precision_policy(mp_policy), fsdp.offload_policy(offload_policy, where.device)
    return WrapOptions(version, precision, offload, verify, timeout, reshard_after_forward)


def _divides(number: bool | int | None, shards: int) -> bool:
    """Return whether FSDP2 can split a unit over that many ranks between the passes, where it is told a number."""
    return isinstance(number, bool | None) or (number > 0 and shards % number == 0)


def folders_seen(values: ValueOrigin) -> dict[str, FolderSeen]:
    """Return whether the source is a folder of this machine; one that is not may be a hub id."""
    if values.folder is None:
        return {}
    if Path(values.folder, ".metadata").exists():
        raise CheckpointError(
            f"{values.folder} is a checkpoint of torch.distributed.checkpoint, which is pickled in part. Wrap with the "
            f"base's folder, and load this one into the sharded model with torch.distributed.checkpoint.load; or make "
            f"a folder of safetensors of it with `accelerate merge-weights FOLDER OUTPUT`."
        )
    return {"source": folder_seen(values.folder)}


def name_adapters(model: nn.Module, adapters: object) -> dict[str, str]:
    """Return the adapters' folders or hub ids by name; a single one is the first adapter of the model."""
    if adapters is None:
        return {}
    if isinstance(adapters, (str, os.PathLike)):
        name = next((name for each in adapted_models(model).values() for name in each.peft_config), "default")
        adapters = {name: adapters}
    if not isinstance(adapters, Mapping):
        raise ArgumentError(f"adapters={adapters!r:.80}: pass a folder or hub id, or {{name: folder}} for several.")
    return {name: path_text(folder, f"adapters[{name!r}]") for name, folder in adapters.items()}
