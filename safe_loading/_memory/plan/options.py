"""The arguments of a plan that searches pass on, with their types: those of ``plan_device_map``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from safe_loading._core.engine_names import PlanNames
from safe_loading._core.parse_size import Limits, Size
from safe_loading._memory.trace.step_tensors import Inputs
from safe_loading._model.quantized.kbit_preparation import KbitPreparation
from safe_loading._model.quantized_meta_model import QuantizationConfig


class CardOptions(PlanNames, total=False):
    """The arguments of a plan over cards that are alike."""

    dtype: torch.dtype | str | None
    quantization_config: QuantizationConfig
    no_split_modules: Iterable[str] | None
    objective: Literal["balance", "fill"]
    verify: bool
    overhead: Size | Limits | None
    inputs: Inputs | None
    auto_class: type | str | None
    attn_implementation: str | None
    revision: str | None
    subfolder: str | None
    token: str | bool | None
    trust_remote_code: bool
    capability: tuple[int, int] | None
    prepare_for_kbit: KbitPreparation | None


class PlanOptions(CardOptions, total=False):
    """All arguments of a plan but the model, the limits and the workload."""

    offload: Literal["never", "cpu", "disk"]
    offload_buffers: bool
    nodes: Sequence[Sequence[object]] | None
