"""Merge a LoRA adapter into its base from disk to disk, in little memory, as a whole or not at all.

The way of an adapter: ``disk/sources.py`` opens it and its base; ``disk/find_changes.py``, the heart of the merge,
finds which tensors on disk change, and by what; ``disk/output_plan.py`` plans every file of the output; and
``disk/write_files.py`` writes them into a stage, which becomes the output by one rename.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from safe_loading._checkpoint.sha256sums import SUMS, sums_of
from safe_loading._core import progress as _progress
from safe_loading._core.arguments import whole_number
from safe_loading._core.engine_names import MERGE, MergeNames
from safe_loading._core.log import logger
from safe_loading._core.parse_size import parse_size
from safe_loading._core.protocols import JsonObject
from safe_loading._loading.base_arguments import as_model_class
from safe_loading._loading.folder_findings import base_findings
from safe_loading._loading.sources import BaseRequest, Source
from safe_loading._model.dtypes import dtype_named
from safe_loading._model.layout.tensor_contents import REPORT
from safe_loading._model.torch_state import torch_kept_when_raised
from safe_loading._output.output_folder import check_apart, output_path
from safe_loading._output.stage import Records, Stage
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading._ranks.device_guard import guarded, own_device
from safe_loading._ranks.launcher import cores
from safe_loading.errors import ArgumentError, CheckpointError

from .disk.changes import FLOATS, NAMES
from .disk.find_changes import find_changes
from .disk.output_plan import FilePlan, plan_files
from .disk.record import Outcome, is_complete, job_of, make_report, report_file
from .disk.report import MergeReport
from .disk.small_files import content_of, small_files
from .disk.sources import MergeSources, checked_weights, merge_request, open_sources
from .disk.tokenizer_ids import end_findings, refuse_ids_without_rows
from .disk.write_files import WriteJob, WrittenFile, from_journal, is_readable, one_torch_thread, write_files

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch_kept_when_raised
@tensors_on_host()
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
    manifest: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
    adapter_revision: str | None = None,
    adapter_subfolder: str | None = None,
    base_revision: str | None = None,
    base_subfolder: str | None = None,
    base_kwargs: Mapping[str, Any] | None = None,
    dequantize: bool = False,
    adapter_weights: Sequence[float] | None = None,
    tokenizer: Literal["adapter", "base"] | None = None,
    auto_class: type | str | None = None,
    allow_pickle: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    **other: Unpack[MergeNames],
) -> MergeReport:
    """Write the base with the adapter merged into it, never holding more than a few blocks of a weight in memory.

    The output has the files, names, layout and dtypes of the base; a file in which nothing changes is copied by the
    kernel. Every merged element is the exact sum, rounded once, the same bits as :func:`merge_lora_inplace` makes.

    Args:
        base_model: Folder or hub id of the base, with safetensors weights.
        adapter: Folder or hub id of a LoRA adapter, or several, which are summed before the one rounding.
        output: The folder to write. It appears as a whole, by one rename, when everything is on disk.
        device: Where blocks are merged: a device, its name, or an index of the accelerator.
        max_shard_size: The most bytes of tensors in a file, as a number or as "5GB" or "5GiB"; the files are named as
            ``save_pretrained`` names them. None keeps the base's files.
        dtype: The dtype of all float tensors of the output, rounded once from the exact sum. None keeps the base's.
        overwrite: Whether an existing folder is replaced, as a whole.
        resume: Whether to go on with what an interrupted call (``kill -9``, a power cut, Ctrl-C, SIGTERM) left.
        verify: Whether to hash every tensor on the way (XXH3-128). The hashes go to ``merge_report.json``. Without
            them a second call writes again what an interrupted call left.
        manifest: Whether the output gets a ``SHA256SUMS`` with the SHA-256 of every file, read once more from the page
            cache: the one form that every system can check (``sha256sum -c``) and every signer can sign. ``check
            --hashes`` compares with it.
        threads: How many threads read, compute and write; by default one for each core, four at the most.
        progress: Whether to show a bar; by default in a terminal.
        adapter_revision: Branch, tag or commit of adapters on the hub; never used for the base.
        adapter_subfolder: Folder inside the adapter's repository; never used for the base.
        base_revision: Branch, tag or commit of the base.
        base_subfolder: Folder inside the base's repository.
        base_kwargs: More arguments of the base's ``from_pretrained``, such as ``trust_remote_code``, ``num_labels`` or
            ``variant``; fields of the config are written into the output's. ``token``, ``cache_dir`` and
            ``local_files_only`` are used for the adapters too.
        dequantize: Whether a quantized base is written as a plain one, in the dtype of its config, each element rounded
            once. Otherwise formats whose codes can be merged into, such as fp8, are kept: merged weights are rounded to
            codes again, ``tensor.rounding`` and findings say what that loses, and all else is copied byte for byte.
            Other formats are refused; the page on merges on disk lists all of them.
        adapter_weights: A factor for what each adapter adds, in their order, as peft's ``set_scale`` takes it. Only
            for adapters that add to weights: not for DoRA, saved modules, trained biases or tokens.
        tokenizer: Whose tokenizer and chat template the output has. By default the last adapter's that brings one,
            where it differs from the base's in more than where it lay.
        auto_class: The class that loads the base, such as ``transformers.AutoModelForCausalLM``, or its name; by
            default the one of the adapter's task.
        allow_pickle: Whether adapters that were saved as ``adapter_model.bin`` are read, with ``weights_only=True``.
        key_mapping: Regular expressions and replacements for the adapters' keys, as for :func:`load_peft_on_rank`.
        **other: Names of transformers that mean one thing here: ``torch_dtype`` is ``dtype``; ``trust_remote_code``,
            ``token``, ``cache_dir`` and ``local_files_only`` go into ``base_kwargs``.

    Returns:
        What was done with each tensor.

    Raises:
        MergeError: The adapter cannot be merged on disk (its method, its init, a tie), or a merged value overflows.
        AdapterError: The adapter does not fit the base.
        CheckpointError: A file is missing or damaged, or (:class:`PickleRefused`) a pickle.
        OutputError: The output is or holds what is read, or exists already, or another process writes it, or the disk
            has too little room.
        DeviceError: There is no such device.
        ArgumentError: An argument cannot be honored.
    """
    begin = time.perf_counter()
    dtype, base_kwargs = MERGE.placed(merge_lora_checkpoint, other, {"dtype": dtype}, base_kwargs)
    shard_bytes, output_dtype = _shard_bytes(max_shard_size), _float_dtype(dtype)
    if threads is not None:
        whole_number(threads, "threads", least=1, what="a number of threads, or None for one for each core")
    own = own_device(device)
    if tokenizer not in (None, "adapter", "base"):
        raise ArgumentError(f'tokenizer={tokenizer!r}: pass "adapter", "base", or None for the one that differs.')
    target = output_path(output)
    asked_base, kwargs = BaseRequest(base_model, base_revision, base_subfolder), dict(base_kwargs or {})
    request = merge_request(adapter, asked_base, adapter_revision, adapter_subfolder, kwargs, allow_pickle=allow_pickle)
    weights, model_class = checked_weights(adapter_weights, request), as_model_class(auto_class)
    with one_torch_thread(), guarded(own), _progress.engine_bars(0):
        sources = open_sources(request, weights, dtype=output_dtype, dequantize=dequantize, key_mapping=key_mapping)
        check_apart(target, sources.folders)
        changes, dtypes = find_changes(sources, output_dtype, model_class)
    base, of_base = sources.base, base_findings(sources.base.opened, sources.base.checkpoint)
    plans = plan_files(base, changes, dtypes, shard_bytes)
    small, findings = small_files(sources, changes, plans, resharded=shard_bytes is not None, tokenizer=tokenizer)
    refuse_ids_without_rows(sources, small, plans)
    findings += end_findings(sources, small)
    options = {"verify": verify, "dtype": str(output_dtype), "max_shard_size": shard_bytes, "device": own.type}
    options["class"] = None if model_class is None else model_class.__name__
    options |= {"key_mapping": str(key_mapping or None), "manifest": bool(manifest)}
    # merge_report.json, which is not written yet, takes less than 512 bytes for each tensor.
    needed = sum(plan.nbytes for plan in plans) + sum(map(len, small.values())) + 512 * len(base.template.tensors)
    records = Records(is_readable, functools.partial(_is_whole, sources, plans, small, manifest=manifest))
    write = {"overwrite": overwrite, "resume": resume, "keep": verify}
    with Stage(target, job_of(sources, options), needed=needed, records=records, **write) as stage:
        if stage.finished is None:
            job = WriteJob(stage, own, threads or min(4, cores()), hashes=verify)
            written, resumed = _write_weights(plans, job, progress)
            # A base that another process wrote meanwhile would be merged half old and half new.
            base.opened.require_unchanged()
            _write_small({**small, REPORT: report_file(sources, plans, written)}, stage, manifest=manifest)
            stage.commit()
        else:  # an interrupted call was killed after the last rename: the output is complete
            written = {name: from_journal(facts["tensors"]) for name, facts in stage.finished.items()}
            resumed = [plan.name for plan in plans]
    findings = [*of_base, *sources.findings, *changes.findings, *findings, *stage.findings]
    outcome = Outcome(sources, plans, written, resumed, list(small), list(changes.dropped), findings)
    report = make_report(target, outcome, time.perf_counter() - begin)
    logger.info("%s", report)
    return report


def _shard_bytes(size: int | str | None) -> int | None:
    """Return the size of a shard in bytes, by the rule of save_pretrained ("5GB" is 5 * 10**9)."""
    if size is None:
        return None
    # parse_size takes floats, of numpy too; here one is more likely a slip, such as 1.5 for "1.5GB".
    nbytes = parse_size(size, "max_shard_size") if isinstance(size, (int, str)) else 0
    if nbytes < 1:
        raise ArgumentError(f'max_shard_size={size!r}: pass at least one byte, as a number or as "5GB".')
    return nbytes


def _float_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    named = dtype_named(dtype)
    if named is None or NAMES.get(named) not in FLOATS:
        raise ArgumentError(
            f"dtype={dtype!r}; pass torch.bfloat16, torch.float16, torch.float32 or torch.float64, or None to keep "
            f"the base's."
        )
    return named


def _write_small(files: Mapping[str, bytes], stage: Stage, *, manifest: bool) -> None:
    """Write the small files, and at last the hashes of all."""
    for name, data in files.items():
        stage.write(name, data)
    if manifest:
        stage.write(SUMS, sums_of(stage.files).encode())


def _is_whole(
    sources: MergeSources,
    plans: Sequence[FilePlan],
    small: Mapping[str, bytes],
    folder: Path,
    recorded: Mapping[str, JsonObject],
    *,
    manifest: bool,
) -> bool:
    """Return whether a folder holds the output of this call; one that a killed call left may be changed since."""
    if not all(plan.name in recorded and is_complete(plan, folder / plan.name, recorded[plan.name]) for plan in plans):
        return False
    written = {name: from_journal(facts["tensors"]) for name, facts in recorded.items()}
    files = {**small, REPORT: report_file(sources, plans, written)}
    try:
        alike = all(content_of(folder / name) == data for name, data in files.items())
    except CheckpointError:  # one is missing
        return False
    return alike and (not manifest or (folder / SUMS).is_file())


def _write_weights(
    plans: Sequence[FilePlan], job: WriteJob, progress: bool | None
) -> tuple[dict[str, WrittenFile], list[str]]:
    """Write the missing weight files; return the record of each file, and the names of those that were resumed."""
    written: dict[str, WrittenFile] = {}
    for plan in plans:
        entry = job.stage.recorded(plan.name, functools.partial(is_complete, plan))
        if entry is not None:
            written[plan.name] = from_journal(entry["tensors"])
    resumed = list(written)
    missing = [plan for plan in plans if plan.name not in written]
    shown = _progress.wanted(0) if progress is None else progress
    with _progress.Bar("merging", sum(plan.nbytes for plan in missing), shown=shown) as bar:
        written |= write_files(missing, job, bar.advance)
    return written, resumed
