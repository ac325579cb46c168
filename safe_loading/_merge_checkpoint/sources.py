"""Where the base and its adapters lie, what they say before a tensor is read, and the files that come along."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safe_loading._adapter.facts import AdapterFacts, digest, read_adapter
from safe_loading._checkpoint.hub import Resolved, adapter_files, base_files, resolve
from safe_loading._checkpoint.index import Checkpoint, read_checkpoint
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._checkpoint.weights import PICKLE_SUFFIXES
from safe_loading.errors import ArgumentError, MergeError

REPORT = "merge_report.json"
Source = str | os.PathLike[str]

# Other formats of the same weights, what training left, and what describes an adapter or an earlier merge.
_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ot", *PICKLE_SUFFIXES)
_LEFT_OUT = frozenset({REPORT, "adapter_config.json", "trainer_state.json", "optimizer.pt", "scheduler.pt"})
_FOLDERS = ("additional_chat_templates",)


@dataclasses.dataclass(frozen=True)
class Sources:
    """What is merged.

    Attributes:
        base: Where the base lies.
        checkpoint: Its weight files.
        adapters: The adapters, by the names that they get, in the order in which they are merged.
        digests: The SHA-256 of each adapter.
        carried: The other files of the base that belong to the output, by their name there.
        left_out: The names of files that do not.
    """

    base: Resolved
    checkpoint: Checkpoint
    adapters: Mapping[str, AdapterFacts]
    digests: Mapping[str, str]
    carried: Mapping[str, Path]
    left_out: tuple[str, ...]

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that are read, by what they are."""
        return {"the base": self.base.folder, **{f"adapter {n!r}": f.folder for n, f in self.adapters.items()}}


def find(base_model: Source, adapter: Source | Sequence[Source]) -> Sources:
    """Find and read everything but tensors.

    Raises:
        ArgumentError: No adapter.
        CheckpointNotFound: Something is not there.
        CheckpointError: A file is damaged, or (:class:`PickleRefused`) a pickle.
        MergeError: The base is quantised.
    """
    asked: Sequence[Source] = [adapter] if isinstance(adapter, (str, os.PathLike)) else list(adapter)
    if not asked:
        raise ArgumentError("adapter is empty; pass a folder or hub id, or several.")
    names = ["default"] if len(asked) == 1 else [f"adapter_{number}" for number in range(1, len(asked) + 1)]
    adapters = {name: read_adapter(resolve(source, adapter_files)) for name, source in zip(names, asked, strict=True)}
    base = resolve(base_model, _everything)
    checkpoint = read_checkpoint(base.folder, kind="model")
    _refuse_quantised(base.folder)
    carried, left_out = _others(base.folder, checkpoint)
    digests = {name: digest(facts) for name, facts in adapters.items()}
    return Sources(base, checkpoint, adapters, digests, carried, left_out)


def _everything(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
    chosen = base_files({})(names, fetch)
    return [*chosen, *sorted(name for name in names if name not in chosen and _belongs(name))]


def _belongs(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    if folder not in ("", *_FOLDERS) or file.startswith(".") or file in _LEFT_OUT:
        return False
    return not file.endswith((*_WEIGHTS, ".index.json")) and not file.startswith(("rng_state", "adapter_"))


def _others(folder: Path, checkpoint: Checkpoint) -> tuple[dict[str, Path], tuple[str, ...]]:
    carried, left_out = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name in checkpoint.headers or any(part.startswith(".") for part in name.split("/")):
            continue
        if checkpoint.index is not None and path == checkpoint.index.path:
            continue
        if _belongs(name):
            carried[name] = path
        else:
            left_out.append(name)
    return carried, tuple(left_out)


def _refuse_quantised(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        return
    quantised = read_json_object(config).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise MergeError(
            f"{config} says that the base is quantised ({method}); adding to its codes would be wrong. Merge into the "
            f"base that it was made from, and quantise the result; or load it, call model.dequantize(), save it with "
            f"save_pretrained, and merge into that."
        )
