"""The ways in which load_base.py gets the weights of a base to where they are used."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def tensors_of(folder: Path) -> Iterator[tuple[Path, str, dict[str, Any], int]]:
    """Yield each tensor on disk, in the order of the files: its file, name, entry in the header, and first byte."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            yield path, name, entry, 8 + size + entry["data_offsets"][0]


def preadv(folder: Path) -> Any:
    """Read the bytes of all tensors, file by file, into one block of memory."""
    import torch

    paths = sorted(folder.glob("*.safetensors"))
    block = torch.empty(sum(path.stat().st_size for path in paths), dtype=torch.uint8)
    room: memoryview = block.numpy().data
    for path in paths:
        with path.open("rb") as file:
            while done := os.preadv(file.fileno(), [room[: 1 << 30]], file.tell()):
                file.seek(done, os.SEEK_CUR)
                room = room[done:]
    return [block]


def into_place(folder: Path) -> Any:
    """Read each tensor where it is used: an expert into its slice of the fused parameter, a cast through a buffer."""
    import torch

    config = json.loads((folder / "config.json").read_text())
    experts = config.get("num_experts") or config.get("num_local_experts")
    cast = folder.name.endswith("cast")
    places, buffer = dict[object, Any](), torch.empty(1 << 22, dtype=torch.uint8)
    for path, tensors in itertools.groupby(tensors_of(folder), key=lambda found: found[0]):
        with path.open("rb") as file:
            for _, name, entry, begin in tensors:
                flat, step = _place(places, name, entry["shape"], experts).view(-1), len(buffer) // 4
                if not cast:
                    os.preadv(file.fileno(), [flat.view(torch.uint8).numpy().data], begin)
                    continue
                for start in range(0, len(flat), step):
                    part = flat[start : start + step]
                    room = buffer[: 4 * len(part)]
                    os.preadv(file.fileno(), [room.numpy().data], begin + 4 * start)
                    part.copy_(room.view(torch.float32))
    return list(places.values())


def _place(places: dict[object, Any], name: str, shape: list[int], count: int) -> Any:
    import torch

    before, of_expert, after = name.partition(".experts.")
    if not of_expert:
        return places.setdefault(name, torch.empty(shape, dtype=torch.bfloat16))
    number, kind, _ = after.split(".")
    rows = 1 if kind == "down_proj" else 2
    key = before, rows
    if key not in places:
        places[key] = torch.empty(count, rows * shape[0], shape[1], dtype=torch.bfloat16)
    whole = places[key][int(number)]
    return whole[shape[0] :] if kind == "up_proj" else whole[: shape[0]]


def load_file(folder: Path) -> Any:
    """Load by safetensors alone, which maps the files."""
    from safetensors.torch import load_file

    return [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in load_file(path).values()]


def from_pretrained(folder: Path) -> Any:
    """Load the base by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def plain_calls(folder: Path) -> Any:
    """Load the base by transformers, and the adapter by peft."""
    from peft import PeftModel

    return PeftModel.from_pretrained(from_pretrained(folder), folder / "adapter")


def ours(folder: Path) -> Any:
    """Load both by load_peft_on_rank."""
    import torch

    from safe_loading import load_peft_on_rank

    return load_peft_on_rank(folder / "adapter", folder, device="cpu", dtype=torch.bfloat16)


METHODS: dict[str, Callable[[Path], Any]] = {
    "preadv": preadv,
    "into place": into_place,
    "load_file": load_file,
    "from_pretrained": from_pretrained,
    "and PeftModel": plain_calls,
    "safe_loading": ours,
}
