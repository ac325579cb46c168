"""``audit_model``: what will cost memory or silently go wrong, each finding with its code, bytes and fix."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._core.arguments import model_source
from safe_loading._core.report import Finding
from safe_loading._core.workload import Workload
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading.errors import ArgumentError, TraceError

from .audit import device_checks as devices
from .audit import dtypes_and_ties as values
from .audit import kept_memory as memory
from .audit import loss, training, wrappers
from .audit import step_checks as behavior
from .audit.report import AuditReport, sorted_findings
from .audit.subject import Subject
from .forecast.build_model import build
from .predict_memory import predict_memory

Check = Callable[[Subject], Iterator[Finding]]
# Without a step: what can be read off the objects.
CHECKS: tuple[Check, ...] = (
    wrappers.check_wrapper,
    wrappers.check_prefix,
    loss.check_unread_loss,
    training.check_trainable,
    training.check_outside,
    training.check_head,
    training.check_heads,
    training.check_optimizer,
    values.check_quantized,
    values.check_dtypes,
    values.check_ties,
    devices.check_device_map,
    devices.check_contexts,
    devices.check_sharding,
    memory.check_kept,
    memory.check_second_base,
    memory.check_teachers,
)


def audit_model(
    model: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload | None = None,
    trainer: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    forecast: bool = True,
    trust_remote_code: bool = False,
) -> AuditReport:
    """Look for what costs memory or goes wrong without a word, and return it with codes, bytes, places and fixes.

    Flags are not believed: one step runs on fake tensors, in the mode that the model is in, and what happened in it is
    compared with what was asked for. The model, the trainer and the optimizer are not changed, and nothing is
    allocated. The codes are listed in the documentation, page "Auditing a model".

    Args:
        model: The model as the training loop has it, wrappers included; real or on meta. Or a folder, a hub id or a
            config, of which a model on meta is made, with the workload's adapter attached.
        workload: The step that is planned. None takes a short one when a trainer or an optimizer is given.
        trainer: A ``transformers.Trainer`` or one that looks like it.
        optimizer: The optimizer; by default the trainer's.
        forecast: Whether the report of a given workload holds `predict_memory`'s forecast.
        trust_remote_code: Whether a repository's own code may run.

    Raises:
        ArgumentError: No model can be built from what is there.
    """
    model_source(model, "model", torch.nn.Module, PreTrainedConfig)
    if workload is not None and not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r:.80}: pass a Workload, for example Workload.train(4, 1024).")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ArgumentError(f"optimizer={optimizer!r:.80}: pass a torch optimizer, or None.")
    source, asked = model, workload
    if not isinstance(model, torch.nn.Module):
        model, workload = _built(model, workload, trust_remote_code)
    planned = workload is not None and workload.kind == "train"
    bound = planned or trainer is not None or optimizer is not None
    subject = Subject(model, trainer, optimizer, bound or any(p.requires_grad for p in model.parameters()))
    findings = [finding for check in CHECKS for finding in check(subject)]
    checked = [check.__name__.removeprefix("check_") for check in CHECKS]
    skipped: list[str] = []
    step = workload if planned else Workload.train(1, 16, optimizer="none") if bound else None
    predicted = None
    if step is not None:
        try:
            with with_stand_ins(model):
                findings += behavior.check_step(subject, step)
            checked.append("step")
        except TraceError as error:
            skipped.append(f"step: {error}")
    if workload is not None and forecast:
        said: dict[str, Any] = {} if source is model else {"trust_remote_code": trust_remote_code}
        try:
            predicted = predict_memory(source, asked or workload, **said)
        except TraceError as error:
            skipped.append(f"forecast: {error}")
    return AuditReport(
        model=os.fspath(source) if isinstance(source, (str, os.PathLike)) else type(model).__name__,
        findings=sorted_findings(findings),
        checked=tuple(checked),
        skipped=tuple(skipped),
        dtypes=values.census(subject),
        forecast=predicted,
    )


def _built(source: Any, workload: Workload | None, trusted: bool) -> tuple[torch.nn.Module, Workload | None]:
    """Return a model on meta with the adapter attached, ready to be trained, and the workload without the adapter."""
    options = {"auto_class": None, "dtype": None, "attn_implementation": None, "revision": None}
    made = build(source, workload or Workload.weights_only(), {**options, "trust_remote_code": trusted}, True)
    adapter = made.workload.adapter
    if adapter is None:
        return made.model, workload
    from peft import get_peft_model

    from safe_loading._loading.peft_config import injecting, read_peft_config

    config: Any = read_peft_config(adapter) if isinstance(adapter, (str, os.PathLike)) else copy.copy(adapter)
    config.inference_mode = False
    with injecting(adapter, made.model):
        attached = get_peft_model(made.model, config)
    return attached, None if workload is None else workload.replace(adapter=None)
