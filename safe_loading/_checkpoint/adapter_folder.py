"""The folder of an adapter, opened once for a call: its config, its header, its digest. Imports no torch.

Each file is stamped before it is read. Whoever lets an engine read the folder again, or reads the tensors after the
header, asks :meth:`AdapterFolder.require_unchanged` afterwards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading.errors import AdapterError, CheckpointError, CheckpointNotFound, PickleRefused

from .adapter_config import adapter_config_faults, config_problems
from .files import open_regular, stamp
from .header import Header, read_header
from .hub import Resolved
from .index import refuse_changed
from .json_files import JsonFiles
from .mlx import MLX_WEIGHTS, is_mlx, mlx_problems, peft_config_of
from .model_folder import ModelFolder
from .other_things import names_of_others
from .weight_files import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_SINGLE, conversion_command

_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class AdapterFolder:
    """An adapter folder, read as far as possible without reading a tensor."""

    source: str  # the folder or hub id that the caller passed
    path: Path  # the folder on this machine
    commit: str | None  # the hub's; None for a local folder
    config: JsonObject  # the content of adapter_config.json
    weights: Path  # the file that holds the tensors
    header: Header | None  # None for a pickle, which has no header
    files: JsonFiles  # adapter_config.json as it was read
    stamps: Mapping[Path, tuple[int, ...]]  # ``files.stamp`` of every file that was read, from before it was
    is_mlx: bool = False  # whether MLX wrote it; ``config`` is then that of the same LoRA in peft

    @property
    def config_file(self) -> Path:
        """The path of its adapter_config.json."""
        return self.path / ADAPTER_CONFIG

    def require_unchanged(self) -> None:
        """Refuse an adapter of which another process has written or replaced a file since it was read here."""
        refuse_changed(self.path, self.stamps)

    def digest(self, weights: Iterable[bytes | memoryview] | None = None) -> str:
        """Return the SHA-256 of the adapter's config and weights, as hexadecimal.

        ``weights`` are the bytes of the file of weights, of whoever has read them; by default they are read.
        """
        sha = hashlib.sha256()
        sha.update(self.files.content(self.config_file) or b"")
        for block in _blocks(self.weights) if weights is None else weights:
            sha.update(block)
        return sha.hexdigest()


def read_adapter(resolved: Resolved, *, allow_pickle: bool = False, folder: ModelFolder | None = None) -> AdapterFolder:
    """Read the config and the header of an adapter; refuse one without weights, or with an unallowed pickle.

    ``folder`` is the same folder, if its files were read before.
    """
    opened = read_adapter_config(resolved, folder)
    if opened.header is not None:
        return opened
    pickle = resolved.folder / ADAPTER_PICKLE
    if not pickle.exists():
        missing = opened.weights.name
        raise CheckpointNotFound(f"{resolved.folder} has {ADAPTER_CONFIG} but no {missing}. Copy or download it, too.")
    if not allow_pickle:
        raise PickleRefused(
            f"{pickle} is a pickle, which can run code when it is read. Convert it once:\n"
            f"{conversion_command(resolved.folder, ADAPTER_PICKLE, ADAPTER_SINGLE)}\n"
            f"or pass allow_pickle=True, which reads it with weights_only=True."
        )
    return dataclasses.replace(opened, weights=pickle, stamps={**opened.stamps, pickle: stamp(pickle)})


def read_adapter_config(resolved: Resolved, opened: ModelFolder | None = None) -> AdapterFolder:
    """Read the config of an adapter, and the header of its weights if they are there as safetensors."""
    folder = resolved.folder
    config_file, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_SINGLE
    files = JsonFiles() if opened is None else opened.files
    config = files.read(config_file)
    if config is None:
        raise CheckpointNotFound(f"{folder} has no {ADAPTER_CONFIG}, so it is not an adapter.{_advice(folder)}")
    by_mlx = is_mlx(config)
    weights = folder / MLX_WEIGHTS if by_mlx else weights
    problems = [] if by_mlx else config_problems(config)
    if problems:
        raise AdapterError(f"{config_file} is not a usable adapter config:", problems)
    stamps = {weights: stamp(weights)} if os.path.lexists(weights) else {}
    read = None if opened is None else opened.inspect_checkpoint(kind="adapter")[0]
    header = None if read is None else read.headers.get(ADAPTER_SINGLE)
    header = read_header(weights) if stamps and header is None else header
    if header is not None and (other := names_of_others(weights, header.tensors, config)) is not None:
        raise AdapterError(f"{folder} {other.message}. {other.fix[0].upper()}{other.fix[1:]}.")
    shapes = None if header is None else {name: info.shape for name, info in header.tensors.items()}
    if by_mlx:
        if problems := mlx_problems(config, shapes or {}):
            raise AdapterError(f"{config_file} is not a usable adapter config:", problems)
        config = peft_config_of(config, shapes or {})
    faults = adapter_config_faults(config_file, config, shapes)
    if faults:
        raise AdapterError(f"{config_file} asks for what an adapter must not:", (fault.problem for fault in faults))
    stamps |= files.stamps
    return AdapterFolder(resolved.source, folder, resolved.commit, config, weights, header, files, stamps, by_mlx)


def _blocks(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _advice(folder: Path) -> str:
    try:
        subfolders = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    if subfolders:
        return f" Its subfolders {subfolders} are: pass adapter_subfolder=."
    for weights in (ADAPTER_SINGLE, ADAPTER_PICKLE):
        if (folder / weights).exists():  # as optimum-neuron consolidates the shards of an adapter
            return f" Copy the {ADAPTER_CONFIG} there that was saved with {weights}."
    return " Pass the folder that save_pretrained of a PeftModel wrote as the adapter; the base is another argument."
