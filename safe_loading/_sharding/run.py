"""The steps of a wrap in order: values, shards, units, buffers, checks; each on all ranks or on none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from safe_loading._core.report import Finding
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.waiting import Waiting

from . import fsdp1, fsdp2
from .added_after_wrap import Wrapped
from .buffers import compute_buffers
from .checkpoint_folder import Folder, find_folder, open_folder
from .checks import check_whole, stale_optimizers
from .local_shard import LocalShard
from .new_values import adapter_values, initialized, initialized_adapters, loaded_adapters
from .setup import Setup, make_mesh
from .value_sources import RootValues, agree_on_names, deliver, from_model, from_state_dict, missing, root_of
from .verify_bytes import check_read, check_sent


@dataclasses.dataclass(frozen=True)
class WrapJob:
    """What the steps of a wrap share, once it is known where each value comes from.

    Attributes:
        setup: What is done.
        ranks: Who does it.
        mesh: The mesh of these ranks.
        given: What the root gives.
        folder: What the folder gives.
        whole: The memory of what nobody splits, by name; the computed buffers have their values.
    """

    setup: Setup
    ranks: Ranks
    mesh: DeviceMesh
    given: RootValues
    folder: Folder
    whole: Mapping[str, torch.Tensor]

    @property
    def at(self) -> int:
        """This rank's place in its shard group."""
        return int(self.mesh.get_local_rank(self.mesh.ndim - 1))

    def together(self, label: str) -> AbstractContextManager[object]:
        """Do a step on all ranks or on none."""
        return self.ranks.together(label, timeout=self.setup.timeout)


@dataclasses.dataclass(frozen=True)
class Done:
    """What was done on this rank.

    Attributes:
        model: The wrapped model.
        local_bytes: The parameters and buffers that this rank holds.
        bytes_read: Weight bytes read from disk.
        bytes_sent: Weight bytes sent to other ranks.
        findings: What is worth knowing.
    """

    model: nn.Module
    local_bytes: int
    bytes_read: int
    bytes_sent: int
    findings: tuple[Finding, ...] = ()


def carry_out(setup: Setup, ranks: Ranks) -> Done:
    """Give every rank its part of the model, and wrap it.

    Nothing of the model is touched before all values are there, for FSDP2; FSDP1 decides while it wraps which part is
    whose, so it is wrapped over empty memory first.
    """
    label = "make the device mesh"
    with ranks.together(label, timeout=setup.timeout):
        mesh = make_mesh(setup, Waiting(ranks, label, setup.device, setup.timeout))
    given, folder = _find_values(setup, ranks, mesh)
    findings = (*given.findings, *folder.findings, *stale_optimizers((*setup.sharded, *setup.whole)))
    with ranks.together("compute the buffers", timeout=setup.timeout):
        whole = _whole(setup, given, folder)
    job = WrapJob(setup, ranks, mesh, given, folder, whole)
    done = _fsdp2(job) if setup.version == 2 else _fsdp1(job)
    if setup.verify != "off":
        with job.together("check the wrapped model"):
            check_whole(done.model, setup.version, {held.name for held in (*setup.whole, *setup.left)})
    replicated = sum(held.nbytes for held in (*setup.whole, *setup.buffers))
    return dataclasses.replace(done, local_bytes=done.local_bytes + replicated, findings=findings)


def _find_values(setup: Setup, ranks: Ranks, mesh: DeviceMesh) -> tuple[RootValues, Folder]:
    """Find out where each tensor's values come from; refuse when one has none."""
    root = root_of(mesh)
    parameters = (*setup.sharded, *setup.whole)
    saved = [held for held in setup.buffers if held.persistent]
    path = find_folder(setup, ranks)
    with ranks.together("read the headers of the checkpoint", timeout=setup.timeout) as phase:
        folder = open_folder(setup, path)
        phase.payload = folder.digest
    folder.compare(ranks, phase.results)
    with ranks.together("find the values on rank 0", timeout=setup.timeout):
        given = RootValues()
        if ranks.rank == root:
            if isinstance(setup.source, Mapping):
                given = from_state_dict(setup, setup.source)
                given.values |= from_model([held for held in saved if held.name not in given.values]).values
            else:
                rest = setup.everything() if setup.folder is None else (*parameters, *saved)
                given = from_model([held for held in rest if held.name not in folder.names])
            given.values.update(loaded_adapters(setup.model, setup.adapters))
            lacking = [held for held in parameters if held.name not in given.values and held.name not in folder.names]
            made = adapter_values(setup.model, lacking) if not setup.left else {}
            given.values.update(made)
            given.findings += initialized_adapters(made)
            lacking = [held for held in lacking if held.name not in given.values]
            if setup.init_new is not None and lacking:
                given.values.update(initialized(setup.model, lacking, setup.init_new))
            missing((*parameters, *saved), given, folder.names, setup, heads=folder.heads)
    given = agree_on_names(ranks, root, given, setup.everything(), timeout=setup.timeout)
    return given, folder.without(given.names)


def _whole(setup: Setup, given: RootValues, folder: Folder) -> dict[str, torch.Tensor]:
    """Return what every rank keeps whole: buffers computed again, and empty memory for what will come."""
    computed = compute_buffers(setup.model)
    found = {
        name: computed[name].to(setup.device)
        for held in setup.buffers
        for name in held.names
        if name in computed and held.name not in given.names
    }
    found |= {
        held.name: torch.empty(held.tensor.shape, dtype=held.tensor.dtype, device=setup.device)
        for held in (*setup.whole, *setup.buffers)
        if held.name in given.names or held.name in folder.names
    }
    return found


def _fsdp2(job: WrapJob) -> Done:
    setup = job.setup
    with job.together("make room for the shards"):
        local = fsdp2.allocate(setup.sharded, job.at, setup.shards, setup.host)
    part = LocalShard(lambda at: fsdp2.stretches(setup.sharded, at, setup.shards), job.at, local, job.whole)
    bytes_read, bytes_sent = _fill(job, part)
    with job.together("shard the model"):
        _to_meta(setup)
        _put_whole(setup, job.whole)
        ignored = _ignored(setup)
        fsdp2.wrap(setup.model, setup.units, job.mesh, setup.mixed_precision, setup.offload, ignored)
        fsdp2.install(setup.sharded, local)
        fsdp2.register_methods(setup.model, ())
        entire = tuple(each for each in ignored if not isinstance(each, DTensor))
        Wrapped(job.mesh, setup.mixed_precision, setup.offload, entire).keep_with(setup.model)
    return Done(setup.model, sum(shard.numel() * shard.itemsize for shard in local.values()), bytes_read, bytes_sent)


def _fsdp1(job: WrapJob) -> Done:
    setup = job.setup
    with job.together("shard the model"):
        _to_meta(setup)
        _put_whole(setup, job.whole)
        ignored = _ignored(setup)
        policies = (setup.mixed_precision, setup.offload, ignored)
        model = fsdp1.wrap(setup.model, setup.units, job.mesh, setup.device, *policies)
        local = fsdp1.shards(model, job.at, setup.shards)
    bytes_read, bytes_sent = _fill(
        job, LocalShard(lambda at: fsdp1.stretches(model, at, setup.shards), job.at, local, job.whole)
    )
    return Done(model, fsdp1.local_bytes(model), bytes_read, bytes_sent)


def _fill(job: WrapJob, part: LocalShard) -> tuple[int, int]:
    """Read and scatter, and with ``verify="bytes"`` compare both with their sources; return the bytes of each."""
    setup, ranks = job.setup, job.ranks
    with job.together("read the weights"):
        bytes_read = job.folder.read(setup, part)
        if setup.verify == "bytes":
            check_read(setup, job.folder, part)
    label = "scatter the weights"
    waiting = Waiting(ranks, label, setup.device, setup.timeout)
    with job.together(label):
        bytes_sent = deliver(setup, job.mesh, job.given, part, waiting)
    if setup.verify == "bytes":
        check_sent(setup, ranks, job.mesh, job.given, part)
    job.given.values.clear()
    return bytes_read, bytes_sent


def _to_meta(setup: Setup) -> None:
    """Give the parameters that will be split twins on meta: FSDP would split the values of each rank's own."""
    for held in setup.sharded:
        if not held.is_meta:
            empty = torch.empty_like(held.tensor, device="meta")
            held.put(nn.Parameter(empty, requires_grad=held.tensor.requires_grad))


def _put_whole(setup: Setup, whole: Mapping[str, torch.Tensor]) -> None:
    for held in (*setup.whole, *setup.buffers):
        tensor: Any = whole.get(held.name)
        if tensor is None and not held.is_meta and held.tensor.device != setup.device:
            tensor = held.tensor.to(setup.device)
        if tensor is not None:
            is_parameter = isinstance(held.tensor, nn.Parameter)
            held.put(nn.Parameter(tensor, requires_grad=held.tensor.requires_grad) if is_parameter else tensor)


def _ignored(setup: Setup) -> set[nn.Parameter]:
    found = set()
    for held in (*setup.whole, *setup.left):
        module, attribute = held.places[0]
        parameter = module._parameters[attribute]
        if parameter is not None:
            found.add(parameter)
    return found
