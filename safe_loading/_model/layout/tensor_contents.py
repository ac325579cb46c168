"""Checks that need the bytes of a checkpoint's tensors: NaN, infinity, and bits that differ from those written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.faults import fault, note
from safe_loading._checkpoint.files import open_regular, unreadable
from safe_loading._checkpoint.header import Header, TensorInfo
from safe_loading._checkpoint.strict_json import try_json_object
from safe_loading._checkpoint.tensor_hash import new_hash, recorded_hash
from safe_loading._core.report import Finding, MiB
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.formats.packed_on_disk import described_weights
from safe_loading._model.tensor_values import as_buffer, value_range, widened
from safe_loading.errors import CheckpointError

REPORT = "merge_report.json"
"""What merge_lora_checkpoint writes next to the weights, with a hash of each tensor."""
_BLOCK_BYTES = 4 * MiB


def check_contents(folder: Path, headers: Mapping[str, Header]) -> Iterator[Finding]:
    """Read every tensor once, in blocks, and yield its faults, also by the folder's record of a merge."""
    # codes in 4 bits, which may be stored in a floating-point dtype: no bits of theirs are a NaN
    codes = described_weights(name for header in headers.values() for name in header.tensors)
    hashes = _recorded_hashes(folder)
    if isinstance(hashes, Finding):
        yield hashes
        hashes = {}
    buffer = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    for header in headers.values():
        try:
            with open_regular(header.path) as file:
                for info in header.tensors.values():
                    dtype = None if info.name in codes else DTYPES.get(info.dtype)
                    yield from _check_tensor(file.fileno(), header.path, info, dtype, hashes.get(info.name), buffer)
        except OSError as error:
            yield unreadable(header.path, error)
        except CheckpointError as error:
            fix = "check it again when its writer is done"
            yield fault("changed", header.path, f"cannot be read whole: {error}", fix)


def _recorded_hashes(folder: Path) -> dict[str, str] | Finding:
    """Return the hash that a merge recorded for each tensor, or a finding when the record is damaged."""
    path = folder / REPORT
    if not path.is_file():
        return {}
    document = try_json_object(path)
    if isinstance(document, Finding):
        return document
    tensors = document.get("tensors")
    entries = tensors.items() if isinstance(tensors, dict) else ()
    return {name: found for name, facts in entries if (found := recorded_hash(facts)) is not None}


def _check_tensor(
    descriptor: int, path: Path, info: TensorInfo, dtype: torch.dtype | None, recorded: str | None, buffer: torch.Tensor
) -> Iterator[Finding]:
    digest, kinds = new_hash(), set[str]()
    memory = as_buffer(buffer)
    for at in range(0, info.nbytes, len(memory)):
        count = min(len(memory), info.nbytes - at)
        read_into(descriptor, memory[:count], info.start + at)
        if recorded is not None:
            digest.update(memory[:count])
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            kinds |= _kinds_of_not_finite(buffer[:count].view(dtype))
    where, again = f"{path}: {info.name}", "download or copy the file again, or save the model again"
    if "NaN" in kinds:
        yield fault("nan", where, "holds NaN, so everything that is computed with it will be NaN", again, info.nbytes)
    if "infinity" in kinds:
        fix = "none if it is a mask; otherwise save the model again"
        yield note("warning", "infinity", where, "holds infinity", fix, info.nbytes)
    if recorded is not None and digest.hexdigest() != recorded:
        message = f"its hash is {digest.hexdigest()}, {os.fspath(path.parent / REPORT)!r} says {recorded}"
        yield fault("hash-differs", where, f"{message}: the file is damaged or from another save", again, info.nbytes)


def _kinds_of_not_finite(values: torch.Tensor) -> set[str]:
    """Return which of NaN and infinity a block holds."""
    values = widened(torch.view_as_real(values) if values.is_complex() else values)
    low, high = value_range(values)
    # A NaN hides an infinity in the range; only then is a second pass needed to tell.
    if math.isnan(low):
        return {"NaN", *(["infinity"] if bool(values.isinf().any()) else [])}
    return {"infinity"} if math.isinf(low) or math.isinf(high) else set()
