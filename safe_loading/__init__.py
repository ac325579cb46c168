"""Safe loading wrappers for large PyTorch and Hugging Face models.

Importing this package imports no torch: a verb or a report is imported when it is first asked for (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._core.report import Finding
from ._core.workload import Workload
from .errors import (
    AdapterError,
    AdapterExists,
    ArgumentError,
    CheckpointError,
    CheckpointNotFound,
    DeviceError,
    DeviceMapInfeasible,
    EngineError,
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

if TYPE_CHECKING:
    from ._core.spread import Spread
    from ._loading.check_checkpoint import CheckpointReport, check_checkpoint
    from ._loading.load_adapter_on_rank import load_adapter_on_rank
    from ._loading.load_peft_on_rank import load_peft_on_rank
    from ._loading.report import LoadReport
    from ._memory.audit.report import AuditReport
    from ._memory.audit_model import audit_model
    from ._memory.fewest_cards import fewest_cards
    from ._memory.fewest_ranks import fewest_ranks
    from ._memory.forecast.report import MemoryForecast
    from ._memory.largest_micro_batch import largest_micro_batch
    from ._memory.largest_workload import largest_workload
    from ._memory.limit_device_memory import limit_device_memory
    from ._memory.memory_guard import MemoryGuard
    from ._memory.plan.device_map_plan import DeviceMapPlan
    from ._memory.plan_device_map import plan_device_map
    from ._memory.predict_memory import predict_memory
    from ._memory.smallest_limits import smallest_limits
    from ._merging.disk.compare_report import MergeCheck
    from ._merging.disk.report import MergeReport
    from ._merging.merge_lora_checkpoint import merge_lora_checkpoint
    from ._merging.merge_lora_inplace import merge_lora_inplace
    from ._merging.report import InplaceMergeReport
    from ._merging.verify_merge import verify_merge
    from ._model.meta_model import meta_model
    from ._ranks.device_for_rank import device_for_rank
    from ._sharding.assert_optimizer_sharded import assert_optimizer_sharded
    from ._sharding.load_at_prepare import load_at_prepare
    from ._sharding.report import FsdpReport
    from ._sharding.wrap_fsdp_meta_safe import wrap_fsdp_meta_safe
    from ._wrapping.attach_head import attach_head
    from ._wrapping.prepare_and_wrap import prepare_and_wrap
    from ._wrapping.report import WrapReport
    from ._wrapping.transparent import Transparent
    from ._wrapping.wrap_transparent import unwrap_transparent, wrap_transparent

__version__ = "0.1.0"

# The module of each name that is imported when it is asked for. Type checkers read the imports above in its place;
# tests/test_import.py holds the two against each other and against `__all__`.
_HOME = {
    "Spread": "_core.spread",
    "CheckpointReport": "_loading.check_checkpoint",
    "check_checkpoint": "_loading.check_checkpoint",
    "load_adapter_on_rank": "_loading.load_adapter_on_rank",
    "load_peft_on_rank": "_loading.load_peft_on_rank",
    "LoadReport": "_loading.report",
    "AuditReport": "_memory.audit.report",
    "audit_model": "_memory.audit_model",
    "fewest_cards": "_memory.fewest_cards",
    "fewest_ranks": "_memory.fewest_ranks",
    "MemoryForecast": "_memory.forecast.report",
    "largest_micro_batch": "_memory.largest_micro_batch",
    "largest_workload": "_memory.largest_workload",
    "limit_device_memory": "_memory.limit_device_memory",
    "MemoryGuard": "_memory.memory_guard",
    "DeviceMapPlan": "_memory.plan.device_map_plan",
    "plan_device_map": "_memory.plan_device_map",
    "predict_memory": "_memory.predict_memory",
    "smallest_limits": "_memory.smallest_limits",
    "MergeCheck": "_merging.disk.compare_report",
    "MergeReport": "_merging.disk.report",
    "merge_lora_checkpoint": "_merging.merge_lora_checkpoint",
    "merge_lora_inplace": "_merging.merge_lora_inplace",
    "InplaceMergeReport": "_merging.report",
    "verify_merge": "_merging.verify_merge",
    "meta_model": "_model.meta_model",
    "device_for_rank": "_ranks.device_for_rank",
    "assert_optimizer_sharded": "_sharding.assert_optimizer_sharded",
    "load_at_prepare": "_sharding.load_at_prepare",
    "FsdpReport": "_sharding.report",
    "wrap_fsdp_meta_safe": "_sharding.wrap_fsdp_meta_safe",
    "attach_head": "_wrapping.attach_head",
    "prepare_and_wrap": "_wrapping.prepare_and_wrap",
    "WrapReport": "_wrapping.report",
    "Transparent": "_wrapping.transparent",
    "unwrap_transparent": "_wrapping.wrap_transparent",
    "wrap_transparent": "_wrapping.wrap_transparent",
}

# These read files and import no engine, so they work beside any.
_TORCH_FREE = ("CheckpointReport", "check_checkpoint")

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
    "EngineError",
    "Finding",
    "FsdpReport",
    "InplaceMergeReport",
    "LoadReport",
    "MemoryForecast",
    "MemoryGuard",
    "MergeCheck",
    "MergeError",
    "MergeReport",
    "OutputError",
    "PickleRefused",
    "RankError",
    "RankTimeout",
    "RanksDisagree",
    "SafeLoadingError",
    "Spread",
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
    "fewest_cards",
    "fewest_ranks",
    "largest_micro_batch",
    "largest_workload",
    "limit_device_memory",
    "load_adapter_on_rank",
    "load_at_prepare",
    "load_peft_on_rank",
    "merge_lora_checkpoint",
    "merge_lora_inplace",
    "meta_model",
    "plan_device_map",
    "predict_memory",
    "prepare_and_wrap",
    "smallest_limits",
    "unwrap_transparent",
    "verify_merge",
    "wrap_fsdp_meta_safe",
    "wrap_transparent",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _TORCH_FREE:
        # Here, because a plain import reads no metadata of packages.
        importlib.import_module("._core.engines", __name__).require_engines()
    value: object = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])
