"""Weights that a training saved beside an adapter's, in files that peft does not read. Imports no torch.

LLaVA and its kin save a projector and a vision tower so, LongLoRA embeddings and norms, ms-swift a tower,
LLaMA-Factory a value head and FlagEmbedding resized embeddings; vLLM reads new words so. Without them the adapter
computes something else than in its training, and nobody says it. sentence-transformers saves what runs behind the
model (pooling, dense layers) so, in folders that its ``modules.json`` names, with a base as with an adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from safe_loading._core.report import Finding, counted

from .faults import listed, note
from .files import open_regular, size_of

_NAMES = frozenset(
    {"non_lora_trainables.bin", "non_lora_state_dict.bin", "mm_projector.bin", "trainable_params.bin"}
    | {"vit.safetensors", "value_head.safetensors", "value_head.bin"}
    | {"new_embeddings.safetensors", "new_embeddings.bin", "embedding/emb.pth"}
)
MODULES = "modules.json"  # of sentence-transformers: the folders of what runs behind the model
_CONFIGS = ("config_sentence_transformers.json", "sentence_bert_config.json")
_MOST_BYTES = 1 << 20
MODULE_WEIGHTS = (".safetensors", ".bin")


def trained_beside(folder: Path, *, carried: bool = False) -> list[Finding]:
    """Return the findings of weights beside those of an adapter; ``carried`` says that modules come along with it."""
    modules = [] if carried else sorted(name for name in modules_in(folder) if name.endswith(MODULE_WEIGHTS))
    findings = [_of_modules(folder, modules)] if modules else []
    found = sorted(name for name in _NAMES if (folder / name).is_file())
    if not found:
        return findings
    message = (
        f"holds {counted(len(found), 'file')} of weights that a training saved beside the adapter, and that peft does "
        f"not read, so that the model runs without them: {listed(found)}"
    )
    fix = "put their values into the base, and pass that model as base_model; or remove them if it has them"
    size = sum(size_of(folder / name) for name in found)
    return [*findings, note("warning", "trained-beside", folder, message, fix, size)]


def _of_modules(folder: Path, names: list[str]) -> Finding:
    message = (
        f"holds weights of modules that sentence-transformers runs behind the model, and that peft does not read: "
        f"{listed(names)}"
    )
    fix = "load this folder with SentenceTransformer, or merge it with merge_lora_checkpoint, which takes them along"
    return note("warning", "trained-beside", folder, message, fix, sum(size_of(folder / name) for name in names))


def module_folders(path: Path) -> frozenset[str]:
    """Return the folders that a ``modules.json`` names; of a damaged one, none."""
    try:
        with open_regular(path) as file:
            return folders_named_in(file.read(_MOST_BYTES))
    except OSError:
        return frozenset()


def folders_named_in(content: bytes) -> frozenset[str]:
    """Return the folders that the content of a ``modules.json`` names; of a damaged one, none."""
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError):
        return frozenset()
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    # A name in the folder itself: no path that leads out of it, and not the folder, where the model is.
    return frozenset(
        each for each in paths if isinstance(each, str) and each and not {"/", "\\"} & {*each} and each[0] != "."
    )


def in_modules(name: str, folders: Collection[str]) -> bool:
    """Return whether a file lies in one of these folders, hidden files left out."""
    first, slash, _ = name.partition("/")
    return bool(slash) and first in folders and not name.rpartition("/")[2].startswith(".")


def module_names(names: Iterable[str], fetch: Callable[[str], Path]) -> list[str]:
    """Return the files of these that sentence-transformers wrote: its configs, and those in the folders of modules."""
    there = sorted(names)
    return of_modules(there, module_folders(fetch(MODULES))) if MODULES in there else []


def of_modules(names: Iterable[str], folders: Collection[str]) -> list[str]:
    """Return the names of sentence-transformers' configs, and those in these folders."""
    return sorted(name for name in names if name in (MODULES, *_CONFIGS) or in_modules(name, folders))


def modules_in(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that sentence-transformers wrote, by their names there."""
    if not (folder / MODULES).is_file():
        return {}
    # which follows no link to a folder
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: files[name] for name in module_names(files, folder.joinpath)}
