"""Whether weights are quantized at all: the headers say, not the config. Imports no torch.

Merges by unsloth, LLaVA and others write plain weights beside the ``quantization_config`` of the base that they were
made from. transformers then makes layers for codes that no file holds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, counted, format_bytes

from .base_config import named_quantization, passed_over
from .faults import fault
from .header import TensorInfo
from .model_folder import ModelFolder

_PLAIN = frozenset({"F16", "BF16", "F32", "F64", "C64", "BOOL", "I64", "U64"})
# Buffers of plain models that are integers: masks and positions.
_BUFFERS = re.compile(r"(?:attn|attention)\.(?:bias|masked_bias)$|_(?:ids|index)$")
_SCALES = re.compile(r"(?:weight|proj|bias|input|output|[qkv])_(?:scales?|zero_point)(?:_inv|_2|_ub)?$|absmax$|SCB$")


def left_over_quantization(path: Path, config: JsonObject, tensors: Mapping[str, TensorInfo]) -> Finding | None:
    """Return the finding of a config that says its weights are quantized, where all of the folder's tensors are plain.

    ``tensors`` are all those of the folder, by name.
    """
    named = named_quantization(config)
    if named is None or not tensors or any(holds_codes(info) for info in tensors.values()):
        return None
    entry, method = named
    dtypes = Counter(info.dtype for info in tensors.values())
    held = " and ".join(f"{count} in {dtype}" for dtype, count in dtypes.most_common(3))
    message = (
        f"{entry} says that the weights are quantized ({method}), and the files hold no codes: "
        f"{counted(len(tensors), 'plain tensor')}, {held}. It is left over from the base that they were made from"
    )
    fix = f"delete {entry} from config.json, and what is left are the plain weights that the files hold"
    return fault("quantization-left-over", path, message, fix, sum(info.nbytes for info in tensors.values()))


def is_passed_over(config: JsonObject, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether a config names a method that transformers passes over, and all tensors of its folder are plain."""
    return bool(tensors) and passed_over(config) and not any(map(holds_codes, tensors.values()))


def bytes_in_codes(folder: ModelFolder) -> int | None:
    """Return the bytes of a folder's weights, 0 where they are not here; None where the headers show plain weights."""
    checkpoint = folder.whole_checkpoint
    if checkpoint is None:
        return 0
    tensors = checkpoint.tensors.values()
    return sum(info.nbytes for info in tensors) if any(map(holds_codes, tensors)) else None


def files_take(size: int) -> str:
    """Return the part of a message that says how many bytes `bytes_in_codes` found; nothing for none."""
    return f"; the files take {format_bytes(size)}" if size else ""


def holds_codes(info: TensorInfo) -> bool:
    """Return whether a tensor is codes, or the scales of codes, by its header."""
    if info.dtype in _PLAIN or math.prod(info.shape) <= 1:
        return _SCALES.search(info.name) is not None
    return _BUFFERS.search(info.name) is None
