"""``merge_lora_inplace``: adapters into the weights' own storage, correctly rounded, all or nothing."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner

from safe_loading._core import progress as _progress
from safe_loading._core.log import logger
from safe_loading._core.report import Finding, MiB
from safe_loading.errors import ArgumentError, MergeError

from .report import InplaceMergeReport, MergedWeight
from .weights import apply
from .weights.across_ranks import agreed, reshard
from .weights.dequantize import Replacement, dequantized, put_in_place
from .weights.finite import delta_rms
from .weights.merge_plan import LayerMerge, MergePlan, make_plan, not_finite, torn_ties
from .weights.offloaded import Offloaded
from .weights.peft_merge import merge_all_by_peft
from .weights.trainable_tokens import Tokens
from .weights.unload import saved_twice, unloaded
from .weights.writable_tensors import parents_of


@torch.no_grad()
def merge_lora_inplace(
    model: torch.nn.Module,
    *,
    adapter_names: Sequence[str] | None = None,
    check_finite: bool = True,
    scratch_bytes: int = 4 * MiB,
    progress: bool | None = None,
    unload: bool = True,
    dequantize: bool = False,
) -> torch.nn.Module:
    """Merge adapters into the weights of their base model, each weight in its own storage.

    Every merged element is the float64 sum of the weight and all adapters, rounded once. What forbids the merge is
    found before the first weight is written: a refused model is unchanged to the last bit. The report is the
    attribute ``merge_report`` of what is returned, and is logged at level INFO to the logger ``safe_loading``.

    Ctrl-C waits until the layer at work is finished. What is left is a model whose merged layers are merged and
    whose others are not; a second call merges the rest. The same holds when the memory runs out between two layers;
    within one, a small reserve lets the layer be finished.

    Args:
        model: A PeftModel (or one of peft's tuners, such as ``LoraModel``).
        adapter_names: The adapters to merge, in this order. None takes the active ones of each layer.
        check_finite: Whether adapters and merged weights must be finite in the dtype of the weight.
        scratch_bytes: The largest temporary, in bytes; never less than eight rows of a weight. The result does not
            depend on it.
        progress: Whether a progress bar is shown. None shows it in a terminal.
        unload: Whether the base model is returned, without any adapter left. With False the adapters stay, marked
            as merged, so that ``model.unmerge_adapter()`` can take them out again.
        dequantize: Whether quantized layers, all of the model, become plain ones in the dtype in which they compute.
            With False those that have adapters are requantized by peft, and a finding says what that rounds away.

    Returns:
        The base model, as ``merge_and_unload`` returns it; with ``unload=False`` the model itself.

    Raises:
        MergeError: What forbids the merge, every layer listed. The model is unchanged.
        ArgumentError: The model has no adapters, or not those that were named.
    """
    started = time.perf_counter()
    tuner = _tuner(model)
    names = _checked_names(tuner, adapter_names)
    if type(scratch_bytes) is not int or scratch_bytes <= 0:
        raise ArgumentError(f"scratch_bytes={scratch_bytes!r}: it is a number of bytes, as 1 << 20.")
    if dequantize and not unload:
        raise ArgumentError("dequantize=True puts plain layers in the place of peft's; that needs unload=True.")
    reshard(model)
    with Offloaded(tuner.model) as store:
        plan = make_plan(tuner.model, names, unload=unload, dequantize=dequantize)
        if unload:
            plan.problems.extend(saved_twice(tuner.model, names))
        made = _check(tuner, plan, store, check_finite=check_finite, scratch_bytes=scratch_bytes, dequantize=dequantize)
        jobs = [job for group in plan.groups for job in group]
        weights, findings = [entry for job in jobs for entry in _entries(job, plan)], _findings(jobs)
        by_peft = [job for job in jobs if job.road == "peft" and job.names]
        findings += merge_all_by_peft(by_peft, store, check_finite=check_finite)
        findings += put_in_place(tuner.model, made)
        shown = _progress.wanted(0) if progress is None else progress
        _carry_out(tuner, plan, store, scratch_bytes=scratch_bytes, unload=unload, shown=shown)
        findings += store.findings()
        result, more = unloaded(tuner, names) if unload else (model, [])
    merged = tuple(dict.fromkeys(name for weight in weights for name in weight.adapters))
    report = InplaceMergeReport(merged, tuple(weights), time.perf_counter() - started, unload, (*findings, *more))
    if weights or "merge_report" not in result.__dict__:  # a cell of a notebook that runs twice keeps what was done
        result.__dict__["merge_report"] = report
    logger.info("%s", report)
    return result


def _check(
    tuner: Any, plan: MergePlan, store: Offloaded, *, check_finite: bool, scratch_bytes: int, dequantize: bool
) -> list[Replacement]:
    """Find out whether all of a plan can be done; nothing of the model is written.

    Returns:
        The plain layers that take the places of quantized ones.

    Raises:
        MergeError: Every reason against it, on every rank.
    """
    problems = [*([] if dequantize else _refused_by_peft(tuner)), *_wrapped_by_fsdp1(tuner), *plan.problems]
    jobs = [job for group in plan.groups for job in group]
    if check_finite:
        for job in jobs:
            problems += not_finite(job, scratch_bytes=scratch_bytes)
    problems += torn_ties(tuner.model, jobs, store)
    if problems:
        problems += _repeated(tuner)
    problems += store.lacking((target.owner, n) for job in jobs for target in job.targets for n in target.written)
    made: list[Replacement] = []
    if dequantize:
        quantized = [job for job in jobs if job.road == "dequantised"]
        made, more = dequantized(tuner.model, quantized, scratch_bytes=scratch_bytes, check_finite=check_finite)
        problems += more
    problems = agreed(tuner.model, problems)
    if problems:
        raise MergeError(
            f"The adapters of this {type(tuner.model).__name__} cannot be merged:", dict.fromkeys(problems)
        )
    return made


def _repeated(tuner: Any) -> list[str]:
    """Return what to do about layers that an adapter repeats, as long as those share their weights."""
    if not any(getattr(config, "layer_replication", None) for config in tuner.peft_config.values()):
        return []
    names: dict[tuple[int, str], int] = {}
    for name, parameter in tuner.model.named_parameters(remove_duplicate=False):
        kind = (id(parameter), "".join(letter for letter in name if not letter.isdigit()))  # the same in another layer
        names[kind] = names.get(kind, 0) + 1
    if max(names.values(), default=1) == 1:
        return []
    return [
        "layer_replication made layers that share their weights. Give each its own before the merge, which takes the "
        "memory of a larger model: layers = model.get_base_model().model.layers; for i, layer in enumerate(layers): "
        "layers[i] = copy.deepcopy(layer)"
    ]


def _tuner(model: torch.nn.Module) -> Any:
    tuner: Any = model.base_model if isinstance(model, PeftModel) else model
    tuner = tuner if isinstance(tuner, BaseTuner) else getattr(tuner, "base_model", None)  # PeftMixedModel
    if not isinstance(tuner, BaseTuner):
        kinds = [str(config.peft_type) for config in getattr(model, "peft_config", {}).values()]
        raise ArgumentError(
            f"{type(model).__name__} has no adapter that can be merged"
            + (f" ({', '.join(kinds)} adds inputs, not weights)" if isinstance(model, PeftModel) else "")
            + ". Pass a peft.PeftModel with LoRA adapters, as load_peft_on_rank returns it."
        )
    return tuner


def _checked_names(tuner: Any, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    there = list(tuner.peft_config)
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise ArgumentError(f"adapter_names={names!r:.80} must be a list of names, as {there}.")
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ArgumentError(f"adapter_names={list(names)}: the model has no {unknown}, it has {there}.")
    if not names or len(set(names)) < len(names):
        raise ArgumentError(
            f"adapter_names={list(names)}: name each adapter once, or leave it out for the active ones; "
            f"model.unload() takes the adapters off without merging."
        )
    return tuple(names)


def _refused_by_peft(tuner: Any) -> list[str]:
    """Return what peft itself says against a merge of this model as a whole."""
    problems = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of tied weights, which are looked at layer by layer
        try:
            tuner._check_merge_allowed()
        except (ValueError, NotImplementedError) as error:
            problems.append(f"peft refuses: {error}.")
    return problems


def _wrapped_by_fsdp1(tuner: Any) -> list[str]:
    for path, module in tuner.model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            return [
                f"{path or 'the model'} is wrapped by FSDP1, which keeps the weights flattened and split. Save the "
                f"adapter, and merge it into the unsharded base."
            ]
    return []


def _entries(job: LayerMerge, plan: MergePlan) -> list[MergedWeight]:
    """Return the lines of the report for one job, before its targets are freed."""
    kind = type(job.layer).__name__
    if job.road in ("peft", "dequantised"):
        base: Any = job.layer.get_base_layer()
        size = sum(parameter.nbytes for parameter in base.parameters())
        dtype = str(next((parameter.dtype for parameter in base.parameters()), "")).removeprefix("torch.")
        return [MergedWeight(job.path, kind, dtype, job.names, job.road, size)] if job.names else []
    entries = []
    for target in job.targets:
        rms, used = None, job.names
        if not isinstance(target, Tokens):
            used = tuple(dict.fromkeys(term.name for term in target.pieces[0].update.terms))
            squares = [delta_rms(piece.update) ** 2 for piece in target.pieces]
            rms = (sum(squares) / len(squares)) ** 0.5
            rms = rms if math.isfinite(rms) else None  # check_finite=False; JSON has no NaN
        dtype = str(target.tensor.dtype).removeprefix("torch.")
        size = target.tensor.nbytes
        group = next(group for group in plan.groups if job in group)
        also = tuple(other.path for other in group if other is not job)
        entries.append(MergedWeight(job.name_of(target), kind, dtype, used, job.road, size, rms, also))
    return entries


def _findings(jobs: list[LayerMerge]) -> list[Finding]:
    findings = []
    before = sorted({name for job in jobs for name in job.merged_before})
    if before:
        count = sum(1 for job in jobs if job.merged_before)
        findings.append(
            Finding(
                "merged-before",
                "info",
                f"{count} of {len(jobs)} layers",
                f"{before} were merged already, and stay so.",
                "none; call unmerge_adapter() before the merge if they should not be in it.",
            )
        )
    return findings


def _carry_out(tuner: Any, plan: MergePlan, store: Offloaded, *, scratch_bytes: int, unload: bool, shown: bool) -> None:
    """Write, mark and unload, one group after the other; free what a group held."""
    places = parents_of(tuner.model) if unload else {}
    groups, total = plan.groups, len(plan.groups)
    bar = _progress.Bar("merging", total, unit=" layers", shown=shown)
    with bar, apply.interrupts_wait() as came:
        for _ in range(total):
            if came:
                break
            for job in groups[0]:
                if job.road in ("blocks", "tokens"):
                    try:
                        apply.merge_by_blocks(job, store, scratch_bytes=scratch_bytes, unload=unload)
                    except (MemoryError, RuntimeError, apply.HalfMerged) as error:
                        raise _stopped(error, groups, total) from error
            for job in groups.pop(0):
                if unload and job.road != "dequantised":
                    apply.unload(job, tuner, places)
            bar.advance()
    if came:
        left = [job.path for group in groups for job in group]
        raise KeyboardInterrupt(
            f"merge_lora_inplace: {total - len(groups)} of {total} layers are merged, the others are unchanged "
            f"({', '.join(left[:3])}, ...). Call it again with the same arguments to merge the rest."
        )


def _stopped(error: Exception, groups: list[list[LayerMerge]], total: int) -> MergeError:
    """Return what is raised when something, the memory most likely, ran out while weights were written."""
    paths = [job.path for group in groups for job in group]
    state = f"{total - len(groups)} of {total} layers are merged"
    if isinstance(error, apply.HalfMerged):
        return MergeError(
            f"The merge stopped within a layer, which could not be finished; {state}, and this one in part:",
            [f"{error}. Its weight is neither the base's nor the merged one: load the base anew."],
        )
    return MergeError(
        f"The merge stopped between two layers; {state}, the others are unchanged:",
        [f"{paths[0]}: {error or type(error).__name__}. Free memory, and call it again: it merges the rest."],
    )
