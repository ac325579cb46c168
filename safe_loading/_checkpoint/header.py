"""The header of a safetensors file, with every check that needs no tensor byte. Imports no torch.

A file is ``N`` (8 bytes, little-endian), a JSON object of ``N`` bytes, and the tensors without a gap between them.
``read_header`` refuses every file that the safetensors reader refuses, and some that it accepts: duplicate keys (the
reader keeps the last), entries with additional keys or written as arrays, a header that begins with white space, a
``null`` for metadata, sizes beyond 63 bits, and more tensors than any model has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, counted, format_bytes

from .faults import fault, json_kind, listed, raise_faults, truncated
from .files import is_lfs_pointer, lfs_pointer, try_open, unreadable
from .strict_json import try_parse

MAX_HEADER_BYTES = 100_000_000
# Far more than any model has: the 671 billion parameters of DeepSeek-V3 are some 90 000 tensors, in 163 files. Without
# a limit, a header of 60 MB that lists empty tensors takes every reader 12 s and 800 MB.
MAX_TENSORS = 200_000
_MAX_COMMAS = 16 * MAX_TENSORS
BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The bits of one element of each dtype, by its safetensors name."""

_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
_MAX_INT64 = 2**63 - 1
_MOST_BITS = 8 * _MAX_INT64
# Frameworks whose weights are the transpose of torch's, or have another layout, under names that may be the same.
_OTHER_LAYOUTS = frozenset({"tf", "flax", "jax", "paddle", "pd"})
_AGAIN = "download or copy the file again, or save it again"
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_OF_WEIGHTS = (".weight", ".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B")
_GATHER = (
    "run DeepSpeed's `zero_to_fp32.py` on its own checkpoint and save what it makes, or save the model again with "
    "`stage3_gather_16bit_weights_on_model_save: true` in the config of DeepSpeed"
)
_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes; convert it to safetensors"),
    (b"\x80", "a Python pickle; convert it to safetensors"),
    (b"GGUF", "a GGUF file, not a safetensors file"),
    (b"<", "a web page, perhaps the error page of a download; download the file again"),
    (b"{", "JSON without the 8 bytes of its length before it; save the file again"),
)


class TensorInfo(NamedTuple):
    """Where one tensor is in its file; the offsets are from the beginning of the file."""

    name: str
    dtype: str  # its safetensors name, such as "BF16"
    shape: tuple[int, ...]
    start: int
    stop: int  # the offset after its last byte

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes in the file."""
        return self.stop - self.start


# What the class's own __new__ calls in the end; calling it directly saves a tenth of the time of reading headers.
_tensor_info = cast("Callable[[type[TensorInfo], tuple[object, ...]], TensorInfo]", tuple.__new__)


@dataclass(frozen=True)
class Header:
    """The header of one safetensors file."""

    path: Path
    tensors: Mapping[str, TensorInfo]  # by name, in the order of the header
    metadata: Mapping[str, str]
    nbytes: int  # the size of the whole file
    content: bytes = field(repr=False)  # all that is in front of the first tensor byte, as it is in the file

    @property
    def data_start(self) -> int:
        """The offset of the first tensor byte."""
        return len(self.content)


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; no tensor byte is read. The error names all invalid tensors."""
    header = try_header(path)
    if isinstance(header, list):
        raise_faults(path, header)
    return header


def try_header(path: Path) -> Header | list[Finding]:
    """Read like :func:`read_header`; return the header, or all the findings that say why there is none."""
    file = try_open(path)
    if isinstance(file, Finding):
        return [file]
    try:
        with file:
            size = os.fstat(file.fileno()).st_size
            content = _header_bytes(path, file, size)
    except OSError as error:
        return [unreadable(path, error)]
    if isinstance(content, Finding):
        return [content]
    document = try_parse(content[8:], f"{path}: the header")
    if isinstance(document, Finding):
        return [document]
    return _check_document(path, document, size, content)


def _header_bytes(path: Path, file: BinaryIO, size: int) -> bytes | Finding:
    """Return the header with its length in front, or the finding that says why it cannot be one."""
    head = file.read(8)
    if len(head) < 8:
        what = "is empty" if not head else f"holds {len(head)} bytes, fewer than the 8 of the header's length"
        return fault("truncated", path, what, _AGAIN)
    length = int.from_bytes(head, "little")
    if is_lfs_pointer(head + file.read(64)):
        return lfs_pointer(path)
    if not 0 < length <= MAX_HEADER_BYTES:
        kind = next((f"; it looks like {kind}" for magic, kind in _OTHER_FORMATS if head.startswith(magic)), "")
        limits = f"between 1 and {MAX_HEADER_BYTES}"
        message = f"gives the length of its header as {length} bytes; it must be {limits}{kind}"
        return fault("header-length", path, message, _AGAIN)
    # Checked before the length is used: it may claim 100 MB, of which read() would allocate a buffer first.
    if 8 + length > size:
        return truncated(path, size, 8 + length, "for the header alone")
    file.seek(8)
    data = file.read(length)
    if len(data) < length:
        # Another process truncates the file while it is read.
        return truncated(path, 8 + len(data), 8 + length, "for the header alone")
    if not data.startswith(b"{"):
        message = f"the header begins with {data[:1]!r}, not with '{{': this is not a safetensors file"
        return fault("header-start", path, message, _AGAIN)
    # Counted before parsing. Names may hold these characters too, so the counts are never too low.
    if data.count(b"{") > MAX_TENSORS + 2 or data.count(b",") > _MAX_COMMAS:
        message = f"describes more than {MAX_TENSORS} tensors in {format_bytes(length)} of header"
        return fault("header-bomb", path, message, "save it in several files; do not trust it until you know why")
    return head + data


def _check_document(path: Path, document: JsonObject, size: int, content: bytes) -> Header | list[Finding]:
    data_start = len(content)
    findings: list[Finding] = []
    metadata = document.pop("__metadata__", {})
    reason = _metadata_fault(metadata)
    if reason is not None:
        findings.append(fault("metadata", path, f"__metadata__ {reason}; it must map text to text", _AGAIN))
    elif metadata.get("format") in _OTHER_LAYOUTS:
        message = f"its metadata has format {metadata['format']!r}, which lays weights out differently from 'pt'"
        findings.append(fault("other-format", path, message, "convert it with that framework, or load its 'pt' files"))
    tensors: dict[str, TensorInfo] = {}
    end, in_order = data_start, True
    for name, entry in document.items():
        info = _tensor(name, entry, data_start)
        if isinstance(info, TensorInfo):
            tensors[name] = info
            in_order = in_order and info.start == end
            end = info.stop
        else:
            code, reason = info
            findings.append(fault(code, path, f"tensor {name!r}: {reason}", _AGAIN))
    if len(tensors) == len(document) and not (in_order and end == size):
        # Overlaps and holes can be found only if every tensor has valid offsets.
        findings += _layout_faults(path, tensors, size, data_start)
    findings += _emptied(path, tensors)
    return findings or Header(path, tensors, metadata, size, content)


def _emptied(path: Path, tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    """Return the fault of weights that ZeRO-3 emptied: of shape [0], where an engine's empty matrix is [0, columns].

    Biases, buffers and codes are not looked at: those may be empty by right, and ZeRO-3 empties the weights with them.
    """
    empty = [
        name
        for name, info in tensors.items()
        if info.shape == (0,) and info.dtype in _FLOATS and name.removesuffix(".default").endswith(_OF_WEIGHTS)
    ]
    if not empty:
        return []
    message = (
        f"holds {counted(len(empty), 'weight')} without an element (shape [0]), as DeepSpeed ZeRO-3 leaves them when a "
        f"model is saved without gathering its parameters: {listed(empty)}"
    )
    return [fault("tensor-empty", path, message, _GATHER)]


def _metadata_fault(metadata: object) -> str | None:
    if not isinstance(metadata, dict):
        return f"is {json_kind(metadata)}"
    wrong = [key for key, value in metadata.items() if not isinstance(value, str)]
    return f"holds a value that is {json_kind(metadata[wrong[0]])} under {listed(wrong)}" if wrong else None


def _tensor(name: str, entry: object, data_start: int) -> TensorInfo | tuple[str, str]:
    """Return where a tensor is, or the code and the reason of its fault.

    Written for speed, because it runs for each of perhaps 90 000 tensors.
    """
    if type(entry) is not dict or entry.keys() != _ENTRY_KEYS:
        return "tensor-entry", _entry_fault(entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    # bool is a subclass of int, hence type() and not isinstance().
    bits = BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        known = ", ".join(BITS)
        return "dtype", f"dtype is {dtype!r}, which is not one of {known}; a newer format, or a damaged header"
    if type(shape) is not list:
        return "shape", _shape_fault(shape)
    nbits = bits
    for length in shape:
        if type(length) is not int or length < 0:
            return "shape", _shape_fault(shape)
        nbits *= length
        if nbits > _MOST_BITS:  # checked in the loop: the product of a million lengths takes an hour
            return "shape", f"shape {_short(shape)} overflows 63 bits"
    if type(offsets) is not list or len(offsets) != 2 or not type(offsets[0]) is type(offsets[1]) is int:
        return "offsets", f"data_offsets is {_short(offsets)}, which is not a pair of integers"
    start, stop = offsets
    if not 0 <= start <= stop <= _MAX_INT64:
        return "offsets", f"data_offsets {_short(offsets)} is reversed, negative or beyond 63 bits"
    if nbits != (stop - start) * 8 or nbits == 0:
        reason = _size_fault(shape, dtype, bits, nbits, start, stop)
        if reason is not None:
            return reason
    return _tensor_info(TensorInfo, (name, dtype, tuple(shape), data_start + start, data_start + stop))


def _shape_fault(shape: object) -> str:
    return f"shape is {_short(shape)}, which is not a list of integers from 0"


def _entry_fault(entry: object) -> str:
    expected = "it must be an object of dtype, shape and data_offsets"
    if not isinstance(entry, dict):
        return f"its entry is {json_kind(entry)}; {expected}"
    missing, extra = sorted(_ENTRY_KEYS - entry.keys()), sorted(entry.keys() - _ENTRY_KEYS)
    reasons = [f"has no {listed(missing)}"] if missing else []
    reasons += [f"has additional keys: {listed(extra)}"] if extra else []
    return f"its entry {' and '.join(reasons)}; {expected}"


def _size_fault(shape: list[int], dtype: str, bits: int, nbits: int, start: int, stop: int) -> tuple[str, str] | None:
    strides_bits = bits
    for length in shape:
        # Even if a dimension of zero makes the size 0: no engine can compute the strides of the others.
        strides_bits *= length or 1
        if strides_bits > _MAX_INT64:
            return "shape", f"shape {_short(shape)} overflows 63 bits"
    if nbits % 8:
        reason = f"shape {_short(shape)} x {bits} bits of {dtype} is {nbits} bits, which is not a whole number of bytes"
        return "tensor-size", reason
    if nbits != (stop - start) * 8:
        needs = f"shape {_short(shape)} x {dtype} needs {nbits // 8} bytes"
        return "tensor-size", f"{needs}, but data_offsets [{start}, {stop}] hold {stop - start}"
    return None


def _layout_faults(path: Path, tensors: Mapping[str, TensorInfo], size: int, data_start: int) -> list[Finding]:
    """Return overlaps, holes and a wrong end. Offsets in the messages are from the beginning of the file."""
    findings: list[Finding] = []
    end, before = data_start, "the header"
    for info in sorted(tensors.values(), key=attrgetter("start", "stop")):
        if info.start != end:
            where = f"tensor {info.name!r} begins at byte {info.start} of the file, but {before} ends at byte {end}"
            if info.start < end:
                findings.append(fault("overlap", path, f"{where}: they overlap", _AGAIN, end - info.start))
            else:
                hole = info.start - end
                findings.append(fault("hole", path, f"{where}: {hole} bytes belong to no tensor", _AGAIN, hole))
        if info.stop >= end:
            end, before = info.stop, f"tensor {info.name!r}"
    if end > size:
        incomplete = [info.name for info in tensors.values() if info.stop > size]
        findings.append(truncated(path, size, end, f"({format_bytes(end)}); incomplete: {listed(incomplete)}"))
    elif end < size:
        message = f"holds {size - end} bytes after {before}, which ends at byte {end} of {size}"
        findings.append(fault("trailing-bytes", path, message, _AGAIN, size - end))
    return findings


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
