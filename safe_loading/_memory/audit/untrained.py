"""Checks for what looks trained and is not: adapters that are off, frozen tokens, gradients that cannot be scaled."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from pathlib import Path

import torch
from transformers import PreTrainedModel

from safe_loading._core.report import Finding
from safe_loading._model.embeddings_and_head import embeddings_and_head_of

from .audited_model import AuditedModel, size_of


def check_disabled(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for adapters that are disabled or merged: the base then runs without them."""
    if audited.peft is None or not audited.training:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {n: m for n, m in audited.peft.named_modules() if isinstance(m, BaseTunerLayer)}
    off = {name: "disabled" for name, layer in layers.items() if layer.disable_adapters}
    off |= {name: "merged" for name, layer in layers.items() if getattr(layer, "merged", False)}
    if off:
        name, why = next(iter(off.items()))
        undo = {"disabled": "base_model.enable_adapter_layers()", "merged": "unmerge_adapter()"}[why]
        own = {name: p for name, p in audited.adapter_parameters.items() if p.requires_grad}
        message = (
            f"the adapter is {why} in {len(off)} of {len(layers)} layers, which run without it: nothing trains it."
        )
        yield Finding("SL127", "error", name, message, f"model.{undo} before training.", size_of(own.values()))


def check_tokens(audited: AuditedModel) -> Iterator[Finding]:
    """Yield findings for tokens that were added to embeddings which stay frozen."""
    base = audited.base
    if base is None or audited.peft is None or not audited.training:
        return
    embeddings = embeddings_and_head_of(base).embeddings
    weight = getattr(embeddings, "weight", None)
    if not isinstance(embeddings, torch.nn.Module) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return
    rows, known = weight.shape[0], _rows_of_checkpoint(base)
    if any(p.requires_grad for p in embeddings.parameters()):
        return
    tokenizer = getattr(audited.trainer, "processing_class", None)
    used = min(rows, len(tokenizer)) if isinstance(tokenizer, Sized) else rows
    if known is not None and used > known:
        message = (
            f"the embeddings have {used - known} tokens that the checkpoint has not ({used} and {known}), but they are "
            f"frozen: those rows keep the values that they were initialized with."
        )
        fix = f"LoraConfig(..., trainable_token_indices=list(range({known}, {used}))), or modules_to_save for all rows."
        where = next(name for name, module in base.named_modules() if module is embeddings)
        yield Finding("SL128", "warning", where, message, fix, (used - known) * weight.shape[1] * weight.itemsize)


def _rows_of_checkpoint(base: PreTrainedModel) -> int | None:
    """Return the rows of the embeddings in the checkpoint that a model was loaded from, if it is on this machine."""
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    name = getattr(base.config, "_name_or_path", "") or getattr(base, "name_or_path", "")
    if not name:
        return None
    try:
        path = cached_file(name, "config.json", local_files_only=True)
        config = AutoConfig.from_pretrained(str(Path(str(path)).parent), local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def check_scaled_halves(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for trained float16 weights under float16 autocast, whose gradients GradScaler refuses."""
    if getattr(audited.training_arguments, "fp16", False) is not True:
        return
    halves = {n: p for n, p in audited.model.named_parameters() if p.requires_grad and p.dtype == torch.float16}
    if halves:
        message = (
            f"{len(halves)} trained parameters are in float16 and the trainer has fp16=True: its GradScaler fails at "
            f"the first step with 'Attempting to unscale FP16 gradients'."
        )
        fix = (
            "cast them: for p in model.parameters(): p.data = p.data.float() if p.requires_grad else p.data; or load "
            "it in bfloat16 with bf16=True."
        )
        yield Finding("SL129", "error", next(iter(halves)), message, fix, size_of(halves.values()))
