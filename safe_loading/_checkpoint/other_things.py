"""Things that people pass in the place of a folder with a checkpoint, by their names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from safe_loading._core.report import counted

from .header import try_header
from .mlx import MLX_WEIGHTS
from .trainer_folder import checkpoints_of, last_whole
from .weight_files import kind_of

_ADDRESS = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+(?:/[\w.-]+)?)(?:/(?:tree|blob|resolve)/([^/?#]+)[^?#]*)?"
    r"/?(?:[?#].*)?"
)
_WEIGHTS = (".safetensors", ".bin")
_GGUF = ".gguf"
_OF_GGUF = "pass a folder that transformers saved, of the model that they were made from"
_OF_DIFFUSERS = "pytorch_lora_weights.safetensors"
_OWN = ("config.json", "adapter_config.json")
_FLAT = re.compile(r"lora_(?:unet|te\d?|transformer)_\w+\.")
# How kohya's scripts, diffusers and what trains for ComfyUI name the factors of a LoRA for a pipeline, in one file.
_OF_PIPELINE = re.compile(
    rf"{_FLAT.pattern}.+|.+\.lora(?:_|\.)(?:down|up)\.weight"
    r"|(?:diffusion_model|unet|text_encoder(?:_\d)?|transformer(?=\.\w*transformer_blocks\.))\..+\.lora_[AB]\.weight"
)
_THERE = "load it there, with load_lora_weights of the pipeline"
# What Tinker calls the head, and all experts of a layer as one.
_OF_TINKER = re.compile(r".+\.(?:unembed_tokens|experts\.w[123])\.lora_[AB]\.weight")
_TINKER_FIX = (
    "convert it with build_lora_adapter of tinker_cookbook.weights, or merge it with build_hf_model, and pass what "
    "they write"
)
_OF_TRAINERS = ("training_args.bin", "optimizer.bin", "scheduler.bin")  # which are no weights


class OtherThing(NamedTuple):
    """The name of a thing that is no folder with a checkpoint, and the right thing in its place."""

    message: str
    fix: str
    download: str = ""  # the command that brings the right thing to this machine


def other_thing(path: Path, *, gguf: bool = False) -> OtherThing | None:
    """Return the name of the thing at a path, unless it may be a folder with a checkpoint.

    With ``gguf`` a folder of GGUF files is one: transformers reads the file that ``gguf_file`` names.
    """
    if path.is_file():
        return _one_file(path)
    names = _names_in(path)
    if _OF_DIFFUSERS in names and not {*_OWN} & {*names}:
        return OtherThing(f"holds a LoRA that diffusers wrote for a whole pipeline ({_OF_DIFFUSERS})", _THERE)
    if any(name in _OWN for name in names):
        return None
    if MLX_WEIGHTS in names:
        message = f"holds the weights of an adapter of MLX ({MLX_WEIGHTS}) without their {_OWN[1]}"
        return OtherThing(message, f"copy the {_OWN[1]} there that mlx_lm.lora wrote beside them")
    if any(name.endswith(_WEIGHTS) for name in names):
        return next((lora for name in sorted(names) if (lora := _lora_of_pipeline(path / name)) is not None), None)
    of_gguf = sorted(name for name in names if name.endswith(_GGUF))
    if of_gguf and gguf:
        return None
    if of_gguf:
        return OtherThing("holds GGUF files, which llama.cpp reads", f"{_OF_GGUF}; {_load_gguf(of_gguf[0])}")
    inside = checkpoints_of(path)
    if not inside:
        return None
    chosen = last_whole(path) or inside[-1]
    return OtherThing(
        f"holds no checkpoint itself, but {len(inside)} of a Trainer in folders of their own",
        f"pass {str(chosen)!r}, the latest{'' if chosen == inside[-1] else ' whole one'} of them",
    )


def adapters_inside(path: Path) -> OtherThing | None:
    """Return the adapters in folders inside one that has no checkpoint, as peft and ms-swift save several; or None."""
    if any(name in _OWN or name.endswith(_WEIGHTS) for name in _names_in(path) if name not in _OF_TRAINERS):
        return None
    inside = sorted(config.parent for config in path.glob(f"*/{_OWN[1]}"))
    if not inside:
        return None
    message = f"holds no checkpoint itself, but {counted(len(inside), 'adapter')} in folders inside it"
    one = f", {'or ' if len(inside) == 2 else ''}".join(repr(str(folder)) for folder in inside[:3])
    return OtherThing(message, f"pass {one}{' or another one' if len(inside) > 3 else ''}")


def is_adapter_alone(path: Path) -> bool:
    """Return whether a folder is that of an adapter, and of no model."""
    names = _names_in(path)
    return _OWN[1] in names and kind_of(names) == "adapter"


def not_a_model(path: Path) -> str:
    """Return the sentence that names the right folder in the place of one without config.json."""
    if is_adapter_alone(path):
        return "It is the folder of an adapter. Pass that of its base, which its base_model_name_or_path names."
    return "Pass the folder of a model, or save it there again."


def address(text: str) -> OtherThing | None:
    """Return the hub id in the address of a web page of the hub; None if a text is none."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        return None
    name, revision = found[1], found[2] if found[2] not in (None, "main") else None
    fix, download = f"pass its id, {name!r}", f"hf download {name}"
    if revision is not None:
        fix, download = f"{fix}, and {revision!r} as its revision", f"{download} --revision {revision}"
    return OtherThing("is the address of a repository of the hub", fix, download)


def _names_in(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.iterdir()]
    except (OSError, ValueError):  # it is not there, or may not be read
        return []


def _load_gguf(name: str) -> str:
    return f"load_peft_on_rank decodes it with base_kwargs={{'gguf_file': {name!r}}}"


def _one_file(path: Path) -> OtherThing | None:
    if path.suffix == _GGUF:
        fix = f"{_OF_GGUF.replace('they were', 'it was')}; {_load_gguf(path.name)} and its folder"
        return OtherThing("is a GGUF file, which llama.cpp reads", fix)
    if path.suffix not in (".json", *_WEIGHTS):
        return None
    if not {*_OWN} & {*_names_in(path.parent)} and (lora := _lora_of_pipeline(path)) is not None:
        return lora
    return OtherThing("is one file of a checkpoint", f"pass its folder, {str(path.parent)!r}")


def _lora_of_pipeline(path: Path) -> OtherThing | None:
    """Return the name of a file with a LoRA for a pipeline of diffusers or ComfyUI; None for any other file."""
    header = try_header(path) if path.suffix == ".safetensors" else []
    keys = [] if isinstance(header, list) else [*header.tensors]
    named = next((key for key in keys if _OF_PIPELINE.fullmatch(key)), None)
    if named is None:
        return None
    return _named_for_pipeline(path, named)


def _named_for_pipeline(path: Path, key: str) -> OtherThing:
    message = f"is no adapter of peft: {path.name} is a LoRA for a pipeline of diffusers or ComfyUI, by {key!r:.80}"
    return OtherThing(message, _THERE)


def names_of_others(path: Path, keys: Iterable[str], config: Mapping[str, object]) -> OtherThing | None:
    """Return the name of a file whose keys have no dots between modules, or names that Tinker alone has; else None.

    kohya's scripts write the first: nothing tells which module such a key is of, whatever config lies beside the file.
    A config that lists its modules is of somebody else than Tinker.
    """
    listed = isinstance(config.get("target_modules"), list)
    for key in keys:
        if _FLAT.match(key):
            return _named_for_pipeline(path, key)
        if not listed and _OF_TINKER.fullmatch(key):
            return OtherThing(f"is an adapter with the names of modules that Tinker has, by {key!r:.120}", _TINKER_FIX)
    return None
