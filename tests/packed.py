"""Tiny bases that transformers packed with bitsandbytes and saved, of every kind of packing, for tests to share."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from models import save_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

Tensors = dict[str, torch.Tensor]
_FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_quant_type": "nf4"}
PACKINGS: dict[str, dict[str, Any]] = {
    "nf4": _FOUR,
    "fp4": {**_FOUR, "bnb_4bit_quant_type": "fp4"},
    "nf4 nested": {**_FOUR, "bnb_4bit_use_double_quant": True},
    "nf4 as bfloat16": {**_FOUR, "bnb_4bit_quant_storage": torch.bfloat16},
    "nf4 nested as float16": {**_FOUR, "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.float16},
    "nf4 as float32": {**_FOUR, "bnb_4bit_quant_storage": torch.float32},
    "int8": {"load_in_8bit": True},
}


@cache
def packing(kind: str) -> Any:
    """Return the config of a kind of packing."""
    return BitsAndBytesConfig(**PACKINGS[kind])


def save_plain(folder: Path, width: int = 128, **config: Any) -> Path:
    """Save a Llama in bfloat16 of which each row has several blocks, and return its folder."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, **config}
    return save_llama(folder, torch.bfloat16, **sizes)


def load(folder: Path, kind: str | None = None) -> Any:
    """Load a model with transformers alone, packed on the fly where a kind is named."""
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if kind is not None:
        options |= {"quantization_config": packing(kind), "device_map": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def save_packed(plain: Path, folder: Path, kind: str) -> Path:
    """Save a plain base packed, in one file, and return the folder."""
    load(plain, kind).save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a folder's one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    """Change entries of the ``quantization_config`` of a folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))
