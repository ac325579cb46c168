"""``audit_model``: wasted memory and silent faults, as findings with a code, their bytes and a fix."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.hub import HubOptions
from safe_loading._core.arguments import model_source
from safe_loading._core.report import Finding, worst_first
from safe_loading._core.workload import Workload, require_workload
from safe_loading._loading.peft_config import refuse_costly_patterns
from safe_loading._model.quantized.kbit_preparation import (
    KbitPreparation,
    check_preparation,
    preparation_of,
    prepare_adapter,
)
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading._model.quantized_meta_model import QuantizationConfig
from safe_loading._model.torch_state import undone_when_raised
from safe_loading._model.zero3 import refuse_split
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading.errors import ArgumentError, TraceError

from .audit import (
    base_values,
    costly_options,
    device_checks,
    dtypes_and_ties,
    kept_memory,
    loss,
    modes,
    optimizer_steps,
    positions,
    reference,
    running_statistics,
    shared_names,
    step_checks,
    training,
    unmatched,
    untrained,
    wrappers,
)
from .audit.audited_model import AuditedModel
from .audit.report import AuditReport
from .audit.round_trip import check_round_trip
from .audit.traced_step import TracedStep, peaks_of_wrapped, trace_configured
from .audit.trainer_evaluation import with_evaluation_of
from .audit.trainer_head import about_loss, with_head_of, with_rows_of
from .audit.unsharded import NO_STEP, is_tensor_parallel, unsharded, without_fsdp1
from .forecast.build_model import build, refuse_adapter
from .forecast.report import MemoryForecast
from .predict_memory import SHARDED_ALREADY, is_sharded, predict_memory
from .trace.attached_adapter import attach_without_values
from .trace.read_adapter import read_adapter, with_read_adapter
from .trace.step_tensors import Inputs, require_tensors

Check = Callable[[AuditedModel], Iterator[Finding]]
# The checks of what each rank holds: FSDP's units, its devices, and the parameters that it trains.
OF_RANKS: tuple[Check, ...] = (
    training.check_optimizer,
    optimizer_steps.check_rates,
    device_checks.check_device_map,
    device_checks.check_contexts,
    device_checks.check_data_parallel,
    device_checks.check_sharding,
    device_checks.check_outside_units,
)
# The other checks that need no step.
CHECKS: tuple[Check, ...] = (
    wrappers.check_prefix,
    loss.check_unread_loss,
    training.check_trainable,
    training.check_head,
    training.check_heads,
    modes.check_kept_in_eval,
    shared_names.check_shared,
    unmatched.check_unmatched,
    untrained.check_disabled,
    untrained.check_allocated,
    untrained.check_nested,
    untrained.check_frozen_heads,
    untrained.check_tokens,
    untrained.check_scaled_halves,
    dtypes_and_ties.check_quantized,
    dtypes_and_ties.check_dtypes,
    dtypes_and_ties.check_ties,
    dtypes_and_ties.check_finite,
    kept_memory.check_kept,
    kept_memory.check_second_base,
    kept_memory.check_teachers,
    reference.check_reference,
    running_statistics.check_statistics,
    positions.check_computed_buffers,
    optimizer_steps.check_rounded_steps,
    optimizer_steps.check_unmoved_factors,
    optimizer_steps.check_scales,
    base_values.check_random_start,
)


@undone_when_raised
def audit_model(
    model: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload | None = None,
    trainer: Any = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    forecast: bool = True,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    inputs: Inputs | None = None,
    quantization_config: QuantizationConfig = None,
    prepare_for_kbit: KbitPreparation | None = None,
    round_trip: bool = False,
) -> AuditReport:
    """Look for wasted memory and silent faults, and return them with codes, bytes, places and fixes.

    Flags are not trusted: one step runs on fake tensors, in the mode that the model is in, and what happens in it is
    compared with what was requested. The model, the trainer and the optimizer are not changed, and nothing is
    allocated. The codes are listed in the documentation, page "Auditing a model".

    Args:
        model: The model as the training loop has it, wrappers included; real or on meta. Or a folder, a hub id or a
            config, from which a model on meta is built, with the workload's adapter attached.
        workload: The planned step. With None a short one is run if a trainer or an optimizer is given.
        trainer: A ``transformers.Trainer`` or one that looks like it. The forecast takes its reference, its evaluation
            and its head, of which trl's and Liger's make no logits.
        optimizer: The optimizer, or several of which each has a part of the parameters; by default the trainer's.
        forecast: Whether the report contains `predict_memory`'s forecast of a given workload.
        revision: Branch, tag or commit of a hub id.
        subfolder: Folder inside the folder or hub id.
        token: Token for the hub, as for ``huggingface_hub``.
        trust_remote_code: Whether a repository's own code may run.
        inputs: What the model takes beside tokens, as for `predict_memory`.
        quantization_config: As for ``from_pretrained``, for a folder, a hub id or a config that is not quantized yet.
        prepare_for_kbit: Who prepares a base in 4 or 8 bits, as for `predict_memory`. None takes the preparation of the
            trainer's model, and trl's without a trainer.
        round_trip: Whether to save what is trained as the trainer would, or else ``save_pretrained``, load it again and
            compare by name and value (SL132). It takes the memory and a temporary folder for what the checkpoint holds.

    Raises:
        ArgumentError: No model can be built from what is there.
        TraceError: The workload's adapter is of a method that no trace can follow; in a model that is SL126.
    """
    _refuse(model, workload, optimizer, quantization_config, inputs)
    preparation = check_preparation(prepare_for_kbit or preparation_of(trainer))
    workload = None if workload is None else with_read_adapter(workload)
    if workload and workload.kind == "train" and workload.reference is None:
        workload = workload.replace(reference=reference.reference_of(trainer))
    source, hub, requested = model, HubOptions(revision, subfolder, token), with_head_of(trainer, model, workload)
    requested, not_counted = with_evaluation_of(trainer, with_rows_of(trainer, requested, inputs), inputs)
    if not isinstance(model, torch.nn.Module):
        model, workload = _build_on_meta(model, workload, trust_remote_code, quantization_config, hub, preparation)
    else:
        hub.refuse_for(model)
    planned = workload is not None and workload.kind == "train"
    will_train = planned or trainer is not None or optimizer is not None
    training = will_train or any(p.requires_grad for p in model.parameters())
    optimizer = optimizer or getattr(trainer, "optimizer", None)
    audited = AuditedModel(model, trainer, optimizer, training)
    findings = [finding for check in OF_RANKS for finding in check(audited)]
    # without a planned step one short row shows what happens, though not at its real size
    step = workload if planned else Workload.train(1, 16, optimizer="none") if will_train else None
    with without_fsdp1(model):
        # again, since an AuditedModel remembers what it looked up, and here the parameters of FSDP1 are the model's own
        audited = AuditedModel(model, trainer, optimizer, training)
        findings += [finding for check in CHECKS for finding in check(audited)]
        found, skipped = _check_steps(audited, step, inputs, planned=planned)
        dtypes = dtypes_and_ties.bytes_by_dtype(audited)
    if round_trip:
        findings += _round_trip(audited, skipped)
    skipped += [*about_loss(trainer, source, requested), *not_counted] if forecast else []
    checked = [check.__name__.removeprefix("check_") for check in (*OF_RANKS, *CHECKS)]
    stepped = step is not None and not any(text.startswith("step:") for text in skipped)
    checked += ["outside", "wrappers", *(["step"] if stepped else []), *(["round_trip"] if round_trip else [])]
    predicted = None
    if requested is not None and forecast:
        trusted = trust_remote_code and source is not model  # a module needs no code from a repository
        quantized = quantization_config if source is not model else None
        options = {"trust_remote_code": trusted, "quantization_config": quantized, "prepare_for_kbit": preparation}
        predicted = _forecast(source, requested, inputs, {**options, **vars(hub)}, skipped)
    return AuditReport(
        model=os.fspath(source) if isinstance(source, (str, os.PathLike)) else type(model).__name__,
        findings=worst_first(sorted([*findings, *found], key=lambda finding: (-finding.bytes, finding.code))),
        checked=tuple(checked),
        skipped=tuple(skipped),
        dtypes=dtypes,
        forecast=predicted,
    )


def _round_trip(audited: AuditedModel, skipped: list[str]) -> list[Finding]:
    """Return the findings of a save and a load: lost tensors, and a base that is not that of the checkpoint."""
    with tensors_on_host():
        findings = [*check_round_trip(audited, skipped)]
    return [*findings, *base_values.check_base_values(audited, skipped)]


def _refuse(model: object, workload: object, optimizer: object, quantization_config: object, inputs: object) -> None:
    """Raise for an argument that is none of the things it may be."""
    require_tensors(inputs)
    model_source(model, "model", torch.nn.Module, PreTrainedConfig)
    if workload is not None:
        require_workload(workload, "Workload.train(4, 1024)").require_sizes()
    if isinstance(model, torch.nn.Module):
        refuse_split(model)
    if quantization_config is not None and isinstance(model, torch.nn.Module):
        raise ArgumentError("quantization_config= is for a config, a folder or a hub id; this model is built already.")
    several = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if optimizer is not None and not all(hasattr(each, "param_groups") for each in several):
        raise ArgumentError(f"optimizer={optimizer!r:.80}: pass a torch optimizer, several in a list, or None.")


def _forecast(
    source: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload,
    inputs: Inputs | None,
    options: dict[str, Any],
    skipped: list[str],
) -> MemoryForecast | None:
    """Return the forecast of a workload, or None where there can be none, with the reason added to `skipped`."""
    if isinstance(source, torch.nn.Module) and is_sharded(source):
        skipped.append(f"forecast: {SHARDED_ALREADY}")
        return None
    try:
        return predict_memory(source, workload, inputs=inputs, **options)
    except TraceError as error:
        skipped.append(f"forecast: {error}")
        return None


def _check_steps(
    audited: AuditedModel, workload: Workload | None, inputs: Inputs | None, *, planned: bool
) -> tuple[list[Finding], list[str]]:
    """Return the findings of a step and of the wrappers, whose cost it shows, and why it was skipped."""
    findings: list[Finding] = []
    skipped: list[str] = []
    peaks, teachers = None, set[str]()
    # the kernels of quantized layers do not run on fake tensors, and neither do collectives
    if workload is not None and is_tensor_parallel(audited.model):
        skipped, workload = [NO_STEP], None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(with_stand_ins(audited.model))
        except TraceError as error:  # of quantized layers that have no stand-in
            skipped, workload = [f"step: {error}"], None
        stack.enter_context(unsharded(audited.model))
        if workload is not None:
            try:
                for config in audited.adapter_configs.values():
                    refuse_adapter(config)
                step = trace_configured(audited, workload, inputs, planned=planned)
                findings += step_checks.check_step(step, workload)
                teachers = step.names_of_teachers
                findings += costly_options.check_options(step)
                peaks = _peaks_in_both_orders(step)
            except TraceError as error:
                skipped.append(f"step: {error}")
                findings.append(step_checks.not_run(audited, error))
                if planned and audited.wrappers:
                    peaks = peaks_of_wrapped(audited, workload, inputs)
        findings += wrappers.check_wrappers(audited, peaks)
        findings += training.check_outside(audited, teachers)
    return findings, skipped


def _peaks_in_both_orders(step: TracedStep) -> tuple[int, int] | None:
    right = step.peak_when_right if step.planned and step.audited.wrappers else None
    return None if right is None else (step.peak_bytes, right)


def _build_on_meta(
    source: PreTrainedConfig | str | os.PathLike[str],
    workload: Workload | None,
    trust_remote_code: bool,
    quantization_config: QuantizationConfig,
    hub: HubOptions,
    preparation: KbitPreparation,
) -> tuple[torch.nn.Module, Workload | None]:
    """Return a model on meta with the adapter attached, ready to be trained, and the workload without the adapter."""
    options: dict[str, object] = {"auto_class": None, "dtype": None, "attn_implementation": None}
    options |= {"trust_remote_code": trust_remote_code, "quantization_config": quantization_config}
    made = build(source, workload or Workload.weights_only(), options, preparation, hub=hub)
    adapter = made.workload.adapter
    if adapter is None:
        return made.model, workload
    if isinstance(adapter, (str, os.PathLike)):
        config, fitted = read_adapter(adapter).config_on(made.model)
        refuse_costly_patterns(config, made.model, adapter)
    else:
        config, fitted = copy.copy(adapter), contextlib.nullcontext()
    config.inference_mode = False  # as it is in a saved config, with which nothing would be trained
    attached = attach_without_values(made.model, config, adapter, fitted)
    prepare_adapter(attached, preparation)
    return attached, None if workload is None else workload.replace(adapter=None)
