"""What is known of an adapter before a tensor of it is read: config, header, digest. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType

from safe_loading._checkpoint.adapter_config import adapter_config_faults
from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.header import Header, read_header
from safe_loading._checkpoint.hub import Resolved
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_SINGLE, conversion_command
from safe_loading._core.protocols import JsonObject
from safe_loading.errors import AdapterError, CheckpointError, CheckpointNotFound, PickleRefused


@dataclasses.dataclass(frozen=True)
class AdapterFacts:
    """An adapter folder, read as far as possible without reading a tensor."""

    source: str  # the folder or hub id that the caller passed
    folder: Path  # the folder on this machine
    commit: str | None  # the hub's; None for a local folder
    config: JsonObject  # the content of adapter_config.json
    weights: Path  # the file that holds the tensors
    header: Header | None  # None for a pickle, which has no header


def read_adapter(resolved: Resolved, *, allow_pickle: bool = False) -> AdapterFacts:
    """Read the config and the header of an adapter; refuse one without weights, or with an unallowed pickle."""
    facts = read_adapter_config(resolved)
    if facts.header is not None:
        return facts
    folder = resolved.folder
    pickle = folder / ADAPTER_PICKLE
    if not pickle.exists():
        raise CheckpointNotFound(f"{folder} has {ADAPTER_CONFIG} but no {ADAPTER_SINGLE}. Copy or download it, too.")
    if not allow_pickle:
        raise PickleRefused(
            f"{pickle} is a pickle, which can run code when it is read. Convert it once:\n"
            f"{conversion_command(folder, ADAPTER_PICKLE, ADAPTER_SINGLE)}\n"
            f"or pass allow_pickle=True, which reads it with weights_only=True."
        )
    return dataclasses.replace(facts, weights=pickle)


def read_adapter_config(resolved: Resolved) -> AdapterFacts:
    """Read the config of an adapter, and the header of its weights if they are there as safetensors."""
    folder = resolved.folder
    config_file, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_SINGLE
    if not os.path.lexists(config_file):
        raise CheckpointNotFound(f"{folder} has no {ADAPTER_CONFIG}, so it is not an adapter.{_advice(folder)}")
    config = read_json_object(config_file)
    problems = config_problems(config)
    if problems:
        raise AdapterError(f"{config_file} is not a usable adapter config:", problems)
    header = read_header(weights) if os.path.lexists(weights) else None
    shapes = None if header is None else {name: info.shape for name, info in header.tensors.items()}
    faults = adapter_config_faults(config_file, config, shapes)
    if faults:
        raise AdapterError(f"{config_file} asks for what an adapter must not:", (fault.problem for fault in faults))
    return AdapterFacts(resolved.source, folder, resolved.commit, config, weights, header)


def digest(facts: AdapterFacts) -> str:
    """Return the SHA-256 of the adapter's config and weights, as hexadecimal."""
    sha = hashlib.sha256()
    for path in (facts.folder / ADAPTER_CONFIG, facts.weights):
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()


def config_problems(config: Mapping[str, object]) -> list[str]:
    """Return what makes an adapter's config unusable, without asking peft about it."""
    method = config.get("peft_type")
    if not isinstance(method, str) or not method:
        return [f'peft_type is {method!r}; it must name the method, such as "LORA"']
    problems = [
        f"{name} is {value!r:.80}; it must be a list of names"
        for name in ("modules_to_save", "target_modules", "exclude_modules", "layers_pattern")
        if not isinstance(value := config.get(name), (list, str, NoneType))
        or (isinstance(value, list) and not all(isinstance(entry, str) for entry in value))
    ]
    problems += [
        f"{name} is {value!r:.80}; it must be an object with a value for each pattern"
        for name, value in config.items()
        if name.endswith("_pattern") and name != "layers_pattern" and not isinstance(value, (dict, NoneType))
    ]
    if not _is_lora(config):
        return problems
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if name not in config:
            # LoraConfig has a default for both, so the adapter would be scaled by a number that nobody chose.
            problems.append(f"{name} is missing; peft would silently take its default, 8")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            problems.append(f"{name} is {value!r}; it must be a number, because it scales the adapter")
        elif name == "r" and value < 1:
            problems.append(f"r is {value!r}; a rank must be at least 1")
    return problems


def factors_of_other_rank(config: Mapping[str, object], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the rank of every ``lora_A`` whose rank is not the config's ``r``: it would be scaled for another rank."""
    rank = config.get("r")
    if not _is_lora(config) or isinstance(rank, bool) or not isinstance(rank, (int, float)):
        return {}
    # A pattern gives some layers other ranks; with target_parameters the factors of all experts are stacked.
    if config.get("rank_pattern") or config.get("target_parameters"):
        return {}
    return {key: shape[0] for key, shape in shapes.items() if ".lora_A." in key and shape and shape[0] != rank}


def _is_lora(config: Mapping[str, object]) -> bool:
    return str(config.get("peft_type")).upper() == "LORA"


def _advice(folder: Path) -> str:
    try:
        subfolders = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    if subfolders:
        return f" Its subfolders {subfolders} are: pass adapter_subfolder=."
    return " Pass the folder that save_pretrained of a PeftModel wrote as the adapter; the base is another argument."
