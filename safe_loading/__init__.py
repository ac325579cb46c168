"""Safe loading wrappers for large PyTorch and Hugging Face models.

Importing this package imports no torch: each public name is imported when it is first asked for (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._assert_optimizer_sharded import assert_optimizer_sharded
    from ._attach_head import attach_head
    from ._audit.report import AuditReport
    from ._audit_model import audit_model
    from ._check_checkpoint import CheckpointReport, check_checkpoint
    from ._device_for_rank import device_for_rank
    from ._forecast.report import MemoryForecast
    from ._largest_micro_batch import largest_micro_batch
    from ._largest_workload import largest_workload
    from ._limit_device_memory import limit_device_memory
    from ._load_adapter_on_rank import load_adapter_on_rank
    from ._load_peft_on_rank import load_peft_on_rank
    from ._load_report import LoadReport
    from ._memory_guard import MemoryGuard
    from ._merge_checkpoint.report import MergeReport
    from ._merge_lora_checkpoint import merge_lora_checkpoint
    from ._merge_lora_inplace import merge_lora_inplace
    from ._merge_report import InplaceMergeReport
    from ._meta_model import meta_model
    from ._plan_device_map import plan_device_map
    from ._planning.plan import DeviceMapPlan
    from ._predict_memory import predict_memory
    from ._prepare_and_wrap import prepare_and_wrap
    from ._report import Finding
    from ._sharding.report import FsdpReport
    from ._smallest_limits import smallest_limits
    from ._transparent.mixin import Transparent
    from ._workload import Workload
    from ._wrap_fsdp_meta_safe import wrap_fsdp_meta_safe
    from ._wrap_report import WrapReport
    from ._wrap_transparent import unwrap_transparent, wrap_transparent
    from .errors import (
        AdapterError,
        AdapterExists,
        ArgumentError,
        CheckpointError,
        CheckpointNotFound,
        DeviceError,
        DeviceMapInfeasible,
        MergeError,
        OutputError,
        PickleRefused,
        RankError,
        RanksDisagree,
        RankTimeout,
        SafeLoadingError,
        TraceError,
        WrapError,
    )

_HOME = {
    "AdapterError": "errors",
    "AdapterExists": "errors",
    "ArgumentError": "errors",
    "AuditReport": "_audit.report",
    "CheckpointError": "errors",
    "CheckpointNotFound": "errors",
    "CheckpointReport": "_check_checkpoint",
    "DeviceError": "errors",
    "DeviceMapInfeasible": "errors",
    "DeviceMapPlan": "_planning.plan",
    "Finding": "_report",
    "FsdpReport": "_sharding.report",
    "InplaceMergeReport": "_merge_report",
    "LoadReport": "_load_report",
    "MemoryForecast": "_forecast.report",
    "MemoryGuard": "_memory_guard",
    "MergeError": "errors",
    "MergeReport": "_merge_checkpoint.report",
    "OutputError": "errors",
    "PickleRefused": "errors",
    "RankError": "errors",
    "RankTimeout": "errors",
    "RanksDisagree": "errors",
    "SafeLoadingError": "errors",
    "TraceError": "errors",
    "Transparent": "_transparent.mixin",
    "Workload": "_workload",
    "WrapError": "errors",
    "WrapReport": "_wrap_report",
    "assert_optimizer_sharded": "_assert_optimizer_sharded",
    "attach_head": "_attach_head",
    "audit_model": "_audit_model",
    "check_checkpoint": "_check_checkpoint",
    "device_for_rank": "_device_for_rank",
    "largest_micro_batch": "_largest_micro_batch",
    "largest_workload": "_largest_workload",
    "limit_device_memory": "_limit_device_memory",
    "load_adapter_on_rank": "_load_adapter_on_rank",
    "load_peft_on_rank": "_load_peft_on_rank",
    "merge_lora_checkpoint": "_merge_lora_checkpoint",
    "merge_lora_inplace": "_merge_lora_inplace",
    "meta_model": "_meta_model",
    "plan_device_map": "_plan_device_map",
    "predict_memory": "_predict_memory",
    "prepare_and_wrap": "_prepare_and_wrap",
    "smallest_limits": "_smallest_limits",
    "unwrap_transparent": "_wrap_transparent",
    "wrap_fsdp_meta_safe": "_wrap_fsdp_meta_safe",
    "wrap_transparent": "_wrap_transparent",
}

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "AdapterExists",
    "ArgumentError",
    "AuditReport",
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointReport",
    "DeviceError",
    "DeviceMapInfeasible",
    "DeviceMapPlan",
    "Finding",
    "FsdpReport",
    "InplaceMergeReport",
    "LoadReport",
    "MemoryForecast",
    "MemoryGuard",
    "MergeError",
    "MergeReport",
    "OutputError",
    "PickleRefused",
    "RankError",
    "RankTimeout",
    "RanksDisagree",
    "SafeLoadingError",
    "TraceError",
    "Transparent",
    "Workload",
    "WrapError",
    "WrapReport",
    "assert_optimizer_sharded",
    "attach_head",
    "audit_model",
    "check_checkpoint",
    "device_for_rank",
    "largest_micro_batch",
    "largest_workload",
    "limit_device_memory",
    "load_adapter_on_rank",
    "load_peft_on_rank",
    "merge_lora_checkpoint",
    "merge_lora_inplace",
    "meta_model",
    "plan_device_map",
    "predict_memory",
    "prepare_and_wrap",
    "smallest_limits",
    "unwrap_transparent",
    "wrap_fsdp_meta_safe",
    "wrap_transparent",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])
