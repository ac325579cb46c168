"""Safetensors files, indexes and folders, each with one fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def entry(dtype: str = "U8", shape: Any = (1,), start: Any = 0, stop: Any = 1) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def safetensors(header: Mapping[str, Any] | str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file: the header as JSON (text and bytes as they stand), its length (or another one), the data."""
    if isinstance(header, Mapping):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode("utf-8")
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@dataclass(frozen=True)
class BadFile:
    """A bad safetensors file, the code of its finding, and words that its message must hold."""

    data: bytes
    code: str
    words: tuple[str, ...]


U8 = json.dumps(entry())
BAD_FILES: dict[str, BadFile] = {
    "empty": BadFile(b"", "truncated", ("is empty", "download")),
    "seven bytes": BadFile(b"1234567", "truncated", ("7 bytes", "8")),
    "lfs pointer": BadFile(LFS_POINTER, "lfs-pointer", ("Git LFS pointer, not the file", "git lfs pull")),
    "header of no bytes": BadFile(safetensors(b""), "header-length", ("0 bytes", "between 1 and 100000000")),
    "header over the limit": BadFile(safetensors(b"{}", length=100_000_001), "header-length", ("100000001",)),
    "header over 63 bits": BadFile(safetensors(b"{}", length=2**64 - 1), "header-length", (str(2**64 - 1),)),
    "zip": BadFile(b"PK\x03\x04" + b"\x08" * 60, "header-length", ("zip", "torch.save")),
    "pickle": BadFile(b"\x80\x02}q\x00X\x05\x00" + b"\x08" * 60, "header-length", ("pickle",)),
    "web page": BadFile(b"<!DOCTYPE html>" + b" " * 60, "header-length", ("web page",)),
    "header longer than the file": BadFile(
        safetensors(b"{}", length=1000), "truncated", ("it has 10 bytes", "1008 are needed", "998 bytes are missing")
    ),
    "header no object": BadFile(safetensors("[]"), "header-start", ("'['", "'{'")),
    "header with white space in front": BadFile(safetensors(" {}"), "header-start", ("b' '",)),
    "header not UTF-8": BadFile(safetensors(b'{"\xff": 1}'), "json-utf8", ("0xff", "byte 2")),
    "header no JSON": BadFile(safetensors('{"a": }'), "json-invalid", ("column 7",)),
    "header with NaN": BadFile(safetensors('{"a": NaN}'), "json-invalid", ("NaN",)),
    "header with half a surrogate": BadFile(safetensors(f'{{"\\ud800": {U8}}}', b"x"), "json-invalid", ("surrogate",)),
    "header of too many tensors": BadFile(
        safetensors("{" + ",".join(f'"{n}":{{}}' for n in range(200_003)) + "}"), "header-bomb", ("200000 tensors",)
    ),
    "header of a long list": BadFile(safetensors('{"a":[' + "0," * 3_200_001 + "0]}"), "header-bomb", ("6.1 MiB",)),
    "header nested deeply": BadFile(safetensors('{"a":' + "[" * 200_000), "json-invalid", ("nested too deeply",)),
    "header with a number of 5000 digits": BadFile(safetensors('{"a":' + "1" * 5000 + "}"), "json-invalid", ("4300",)),
    "tensor twice": BadFile(safetensors(f'{{"a": {U8}, "a": {U8}}}', b"x"), "duplicate-key", ("'a'",)),
    "dtype twice": BadFile(
        safetensors('{"a": {"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "duplicate-key",
        ("'dtype'",),
    ),
    "metadata key twice": BadFile(safetensors('{"__metadata__":{"k":"1","k":"2"}}'), "duplicate-key", ("'k'",)),
    "metadata null": BadFile(safetensors({"__metadata__": None}), "metadata", ("null",)),
    "metadata a list": BadFile(safetensors({"__metadata__": []}), "metadata", ("list",)),
    "metadata a number": BadFile(safetensors({"__metadata__": {"epoch": 3}}), "metadata", ("int", "'epoch'")),
    "entry a list": BadFile(safetensors({"w": ["U8", [1], [0, 1]]}, b"x"), "tensor-entry", ("'w'", "list")),
    "entry lacking dtype": BadFile(
        safetensors({"w": {"shape": [1], "data_offsets": [0, 1]}}, b"x"), "tensor-entry", ("'w'", "has no 'dtype'")
    ),
    "entry with more": BadFile(
        safetensors({"w": {**entry(), "x": 1}}, b"x"), "tensor-entry", ("'w'", "additional keys: 'x'")
    ),
    "unknown dtype": BadFile(safetensors({"w": entry("F12")}, b"x"), "dtype", ("'w'", "'F12'", "BF16")),
    "dtype a number": BadFile(safetensors({"w": {**entry(), "dtype": 3}}, b"x"), "dtype", ("'w'", "3")),
    "dtype a list": BadFile(safetensors({"w": {**entry(), "dtype": []}}, b"x"), "dtype", ("'w'", "[]")),
    "shape a number": BadFile(safetensors({"w": {**entry(), "shape": 1}}, b"x"), "shape", ("'w'", "is 1,")),
    "shape with true": BadFile(safetensors({"w": entry(shape=[True])}, b"x"), "shape", ("'w'", "[True]")),
    "shape with a float": BadFile(safetensors({"w": entry(shape=[1.0])}, b"x"), "shape", ("'w'", "[1.0]")),
    "shape with -0": BadFile(
        safetensors('{"w": {"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), "shape", ("'w'", "[-0.0]")
    ),
    "shape negative": BadFile(safetensors({"w": entry(shape=[-1, -1])}, b"x"), "shape", ("'w'", "[-1, -1]")),
    "shape over 63 bits": BadFile(safetensors({"w": entry(shape=[2**63, 0], stop=0)}), "shape", (str(2**63),)),
    "shape overflows": BadFile(safetensors({"w": entry(shape=[2**40, 2**40, 0], stop=0)}), "shape", ("overflows",)),
    "offsets three": BadFile(
        safetensors({"w": {**entry(), "data_offsets": [0, 1, 2]}}, b"x"), "offsets", ("'w'", "[0, 1, 2]")
    ),
    "offsets true": BadFile(
        safetensors({"w": entry(start=False, stop=True)}, b"x"), "offsets", ("'w'", "[False, True]")
    ),
    "offsets text": BadFile(safetensors({"w": entry(start="0")}, b"x"), "offsets", ("'w'", "['0', 1]")),
    "offsets reversed": BadFile(safetensors({"w": entry(start=1, stop=0)}, b"x"), "offsets", ("[1, 0]", "reversed")),
    "offsets negative": BadFile(safetensors({"w": entry(start=-1, stop=0)}, b"x"), "offsets", ("[-1, 0]", "negative")),
    "offsets of 4300 digits": BadFile(
        safetensors({"w": entry(start=10**4300 - 2, stop=10**4300 - 1)}), "offsets", ("'w'", "beyond 63 bits")
    ),
    # multiplied to its end, this takes minutes
    "shape of many lengths": BadFile(
        safetensors({"w": entry(shape=[0] + [10**9] * 300_000, stop=0)}), "shape", ("overflows",)
    ),
    "shape of 4300 digits": BadFile(safetensors({"w": entry(shape=[10**4300 - 1] * 2)}, b"x"), "shape", ("overflows",)),
    "size too large": BadFile(
        safetensors({"w": entry("BF16", [2, 3], 0, 14)}, bytes(14)),
        "tensor-size",
        ("'w'", "[2, 3] x BF16 needs 12 bytes", "[0, 14] hold 14"),
    ),
    "size too small": BadFile(
        safetensors({"w": entry("F32", [], 0, 2)}, bytes(2)), "tensor-size", ("4 bytes", "hold 2")
    ),
    "size zero": BadFile(safetensors({"w": entry("F32", [0], 0, 4)}, bytes(4)), "tensor-size", ("0 bytes", "hold 4")),
    "bits that fill no byte": BadFile(
        safetensors({"w": entry("F4", [3], 0, 2)}, bytes(2)), "tensor-size", ("12 bits", "whole number of bytes")
    ),
    "overlap": BadFile(
        safetensors({"a": entry(shape=[4], stop=4), "b": entry(shape=[4], start=2, stop=6)}, bytes(6)),
        "overlap",
        ("tensor 'b' begins", "tensor 'a' ends", "overlap"),
    ),
    "nested overlap": BadFile(
        safetensors({"a": entry(shape=[4], stop=4), "b": entry(shape=[1], start=1, stop=2)}, bytes(4)),
        "overlap",
        ("'a'", "'b'"),
    ),
    "hole": BadFile(
        safetensors({"a": entry(), "b": entry(start=3, stop=4)}, bytes(4)),
        "hole",
        ("'b' begins", "'a' ends", "2 bytes belong to no tensor"),
    ),
    "hole after the header": BadFile(
        safetensors({"a": entry(start=2, stop=3)}, bytes(3)), "hole", ("the header ends",)
    ),
    "bytes after the last tensor": BadFile(
        safetensors({"a": entry()}, bytes(4)), "trailing-bytes", ("3 bytes after tensor 'a'",)
    ),
    "bytes after no tensor": BadFile(safetensors({}, bytes(4)), "trailing-bytes", ("4 bytes after the header",)),
    "tensor cut off": BadFile(
        safetensors({"a": entry(), "b": entry(shape=[9], start=1, stop=10)}, bytes(6)),
        "truncated",
        ("4 bytes are missing", "incomplete: 'b'"),
    ),
}


def shard(tensors: Mapping[str, int]) -> bytes:
    """Return a whole safetensors file that holds these tensors of so many bytes each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors.items():
        header[name] = entry(shape=[size], start=end, stop=end + size)
        end += size
    return safetensors(header, bytes(end))


def write_model(
    folder: Path, shards: Mapping[str, Mapping[str, int]], *, weight_map: Any = None, metadata: Any = None
) -> Path:
    """Write a sharded model folder; ``weight_map`` and ``metadata`` replace what would be true."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(shard(tensors))
    truth = {name: file for file, tensors in shards.items() for name in tensors}
    size = sum(size for tensors in shards.values() for size in tensors.values())
    index = {
        "metadata": {"total_size": size} if metadata is None else metadata,
        "weight_map": truth if weight_map is None else weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def write_adapter(folder: Path, config: Any = None) -> Path:
    """Write an adapter folder; ``config`` replaces a sound adapter_config.json (text as it stands)."""
    folder.mkdir(parents=True, exist_ok=True)
    sound = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "some/base"}
    text = config if isinstance(config, str) else json.dumps(sound if config is None else config)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    factor = {"base_model.model.q.lora_A.weight": entry("F8_E4M3", [8], 0, 8)}
    (folder / "adapter_model.safetensors").write_bytes(safetensors(factor, bytes(8)))
    return folder
