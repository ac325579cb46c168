"""The positions that a model was made for, and a finding where a workload's rows are longer."""

from __future__ import annotations

import torch

from safe_loading._checkpoint.faults import note
from safe_loading._core.report import Finding
from safe_loading._core.workload import Workload

from .text_config import text_config


def positions_of(config: object) -> int | None:
    """Return a config's ``max_position_embeddings``, of its text model if it has several; None where it names none."""
    found = getattr(text_config(config), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None  # XLNet says -1: it has no limit


def long_rows(model: torch.nn.Module, workload: Workload | None, name: str = "") -> list[Finding]:
    """Return a finding where the rows of a workload have more tokens than the model has positions."""
    tokens, positions = workload.sequence_length if workload else 0, positions_of(getattr(model, "config", None))
    if positions is None or tokens <= positions:
        return []
    message = (
        f"a row has {tokens} tokens, and the model was made for {positions} (max_position_embeddings): learned "
        f"positions end there, so that the step fails, and rotary ones were not trained further"
    )
    where = name or type(model).__name__
    return [note("warning", "context-too-long", where, message, f"plan for rows of at most {positions} tokens")]
