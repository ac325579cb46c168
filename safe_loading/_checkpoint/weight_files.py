"""Which weight files of a folder are read: chosen as transformers and peft choose them. Imports no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safe_loading._core.report import Finding

from .faults import fault, listed, note
from .files import LFS_FIX, not_contained, pointed_bytes, unreadable
from .json_files import JsonFiles
from .mlx import MLX_WEIGHTS

Kind = Literal["model", "adapter"]
ADAPTER_SINGLE, ADAPTER_PICKLE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"
MODEL_SINGLE = "model.safetensors"
MODEL_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_ITS_FOLDER = ", and pass the folder that this writes"
# Weights as other programs keep them for themselves, and the road to a folder of transformers.
_OF_OTHERS = {
    r"model_world_size_\d+_rank_\d+\.pt": f"merge these shards with verl (verl.model_merger){_ITS_FOLDER}",
    r"lit_model\.pth(\.lora)?": f"convert this model of LitGPT (merge_lora, then convert_from_litgpt){_ITS_FOLDER}",
    r"consolidated([.-].+)?\.(pth|safetensors)": "take the files in the format of transformers that its publisher has",
    r"common\.pt": f"convert this checkpoint of Megatron (export_ckpt of Megatron-Bridge's AutoBridge){_ITS_FOLDER}",
    r"global_step\d+": (
        "run `python zero_to_fp32.py . OUTPUT --safe_serialization` in it, which DeepSpeed left there, copy "
        "config.json and the tokenizer into OUTPUT, and pass that"
    ),
    r"__\d+_\d+\.distcp|pytorch_model_fsdp_\d+": (
        "merge these shards with `accelerate merge-weights FOLDER OUTPUT`, where FOLDER is the one with .metadata, "
        "copy config.json and the tokenizer into OUTPUT, and pass that"
    ),
}

_CONVERT_ONE = """\
import torch, safetensors.torch
weights = torch.load({source!r}, map_location="cpu", weights_only=True)
weights = weights.get("state_dict", weights)
weights = {{name: w.clone(memory_format=torch.contiguous_format) for name, w in weights.items()}}
safetensors.torch.save_file(weights, {target!r}, metadata={{"format": "pt"}})"""
_CONVERT_SHARDS = """\
import json, pathlib, torch, safetensors.torch
folder, source, target = pathlib.Path({folder!r}), {source!r}, {target!r}
index = json.loads((folder / source).read_text(encoding="utf-8"))
renamed = {{old: old.replace("pytorch_model", "model").removesuffix(".bin") + ".safetensors" for old in set(index["weight_map"].values())}}
for old, new in renamed.items():
    weights = torch.load(folder / old, map_location="cpu", weights_only=True)
    weights = {{name: w.clone(memory_format=torch.contiguous_format) for name, w in weights.items()}}
    safetensors.torch.save_file(weights, folder / new, metadata={{"format": "pt"}})
index["weight_map"] = {{name: renamed[old] for name, old in index["weight_map"].items()}}
(folder / target).write_text(json.dumps(index, indent=2), encoding="utf-8")"""  # noqa: E501 - a snippet to paste


@dataclass(frozen=True)
class Weights:
    """The weight file of a folder, or the index of its weight files."""

    kind: Kind
    path: Path
    is_index: bool


def find_weights(
    folder: Path, names: Collection[str], *, read: JsonFiles, variant: str | None = None, kind: Kind | None = None
) -> tuple[Weights | None, list[Finding]]:
    """Choose the weight file or index as transformers and peft do: a single file before an index, never a pickle.

    ``names`` are those that :func:`names_in` returned. ``variant`` ("fp16") is for models only. By default the folder
    is read as an adapter when it holds an adapter and no model weights.
    """
    single, index = names_of_model(names, variant)
    configured = _configured(folder, names, read)
    if isinstance(configured, Finding):
        return None, [configured]
    if kind == "adapter" or (kind is None and configured is None and kind_of(names, variant) == "adapter"):
        if ADAPTER_SINGLE in names:
            return Weights("adapter", folder / ADAPTER_SINGLE, False), []
        if MLX_WEIGHTS in names:
            return Weights("adapter", folder / MLX_WEIGHTS, False), []
        return None, [_no_weights(folder, names, [(ADAPTER_PICKLE, ADAPTER_SINGLE)])]
    # From here on in the order of transformers' _get_resolved_checkpoint_files: config, single file, index.
    if configured is not None:
        return Weights("model", configured, configured.name.endswith(".index.json")), []
    if single in names:
        findings = _two_checkpoints(folder, single, index) if index in names else []
        return Weights("model", folder / single, False), findings
    if index in names:
        return Weights("model", folder / index, True), []
    pickles = [_with_variant(name, variant) for name in MODEL_PICKLES]
    # model.pth: as LitGPT's convert_from_litgpt writes it, with the names of transformers.
    pairs = [*zip(pickles, (single, index), strict=True), ("model.pth", single)]
    return None, [_no_weights(folder, names, pairs)]


def kind_of(names: Collection[str], variant: str | None = None) -> Kind:
    """Return the kind of a folder by the names in it; trainers save the base's config.json beside an adapter, too."""
    held = set(names)
    if held & set(names_of_model(names, variant)):
        return "model"
    if "config.json" not in held:
        return "adapter" if held & {ADAPTER_SINGLE, ADAPTER_PICKLE, ADAPTER_CONFIG} else "model"
    if held & {_with_variant(name, variant) for name in MODEL_PICKLES}:
        return "model"
    return "adapter" if held & {ADAPTER_SINGLE, ADAPTER_PICKLE, MLX_WEIGHTS} else "model"


def names_in(folder: Path) -> list[str] | Finding:
    """Return the sorted names in a folder, or the finding that says why it cannot be listed."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except NotADirectoryError:
        return fault("not-a-folder", folder, "is not a folder", "pass the folder that holds the checkpoint")
    except (OSError, ValueError) as error:
        return unreadable(folder, error)


def conversion_command(folder: Path, source: str, target: str) -> str:
    """Return the shell command that turns a pickle, or the index of several, into safetensors in the same folder."""
    if source.endswith(".json"):
        code = _CONVERT_SHARDS.format(folder=str(folder), source=source, target=target)
    else:
        code = _CONVERT_ONE.format(source=str(folder / source), target=str(folder / target))
    return f"python -c {shlex.quote(code)}"


def names_of_model(names: Collection[str], variant: str | None) -> tuple[str, str]:
    """Return the names of a single file and of an index: those of transformers, or of diffusers where these are there.

    The variant stands before the last suffix with both (diffusers 0.42).
    """
    ours, theirs = (
        (_with_variant(f"{stem}.safetensors", variant), _with_variant(f"{stem}.safetensors.index.json", variant))
        for stem in ("model", "diffusion_pytorch_model")
    )
    return theirs if set(ours).isdisjoint(names) and not set(theirs).isdisjoint(names) else ours


def _with_variant(name: str, variant: str | None) -> str:
    if variant is None:
        return name
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{variant}.{suffix}"


def _configured(folder: Path, names: Collection[str], read: JsonFiles) -> Path | Finding | None:
    """Return the file that ``transformers_weights`` of config.json names, which transformers prefers to all others."""
    config = read.try_read(folder / "config.json") if "config.json" in names else None
    weights = config.get("transformers_weights") if isinstance(config, dict) else None
    if weights is None:
        return None
    if not isinstance(weights, str) or not weights.endswith((".safetensors", ".safetensors.index.json")):
        message = f"transformers_weights is {weights!r}, which is not a safetensors file"
    elif reason := not_contained(folder, weights):
        message = f"transformers_weights: {reason}"
    else:
        return folder / weights
    fix = "name a safetensors file or index of this folder, or remove the entry"
    return fault("config-weights", folder / "config.json", message, fix)


def _two_checkpoints(folder: Path, single: str, index: str) -> list[Finding]:
    message = f"holds both {single!r} and {index!r}; transformers reads {single!r} and ignores the index and its shards"
    fix = "delete the one that you do not need; it is probably left over from an earlier save"
    return [note("warning", "two-checkpoints", folder, message, fix)]


def _no_weights(folder: Path, names: Collection[str], pickles: list[tuple[str, str]]) -> Finding:
    for source, target in pickles:
        if source in names:
            message = f"the weights are a pickle, which can run code when it is read, and there is no {target!r}"
            fix = f"convert it once (this reads tensors only):\n{conversion_command(folder, source, target)}"
            stem, _, suffix = source.removesuffix(".index.json").rpartition(".")
            pickled = [name for name in names if name.startswith(stem) and name.endswith(suffix)]
            pointers = [name for name in pickled if pointed_bytes(folder / name) is not None]
            if pointers:
                message += f"; {listed(pointers)} {'is a pointer' if len(pointers) == 1 else 'are pointers'} of Git LFS"
                fix = f"{LFS_FIX}, and then {fix}"
            return fault("pickle-only", folder / source, message, fix)
    expected = " or ".join(dict.fromkeys(repr(target) for _, target in pickles))
    others = [name for name in names if name.endswith((".safetensors", ".gguf", *PICKLE_SUFFIXES))]
    instead = f"; it holds {listed(others)}" if others else ""
    fix = "check the path and the variant, or download or copy the weights"
    fix = next((to for of, to in _OF_OTHERS.items() if any(re.fullmatch(of, name) for name in names)), fix)
    if others and all(name.endswith(".gguf") for name in others):
        instead += ", which llama.cpp reads"
        fix = "pass a folder that transformers saved, of the model that the GGUF file was made from"
    return fault("weights-missing", folder, f"holds no weights: {expected} does not exist{instead}", fix)
