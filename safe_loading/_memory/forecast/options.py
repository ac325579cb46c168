"""The arguments of a forecast that searches pass on, with their types: those of ``predict_memory``."""

from __future__ import annotations

from typing import Literal, TypedDict

import torch

from safe_loading._core.spread import Spread
from safe_loading._memory.trace.step_tensors import Inputs
from safe_loading._model.quantized.kbit_preparation import KbitPreparation
from safe_loading._model.quantized_meta_model import QuantizationConfig


class JobOptions(TypedDict, total=False):
    """All arguments of a forecast but the model, the workload and the spread over ranks."""

    inputs: Inputs | None
    capability: tuple[int, int] | None
    context_bytes: int | None
    expandable_segments: bool
    dtype: torch.dtype | str | None
    attn_implementation: str | None
    auto_class: type | str | None
    prepare_for_kbit: KbitPreparation | None
    keep_outputs: bool | Literal["across_steps"]
    revision: str | None
    subfolder: str | None
    token: str | bool | None
    trust_remote_code: bool
    quantization_config: QuantizationConfig
    scan_kernels: bool
    loaded_by: Literal["to", "device_map"]
    empties_cache: bool


class ForecastOptions(JobOptions, total=False):
    """All arguments of a forecast but the model and the workload."""

    spread: Spread | None
