"""``check_checkpoint``: whether a folder is whole and safe to load, by its headers and the load's own check."""

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
from safe_loading._checkpoint.hub import did_you_mean, is_hub_id
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._checkpoint.other_things import adapters_inside, address, other_thing
from safe_loading._checkpoint.published_hashes import compare_hashes
from safe_loading._checkpoint.signer import Signer, signer_of
from safe_loading._checkpoint.tokenizer_ids import rows_of, tokenizer_findings
from safe_loading._checkpoint.trainer_folder import checkpoints_of, half_checkpoint
from safe_loading._checkpoint.weight_files import PICKLE_SUFFIXES, conversion_command, kind_of, names_in
from safe_loading._core.paths import path_text
from safe_loading._core.report import Finding, Table, Verdict, counted, errors_of, format_bytes, worst_first
from safe_loading._model.quantized.on_disk import quantization_on_disk
from safe_loading.errors import EngineError

from .adapter_findings import adapter_findings
from .folder_findings import code_findings, model_findings, type_findings

Kind = Literal["model", "adapter", "file"]
_HEADERS = "headers alone"
_CHECKED_ALONE = (".safetensors", *PICKLE_SUFFIXES)


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
    """The report of :func:`check_checkpoint`.

    Attributes:
        path: The folder or file.
        kind: What it was read as: ``"model"``, ``"adapter"`` or a single ``"file"``.
        files: The weight files that could be read, in the order in which they are loaded.
        tensors: How many tensors these files have.
        bytes: The bytes of these tensors.
        dtypes: The bytes in each dtype, by its safetensors name.
        metadata: The metadata of the weight files.
        findings: Everything worth knowing, errors first.
        checked_on: The model that the load's own check was asked with, such as ``"LlamaForCausalLM on meta"``, or
            ``"headers alone"`` and the reason.
        hashed: How many files were read and compared with the hash that they were published with.
    """

    path: str
    kind: Literal["model", "adapter", "file"]
    files: tuple[CheckpointFile, ...]
    tensors: int
    bytes: int
    dtypes: Mapping[str, int]
    metadata: Mapping[str, str]
    findings: tuple[Finding, ...]
    checked_on: str = _HEADERS
    hashed: int = 0

    def _title(self) -> str:
        dtypes = ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in self.dtypes.items())
        weights = f"{counted(self.tensors, 'tensor')} in {counted(len(self.files), 'file')}, {format_bytes(self.bytes)}"
        return f"{self.path}: {self.kind}, {weights}{f' ({dtypes})' if dtypes else ''}: {self._verdict()}"

    def _verdict(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        verdict = f"{'ok' if self.ok else 'NOT OK'}{'' if self.kind == 'file' else f' ({self.checked_on})'}"
        verdict += f", {counted(self.hashed, 'file')} compared by hash" if self.hashed else ""
        return verdict + "".join(f", {counted(n, severity)}" for severity, n in counts.items())

    def _tables(self) -> list[Table]:
        rows = [(file.name, str(file.tensors), format_bytes(file.bytes)) for file in self.files]
        return [Table(("file", "tensors", "bytes"), rows)]


def check_checkpoint(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    headers: bool = False,
    hashes: bool = False,
    signed_by: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
) -> CheckpointReport:
    """Check that a checkpoint is whole and safe to load, by its headers and as a load does.

    Headers, indexes and configs are read first, without torch. Where they have no error and the engines are installed,
    the model is built on meta and the check of :func:`load_peft_on_rank` is asked: which weights are missing, or have
    another shape or kind. An adapter is read, and attached to its base on meta if the base is on this machine. Of a
    model no tensor is read, but two weights that its class ties and its files both hold, and the descriptions of
    packed weights. Of a Trainer's ``checkpoint-N``, or a folder with several, it says what a save that was killed left
    out, and which is the last whole one.

    Args:
        path: The folder of a model or of an adapter, or one ``.safetensors`` file.
        values: Whether to read every tensor as well, once, through 4 MiB of memory, to find NaN and infinity, and,
            if there is a ``merge_report.json`` of :func:`merge_lora_checkpoint`, bytes that differ from what it wrote.
        headers: Whether headers and configs are all that is checked: no engine is imported, so that a folder of any
            size takes a fraction of a second in a new process.
        hashes: Whether every file is also read and compared with the hash that it was published with: the name of its
            blob in a Hugging Face cache (git's SHA-1, or SHA-256), and the manifest of a model signing (``model.sig``).
            Where no file has one, that is an error.
        signed_by: Who must have signed the folder: the path of a public key, or of certificates of which one must have
            issued the signer's, in PEM. The signature of ``model.sig`` is verified by model-signing (the extra
            ``signing``), offline; a file that it does not cover is an error. Implies ``hashes``.
        base_model: For an adapter, the folder or hub id of its base. None takes the one that its config names.

    Returns:
        The report; ``checked_on`` says which was done. A bad checkpoint does not raise; its faults are findings of
        severity ``"error"``.

    Raises:
        CheckpointNotFound: There is nothing at ``path``.
        ArgumentError: ``path`` or ``base_model`` is not a path, or ``signed_by`` is not one of such a file.
        EngineError: ``signed_by`` is given, and model-signing is not installed.
    """
    if base_model is not None:
        path_text(base_model, "base_model")
    checked = Path(path_text(path, "path")).expanduser()
    signer = signer_of(signed_by) if signed_by is not None else None
    try:
        checked.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        finding = unreadable(checked, error)
        if finding.code in ("not-found", "broken-link"):
            raise_faults(checked, [_with_other_roads(finding, checked, str(path))])
        return _report(checked, "file", {}, [finding])
    other = other_thing(checked) or adapters_inside(checked)
    if other is not None and checked.suffix not in _CHECKED_ALONE:
        halves = [half_checkpoint(latest) for latest in checkpoints_of(checked)[-1:]]
        findings = [fault("not-a-folder", checked, other.message, other.fix), *filter(None, halves)]
        return _report(checked, "file", {}, findings)
    is_folder = checked.is_dir()
    report = _check_folder(checked, values, headers, base_model) if is_folder else _check_file(checked, values)
    return _with_hashes(report, checked, signer) if hashes or signer is not None else report


def _with_hashes(report: CheckpointReport, path: Path, signer: Signer | None) -> CheckpointReport:
    """Return the report with the findings about every file and its published hash."""
    folder, names = (path, None) if path.is_dir() else (path.parent, [path.name])
    compared = compare_hashes(folder, names, signer)
    findings = worst_first([*report.findings, *compared.findings])
    return replace(report, findings=findings, hashed=compared.files)


def _with_other_roads(finding: Finding, path: Path, text: str) -> Finding:
    """Return the finding on a path that is not there, with the names like it and, of a hub id, the download."""
    if page := address(text):
        return fault("not-found", text, page.message, f"{page.fix}; it is downloaded first: `{page.download}`")
    if finding.code != "not-found":
        return finding
    fix = f"{finding.fix}{did_you_mean(path)}"
    if "/" in text and is_hub_id(text):
        fix += f" A hub id is downloaded first: `hf download {text}`."
    return replace(finding, fix=fix)


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


def _check_folder(
    folder: Path, values: bool, headers_alone: bool, base_model: str | os.PathLike[str] | None
) -> CheckpointReport:
    names = names_in(folder)
    if isinstance(names, Finding):
        return _report(folder, "model", {}, [names])
    opened = ModelFolder(folder)
    checkpoint, findings = opened.inspect_checkpoint()
    headers = checkpoint.headers if checkpoint is not None else {}
    tensors = checkpoint.tensors if checkpoint is not None else {}
    kind = checkpoint.kind if checkpoint is not None else kind_of(names)
    if kind == "adapter":
        findings += adapter_findings(folder, tensors, opened.files)
    else:
        is_whole = not errors_of(findings)
        findings += model_findings(opened, names, tensors)
        findings += quantization_on_disk(opened, checkpoint) if is_whole and checkpoint is not None else []
        findings += tokenizer_findings(folder, rows_of(tensors))
    findings += code_findings(folder, names)
    findings += filter(None, [half_checkpoint(folder)])
    checked_on = _HEADERS
    if not headers_alone and not errors_of(findings):
        checked_on, refused = _as_a_load(opened, kind, base_model)
        findings += refused
    if kind == "model" and "config.json" in names and not checked_on.endswith(" on meta"):
        findings += type_findings(opened)
    if values and headers:
        findings += _value_findings(folder, headers)
    return _report(folder, kind, headers, findings, checked_on)


def _as_a_load(opened: ModelFolder, kind: Kind, base_model: str | os.PathLike[str] | None) -> tuple[str, list[Finding]]:
    """Return the model that the load's own check was asked with, and its findings."""
    from safe_loading._core.engines import require_engines  # which reads versions with a package of its own

    try:
        require_engines()
    except EngineError as error:
        return f"{_HEADERS}: {error.problems[0]}", []
    from .check_as_load import check_adapter, check_model

    by, findings = check_adapter(opened, base_model) if kind == "adapter" else check_model(opened)
    return by, findings


def _value_findings(folder: Path, headers: Mapping[str, Header]) -> list[Finding]:
    from safe_loading._model.layout.tensor_contents import check_contents  # torch, which nothing else here needs

    return [*check_contents(folder, headers)]


def _report(
    path: Path, kind: Kind, headers: Mapping[str, Header], findings: Sequence[Finding], checked_on: str = _HEADERS
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
        checked_on=checked_on,
    )
