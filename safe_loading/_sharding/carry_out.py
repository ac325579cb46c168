"""The steps of a wrap in order: values, shards, units, buffers, checks; each on all ranks or on none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from safe_loading._distributed.exchange import Ranks
from safe_loading._distributed.waiting import Waiting
from safe_loading._report import Finding
from safe_loading._sharding import fsdp1, fsdp2
from safe_loading._sharding.attached import Wrapped
from safe_loading._sharding.buffers import compute_buffers
from safe_loading._sharding.checks import check_whole, stale_optimizers
from safe_loading._sharding.fill import Given, agree_on_names, deliver, from_model, from_state_dict, missing, root_of
from safe_loading._sharding.folder import Folder, find_folder, open_folder
from safe_loading._sharding.new import adapter_values, initialised, initialised_adapters, loaded_adapters
from safe_loading._sharding.scatter import Stretch
from safe_loading._sharding.setup import Setup, make_mesh
from safe_loading._sharding.verify import check_read, check_sent


@dataclasses.dataclass
class Done:
    """What was done on this rank.

    Attributes:
        model: The wrapped model.
        bytes_read: Weight bytes read from disk.
        bytes_sent: Weight bytes sent to other ranks.
        local_bytes: The parameters and buffers that this rank holds.
        findings: What is worth knowing.
    """

    model: nn.Module
    bytes_read: int = 0
    bytes_sent: int = 0
    local_bytes: int = 0
    findings: list[Finding] = dataclasses.field(default_factory=list)


def carry_out(setup: Setup, ranks: Ranks) -> Done:
    """Give every rank its part of the model, and wrap it.

    Nothing of the model is touched before all values are there, for FSDP2; FSDP1 decides while it wraps which part is
    whose, so it is wrapped over empty memory first.
    """
    done = Done(setup.model)
    with ranks.together("make the device mesh", timeout=setup.timeout):
        mesh = make_mesh(setup)
    given, folder = _find_values(setup, ranks, mesh)
    done.findings += [*given.findings, *folder.findings]
    done.findings += stale_optimizers((*setup.sharded, *setup.whole))
    with ranks.together("compute the buffers", timeout=setup.timeout):
        whole = _whole(setup, given, folder)
    if setup.version == 2:
        _fsdp2(setup, ranks, mesh, given, folder, whole, done)
    else:
        _fsdp1(setup, ranks, mesh, given, folder, whole, done)
    if setup.verify != "off":
        with ranks.together("check the wrapped model", timeout=setup.timeout):
            check_whole(done.model, setup.version, {held.name for held in (*setup.whole, *setup.left)})
    done.local_bytes += sum(held.nbytes for held in (*setup.whole, *setup.buffers))
    return done


def _find_values(setup: Setup, ranks: Ranks, mesh: DeviceMesh) -> tuple[Given, Folder]:
    """Find out where each tensor's values come from; refuse when one has none."""
    root = root_of(mesh)
    parameters = (*setup.sharded, *setup.whole)
    path = find_folder(setup, ranks)
    with ranks.together("read the headers of the checkpoint", timeout=setup.timeout) as phase:
        folder = open_folder(setup, path)
        phase.payload = folder.digest
    folder.compare(ranks, phase.results)
    with ranks.together("find the values on rank 0", timeout=setup.timeout):
        given = Given()
        if ranks.rank == root:
            if isinstance(setup.source, Mapping):
                given = from_state_dict(setup, setup.source)
            else:
                rest = parameters if setup.folder is None else [h for h in parameters if h.name not in folder.names]
                given = from_model([*rest, *(setup.buffers if setup.folder is None else ())])
            given.values.update(loaded_adapters(setup.model, setup.adapters))
            lacking = [held for held in parameters if held.name not in given.values and held.name not in folder.names]
            made = adapter_values(setup.model, lacking) if not setup.left else {}
            given.values.update(made)
            given.findings += initialised_adapters(made)
            lacking = [held for held in lacking if held.name not in given.values]
            if setup.init_new is not None and lacking:
                given.values.update(initialised(setup.model, lacking, setup.init_new))
            missing(parameters, given, folder.names, setup)
    given = agree_on_names(ranks, root, given, setup.everything(), timeout=setup.timeout)
    return given, folder.without(given.names)


def _whole(setup: Setup, given: Given, folder: Folder) -> dict[str, torch.Tensor]:
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


def _fsdp2(
    setup: Setup,
    ranks: Ranks,
    mesh: DeviceMesh,
    given: Given,
    folder: Folder,
    whole: dict[str, torch.Tensor],
    done: Done,
) -> None:
    rank = mesh.get_local_rank(mesh.ndim - 1)
    with ranks.together("make room for the shards", timeout=setup.timeout):
        local = fsdp2.allocate(setup.sharded, rank, setup.shards, setup.host)
    _fill(
        setup,
        ranks,
        mesh,
        given,
        folder,
        lambda at: fsdp2.stretches(setup.sharded, at, setup.shards),
        local,
        whole,
        done,
    )
    with ranks.together("shard the model", timeout=setup.timeout):
        _to_meta(setup)
        _put_whole(setup, whole)
        ignored = _ignored(setup)
        fsdp2.wrap(setup.model, setup.units, mesh, setup.mixed_precision, setup.offload, ignored)
        fsdp2.install(setup.sharded, local)
        fsdp2.register_methods(setup.model, ())
        entire = tuple(each for each in ignored if not isinstance(each, DTensor))
        Wrapped(mesh, setup.mixed_precision, setup.offload, entire).keep_with(setup.model)
    done.local_bytes = sum(shard.numel() * shard.itemsize for shard in local.values())


def _fsdp1(
    setup: Setup,
    ranks: Ranks,
    mesh: DeviceMesh,
    given: Given,
    folder: Folder,
    whole: dict[str, torch.Tensor],
    done: Done,
) -> None:
    rank = mesh.get_local_rank(mesh.ndim - 1)
    with ranks.together("shard the model", timeout=setup.timeout):
        _to_meta(setup)
        _put_whole(setup, whole)
        ignored = _ignored(setup)
        model = fsdp1.wrap(setup.model, setup.units, mesh, setup.device, setup.mixed_precision, setup.offload, ignored)
        local = fsdp1.shards(model, rank, setup.shards)
    _fill(setup, ranks, mesh, given, folder, lambda at: fsdp1.stretches(model, at, setup.shards), local, whole, done)
    done.model, done.local_bytes = model, fsdp1.local_bytes(model)


def _fill(
    setup: Setup,
    ranks: Ranks,
    mesh: DeviceMesh,
    given: Given,
    folder: Folder,
    owned: Callable[[int], Sequence[Stretch]],
    local: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    done: Done,
) -> None:
    """Read and scatter, and with ``verify="bytes"`` compare both with their sources."""
    mine = owned(mesh.get_local_rank(mesh.ndim - 1))
    with ranks.together("read the weights", timeout=setup.timeout):
        read = folder.read(setup, mine, local, whole)
        done.bytes_read = read.bytes_read if read is not None else 0
        if setup.verify == "bytes":
            check_read(setup, folder, mine, local, whole)
    label = "scatter the weights"
    wait = Waiting(ranks, label, setup.device, setup.timeout).work
    with ranks.together(label, timeout=setup.timeout):
        done.bytes_sent = deliver(setup, mesh, given, owned, local, whole, wait)
    if setup.verify == "bytes":
        check_sent(setup, ranks, mesh, given, owned, local)
    given.values.clear()


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
