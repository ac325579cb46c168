"""``wrap_fsdp_meta_safe``: FSDP over a model on meta, where each rank gets only its own bytes."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy

from safe_loading._core.engine_names import WRAP, WrapNames
from safe_loading._core.log import logger
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading._ranks.device_guard import check_not_shared, owned_device
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.same_on_ranks import check_same_folders
from safe_loading.errors import ArgumentError

from .adapter_methods import guard_merges
from .added_after_wrap import Wrapped, attached_units, wrapped_before
from .agree import agree
from .checkpoint_folder import OpenedFolder, find_folder, untie_as_in_folder
from .fsdp2 import let_generate_wait
from .fsdp_units import ShardingUnit, Wrap, plan_units
from .mesh import TENSOR, WrapPlace, find_place, is_tensor_parallel
from .parameters import Ignored, memory_problems
from .peak_memory import Peak
from .plain_attributes import fill_attributes
from .report import FsdpReport, FsdpUnit
from .run import WrapResult, run_wrap
from .saving import make_saving_whole
from .setup import (
    Setup,
    TensorRoles,
    ValueOrigin,
    assign_roles,
    check_kinds,
    check_second_call,
    folders_seen,
    name_adapters,
    ranks_of,
    resolve_options,
)
from .tensor_parallel import split_model, units_in_parts
from .tensor_split import TensorSplit
from .undo import model_as_before

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .report import ShardedModel


@tensors_on_host()
def wrap_fsdp_meta_safe(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None = None,
    *,
    version: Literal[1, 2] = 2,
    mesh: DeviceMesh | Sequence[int] | None = None,
    auto_wrap_policy: Wrap | None = None,
    mp_policy: MixedPrecisionPolicy | MixedPrecision | torch.dtype | None = None,
    offload_policy: OffloadPolicy | CPUOffload | bool | None = None,
    device: torch.device | str | int | None = None,
    ignored_params: Iterable[nn.Module | nn.Parameter | str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
    init_new: Callable[[nn.Module], Any] | None = None,
    verify: Literal["off", "structure", "bytes"] = "structure",
    timeout: float = 1800.0,
    reshard_after_forward: bool | int | None = None,
    prefer: Literal["source", "model"] | None = None,
    **other: Unpack[WrapNames],
) -> ShardedModel:
    """Wrap a model in FSDP, and give each rank its shard of the weights and nothing else.

    All ranks call it with the same model: on meta everywhere, real on rank 0 and on meta elsewhere, or real everywhere.
    Before any weight moves, the ranks agree on the names, shapes, dtypes, ties, units and arguments; if they differ, or
    one of them fails, all of them raise. The result computes what the unsharded model does, to the last bit (in another
    order of sums with tensor parallelism). The :class:`FsdpReport` is the attribute ``fsdp_report`` of the returned
    module, and is logged at level INFO to the logger ``safe_loading``.

    Called again on a model that FSDP2 wrapped, it shards what was attached since (an adapter, a head) and nothing else.

    ``save_pretrained`` of the result gathers what it saves: call it on every rank, and the first one writes.

    Args:
        model: The model. Make it with :func:`meta_model`, or under ``torch.device("meta")``.
        source: A folder or hub id: each rank reads its own bytes from it, and no weight is sent. It is that of the
            model of transformers, also where that is inside a module of yours, once or more often, or has the names of
            the module's own ``state_dict()``. A state dict on rank 0 (None or ``{}`` on the others): scattered. None:
            rank 0's own weights, scattered. Persistent buffers that are missing from the source are those of rank 0's
            model.
        version: 2 for ``fully_shard``, 1 for ``FullyShardedDataParallel``.
        mesh: A DeviceMesh of one dimension (FSDP) or two (HSDP: replicas, shards), or its sizes. None takes all ranks.
            FSDP1 takes replicas of two shards or more. A last dimension named "tp", after the shards, splits each layer
            over its ranks (tensor parallelism, by the plan of the model's class), which must get the same batches; a
            first one named "dp_replicate" then has replicas.
        auto_wrap_policy: The modules that are gathered together: classes, names of classes, patterns of module names,
            ``fn(module) -> bool``, or torch's policies of layers (``ModuleWrapPolicy``). None takes the layers, and the
            last norm with the head.
        mp_policy: The policy class of that FSDP version, or the dtype to compute in (gradients are then reduced
            in float32).
        offload_policy: Whether the shards stay on the host, or the policy class of that FSDP version.
        device: The device of this rank; None takes :func:`device_for_rank`, which is the CPU without an accelerator.
        ignored_params: Modules, parameters, names or patterns that every rank keeps whole, and that FSDP leaves alone;
            so are scalars, which it cannot split. The gradients of those that are trained are averaged over the ranks.
        adapters: Folder or hub id of the adapter that the model has, or ``{name: folder}`` for several: rank 0 alone
            downloads and reads it, and its values are scattered.
        init_new: Called on each module that has parameters which the source does not have, on rank 0, on the CPU,
            in the order of ``named_modules``; what it writes is scattered. Not needed for peft's LoRA layers, nor used
            for buffers.
        verify: ``"structure"`` proves that nothing is left on meta and nothing trained is left unsharded; ``"bytes"``
            also compares every shard with its source; ``"off"`` does neither.
        timeout: Longest wait for the other ranks, in seconds.
        reshard_after_forward: Whether a unit is freed between the forward and the backward pass; with FSDP2 also over
            how many ranks it is split meanwhile. None frees it. The root, and the last norm with the head, stay.
        prefer: For a real model with a folder: whose values are trained where rank 0's model and the folder differ,
            ``"source"`` or ``"model"``. None compares all that rank 0 has, and refuses a difference. Values that a
            script wrote and a folder's fine-tuning look alike, so it is not guessed.
        **other: Names of FSDP1 that mean one thing here: ``mixed_precision`` is ``mp_policy``, ``cpu_offload`` is
            ``offload_policy``, ``ignored_modules`` and ``ignored_states`` are ``ignored_params``, ``device_mesh`` is
            ``mesh``, ``device_id`` is ``device``.

    Returns:
        The same object with version 2, and with version 1 the module that wraps it.

    Raises:
        ArgumentError: The arguments contradict each other or the model.
        CheckpointError: The source is incomplete or does not fit the model; every problem is listed.
        DeviceError: There is no device for this rank, another rank has it too, or the wrapped model is incomplete.
        RankError: Another rank failed, or the ranks disagree (:class:`RanksDisagree`).
    """
    started = time.perf_counter()
    before = wrapped_before(model)
    own: dict[str, object] = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload_policy, "device": device}
    own |= {"ignored_params": ignored_params}
    named = other.get("device_mesh") if mesh is None else mesh
    ranks = ranks_of(named if before is None else before.mesh)
    with ranks.together("check the arguments", timeout=timeout) as phase:
        mesh, mp_policy, offload_policy, device, ignored_params, _ = WRAP.placed(wrap_fsdp_meta_safe, other, own, None)
        check_kinds(model, source, version, init_new, verify, prefer)
        if before is not None:
            check_second_call(before, source, version, mesh, auto_wrap_policy, adapters)
        where = find_place(mesh if before is None else before.mesh, device, ranks, version)
        tensors, units, split = _planned(model, auto_wrap_policy, ignored_params, version, before, where)
        # A script in load_at_prepare() trains what it would train without it, and there plain FSDP splits the memory.
        if not isinstance(source, OpenedFolder) and (shared := memory_problems(tensors.parameters)):
            raise ArgumentError(f"FSDP{version} cannot shard this {type(model).__name__}:", shared)
        how = resolve_options(
            version,
            mp_policy,
            offload_policy,
            where,
            before,
            verify=verify,
            timeout=timeout,
            reshard_after_forward=reshard_after_forward,
        )
        values = ValueOrigin(source, name_adapters(model, adapters), init_new, prefer)
        setup = Setup(model, values, where, how, tensors, units, split)
        phase.payload = owned_device(where.device, device), folders_seen(values)
    check_not_shared(ranks.ranks, [device_of_rank for device_of_rank, _ in phase.results])
    check_same_folders(ranks.ranks, [folders for _, folders in phase.results])
    path = find_folder(setup, ranks)
    with model_as_before(model):
        return _wrap(setup, ranks, path, auto_wrap_policy, before, started)


def _wrap(
    setup: Setup, ranks: Ranks, path: Path | None, auto_wrap_policy: Wrap | None, before: Wrapped | None, started: float
) -> ShardedModel:
    """Return the wrapped model, with its report; until here nothing of it was touched."""
    model, where, version, timeout = setup.model, setup.where, setup.how.version, setup.how.timeout
    fill_attributes(model)
    with ranks.together("compare tied weights", timeout=timeout):
        if untie_as_in_folder(setup, path):
            kept = [each.tensor for each in setup.tensors.ignored if isinstance(each.tensor, nn.Parameter)]
            tensors, units, split = _planned(model, auto_wrap_policy, kept, version, before, where)
            setup = dataclasses.replace(setup, tensors=tensors, units=units, split=split)
    unit_lines = [f"{unit.name}: {len(unit.parameters)} parameters" for unit in setup.units]
    agree(ranks, setup.arguments(), setup.lines(), unit_lines, timeout=timeout)
    with Peak(where.device) as peak:
        result = run_wrap(setup, ranks, path)
    report = _report(setup, result, ranks.index(ranks.rank), ranks.size, peak.bytes, time.perf_counter() - started)
    # with version 1 the result is another module than the model, so the report goes on the result
    result.model.__dict__["fsdp_report"] = report
    make_saving_whole(result.model, ranks, where.device, timeout)
    guard_merges(model, version)
    let_generate_wait(model)
    logger.info("%s", report)
    return cast("ShardedModel", result.model)


def _planned(
    model: nn.Module,
    wrap: Wrap | None,
    ignored: Iterable[Ignored] | None,
    version: int,
    before: Wrapped | None,
    where: WrapPlace,
) -> tuple[TensorRoles, tuple[ShardingUnit, ...], TensorSplit]:
    """Return the role of each tensor, the units, and how tensor parallelism splits the model."""
    tensors, kept = assign_roles(model, () if ignored is None else ignored, version, before)
    if before is not None:
        return tensors, attached_units(model, tensors.sharded), TensorSplit()
    units = plan_units(model, wrap, ignored=kept, flat=version == 1)
    if where.given_mesh is None or not is_tensor_parallel(where.given_mesh):
        return tensors, units, TensorSplit()
    split = split_model(model, tensors, where.given_mesh[TENSOR])
    return tensors, units_in_parts(units, split, tensors.sharded), split


def _report(setup: Setup, result: WrapResult, rank: int, ranks: int, peak: int, seconds: float) -> FsdpReport:
    return FsdpReport(
        version=setup.how.version,
        rank=rank,
        ranks=ranks,
        shards=setup.where.shards,
        device=str(setup.where.device),
        units=tuple(FsdpUnit(unit.name, len(unit.parameters), unit.bytes, unit.keeps) for unit in setup.units),
        model_bytes=sum(tensor.nbytes for tensor in setup.tensors.all),
        local_bytes=result.local_bytes,
        bytes_read=result.bytes_read,
        bytes_sent=result.bytes_sent,
        peak_bytes=peak,
        seconds=seconds,
        verified=setup.how.verify,
        ignored=tuple(tensor.name for tensor in setup.tensors.ignored),
        parts=setup.where.parts,
        undivided=setup.split.undivided,
        findings=tuple(result.findings),
    )
