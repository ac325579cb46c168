"""Findings on the files next to the weights of a model: its config, and files that could run code. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from safe_loading._checkpoint.base_config import base_config_faults, quantization_findings
from safe_loading._checkpoint.faults import fault, listed, note, raise_faults
from safe_loading._checkpoint.files import size_of
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import CONFIG, GENERATION_CONFIG, ModelFolder
from safe_loading._checkpoint.unread_codes import unread_codes
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG, PICKLE_SUFFIXES, names_in
from safe_loading._core.names import canonical, prefix_of_all, wrapper_part
from safe_loading._core.report import Finding, counted

_BODIES = ("model", "transformer", "bert", "roberta", "gpt_neox", "base_model")


def model_findings(folder: ModelFolder, names: Sequence[str], tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    """Return findings on the config of a model and the names of its tensors; ``names`` are its files."""
    of_config = _model_config(folder, names, tensors)
    return [*of_config, *_wrapper_prefix(folder.path, tensors), *_two_names(folder.path, tensors)]


def type_findings(folder: ModelFolder) -> list[Finding]:
    """Return a finding on a config without a model type, of which no class was found that reads it all the same."""
    path, config = folder.path / CONFIG, folder.files.try_read(folder.path / CONFIG)
    if isinstance(config, Finding) or isinstance(config.get("model_type"), str) or "_diffusers_version" in config:
        return []
    message = f"model_type is {config.get('model_type')!r}; transformers cannot tell which model this is"
    fix = 'set "model_type" to the architecture, such as "llama"'
    return [note("warning", "config-model-type", path, message, fix)]


def base_findings(folder: ModelFolder, checkpoint: Checkpoint) -> list[Finding]:
    """Return the findings of ``check_checkpoint`` on a folder that are no errors, for the reports of a load."""
    names = names_in(folder.path)
    if isinstance(names, Finding):
        return []
    found = [
        *checkpoint.findings,
        *model_findings(folder, names, checkpoint.tensors),
        *code_findings(folder.path, names),
    ]
    return [finding for finding in found if finding.severity != "error"]


def refuse_index_without_metadata(folder: ModelFolder, checkpoint: Checkpoint) -> None:
    """Refuse an index that transformers cannot read; a merge and a wrapped model need no metadata."""
    metadata = [finding for finding in checkpoint.findings if finding.code == "index-metadata"]
    if checkpoint.index is not None and checkpoint.index.total_size is None and metadata:
        document = folder.files.try_read(checkpoint.index.path)
        if not isinstance(document, Finding) and not isinstance(document.get("metadata"), dict):
            raise_faults(checkpoint.folder, metadata)


def code_findings(folder: Path, names: Sequence[str]) -> list[Finding]:
    """Return findings for files next to the weights that could run code: pickles and Python files."""
    findings = []
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        message = f"has {counted(len(pickles), 'pickle')}, which can run code when it is read: {listed(pickles)}"
        fix = "delete those that are not needed; read the others with torch.load(..., weights_only=True)"
        size = sum(size_of(folder / name) for name in pickles)
        findings.append(note("warning", "pickle-beside", folder, message, fix, size))
    code = [name for name in names if name.endswith(".py")]
    if code:
        message = f"has Python files, which run only with trust_remote_code=True: {listed(code)}"
        fix = "read them before you pass trust_remote_code=True"
        findings.append(note("info", "custom-code", folder, message, fix))
    return findings


def _model_config(folder: ModelFolder, names: Sequence[str], tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    path = folder.path / CONFIG
    if path.name not in names:
        message = "has no 'config.json', so no model can be made for the weights"
        fix = "copy the model's config.json here, or save the model again with `save_pretrained`"
        return [fault("config-missing", folder.path, message, fix)]
    config = folder.files.try_read(path)
    if isinstance(config, Finding):
        return [config]
    findings = base_config_faults(path, config)
    findings += quantization_findings(path, config, {name.rpartition(".")[0] for name in tensors})
    if found := unread_codes(folder):
        findings = [each for each in findings if each.code != "quantization-unknown"] + [found]
    generation = folder.path / GENERATION_CONFIG
    if generation.name in names and isinstance(damaged := folder.files.try_read(generation), Finding):
        findings.append(damaged)
    if ADAPTER_CONFIG in names:
        message = f"has a model and {ADAPTER_CONFIG!r}; transformers loads that adapter into the model without asking"
        fix = "keep the adapter in a folder of its own"
        findings.append(note("warning", "adapter-beside", folder.path, message, fix))
    return findings


def _wrapper_prefix(folder: Path, tensors: Collection[str]) -> list[Finding]:
    prefix = prefix_of_all(tensors)
    within = [name for name in tensors if wrapper_part(name)]
    if prefix:
        name = next(iter(tensors))
        where, bare = f"all {len(tensors)} names begin with {prefix!r}", name.removeprefix(prefix)
    elif within:
        name, bare = within[0], canonical(within[0])
        where = f"{counted(len(within), 'tensor')} with {wrapper_part(name)!r} inside the name"
    else:
        return []
    message = f"{where}, which a wrapper put there, such as {name!r}"
    fix = f"save the model that is inside the wrapper, or rename the tensors, such as to {bare!r}"
    return [fault("key-prefix", folder, message, fix)]


def _two_names(folder: Path, tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    """Find tensors that are there with the name of the model's body in front, and without."""
    with_body = [name.partition(".") for name in tensors]
    twice = {n for b, _, n in with_body if b in _BODIES and n in tensors and _alike(tensors, n, f"{b}.{n}")}
    if not twice:
        return []
    same = [name for name in tensors if name in twice]
    message = (
        f"holds {counted(len(same), 'tensor')} twice, with 'model.' (or the like) in front and without: {listed(same)}"
    )
    fix = "delete the one that is left over; transformers would take one of the two without a word"
    return [fault("tensor-two-names", folder, message, fix, sum(tensors[name].nbytes for name in same))]


def _alike(tensors: Mapping[str, TensorInfo], one: str, other: str) -> bool:
    return tensors[one].shape == tensors[other].shape
