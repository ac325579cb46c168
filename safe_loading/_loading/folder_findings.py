"""Findings on what lies next to the weights in a folder: its configs, and files that could run code. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from safe_loading._checkpoint.adapter_config import adapter_config_faults
from safe_loading._checkpoint.faults import fault, listed, note
from safe_loading._checkpoint.files import size_of
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.strict_json import try_json_object
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG, PICKLE_SUFFIXES
from safe_loading._core.names import WRAPPER_PREFIXES
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

from .adapter_facts import config_problems, factors_of_other_rank

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_SAVE_ADAPTER = "save the adapter again with `save_pretrained` of peft"


def model_findings(folder: Path, names: Sequence[str], tensors: Collection[str]) -> list[Finding]:
    """Return what is wrong with the config of a model and the names of its tensors; ``names`` are its files."""
    return [*_model_config(folder, names, tensors), *_wrapper_prefix(folder, tensors)]


def adapter_findings(folder: Path, tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    """Return what is wrong with the config of an adapter, also compared with its tensors."""
    path = folder / ADAPTER_CONFIG
    config = try_json_object(path)
    if isinstance(config, Finding):
        return [config]
    problems = config_problems(config)
    other_rank = factors_of_other_rank(config, {name: info.shape for name, info in tensors.items()})
    if other_rank:
        name, rank = next(iter(other_rank.items()))
        problems.append(f"r is {config['r']}, and {name!r} has rank {rank}: it would be scaled for another rank")
    findings = [fault("adapter-config", path, problem, _SAVE_ADAPTER) for problem in problems]
    findings += adapter_config_faults(path, config, tensors)
    if isinstance(config.get("peft_type"), str) and not isinstance(config.get("base_model_name_or_path"), str):
        message = "names no base model (base_model_name_or_path)"
        fix = "pass base_model= when you load it"
        findings.append(note("warning", "adapter-base", path, message, fix))
    return findings


def code_findings(folder: Path, names: Sequence[str]) -> list[Finding]:
    """Return findings for files next to the weights that could run code: pickles and Python files."""
    findings = []
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        message = f"has {len(pickles)} pickle files, which can run code when they are read: {listed(pickles)}"
        fix = "delete those that are not needed; read the others with torch.load(..., weights_only=True)"
        size = sum(size_of(folder / name) for name in pickles)
        findings.append(note("warning", "pickle-beside", folder, message, fix, size))
    code = [name for name in names if name.endswith(".py")]
    if code:
        message = f"has Python files, which run only with trust_remote_code=True: {listed(code)}"
        fix = "read them before you pass trust_remote_code=True"
        findings.append(note("info", "custom-code", folder, message, fix))
    return findings


def _model_config(folder: Path, names: Sequence[str], tensors: Collection[str]) -> list[Finding]:
    path = folder / "config.json"
    if path.name not in names:
        message = "has no 'config.json', so no model can be made for the weights"
        fix = "copy the model's config.json here, or save the model again with `save_pretrained`"
        return [fault("config-missing", folder, message, fix)]
    config = try_json_object(path)
    if isinstance(config, Finding):
        return [config]
    findings = _layer_count(path, config, tensors)
    if not isinstance(config.get("model_type"), str):
        message = f"model_type is {config.get('model_type')!r}; transformers cannot tell which model this is"
        fix = 'set "model_type" to the architecture, such as "llama"'
        findings.append(note("warning", "config-model-type", path, message, fix))
    if ADAPTER_CONFIG in names:
        message = f"has a model and {ADAPTER_CONFIG!r}; transformers loads that adapter into the model without asking"
        fix = "keep the adapter in a folder of its own"
        findings.append(note("warning", "adapter-beside", folder, message, fix))
    return findings


def _layer_count(path: Path, config: JsonObject, tensors: Collection[str]) -> list[Finding]:
    """Compare the number of layers in the config with the layer numbers in the tensors' names."""
    # A model of text and images has the number in the config of its language model.
    configs = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    count = next((part["num_hidden_layers"] for part in configs if type(part.get("num_hidden_layers")) is int), None)
    # The highest number of each list of layers: an image encoder has a list of its own, which num_hidden_layers does
    # not count, so one list that fits is enough.
    highest: dict[str, int] = {}
    for name in tensors:
        if match := _LAYER.search(name):
            layers = name[: match.start(1)]
            highest[layers] = max(highest.get(layers, 0), int(match[1]))
    if count is None or not highest or count - 1 in highest.values():
        return []
    message = f"num_hidden_layers is {count}, and the files have the layers 0 to {max(highest.values())}"
    fix = "correct config.json, or save the model again; layers that the config does not count are not loaded"
    return [note("warning", "layers-differ", path, message, fix)]


def _wrapper_prefix(folder: Path, tensors: Collection[str]) -> list[Finding]:
    prefix = next((p for p in WRAPPER_PREFIXES if tensors and all(name.startswith(p) for name in tensors)), None)
    if prefix is None:
        return []
    name = next(iter(tensors))
    message = f"all {len(tensors)} names begin with {prefix!r}, which a wrapper put there, such as {name!r}"
    fix = f"save the model that is inside the wrapper, or rename the tensors, such as to {name.removeprefix(prefix)!r}"
    return [fault("key-prefix", folder, message, fix)]
