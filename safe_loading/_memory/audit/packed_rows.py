"""Checks of rows that follow one another without padding: whether attention tells them apart in the step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from transformers import masking_utils

from safe_loading._core.report import Finding
from safe_loading._core.thread_patches import patched, seen_here
from safe_loading._memory.trace.step_tensors import Inputs, is_packed, starts_anew, tensor_of
from safe_loading._model.text_config import text_config

from .audited_model import AuditedModel

_MASKED = ("eager", "sdpa", "flex_attention")  # attention that knows the rows by the mask alone


@dataclasses.dataclass
class RowsSeen:
    """Whether a step's mask was made with the bounds of packed rows."""

    apart: bool = False


@contextlib.contextmanager
def watching_rows() -> Iterator[RowsSeen]:
    """Inside, it is recorded whether transformers looks for the bounds of rows while it makes a mask."""
    seen, find = RowsSeen(), seen_here(masking_utils, "find_packed_sequence_indices")

    def record(*args: Any, **kwargs: Any) -> Any:
        bounds = find(*args, **kwargs)
        seen.apart |= bounds is not None  # positions without a new beginning are one row
        return bounds

    with patched(masking_utils, "find_packed_sequence_indices", record):
        yield seen


def fills_cache(audited: AuditedModel, inputs: Inputs | None) -> bool:
    """Whether the model fills a cache while it is trained with packed rows; a Trainer switches that off."""
    text = text_config(getattr(audited.base, "config", None))
    return audited.trainer is None and is_packed(inputs) and bool(getattr(text, "use_cache", False))


def check_rows(audited: AuditedModel, inputs: Inputs | None, seen: RowsSeen) -> Iterator[Finding]:
    """Yield a finding when rows were packed into one, and nothing told attention where each begins."""
    config: Any = getattr(audited.base, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    mask = tensor_of(inputs, "attention_mask")
    if seen.apart or not is_packed(inputs) or attention not in _MASKED or (mask is not None and mask.dim() > 2):
        return
    why, fix = "there is no position at which a row begins", "pass position_ids that start anew with each row."
    if starts_anew(inputs):
        why = "the mask is made without a look at the positions while the model fills a cache"
        fix = "model.config.use_cache = False in training."
        if mask is not None:
            why = "the mask that was passed is taken in the place of one made from the positions"
            fix = "leave attention_mask out, and set model.config.use_cache = False."
    message = (
        f"rows are packed into one, and with attention {attention!r} each attends to those before it: {why}. The loss "
        f"falls all the same."
    )
    yield Finding("SL141", "error", type(audited.base).__name__, message, fix)
