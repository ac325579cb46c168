"""Safe loading wrappers for large PyTorch and Hugging Face models.

Importing this package imports no torch: each public name is imported when it is first asked for (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._check_checkpoint import CheckpointReport, check_checkpoint
    from ._device_for_rank import device_for_rank
    from ._load_adapter_on_rank import load_adapter_on_rank
    from ._load_peft_on_rank import load_peft_on_rank
    from ._load_report import LoadReport
    from ._merge_checkpoint.report import MergeReport
    from ._merge_lora_checkpoint import merge_lora_checkpoint
    from ._merge_lora_inplace import merge_lora_inplace
    from ._merge_report import InplaceMergeReport
    from ._report import Finding
    from .errors import (
        AdapterError,
        AdapterExists,
        ArgumentError,
        CheckpointError,
        CheckpointNotFound,
        DeviceError,
        MergeError,
        OutputError,
        PickleRefused,
        RankError,
        RanksDisagree,
        RankTimeout,
        SafeLoadingError,
    )

_HOME = {
    "AdapterError": "errors",
    "AdapterExists": "errors",
    "ArgumentError": "errors",
    "CheckpointError": "errors",
    "CheckpointNotFound": "errors",
    "CheckpointReport": "_check_checkpoint",
    "DeviceError": "errors",
    "Finding": "_report",
    "InplaceMergeReport": "_merge_report",
    "LoadReport": "_load_report",
    "MergeError": "errors",
    "MergeReport": "_merge_checkpoint.report",
    "OutputError": "errors",
    "PickleRefused": "errors",
    "RankError": "errors",
    "RankTimeout": "errors",
    "RanksDisagree": "errors",
    "SafeLoadingError": "errors",
    "check_checkpoint": "_check_checkpoint",
    "device_for_rank": "_device_for_rank",
    "load_adapter_on_rank": "_load_adapter_on_rank",
    "load_peft_on_rank": "_load_peft_on_rank",
    "merge_lora_checkpoint": "_merge_lora_checkpoint",
    "merge_lora_inplace": "_merge_lora_inplace",
}

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "AdapterExists",
    "ArgumentError",
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointReport",
    "DeviceError",
    "Finding",
    "InplaceMergeReport",
    "LoadReport",
    "MergeError",
    "MergeReport",
    "OutputError",
    "PickleRefused",
    "RankError",
    "RankTimeout",
    "RanksDisagree",
    "SafeLoadingError",
    "check_checkpoint",
    "device_for_rank",
    "load_adapter_on_rank",
    "load_peft_on_rank",
    "merge_lora_checkpoint",
    "merge_lora_inplace",
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
