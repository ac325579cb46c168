"""Merge a LoRA adapter into its base from disk to disk, in little memory, whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.serialization._base import parse_size_to_int

from safe_loading._checkpoint.index import require_unchanged
from safe_loading._core import progress as _progress
from safe_loading._core.arguments import whole_number
from safe_loading._core.log import logger
from safe_loading._loading.sources import BaseRequest, Source
from safe_loading._model.layout.tensor_contents import REPORT
from safe_loading._output.output_folder import check_apart, output_path
from safe_loading._output.stage import Stage
from safe_loading._ranks.device_guard import guarded, own_device
from safe_loading.errors import ArgumentError

from .disk.changes import FLOATS, NAMES
from .disk.find_changes import find_changes
from .disk.output_plan import FilePlan, plan_files
from .disk.record import Outcome, job, report, report_file
from .disk.report import MergeReport
from .disk.resume import facts_of, is_whole
from .disk.small_files import small_files
from .disk.sources import ask, find
from .disk.stream import Facts, Work, Written, one_torch_thread, stream


def merge_lora_checkpoint(
    base_model: Source,
    adapter: Source | Sequence[Source],
    output: Source,
    *,
    device: torch.device | str | int = "cpu",
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
    resume: bool = True,
    verify: bool = True,
    threads: int | None = None,
    progress: bool | None = None,
    adapter_revision: str | None = None,
    adapter_subfolder: str | None = None,
    base_revision: str | None = None,
    base_subfolder: str | None = None,
    base_kwargs: Mapping[str, Any] | None = None,
    dequantize: bool = False,
) -> MergeReport:
    """Write the base with the adapter merged into it, never holding more than a few blocks of a weight in memory.

    The output has the base's files, names, layout and dtypes; a file in which nothing changes is copied by the
    kernel. Every merged element is the exact sum, rounded once, the same bits as :func:`merge_lora_inplace` makes.

    Args:
        base_model: Folder or hub id of the base, with safetensors weights.
        adapter: Folder or hub id of a LoRA adapter, or several, which are summed before the one rounding.
        output: The folder to write. It appears whole, by one rename, when everything is on disk.
        device: Where blocks are merged: a device, its name, or an index of the accelerator.
        max_shard_size: The most bytes of tensors in a file, as a number or as "5GB"; the files are named as
            ``save_pretrained`` names them. None keeps the base's files.
        dtype: The dtype of all float tensors of the output, rounded once from the exact sum. None keeps the base's.
        overwrite: Whether a folder that is there is replaced, as a whole.
        resume: Whether to go on with what an interrupted call (``kill -9``, a power cut, Ctrl-C) left.
        verify: Whether to hash every tensor on the way. The hashes go to ``merge_report.json``, and without them what
            an interrupted call left is written again.
        threads: How many threads read, compute and write; by default one for each core, four at the most.
        progress: Whether to show a bar; by default in a terminal.
        adapter_revision: Branch, tag or commit of adapters on the hub; never used for the base.
        adapter_subfolder: Folder inside the adapter's repository; never used for the base.
        base_revision: Branch, tag or commit of the base.
        base_subfolder: Folder inside the base's repository.
        base_kwargs: More arguments of the base's ``from_pretrained``, as ``trust_remote_code``, ``num_labels``,
            ``variant``. ``token``, ``cache_dir`` and ``local_files_only`` are used for the adapters too.
        dequantize: Whether a quantized base (bitsandbytes in 4 or 8 bits, fp8 with ``weight_scale_inv``) is written as
            a plain one, in the dtype of its config, each element rounded once. Else it is refused.

    Returns:
        What was done with each tensor.

    Raises:
        MergeError: The adapter cannot be merged on disk (its kind, its start, a tie), or a merged value overflows.
        AdapterError: The adapter does not fit the base.
        CheckpointError: A file is missing or damaged, or (:class:`PickleRefused`) a pickle.
        OutputError: The output is or holds what is read, is there already, another process writes it, or the disk has
            too little room.
        DeviceError: There is no such device.
        ArgumentError: An argument cannot be honored.
    """
    begin = time.perf_counter()
    shard_bytes, wanted = _bytes(max_shard_size), _dtype(dtype)
    if threads is not None:
        whole_number(threads, "threads", least=1, what="a number of threads, or None for one for each core")
    own = own_device(device)
    if base_kwargs is not None and not isinstance(base_kwargs, Mapping):
        raise ArgumentError(f"base_kwargs={base_kwargs!r:.80}: pass a dict of arguments of from_pretrained.")
    target = output_path(output)
    request = ask(
        adapter,
        BaseRequest(base_model, base_revision, base_subfolder),
        base_kwargs=dict(base_kwargs or {}),
        adapter_revision=adapter_revision,
        adapter_subfolder=adapter_subfolder,
    )
    with one_torch_thread(), guarded(own), _progress.engine_bars(0):
        sources = find(request, dequantize=dequantize)
        check_apart(target, sources.folders)
        changes, casts = find_changes(sources, wanted)
    plans = plan_files(sources, changes, casts, shard_bytes)
    small, findings = small_files(sources, changes, plans, resharded=shard_bytes is not None)
    needed = sum(plan.nbytes for plan in plans) + sum(map(len, small.values())) + 512 * len(sources.checkpoint.tensors)
    options = {"verify": verify, "dtype": str(wanted), "max_shard_size": shard_bytes, "device": own.type}
    with Stage(target, job(sources, options), needed=needed, overwrite=overwrite, resume=resume) as stage:
        if stage.finished is None:
            facts, fresh = _write_weights(plans, stage, own, verify, threads or min(4, _cores()), progress)
            require_unchanged(sources.checkpoint)
            for name, data in {**small, REPORT: report_file(sources, plans, facts)}.items():
                stage.write(name, data)
            stage.commit({plan.name: {n: [w.sha256, w.largest] for n, w in facts[plan.name].items()} for plan in plans})
        else:
            facts = {name: facts_of({"tensors": held}) for name, held in stage.finished.items()}
            fresh = []
    outcome = Outcome(sources, plans, facts, fresh, list(small), list(changes.dropped), [*changes.findings, *findings])
    result = report(target, outcome, time.perf_counter() - begin)
    logger.info("%s", result)
    return result


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bytes(size: int | str | None) -> int | None:
    """Return a size in bytes, by the rule of save_pretrained ("5GB" is 5 * 10**9)."""
    if size is None:
        return None
    try:
        found = parse_size_to_int(size) if isinstance(size, str) else whole_number(size, "max_shard_size", least=1)
    except ValueError as error:
        raise ArgumentError(f"max_shard_size={size!r}: {error}") from error
    if found < 1:
        raise ArgumentError(f"max_shard_size={size!r}; pass a number of bytes, or a text as '5GB'.")
    return found


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or NAMES.get(found) not in FLOATS:
        raise ArgumentError(
            f"dtype={dtype!r}; pass torch.bfloat16, torch.float16, torch.float32 or torch.float64, or None to keep "
            f"the base's."
        )
    return found


def _write_weights(
    plans: Sequence[FilePlan], stage: Stage, device: torch.device, verify: bool, threads: int, progress: bool | None
) -> tuple[dict[str, Facts], list[FilePlan]]:
    """Write the weight files that an interrupted call has not left whole; return the facts of all, and those."""
    facts: dict[str, dict[str, Written]] = {}
    left = []
    for plan in plans:
        held = stage.recorded(plan.name, lambda path, facts, plan=plan: is_whole(plan, path, facts))  # type: ignore[misc]
        if held is None:
            left.append(plan)
        else:
            facts[plan.name] = facts_of(held)
    shown = _progress.wanted(0) if progress is None else progress
    with _progress.Bar("merging", sum(plan.nbytes for plan in left), shown=shown) as bar:
        stream(
            left, Work(stage, device, threads, verify, lambda plan, own: facts.update({plan.name: own}), bar.advance)
        )
    return facts, left
