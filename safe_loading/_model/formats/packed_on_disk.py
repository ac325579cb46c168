"""Weights of bitsandbytes on disk: codes, and the statistics that decode them, by header and JSON. Imports no torch.

transformers and bitsandbytes judge none of it: a statistic that is missing, short or of another save ends in an
attribute that no ``Parameter`` has, in a model that computes something else, or in a read beyond the end of a tensor.
Names, shapes and sizes say all of that before a weight is read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from safe_loading._checkpoint.base_config import named_quantization
from safe_loading._checkpoint.copy_bytes import range_of
from safe_loading._checkpoint.faults import fault, listed, raise_faults
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.strict_json import try_parse
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

FOUR_BITS, EIGHT_BITS = "4 bits", "8 bits"
NESTED_BLOCK = 256  # elements of absmax that share a statistic, with double quantization: bitsandbytes has no other
_STATE = ".quant_state.bitsandbytes__"  # and the type of code: transformers' name for bitsandbytes' own description
STATES = {f"{_STATE}{kind}": kind for kind in ("nf4", "fp4")}
# bitsandbytes.functional.get_4bit_type (0.50), whose kernels have them built in; in the order of the codes.
NUMBERS = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}
_TABLES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_OF_FOUR_BITS = (*(f".{role}" for role in _TABLES), *STATES)
_ROW_SCALES, WEIGHT_FORMAT = "SCB", "weight_format"
_STORAGE = {"uint8": "U8", "bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # of 4-bit codes
_FLOATS = ("F32", "F16", "BF16")
_BLOCKS = frozenset(2**power for power in range(5, 13))
_LARGEST_STATE = 4096  # bytes; those of bitsandbytes have some 170
_AGAIN = "download or copy the folder again, or quantize the model again and save it"


class PackedWeight(NamedTuple):
    """A weight that the disk holds as codes of bitsandbytes, whose statistics fit it."""

    kind: str
    info: TensorInfo  # the codes
    shape: tuple[int, int]  # of the weight that they stand for
    statistics: Mapping[str, TensorInfo]  # by their names in the format
    facts: JsonObject  # of 4 bits, bitsandbytes' description: blocksize, nested_blocksize, nested_offset, ...


class _UnfitError(Exception):
    """The reason why a weight cannot be decoded; those of one ``kind`` are told together."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def read_packed_weight(name: str, checkpoint: Checkpoint, kind: str) -> PackedWeight | None:
    """Return the weight of which a tensor holds the codes; None for any other tensor. A damaged weight is refused."""
    try:
        return _read(name, checkpoint, [kind])
    except _UnfitError as reason:
        raise_faults(checkpoint.folder, [_finding(name, checkpoint, str(reason), [])])


def codes_among(tensors: Mapping[str, object]) -> frozenset[str]:
    """Return the names of the tensors that are codes in 4 or 8 bits, by the statistics beside them."""
    found = described_weights(tensors) | _with_row_scales(tensors)
    return frozenset(found & tensors.keys())


def packed_findings(path: Path, config: JsonObject, checkpoint: Checkpoint) -> list[Finding]:
    """Return the findings of weights whose statistics do not decode them, where the config at ``path`` names some."""
    settings = _settings(config)
    if settings is None:
        return []
    reasons: dict[str, list[tuple[str, _UnfitError]]] = defaultdict(list)
    kinds: dict[str, str] = {}
    for name in sorted(_candidates(checkpoint.tensors, settings)):
        try:
            packed = _read(name, checkpoint)
            if packed is None:
                raise _UnfitError("alone", "holds codes, and no statistics that decode them are there")
            kinds[packed.kind] = name
        except _UnfitError as reason:
            reasons[reason.kind].append((name, reason))
    findings = []
    for found in reasons.values():
        name, first = found[0]
        findings.append(_finding(name, checkpoint, str(first), [other for other, _ in found[1:]]))
    return findings or _other_bits(path, settings, kinds)


def _settings(config: JsonObject) -> JsonObject | None:
    """Return a config's entry about bitsandbytes; None where it says that the weights are plain or another method's."""
    named = named_quantization(config)
    if named is None or not named[1].startswith("bitsandbytes"):
        return None
    section: JsonObject = config
    for key in named[0].split("."):
        section = section[key]
    return section


def _other_bits(path: Path, settings: JsonObject, kinds: Mapping[str, str]) -> list[Finding]:
    """Return the finding of a config that names the other number of bits: transformers makes its layers by that."""
    asked = FOUR_BITS if settings.get("load_in_4bit") else EIGHT_BITS if settings.get("load_in_8bit") else None
    if asked is None or not kinds or asked in kinds:
        return []
    (held, name), *_ = kinds.items()
    right, wrong = ("load_in_4bit", "load_in_8bit") if held == FOUR_BITS else ("load_in_8bit", "load_in_4bit")
    message = f"says that the weights are codes in {asked}, and the files hold codes in {held}, such as {name!r}"
    return [fault("packed-statistics", path, message, f"set {right} to true and {wrong} to false in it")]


def _finding(name: str, checkpoint: Checkpoint, text: str, others: list[str]) -> Finding:
    file = checkpoint.file_of.get(name, checkpoint.folder)
    message = f"{text}; so it is with {len(others)} more: {listed(others)}" if others else text
    size = sum(checkpoint.tensors[each].nbytes for each in (name, *others) if each in checkpoint.tensors)
    return fault("packed-statistics", f"{file}: {name}", message, _AGAIN, size)


def described_weights(tensors: Iterable[str]) -> set[str]:
    """Return the names of the weights in 4 bits that any statistic describes, be the weight there or not."""
    return {name.removesuffix(suffix) for name in tensors for suffix in _OF_FOUR_BITS if name.endswith(suffix)}


def _with_row_scales(tensors: Iterable[str]) -> set[str]:
    return {f"{name.removesuffix(_ROW_SCALES)}weight" for name in tensors if name.endswith(f".{_ROW_SCALES}")}


def _candidates(tensors: Mapping[str, TensorInfo], settings: JsonObject) -> set[str]:
    """Return the names of weights that have statistics, or are stored as nothing but codes are."""
    found = described_weights(tensors) | _with_row_scales(tensors)
    codes = {"U8", _STORAGE.get(str(settings.get("bnb_4bit_quant_storage")), "U8")}
    kept = settings.get("llm_int8_skip_modules")
    kept = {part for part in kept if isinstance(part, str)} if isinstance(kept, list) else set()
    for name, info in tensors.items():
        if name.endswith(".weight") and len(info.shape) == 2 and not any(part in name for part in kept):
            column = info.shape[1] == 1 and info.shape[0] > 1
            if info.dtype == "I8" or (info.dtype in codes and column):
                found.add(name)
    return found


def _read(name: str, checkpoint: Checkpoint, kinds: Sequence[str] = (FOUR_BITS, EIGHT_BITS)) -> PackedWeight | None:
    tensors = checkpoint.tensors
    states = [suffix for suffix in STATES if f"{name}{suffix}" in tensors]
    tables = {role: tensors[f"{name}.{role}"] for role in _TABLES if f"{name}.{role}" in tensors}
    if states or tables:
        if FOUR_BITS not in kinds:
            return None
        return _four_bits(name, checkpoint, states, tables)
    module = name.removesuffix("weight")
    if EIGHT_BITS in kinds and f"{module}{_ROW_SCALES}" in tensors:
        return _eight_bits(name, checkpoint, tensors[f"{module}{_ROW_SCALES}"])
    return None


def _four_bits(name: str, checkpoint: Checkpoint, states: list[str], tables: Mapping[str, TensorInfo]) -> PackedWeight:
    info = _codes_of(name, checkpoint, [*states, *(f".{role}" for role in tables)])
    if len(states) != 1:
        problem = "two descriptions, nf4 and fp4" if states else f"no description of its codes ({name}{_STATE}nf4)"
        raise _UnfitError("state", f"has {problem}, which bitsandbytes needs to decode it")
    facts = _facts(name, checkpoint, states[0])
    rows, columns = facts["shape"]
    elements, stored = rows * columns, tuple(_STORAGE.values())
    if info.dtype not in stored or 2 * info.nbytes != elements + elements % 2:
        raise _UnfitError(
            "codes",
            f"is {info.nbytes} bytes in {info.dtype}; its description says {[rows, columns]}, which is "
            f"{(elements + 1) // 2} bytes of codes in {' or '.join(stored)}",
        )
    blocks, nested = math.ceil(elements / facts["blocksize"]), "nested_blocksize" in facts
    needed = {"absmax": (blocks, ("U8",) if nested else _FLOATS), "quant_map": (16, _FLOATS)}
    if nested:
        needed["nested_absmax"] = math.ceil(blocks / facts["nested_blocksize"]), ("F32",)
        needed["nested_quant_map"] = 256, ("F32",)
    for role in tables.keys() - needed.keys():
        raise _UnfitError(role, f"has {name}.{role}, and its description says nothing of nested statistics")
    for role, (count, dtypes) in needed.items():
        if role not in tables:
            raise _UnfitError(role, f"lacks {name}.{role}, which decodes it")
        _require(tables[role], count, dtypes, f"its {elements} elements in blocks of {facts['blocksize']}")
    return PackedWeight(FOUR_BITS, info, (rows, columns), tables, facts)


def _eight_bits(name: str, checkpoint: Checkpoint, scales: TensorInfo) -> PackedWeight:
    info = _codes_of(name, checkpoint, [scales.name])
    if info.dtype != "I8" or len(info.shape) != 2:
        raise _UnfitError("codes", f"is {info.dtype} {list(info.shape)}, and has {scales.name} as codes in I8 have it")
    _require(scales, info.shape[0], _FLOATS, f"its {info.shape[0]} rows")
    order = checkpoint.tensors.get(f"{name.removesuffix('weight')}{WEIGHT_FORMAT}")
    if order is not None and order.nbytes == 1 and _bytes_of(order, checkpoint) != b"\0":
        raise _UnfitError(
            "order",
            f"{order.name} says that its codes are in the order of a card, which no bitsandbytes reads any more",
        )
    return PackedWeight(EIGHT_BITS, info, (info.shape[0], info.shape[1]), {_ROW_SCALES: scales}, {})


def _codes_of(name: str, checkpoint: Checkpoint, statistics: list[str]) -> TensorInfo:
    info = checkpoint.tensors.get(name)
    if info is None:
        raise _UnfitError("missing", f"the files hold its statistics ({', '.join(statistics)}), and not the weight")
    return info


def _require(info: TensorInfo, count: int, dtypes: tuple[str, ...], because: str) -> None:
    """Refuse a statistic of another size: the engine reads beyond its end, or by another block."""
    in_a_row = sum(size > 1 for size in info.shape) <= 1  # a forward on a CPU with AVX-512 leaves a matrix behind
    if math.prod(info.shape) != count or not in_a_row or info.dtype not in dtypes:
        raise _UnfitError(
            info.name.rpartition(".")[2],
            f"{info.name} is {info.dtype} {list(info.shape)}; {because} need {' or '.join(dtypes)} [{count}]",
        )


def _facts(name: str, checkpoint: Checkpoint, suffix: str) -> JsonObject:
    """Return bitsandbytes' description of a weight, in which every entry has a value that it can have."""
    info = checkpoint.tensors[f"{name}{suffix}"]
    if info.dtype != "U8" or info.nbytes > _LARGEST_STATE:
        raise _UnfitError("state", f"{info.name} is {info.dtype} of {info.nbytes} bytes, and no description of codes")
    facts = try_parse(_bytes_of(info, checkpoint), info.name, finite=True)
    if isinstance(facts, Finding):
        raise _UnfitError("state", f"{info.name}: {facts.message}")
    for key, problem in _wrong_facts(facts, STATES[suffix]):
        raise _UnfitError(key, f"{info.name} says {key}: {facts.get(key)!r:.80}, and {problem}")
    return facts


def _wrong_facts(facts: JsonObject, kind: str) -> Iterator[tuple[str, str]]:
    shape, block = facts.get("shape"), facts.get("blocksize")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        yield "shape", "a weight has two sizes of at least 1"
    if type(block) is not int or block not in _BLOCKS:
        yield "blocksize", f"bitsandbytes has blocks of {min(_BLOCKS)} to {max(_BLOCKS)} elements, a power of two"
    if facts.get("quant_type") != kind:
        yield "quant_type", f"the name of its tensor says {kind}"
    if facts.get("dtype") not in ("float32", "float16", "bfloat16"):
        yield "dtype", "a weight was float32, float16 or bfloat16"
    if not any(key.startswith("nested_") for key in facts):
        return
    if facts.get("nested_blocksize") != NESTED_BLOCK:
        yield "nested_blocksize", f"bitsandbytes has {NESTED_BLOCK}"
    if type(facts.get("nested_offset")) not in (int, float) or not math.isfinite(facts["nested_offset"]):
        yield "nested_offset", "it is a finite number"
    if facts.get("nested_dtype") != "float32":
        yield "nested_dtype", "nested statistics are float32"


def _bytes_of(info: TensorInfo, checkpoint: Checkpoint) -> bytes:
    return bytes(range_of(checkpoint.file_of[info.name], info.start, info.nbytes))
