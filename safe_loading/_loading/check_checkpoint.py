"""Is this folder whole and safe to load? Headers and configs only, without torch, unless the values are asked for."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safe_loading._checkpoint.faults import fault, listed, note, raise_faults
from safe_loading._checkpoint.files import size_of, unreadable
from safe_loading._checkpoint.header import Header, TensorInfo, try_header
from safe_loading._checkpoint.index import inspect_checkpoint
from safe_loading._checkpoint.strict_json import try_json_object
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG, PICKLE_SUFFIXES, conversion_command, names_in
from safe_loading._core.names import WRAPPER_PREFIXES
from safe_loading._core.paths import path_text
from safe_loading._core.report import Finding, Table, Verdict, format_bytes, worst_first

_LORA_NUMBERS = ("r", "lora_alpha")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_SAVE_ADAPTER = "save the adapter again with `save_pretrained` of peft"


@dataclass(frozen=True)
class CheckpointFile:
    """One weight file of a report.

    Attributes:
        name: Its name, relative to the folder.
        tensors: How many tensors it holds.
        bytes: The bytes of these tensors.
    """

    name: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class CheckpointReport(Verdict):
    """What :func:`check_checkpoint` found.

    Attributes:
        path: The folder or file.
        kind: What it was read as: ``"model"``, ``"adapter"`` or a single ``"file"``.
        files: The weight files that could be read, in the order in which they are loaded.
        tensors: How many tensors these files hold.
        bytes: The bytes of these tensors.
        dtypes: The bytes in each dtype, by its safetensors name.
        metadata: The metadata of the weight files.
        findings: Everything worth knowing, errors first.
    """

    path: str
    kind: Literal["model", "adapter", "file"]
    files: tuple[CheckpointFile, ...]
    tensors: int
    bytes: int
    dtypes: Mapping[str, int]
    metadata: Mapping[str, str]
    findings: tuple[Finding, ...]

    def _title(self) -> str:
        dtypes = ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in self.dtypes.items())
        files = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
        weights = f"{self.tensors} tensors in {files}, {format_bytes(self.bytes)}"
        return f"{self.path}: {self.kind}, {weights}{f' ({dtypes})' if dtypes else ''}: {self._verdict()}"

    def _verdict(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        return ("ok" if self.ok else "NOT OK") + "".join(f", {n} {severity}" for severity, n in counts.items())

    def _tables(self) -> list[Table]:
        rows = [(file.name, str(file.tensors), format_bytes(file.bytes)) for file in self.files]
        return [Table(("file", "tensors", "bytes"), rows)]


def check_checkpoint(path: str | os.PathLike[str], *, values: bool = False) -> CheckpointReport:
    """Check that a checkpoint is whole and safe to load, from headers and configs alone.

    No tensor byte is read and torch is not imported, so that a folder of any size takes a fraction of a second.

    Args:
        path: The folder of a model or of an adapter, or one ``.safetensors`` file.
        values: Whether to read every tensor too, once, through 4 MiB of memory: for NaN and infinity, and, where
            :func:`merge_lora_checkpoint` left its ``merge_report.json``, for other bytes than it wrote.

    Returns:
        The report. A bad checkpoint raises nothing; its faults are findings of severity ``"error"``.

    Raises:
        CheckpointNotFound: There is nothing at ``path``.
        ArgumentError: It is no path.
    """
    place = Path(path_text(path, "path"))
    try:
        place.stat()
    except (OSError, ValueError) as error:
        finding = unreadable(place, error)
        if finding.code in ("not-found", "broken-link"):
            raise_faults(place, [finding])
        return _report(place, "file", {}, [finding])
    return _check_folder(place, values) if place.is_dir() else _check_file(place, values)


def _contents(folder: Path, headers: Mapping[str, Header]) -> list[Finding]:
    from safe_loading._model.layout.tensor_contents import check_contents  # torch, which nothing else here needs

    return [*check_contents(folder, headers)]


def _check_file(path: Path, values: bool) -> CheckpointReport:
    if path.name.endswith(PICKLE_SUFFIXES):
        command = conversion_command(path.parent, path.name, f"{path.stem}.safetensors")
        message = "is a pickle by its name, which can run code when it is read"
        fix = f"convert it once (this reads tensors only):\n{command}"
        return _report(path, "file", {}, [fault("pickle-only", path, message, fix, size_of(path))])
    header = try_header(path)
    if isinstance(header, Header):
        headers = {path.name: header}
        return _report(path, "file", headers, _contents(path.parent, headers) if values else [])
    return _report(path, "file", {}, header)


def _check_folder(folder: Path, values: bool) -> CheckpointReport:
    names = names_in(folder)
    if isinstance(names, Finding):
        return _report(folder, "model", {}, [names])
    checkpoint, findings = inspect_checkpoint(folder)
    kind: Literal["model", "adapter"]
    if checkpoint is not None:
        kind = checkpoint.kind
    else:
        kind = "adapter" if ADAPTER_CONFIG in names and "config.json" not in names else "model"
    tensors = checkpoint.tensors if checkpoint is not None else {}
    if kind == "adapter":
        findings += _adapter_config(folder, tensors)
    else:
        findings += _model_config(folder, names, tensors) + _prefix(folder, tensors)
    findings += _beside(folder, names)
    if values and checkpoint is not None:
        findings += _contents(folder, checkpoint.headers)
    return _report(folder, kind, checkpoint.headers if checkpoint is not None else {}, findings)


def _report(
    path: Path,
    kind: Literal["model", "adapter", "file"],
    headers: Mapping[str, Header],
    findings: Sequence[Finding],
) -> CheckpointReport:
    files, dtypes, metadata = [], Counter[str](), dict[str, str]()
    for name, header in headers.items():
        size = 0
        for info in header.tensors.values():
            size += info.nbytes
            dtypes[info.dtype] += info.nbytes
        files.append(CheckpointFile(name, len(header.tensors), size))
        metadata.update(header.metadata)
    return CheckpointReport(
        path=str(path),
        kind=kind,
        files=tuple(files),
        tensors=sum(file.tensors for file in files),
        bytes=sum(file.bytes for file in files),
        dtypes=dict(dtypes.most_common()),
        metadata=metadata,
        findings=worst_first(findings),
    )


def _model_config(folder: Path, names: Sequence[str], tensors: Collection[str]) -> list[Finding]:
    path = folder / "config.json"
    if path.name not in names:
        fix = "copy the model's config.json here, or save the model again with `save_pretrained`"
        return [fault("config-missing", folder, "holds no 'config.json', so no model can be made for the weights", fix)]
    config = try_json_object(path)
    if isinstance(config, Finding):
        return [config]
    findings = _layers(path, config, tensors)
    if not isinstance(config.get("model_type"), str):
        message = f"model_type is {config.get('model_type')!r}; transformers cannot tell which model this is"
        fix = 'set "model_type" to the architecture, such as "llama"'
        findings.append(note("warning", "config-model-type", path, message, fix))
    if ADAPTER_CONFIG in names:
        message = f"holds a model and {ADAPTER_CONFIG!r}; transformers loads that adapter into the model unasked"
        fix = "keep the adapter in a folder of its own"
        findings.append(note("warning", "adapter-beside", folder, message, fix))
    return findings


def _layers(path: Path, config: Mapping[str, Any], tensors: Collection[str]) -> list[Finding]:
    """Compare the layers that the config counts with those that the files number."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    told = next((part["num_hidden_layers"] for part in parts if type(part.get("num_hidden_layers")) is int), None)
    held: dict[str, int] = {}  # the highest number of each list: an encoder of images has one of its own
    for name in tensors:
        if match := _LAYER.search(name):
            before = name[: match.start(1)]
            held[before] = max(held.get(before, 0), int(match[1]))
    if told is None or not held or told - 1 in held.values():
        return []
    message = f"num_hidden_layers is {told}, and the files hold the layers 0 to {max(held.values())}"
    fix = "correct config.json, or save the model again; layers that the config does not count are not loaded"
    return [note("warning", "layers-differ", path, message, fix)]


def _prefix(folder: Path, tensors: Collection[str]) -> list[Finding]:
    prefix = next((p for p in WRAPPER_PREFIXES if tensors and all(name.startswith(p) for name in tensors)), None)
    if prefix is None:
        return []
    name = next(iter(tensors))
    message = f"all {len(tensors)} names begin with {prefix!r}, which a wrapper put there, as {name!r}"
    fix = f"save the model that is inside the wrapper, or rename them, as to {name.removeprefix(prefix)!r}"
    return [fault("key-prefix", folder, message, fix)]


def _adapter_config(folder: Path, tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    path = folder / ADAPTER_CONFIG
    config = try_json_object(path)
    if isinstance(config, Finding):
        return [config]
    peft_type = config.get("peft_type")
    if not isinstance(peft_type, str) or not peft_type:
        message = f'peft_type is {peft_type!r}; it must name the method, such as "LORA"'
        return [fault("adapter-config", path, message, _SAVE_ADAPTER)]
    findings = _lora_numbers(path, config, tensors) if peft_type.upper() == "LORA" else []
    if not isinstance(config.get("base_model_name_or_path"), str):
        message = "names no base model (base_model_name_or_path)"
        fix = "pass base_model= when you load it"
        findings.append(note("warning", "adapter-base", path, message, fix))
    return findings


def _lora_numbers(path: Path, config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    findings = []
    ranks = {info.shape[0]: name for name, info in tensors.items() if ".lora_A." in name and info.shape}
    other = [(rank, name) for rank, name in ranks.items() if rank != config.get("r")]
    # a pattern gives layers other ranks; of target_parameters the factors of all experts are stacked
    told = type(config.get("r")) is int and not (config.get("rank_pattern") or config.get("target_parameters"))
    if other and told:
        message = f"r is {config['r']}, and {other[0][1]!r} has rank {other[0][0]}: it would be scaled for another rank"
        findings.append(fault("adapter-config", path, message, _SAVE_ADAPTER))
    for key in _LORA_NUMBERS:
        value = config.get(key)
        # peft fills in its own default for what is absent, and so scales the adapter by a number nobody chose.
        if key not in config:
            message = f"LORA without {key!r}; peft would take its own default in silence"
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or (key == "r" and value < 1):
            message = f"{key} is {value!r}, which is no number that LORA can take"
        else:
            continue
        findings.append(fault("adapter-config", path, message, _SAVE_ADAPTER))
    return findings


def _beside(folder: Path, names: Sequence[str]) -> list[Finding]:
    """Return findings for what lies beside the weights and could run code."""
    findings = []
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        message = f"holds {len(pickles)} pickle files, which can run code when they are read: {listed(pickles)}"
        fix = "delete those that are not needed; read the others with torch.load(..., weights_only=True)"
        size = sum(size_of(folder / name) for name in pickles)
        findings.append(note("warning", "pickle-beside", folder, message, fix, size))
    code = [name for name in names if name.endswith(".py")]
    if code:
        message = f"holds Python files, which run only with trust_remote_code=True: {listed(code)}"
        fix = "read them before you pass trust_remote_code=True"
        findings.append(note("info", "custom-code", folder, message, fix))
    return findings
