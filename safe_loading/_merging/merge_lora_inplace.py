"""``merge_lora_inplace``: adapters into the weights' own storage, correctly rounded, all or nothing."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner

from safe_loading._core import progress as _progress
from safe_loading._core.engine_names import INPLACE, InplaceNames
from safe_loading._core.interrupts import signals_held, undone_on_error
from safe_loading._core.log import logger
from safe_loading._core.names import method_name
from safe_loading._core.report import Finding, MiB
from safe_loading._model.formats.four_bit import reordering_findings
from safe_loading._model.peft_layers import adapters_of, module_in_model, tuner_of, without_peft_levels
from safe_loading._model.quantized.recognize import is_quantized
from safe_loading._model.torch_state import torch_kept_when_raised
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading.errors import ArgumentError

from .report import InplaceMergeReport, MergedWeight
from .weights.apply import carry_out
from .weights.check_merge import check_merge, reshard
from .weights.dequantize import replace_quantized
from .weights.finite import delta_rms
from .weights.layer_merge import LayerMerge, MergeOptions
from .weights.loss_findings import IN_MEMORY, loss_findings
from .weights.merge_plan import MergePlan, make_plan
from .weights.offloaded import OffloadedWeights
from .weights.packed_base import packed_base_findings
from .weights.peft_merge import merge_all_by_peft
from .weights.release_ties import release_ties
from .weights.saved_as_plain import forget_codes
from .weights.shared_weights import give_own_weights, take_back
from .weights.trainable_tokens import TokenRows
from .weights.unload import unload_adapters

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .report import MergedModel


@torch_kept_when_raised
@tensors_on_host()
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
    **other: Unpack[InplaceNames],
) -> MergedModel:
    """Merge adapters into the weights of their base model, each weight in its own storage.

    Every merged element is the float64 sum of the weight and all adapters, rounded once. What forbids the merge is
    found before the first weight is written: a refused model is unchanged to the last bit. The report is the
    attribute ``merge_report`` of what is returned, and is logged at level INFO to the logger ``safe_loading``.

    Ctrl-C takes effect once the current layer is finished. The layers before it are merged then, the others are not,
    and a second call merges the rest. The same holds when the memory runs out between two layers; within a layer, a
    small reserve is freed so that it can be finished.

    Args:
        model: A PeftModel (or one of peft's tuners, such as ``LoraModel``), or a model of transformers or diffusers
            after ``model.load_adapter()``, ``load_lora_adapter()`` or ``add_adapter()``.
        adapter_names: The adapters to merge, in this order. None takes the active ones of each layer.
        check_finite: Whether adapters and merged weights must be finite in the dtype of the weight.
        scratch_bytes: The largest temporary of a thread, in bytes; never less than eight rows of a weight. On the CPU
            as many threads merge as ``torch.get_num_threads()`` says, 16 at most. The result depends on neither.
        progress: Whether a progress bar is shown. None shows it in a terminal.
        unload: Whether the base model is returned, without any adapter left. With False the adapters stay, marked
            as merged, so that ``model.unmerge_adapter()`` can take them out again.
        dequantize: Whether all quantized layers of the model become plain ones in the dtype of the model.
            With False those that have adapters are requantized by peft, and a finding says what that rounds away.
        **other: Names of peft that mean one thing here: ``progressbar`` is ``progress``.

    Returns:
        The base model, as ``merge_and_unload`` returns it; with ``unload=False`` the model itself.

    Raises:
        MergeError: The merge is forbidden, for the reasons that are listed for every layer, and the model is unchanged;
            or memory or disk space ran out while weights were written, and the message says how many layers are merged.
        ArgumentError: The model has no adapters, or not those that were named.
    """
    started = time.perf_counter()
    progress, _ = INPLACE.placed(merge_lora_inplace, other, {"progress": progress}, None)
    tuner = _tuner_of(model)
    names = _checked_names(tuner, adapter_names)
    if type(scratch_bytes) is not int or scratch_bytes <= 0:
        raise ArgumentError(f"scratch_bytes={scratch_bytes!r}: pass a number of bytes, for example 1 << 20.")
    if dequantize and not unload:
        raise ArgumentError("dequantize=True replaces peft's layers by plain ones, which needs unload=True.")
    options = MergeOptions(names, check_finite, scratch_bytes, unload, dequantize)
    reshard(model)
    with OffloadedWeights(tuner.model) as offloaded:
        plan = make_plan(tuner.model, options, tuner.peft_config.values())
        replacements = check_merge(tuner, plan, offloaded, options)
        # Nothing was written up to here. The report comes first, as carrying out the plan frees what it is made from.
        weights = [weight for group in plan.groups for job in group for weight in _weights_of(job, group)]
        findings = [*_merged_before(plan.jobs), *_trained_on_packed(tuner)]
        findings += [] if unload else _left_out(plan.jobs)
        # Ctrl-C waits from here on, for the end of a layer.
        with signals_held() as held:
            # peft's merge may still fail, and is undone then; so it comes before everything that is not undone.
            give_own_weights(plan.own_weights)
            with undone_on_error(lambda: take_back(plan.own_weights)):
                by_peft = [job for job in plan.jobs if job.method == "peft" and job.names]
                methods = {config.peft_type for config in tuner.peft_config.values()}
                findings += merge_all_by_peft(by_peft, offloaded, methods, held, check_finite=check_finite)
                findings += _taken_apart(tuner.model, plan)
            findings += replace_quantized(tuner.model, replacements)
            forget_codes(tuner.model)
            shown = _progress.wanted(0) if progress is None else progress
            losses = carry_out(tuner, plan, offloaded, options, held, show_progress=shown)
            weights = [dataclasses.replace(weight, rounding=losses.get(weight.name)) for weight in weights]
            findings += [*loss_findings(weights, IN_MEMORY), *offloaded.findings(), *reordering_findings(tuner.model)]
            result, untied = unload_adapters(tuner, names) if unload else (model, [])
    merged = tuple(dict.fromkeys(name for weight in weights for name in weight.adapters))
    report = InplaceMergeReport(merged, tuple(weights), time.perf_counter() - started, unload, (*findings, *untied))
    if weights or "merge_report" not in result.__dict__:  # a cell of a notebook that runs twice keeps what was done
        result.__dict__["merge_report"] = report
    logger.info("%s", report)
    return cast("MergedModel", result)


def _tuner_of(model: torch.nn.Module) -> BaseTuner:
    tuner = tuner_of(model)
    if tuner is None:
        kinds = [method_name(config.peft_type) for config in getattr(model, "peft_config", {}).values()]
        # of DataParallel, a LightningModule, a SentenceTransformer: the first, so the outermost
        modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        inside = next((name for name, each in modules if name and tuner_of(each) is not None), None)
        fix = "Pass a peft.PeftModel with LoRA adapters, as load_peft_on_rank returns."
        if inside is not None:
            fix = f"Pass the model in it: `{module_in_model(inside)}`."
        raise ArgumentError(
            f"{type(model).__name__} has no adapter that can be merged"
            + (f" ({', '.join(kinds)} adds inputs, not weights)" if isinstance(model, PeftModel) else "")
            + f". {fix}"
        )
    if isinstance(tuner.model, PeftModel):  # peft cannot unload it, and would say so once its layers are gone
        raise ArgumentError(
            "get_peft_model was called with a model that has an adapter, so there is a PeftModel in this one, whose "
            "layers hold the adapters of both. Pass the model in it: `model.base_model.model`."
        )
    return tuner


def _checked_names(tuner: BaseTuner, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    existing = list(tuner.peft_config)
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise ArgumentError(f"adapter_names={names!r:.80} must be a list of names, for example {existing}.")
    unknown = [name for name in names if name not in existing]
    if unknown:
        raise ArgumentError(f"adapter_names={list(names)}: the model has no {unknown}, it has {existing}.")
    if not names or len(set(names)) < len(names):
        raise ArgumentError(
            f"adapter_names={list(names)}: name each adapter once, or leave it out for the active ones; "
            f"model.unload() takes the adapters off without merging."
        )
    return tuple(names)


def _weights_of(job: LayerMerge, group: Sequence[LayerMerge]) -> list[MergedWeight]:
    """Return the lines of the report for one layer, which is merged with the others of its group."""
    kind = type(job.layer).__name__
    if job.method in ("peft", "dequantized"):
        parameters = list(job.layer.get_base_layer().parameters())
        size = sum(parameter.nbytes for parameter in parameters)
        dtype = str(next((parameter.dtype for parameter in parameters), "")).removeprefix("torch.")
        return [MergedWeight(job.path, kind, dtype, job.names, job.method, size)] if job.names else []
    tied = tuple(other.path for other in group if other is not job)
    weights = []
    for target in job.targets:
        rms, adapters = None, job.names
        if not isinstance(target, TokenRows):
            adapters = tuple(dict.fromkeys(term.name for term in target.matrices[0].update.terms))
            squares = [delta_rms(matrix.update) ** 2 for matrix in target.matrices]
            rms = (sum(squares) / len(squares)) ** 0.5
            rms = rms if math.isfinite(rms) else None  # check_finite=False; JSON has no NaN
        dtype, size = str(target.tensor.dtype).removeprefix("torch."), target.tensor.nbytes
        weights.append(MergedWeight(job.name_of(target), kind, dtype, adapters, job.method, size, rms, tied))
    return weights


def _taken_apart(model: torch.nn.Module, plan: MergePlan) -> list[Finding]:
    """Make the model consistent where weights were taken apart, and say so."""
    if not plan.own_weights:
        return []
    names = {name for own in plan.own_weights for name in (own.name, *map(without_peft_levels, own.others))}
    changed, size = [own.name for own in plan.own_weights], sum(own.parameter.nbytes for own in plan.own_weights)
    why = f"they were one weight, and the adapter changes {', '.join(changed)} alone or in another way"
    return [release_ties(model, names, why, size)]


def _trained_on_packed(tuner: BaseTuner) -> list[Finding]:
    if any(is_quantized(module) for module in tuner.model.modules()):
        return []
    configs = tuner.peft_config.items()
    return packed_base_findings({name: config.base_model_name_or_path for name, config in configs})


def _merged_before(jobs: list[LayerMerge]) -> list[Finding]:
    names = sorted({name for job in jobs for name in job.merged_before})
    if not names:
        return []
    count = sum(1 for job in jobs if job.merged_before)
    fix = "none; call unmerge_adapter() before the merge if they should not be in it."
    where, why = f"{count} of {len(jobs)} layers", f"{names} were merged already, and stay so."
    return [Finding("merged-before", "info", where, why, fix)]


def _left_out(jobs: list[LayerMerge]) -> list[Finding]:
    """Warn of active adapters beside merged ones: peft's layers then compute with their weights alone."""
    merged = [(job, {*job.names, *job.merged_before}) for job in jobs]
    left = [adapters_of(job.layer).intersection(job.layer.active_adapters) - names for job, names in merged if names]
    names = sorted(set().union(*left))
    if not names:
        return []
    where, why = f"{sum(map(bool, left))} of {len(jobs)} layers", f"{names} are active, and no longer applied."
    return [Finding("active-left-out", "warning", where, why, "merge them too, or call unmerge_adapter().")]
