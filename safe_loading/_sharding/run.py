"""The steps of a wrap in order: values, shards, units, buffers, checks; each on all ranks or on none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from safe_loading._core.report import Finding, counted
from safe_loading._model.formats.four_bit import is_four_bit, keep_order_of_codes
from safe_loading._model.tensors import ModelTensor
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.waiting import Waiting
from safe_loading.errors import ArgumentError

from . import fsdp1, fsdp2
from .accelerate_findings import accelerate_findings
from .added_after_wrap import Wrapped
from .buffers import compute_buffers
from .checkpoint_folder import Folder, open_folder
from .checks import check_whole, kept_precision_findings, stale_holders
from .four_bit import refuse_packed_by_root, share_statistics
from .freed_after_passes import free_after_passes
from .local_shard import ElementRange, LocalShard
from .mesh import WrapMesh, make_mesh
from .parameters import average_gradients
from .same_batch import compare_first_batch
from .scatter import send_root_values, warm_up
from .setup import Setup
from .tensor_parallel import compute_in_parts
from .value_sources import RootValues, agree_on_names, collect_root_values
from .verify_bytes import check_read, check_sent

_COPIES = (".modules_to_save.", ".ln_tuning_layers.")  # peft's copies of modules of the base


@dataclasses.dataclass(frozen=True)
class WrapJob:
    """The state that the steps of a wrap share, once it is known where each value comes from."""

    setup: Setup
    ranks: Ranks
    mesh: WrapMesh
    root_values: RootValues  # what the root gives
    folder: Folder  # what the folder gives
    # the memory of the tensors that every rank keeps whole, by name; computed buffers have their values
    replicated: Mapping[str, torch.Tensor]

    def together(self, label: str) -> AbstractContextManager[object]:
        """Do a step on all ranks or on none."""
        return self.ranks.together(label, timeout=self.setup.how.timeout)


@dataclasses.dataclass(frozen=True)
class WrapResult:
    """The wrapped model of this rank, with its sizes, bytes read and sent, and findings."""

    model: nn.Module
    local_bytes: int  # the size of the parameters and buffers that this rank holds
    bytes_read: int  # weight bytes read from disk
    bytes_sent: int  # weight bytes sent to other ranks
    findings: tuple[Finding, ...] = ()


def run_wrap(setup: Setup, ranks: Ranks, path: Path | None) -> WrapResult:
    """Give every rank its part of the model, and wrap it; ``path`` is the folder of the weights, where there is one.

    With FSDP2 nothing of the model is touched before all values are there. FSDP1 decides while it wraps which elements
    a rank owns, so it wraps empty memory first, which is filled afterwards.
    """
    timeout = setup.how.timeout
    label = "make the device mesh"
    with ranks.together(label, timeout=timeout):
        mesh = make_mesh(setup.where, Waiting(ranks, label, setup.where.device, timeout))
    root_values, folder = _find_values(setup, ranks, mesh, path)
    # before the wrap replaces the parameters by which a stale optimizer, or a tie outside, is told
    findings = (
        *root_values.findings,
        *folder.findings,
        *stale_holders(setup.model, setup.tensors.parameters),
        *accelerate_findings(setup.how.version, getattr(setup.how.mixed_precision, "param_dtype", None)),
        *kept_precision_findings(setup.model, setup.tensors.sharded, setup.how.mixed_precision),
    )
    with ranks.together("compute the buffers", timeout=timeout):
        _refuse_unfilled(setup, root_values, folder)
        refuse_packed_by_root(setup.tensors.sharded, root_values.names)
        replicated = _replicated_memory(setup, root_values, folder)
    job = WrapJob(setup, ranks, mesh, root_values, folder, replicated)
    result = _wrap_fsdp2(job) if setup.how.version == 2 else _wrap_fsdp1(job)
    if setup.how.verify != "off":
        with job.together("check the wrapped model"):
            not_sharded = {each.name for each in (*setup.tensors.ignored, *setup.tensors.left_alone)}
            check_whole(result.model, setup.how.version, not_sharded)
    average_gradients(setup.tensors.ignored, mesh.fsdp.get_all_groups())
    replicated_bytes = sum(each.nbytes for each in (*setup.tensors.ignored, *setup.tensors.buffers))
    return dataclasses.replace(result, local_bytes=result.local_bytes + replicated_bytes, findings=findings)


def _find_values(setup: Setup, ranks: Ranks, mesh: WrapMesh, path: Path | None) -> tuple[RootValues, Folder]:
    """Find out where the values of each tensor come from; refuse when one has none."""
    root, timeout = mesh.root, setup.how.timeout
    with ranks.together("read the headers of the checkpoint", timeout=timeout) as phase:
        folder = open_folder(setup, path)
        phase.payload = folder.digest
    folder.compare(ranks, phase.results)
    root_values = RootValues()
    with ranks.together("find the values on rank 0", timeout=timeout):
        if ranks.rank == root:
            own = [each for each in setup.tensors.parameters if not each.is_meta]
            on_disk = folder.names
            # a copy that an adapter trains has the base's values only at first
            own_copies = {each.name for each in own if any(part in each.name for part in _COPIES)}
            on_disk -= {each.name for each in own} if setup.values.prefer == "model" else own_copies
            root_values = collect_root_values(setup, on_disk, folder.heads)
            if setup.values.prefer is None:
                _refuse_overwriting(setup, folder, [each for each in own if each.name not in root_values.tensors])
    # what rank 0 gives is not read from the folder: an adapter of adapters= wins over what the folder has
    root_values = agree_on_names(ranks, root, root_values, setup)
    return root_values, folder.without(root_values.names)


def _refuse_overwriting(setup: Setup, folder: Folder, own: Sequence[ModelTensor]) -> None:
    """Refuse to replace rank 0's values by others of the folder, unless the caller says so."""
    if differ := folder.unlike(own):
        raise ArgumentError(
            f"Rank 0's {type(setup.model).__name__} has other values than the folder {setup.values.folder} in "
            f"{counted(len(differ), 'parameter')}. To train the folder's, pass prefer='source', or a model on meta; "
            f"to train the model's, pass prefer='model':",
            [each.line() for each in differ],
        )


def _refuse_unfilled(setup: Setup, root_values: RootValues, folder: Folder) -> None:
    """Refuse parameters that rank 0 would read from the folder, and this rank's script replaced."""
    known = root_values.names | folder.names
    replaced = [each.line() for each in setup.tensors.parameters if each.name not in known]
    if replaced:
        raise ArgumentError(
            "Only this rank's script replaced these parameters, and rank 0 has them as they were loaded; run the same "
            "lines on every rank:",
            replaced,
        )


def _replicated_memory(setup: Setup, root_values: RootValues, folder: Folder) -> dict[str, torch.Tensor]:
    """Return the tensors that every rank keeps whole: computed buffers, and empty memory for values read or sent."""
    computed, device = compute_buffers(setup.model), setup.where.device
    memory = {
        name: computed[name].to(device)
        for buffer in setup.tensors.buffers
        for name in buffer.names
        if name in computed and buffer.name not in root_values.names
    }
    memory |= {
        each.name: torch.empty(each.tensor.shape, dtype=each.tensor.dtype, device=device)
        for each in (*setup.tensors.ignored, *setup.tensors.buffers)
        if each.name in root_values.names or each.name in folder.names
    }
    return memory


def _wrap_fsdp2(job: WrapJob) -> WrapResult:
    setup, sharded = job.setup, job.setup.tensors.sharded

    def owned_by(place: int) -> list[ElementRange]:
        shard, part = divmod(place, setup.where.parts)
        return fsdp2.owned_ranges(sharded, shard, setup.where.shards, setup.split.windows(sharded, part))

    with job.together("make room for the shards"):
        local = fsdp2.allocate(sharded, owned_by(job.mesh.position), setup.shard_device)
    shard = LocalShard(owned_by, job.mesh.position, local, job.replicated)
    # before the model is touched, so that a rank that cannot read or is lost leaves it as it was
    bytes_read, bytes_sent = _fill(job, shard)
    with job.together("shard the model"):
        how, not_sharded = setup.how, _keep_whole(job)
        policies = (how.mixed_precision, how.offload, not_sharded, how.reshard_after_forward)
        if job.mesh.tensor is not None:
            compute_in_parts(setup, job.mesh.tensor)
        fsdp2.wrap(setup.model, setup.units, job.mesh.fsdp, *policies)
        fsdp2.install(sharded, local)
        methods = fsdp2.register_methods(setup.model)
        if not setup.tensors.left_alone:  # a second call finds the hooks of the first
            base = fsdp2.base_of_adapters(setup.model)
            free_after_passes(setup.model, [setup.model, *([base] if base is not None else [])], methods)
        if job.mesh.tensor is not None:
            compare_first_batch(setup.model, job.ranks, setup.where.mesh_sizes, setup.how.timeout)
        kept_whole = tuple(parameter for parameter in not_sharded if not isinstance(parameter, DTensor))
        Wrapped(job.mesh.whole, how.mixed_precision, how.offload, kept_whole, how.reshard_after_forward).keep_with(
            setup.model
        )
    local_bytes = sum(tensor.numel() * tensor.itemsize for tensor in local.values())
    return WrapResult(setup.model, local_bytes, bytes_read, bytes_sent)


def _wrap_fsdp1(job: WrapJob) -> WrapResult:
    setup, shards = job.setup, job.setup.where.shards
    with job.together("shard the model"):
        how = setup.how
        policies = (how.mixed_precision, how.offload, _keep_whole(job), how.reshard_after_forward)
        model = fsdp1.wrap(setup.model, setup.units, job.mesh.fsdp, setup.where.device, *policies)
        fsdp1.keep_frozen_parameters(model)
        fsdp1.make_usable(model)
        # views into the flat parameters, known only now: the values come last
        local = fsdp1.local_shards(model, job.mesh.position, shards)
    shard = LocalShard(lambda rank: fsdp1.owned_ranges(model, rank, shards), job.mesh.position, local, job.replicated)
    bytes_read, bytes_sent = _fill(job, shard)
    return WrapResult(model, fsdp1.local_bytes(model), bytes_read, bytes_sent)


def _fill(job: WrapJob, shard: LocalShard) -> tuple[int, int]:
    """Read and scatter, and with ``verify="bytes"`` compare both with their sources; return the bytes of each."""
    setup, ranks, verify = job.setup, job.ranks, job.setup.how.verify
    with job.together("read the weights"):
        bytes_read, statistics = job.folder.read(shard, setup.where.device)
        if verify == "bytes":
            check_read(job.folder, shard, setup.where.device)
    if job.folder.four_bit:
        label = "share the statistics of 4-bit weights"
        waiting = Waiting(ranks, label, setup.where.device, setup.how.timeout)
        with job.together(label):
            warm_up(job.mesh.owners, setup.where.device, waiting)
            share_statistics(job.folder.four_bit, statistics, shard, job.mesh.owners, waiting)
    label = "scatter the weights"
    waiting = Waiting(ranks, label, setup.where.device, setup.how.timeout)
    with job.together(label):
        bytes_sent = send_root_values(setup, job.mesh, job.root_values, shard, waiting)
    if verify == "bytes":
        check_sent(setup, ranks, job.mesh, job.root_values, shard)
    job.root_values.tensors.clear()  # rank 0 need not hold both its own model and its shard while it wraps
    return bytes_read, bytes_sent


def _keep_whole(job: WrapJob) -> set[nn.Parameter]:
    """Move the parameters that FSDP splits to meta, and the others to the device; return those that it leaves alone."""
    _move_to_meta(job.setup)
    _put_replicated(job.setup, job.replicated)
    return _parameters_to_ignore(job.setup)


def _move_to_meta(setup: Setup) -> None:
    """Replace the parameters that will be split by ones on meta: FSDP would split the values of each rank's own."""
    for each in setup.tensors.sharded:
        if not each.is_meta or is_four_bit(each.tensor):  # FSDP splits a plain parameter
            empty = torch.empty(each.tensor.shape, dtype=each.tensor.dtype, device="meta")
            parameter = nn.Parameter(empty, requires_grad=each.tensor.requires_grad)
            fsdp2.copy_attributes(each.tensor, parameter)
            each.put(parameter)
        for module, _ in each.places if is_four_bit(each.tensor) else ():
            keep_order_of_codes(module)


def _put_replicated(setup: Setup, replicated: Mapping[str, torch.Tensor]) -> None:
    """Put the tensors that every rank keeps whole into the model; those that are real already move to the device."""
    for each in (*setup.tensors.ignored, *setup.tensors.buffers):
        tensor = replicated.get(each.name)
        if tensor is None and not each.is_meta and each.tensor.device != setup.where.device:
            tensor = each.tensor.to(setup.where.device)
        if tensor is not None and isinstance(each.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=each.tensor.requires_grad)
            fsdp2.copy_attributes(each.tensor, tensor)
        if tensor is not None:
            each.put(tensor)


def _parameters_to_ignore(setup: Setup) -> set[nn.Parameter]:
    """Return the parameters that FSDP leaves alone, as the model has them now."""
    parameters = set()
    for each in (*setup.tensors.ignored, *setup.tensors.left_alone):
        module, attribute = each.places[0]
        parameter = module._parameters[attribute]
        if parameter is not None:
            parameters.add(parameter)
    return parameters
