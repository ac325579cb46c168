"""What an adapter folder says before a tensor of it is read: config, header, digest. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.header import Header, read_header
from safe_loading._checkpoint.hub import Resolved
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_SINGLE, conversion_command
from safe_loading.errors import AdapterError, CheckpointError, CheckpointNotFound, PickleRefused


@dataclasses.dataclass(frozen=True)
class AdapterFacts:
    """An adapter folder, read as far as that goes without a tensor.

    Attributes:
        source: What the user wrote.
        folder: Where it lies.
        commit: The hub's commit; None for a local folder.
        config: The content of ``adapter_config.json``.
        weights: The file of the tensors.
        header: The tensors' names, dtypes and shapes; None for a pickle, which has no header.
    """

    source: str
    folder: Path
    commit: str | None
    config: dict[str, Any]
    weights: Path
    header: Header | None

    @property
    def nbytes(self) -> int:
        """The bytes of the adapter's tensors; of the whole file for a pickle."""
        if self.header is None:
            return self.weights.stat().st_size
        return sum(tensor.nbytes for tensor in self.header.tensors.values())


def read_adapter(resolved: Resolved, *, allow_pickle: bool = False) -> AdapterFacts:
    """Read the config and the header of an adapter.

    Raises:
        CheckpointNotFound: No config, or no weights, in the folder.
        PickleRefused: The weights are a pickle and ``allow_pickle`` is False.
        CheckpointError: A file is damaged.
        AdapterError: The config lacks what it must say.
    """
    found = read_adapter_config(resolved)
    if found.header is not None:
        return found
    folder = resolved.folder
    pickle = folder / ADAPTER_PICKLE
    if not pickle.exists():
        raise CheckpointNotFound(f"{folder} holds {ADAPTER_CONFIG} but no {ADAPTER_SINGLE}.")
    if not allow_pickle:
        raise PickleRefused(
            f"{pickle} is a pickle, which can run code when it is read. Convert it once:\n"
            f"{conversion_command(folder, ADAPTER_PICKLE, ADAPTER_SINGLE)}\n"
            f"or pass allow_pickle=True, which reads it with weights_only=True."
        )
    return dataclasses.replace(found, weights=pickle)


def read_adapter_config(resolved: Resolved) -> AdapterFacts:
    """Read the config of an adapter, and the header of its weights where they are safetensors and there.

    Raises:
        CheckpointNotFound: No config in the folder.
        CheckpointError: A file is damaged.
        AdapterError: The config lacks what it must say.
    """
    folder = resolved.folder
    config_file, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_SINGLE
    if not os.path.lexists(config_file):
        raise CheckpointNotFound(f"{folder} holds no {ADAPTER_CONFIG}, so it is no adapter.{_near_adapters(folder)}")
    config = read_json_object(config_file)
    problems = _config_problems(config)
    if problems:
        raise AdapterError(f"{config_file} does not say what an adapter must say:", problems)
    header = read_header(weights) if os.path.lexists(weights) else None
    return AdapterFacts(resolved.source, folder, resolved.commit, config, weights, header)


def digest(facts: AdapterFacts) -> str:
    """Return the SHA-256 of the adapter's config and weights, as hexadecimal."""
    sha = hashlib.sha256()
    for path in (facts.folder / ADAPTER_CONFIG, facts.weights):
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()


def _config_problems(config: dict[str, Any]) -> list[str]:
    problems = []
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        problems.append(f"peft_type is {kind!r}; it names the method, as 'LORA'")
    if kind == "LORA":
        # peft takes 8 for either when it is absent, and scales the adapter by the wrong factor without a word.
        problems += [
            f"{name} is {config.get(name)!r}; it must be a number, since it scales the adapter (peft would take 8)"
            for name in ("r", "lora_alpha")
            if isinstance(config.get(name), bool) or not isinstance(config.get(name), (int, float))
        ]
        if not problems and config["r"] < 1:
            problems.append(f"r is {config['r']!r}; a rank is 1 or more")
    return problems


def _near_adapters(folder: Path) -> str:
    try:
        near = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    if near:
        return f" Its subfolders {near} are: pass adapter_subfolder=."
    return (
        " Pass the folder that save_pretrained of a PeftModel wrote; the first argument is the adapter, not the base."
    )
