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
    from ._report import Finding
    from .errors import (
        AdapterError,
        AdapterExists,
        ArgumentError,
        CheckpointError,
        CheckpointNotFound,
        DeviceError,
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
    "LoadReport": "_load_report",
    "PickleRefused": "errors",
    "RankError": "errors",
    "RankTimeout": "errors",
    "RanksDisagree": "errors",
    "SafeLoadingError": "errors",
    "check_checkpoint": "_check_checkpoint",
    "device_for_rank": "_device_for_rank",
    "load_adapter_on_rank": "_load_adapter_on_rank",
    "load_peft_on_rank": "_load_peft_on_rank",
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
    "LoadReport",
    "PickleRefused",
    "RankError",
    "RankTimeout",
    "RanksDisagree",
    "SafeLoadingError",
    "check_checkpoint",
    "device_for_rank",
    "load_adapter_on_rank",
    "load_peft_on_rank",
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
