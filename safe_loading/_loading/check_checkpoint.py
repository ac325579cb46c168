"""``check_checkpoint``: whether a folder is whole and safe to load, from headers and configs, without torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from safe_loading._checkpoint.faults import fault, raise_faults
from safe_loading._checkpoint.files import size_of, unreadable
from safe_loading._checkpoint.header import Header, try_header
from safe_loading._checkpoint.hub import is_hub_id
from safe_loading._checkpoint.index import inspect_checkpoint
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG, PICKLE_SUFFIXES, conversion_command, names_in
from safe_loading._core.paths import path_text
from safe_loading._core.report import Finding, Table, Verdict, format_bytes, worst_first

from .folder_findings import adapter_findings, code_findings, model_findings

Kind = Literal["model", "adapter", "file"]


@dataclass(frozen=True)
class CheckpointFile:
    """One weight file of a report.

    Attributes:
        name: Its name, relative to the folder.
        tensors: How many tensors it has.
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
        tensors: How many tensors these files have.
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

    No tensor is read and torch is not imported, so a folder of any size takes a fraction of a second.

    Args:
        path: The folder of a model or of an adapter, or one ``.safetensors`` file.
        values: Whether to read every tensor as well, once, through 4 MiB of memory, to find NaN and infinity, and,
            if there is a ``merge_report.json`` of :func:`merge_lora_checkpoint`, bytes that differ from what it wrote.

    Returns:
        The report. A bad checkpoint does not raise; its faults are findings of severity ``"error"``.

    Raises:
        CheckpointNotFound: There is nothing at ``path``.
        ArgumentError: ``path`` is not a path.
    """
    checked = Path(path_text(path, "path"))
    try:
        checked.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        finding = unreadable(checked, error)
        if finding.code in ("not-found", "broken-link"):
            raise_faults(checked, [_with_download(finding, str(path))])
        return _report(checked, "file", {}, [finding])
    return _check_folder(checked, values) if checked.is_dir() else _check_file(checked, values)


def _with_download(finding: Finding, text: str) -> Finding:
    """Return the finding on a path that is not there; where it may be a hub id, its fix says how to download it."""
    if finding.code != "not-found" or "/" not in text or not is_hub_id(text):
        return finding
    return replace(finding, fix=f"{finding.fix}; a hub id is downloaded first: `hf download {text}`")


def _check_file(path: Path, values: bool) -> CheckpointReport:
    if path.name.endswith(PICKLE_SUFFIXES):
        command = conversion_command(path.parent, path.name, f"{path.stem}.safetensors")
        message = "is a pickle by its name, which can run code when it is read"
        fix = f"convert it once (this reads tensors only):\n{command}"
        return _report(path, "file", {}, [fault("pickle-only", path, message, fix, size_of(path))])
    header = try_header(path)
    if not isinstance(header, Header):
        return _report(path, "file", {}, header)
    headers = {path.name: header}
    return _report(path, "file", headers, _value_findings(path.parent, headers) if values else [])


def _check_folder(folder: Path, values: bool) -> CheckpointReport:
    names = names_in(folder)
    if isinstance(names, Finding):
        return _report(folder, "model", {}, [names])
    checkpoint, findings = inspect_checkpoint(folder)
    headers = checkpoint.headers if checkpoint is not None else {}
    tensors = checkpoint.tensors if checkpoint is not None else {}
    if checkpoint is not None:
        kind = checkpoint.kind
    else:
        kind = "adapter" if ADAPTER_CONFIG in names and "config.json" not in names else "model"
    if kind == "adapter":
        findings += adapter_findings(folder, tensors)
    else:
        findings += model_findings(folder, names, tensors)
    findings += code_findings(folder, names)
    if values and headers:
        findings += _value_findings(folder, headers)
    return _report(folder, kind, headers, findings)


def _value_findings(folder: Path, headers: Mapping[str, Header]) -> list[Finding]:
    from safe_loading._model.layout.tensor_contents import check_contents  # torch, which nothing else here needs

    return [*check_contents(folder, headers)]


def _report(path: Path, kind: Kind, headers: Mapping[str, Header], findings: Sequence[Finding]) -> CheckpointReport:
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
