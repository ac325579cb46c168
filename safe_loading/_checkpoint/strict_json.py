"""JSON objects, read strictly, because these files decide which model is built and loaded. Imports no torch.

Python's own parser keeps the last of two equal keys, accepts ``NaN`` and ``1e400``, and reads half a surrogate pair.
Each of these lets two programs read the same file differently, so each is refused here. ``Infinity`` is read where
transformers itself writes it: in a model's config (``time_step_limit`` of Nemotron-H).
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import NoReturn

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, format_bytes

from .faults import fault, listed, raise_faults
from .files import is_lfs_pointer, lfs_pointer, try_open, unreadable

MAX_BYTES = 64 * 1024 * 1024
# The engines copy and write these again and again; the largest published ones, with a name for each of 21 000 classes
# or for each layer that stays as it is, have 2 MB.
_LARGEST_CONFIGS = {
    "config.json": 16 * 1024 * 1024,
    "adapter_config.json": 16 * 1024 * 1024,
    "generation_config.json": 1024 * 1024,
}
_HALF_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_NUMBER = re.compile(r"\d{309}")  # the largest double has 309 digits
_AGAIN = "write the file again with the program that made it, or download it again"
_ENCODE = "save it as UTF-8 without a byte order mark, or download it again"  # as editors and shells of Windows do not
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONSTANT = re.compile(r'(?:"[^"\\]{0,80}"\s{0,9}:\s{0,9})?(?:NaN|-?Infinity)')


def read_json_object(path: Path) -> JsonObject:
    """Read a file that holds one strict JSON object in UTF-8, of a limited size, or raise its fault."""
    value = try_json_object(path)
    if isinstance(value, Finding):
        raise_faults(path, [value])
    return value


def try_json_object(path: Path) -> JsonObject | Finding:
    """Read like :func:`read_json_object`; return the object, or the finding that says why there is none."""
    data = try_json_bytes(path)
    return data if isinstance(data, Finding) else try_parse_file(data, path)


def try_parse_file(data: bytes, path: Path) -> JsonObject | Finding:
    """Parse the bytes of a JSON file, in which an integer that no double can hold is refused."""
    return try_parse(data, str(path), finite=True, infinity=path.name == "config.json")


def try_json_bytes(path: Path) -> bytes | Finding:
    """Return the bytes of a file of a limited size that should hold JSON, or the finding that says why not."""
    file = try_open(path)
    if isinstance(file, Finding):
        return file
    most = min(MAX_BYTES, _LARGEST_CONFIGS.get(path.name, MAX_BYTES))
    try:
        with file:
            # Not the limit at once, for which read() would take memory whatever the file has.
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, most) + 1)
    except OSError as error:
        return unreadable(path, error)
    if len(data) > most:
        what = path.name if path.name in _LARGEST_CONFIGS else "JSON file"
        limit = f"{format_bytes(most)} ({most} bytes), the limit for a {what} of a checkpoint"
        return fault("json-too-large", path, f"is larger than {limit}", "check that it is the right file")
    return lfs_pointer(path) if is_lfs_pointer(data) else data


def try_parse(data: bytes, where: str, *, finite: bool = False, infinity: bool = False) -> JsonObject | Finding:
    """Parse one JSON object in UTF-8 without a byte order mark; ``where`` names the bytes in the finding.

    With ``finite``, an integer that no double can hold is refused, too: whoever computes with it overflows. With
    ``infinity``, ``Infinity`` and ``-Infinity`` are read.
    """
    if is_lfs_pointer(data):
        return lfs_pointer(where)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{data[error.start]:02x}"
        fix = _ENCODE if data.startswith(_MARKS) else _AGAIN
        return fault("json-utf8", where, f"the JSON is not valid UTF-8: {byte} ({error.reason})", fix)
    try:
        value, duplicates = _decode(text, finite=finite, infinity=infinity)
    except RecursionError:
        return fault("json-invalid", where, "the JSON is nested too deeply to be read", _AGAIN)
    except ValueError as error:
        fix = _ENCODE if data.startswith(_MARKS) else _AGAIN
        return fault("json-invalid", where, f"is not valid JSON: {error}{_standing(text, error)}", fix)
    if duplicates:
        twice = f"the JSON holds the same key twice in one object: {listed(duplicates)}"
        return fault("duplicate-key", where, f"{twice}; readers differ in which they keep", _AGAIN)
    if not isinstance(value, dict):
        return fault("json-invalid", where, f"the JSON is a {type(value).__name__}, not an object", _AGAIN)
    return value


def _standing(text: str, error: ValueError) -> str:
    """Return the text that stands where JSON ends: a web page, a comment or a comma is told by its first words."""
    if isinstance(error, json.JSONDecodeError):
        found = text[error.pos : error.pos + 40]
        return f", where it has {found!r}" if found.strip() else ", where it has nothing"
    constant = _CONSTANT.search(text)
    return f", in {constant.group()!r}" if constant else ""


def _decode(text: str, *, finite: bool, infinity: bool) -> tuple[object, list[str]]:
    duplicates: list[str] = []

    def to_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            duplicates.extend(key for key, count in counts.items() if count > 1)
        return result

    # A hook for each number takes as long as all the rest, so it is set only when the text may need it.
    parse_int = _zero_keeps_its_sign if "-0" in text else None
    if finite and _LONG_NUMBER.search(text):
        parse_int = _finite_integer
    constant = _infinity if infinity else _no_constant
    if "\\" not in text:
        value = json.loads(text, parse_constant=constant, parse_float=_finite, parse_int=parse_int)
        # Faster than a hook for each object: without escapes every quotation mark begins or ends a string, and a key
        # that is there twice leaves two marks more than the parsed strings have.
        if type(value) is dict and 2 * _count_strings(value) == text.count('"'):
            return value, []
    value = json.loads(
        text, object_pairs_hook=to_dict, parse_constant=constant, parse_float=_finite, parse_int=parse_int
    )
    if "\\u" in text and _HALF_SURROGATE.search(text):
        # Two halves that belong together have become one character; a half that is left cannot be encoded.
        _refuse_half_surrogates(value)
    return value, duplicates


def _count_strings(document: JsonObject) -> int:
    """Count the strings and keys of an object and of the objects directly in it: all that a header or an index has."""
    objects = [document, *(value for value in document.values() if type(value) is dict)]
    return sum(map(len, objects)) + sum([type(text) is str for values in objects for text in values.values()])


def _refuse_half_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("a \\u escape is half of a surrogate pair, which UTF-8 cannot encode") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _infinity(name: str) -> float:
    return _no_constant(name) if name == "NaN" else float(name)


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number:.40} is larger than any floating-point number")
    return value


def _finite_integer(digits: str) -> int | float:
    _finite(digits)
    return _zero_keeps_its_sign(digits)


def _zero_keeps_its_sign(digits: str) -> int | float:
    # As in the safetensors reader: -0 is a float, which is refused wherever an integer is expected.
    return -0.0 if digits == "-0" else int(digits)
