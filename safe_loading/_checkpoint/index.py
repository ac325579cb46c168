"""A checkpoint in one file or several, and whether its files agree with one another. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, counted, errors_of

from .faults import fault, json_kind, listed, note, raise_faults
from .files import not_contained, size_of, stamp
from .header import Header, TensorInfo, try_header
from .json_files import JsonFiles
from .weight_files import Kind, find_weights, names_in

_TRIES = 50  # replacing a folder takes a moment; one that is replaced all the time is read as it is
_SAVE_AGAIN = "index and files are not from one save: download or copy the whole folder again, or save it again"


@dataclass(frozen=True)
class Index:
    """The content of a ``*.safetensors.index.json``."""

    path: Path
    weight_map: Mapping[str, str]  # the file of each tensor, relative to the folder of the index
    total_size: int | None  # the bytes of all tensors as the index states them; None if it does not
    dtype: object = None  # as the index states it


@dataclass(frozen=True)
class Checkpoint:
    """The headers of the weight files of one folder."""

    folder: Path
    kind: Kind
    index: Index | None
    headers: Mapping[str, Header]  # by file name relative to the folder, in the order of loading
    tensors: Mapping[str, TensorInfo]
    file_of: Mapping[str, Path]
    findings: tuple[Finding, ...] = ()  # warnings and notes, no errors
    # ``files.stamp`` of each weight file before its header was read, and of the index before it was.
    stamps: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, in the order in which they are loaded."""
        return tuple(header.path for header in self.headers.values())


def read_index(path: Path) -> Index:
    """Read and check an index. The files that it names are inside its folder; whether they exist is not looked at."""
    index, findings = inspect_index(path)
    if index is None:
        raise_faults(path, errors_of(findings))
    return index


def read_checkpoint(
    folder: Path, *, variant: str | None = None, kind: Kind | None = None, files: JsonFiles | None = None
) -> Checkpoint:
    """Read the headers of all weight files of a folder, and check that together they are one complete checkpoint.

    The error names all files that are missing, damaged or from another save. For weights that exist as a pickle only it
    is PickleRefused, with the command that converts them. By default the folder is read as an adapter if it holds one
    and no model. A caller who has read JSON files of the folder passes them as ``files``; they are not read again.
    """
    return require_whole(folder, inspect_checkpoint(folder, variant=variant, kind=kind, files=files))


def require_whole(folder: Path, inspected: tuple[Checkpoint | None, list[Finding]]) -> Checkpoint:
    """Return the checkpoint that :func:`inspect_checkpoint` found in a folder; raise its errors if it has any."""
    checkpoint, findings = inspected
    errors = errors_of(findings)
    if checkpoint is None or errors:
        raise_faults(folder, errors)
    return checkpoint


def require_unchanged(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose files another process has written or replaced since their headers were checked."""
    refuse_changed(checkpoint.folder, checkpoint.stamps)


def refuse_changed(folder: Path, stamps: Mapping[Path, tuple[int, ...]]) -> None:
    """Refuse a folder of whose files one has no longer the stamp that it had before it was read."""
    changed = [path for path, before in stamps.items() if stamp(path) != before]
    if changed:
        message = f"{len(changed)} of {len(stamps)} files were written while they were read: "
        message += listed(path.name for path in changed)
        fix = "load it again when its writer is done; write each new checkpoint to a folder of its own"
        raise_faults(folder, [fault("changed", folder, message, fix)])


def inspect_checkpoint(
    folder: Path, *, variant: str | None = None, kind: Kind | None = None, files: JsonFiles | None = None
) -> tuple[Checkpoint | None, list[Finding]]:
    """Read like :func:`read_checkpoint`, but raise nothing; return the checkpoint and findings of any severity.

    Where nothing could be read, the checkpoint is ``None``, and at least one of the findings is an error.
    """
    tries, files = 0, JsonFiles() if files is None else files
    while True:
        before, tries = stamp(folder), tries + 1
        read = files.copy()
        result = _inspect(folder, variant, kind, read)
        # Read again if the folder was replaced in the meantime.
        if tries == _TRIES or stamp(folder) == before:
            files.add(read)
            return result


def _inspect(
    folder: Path, variant: str | None, kind: Kind | None, read: JsonFiles
) -> tuple[Checkpoint | None, list[Finding]]:
    names = names_in(folder)
    if isinstance(names, Finding):
        return None, [names]
    weights, findings = find_weights(folder, names, variant=variant, kind=kind, read=read)
    if weights is None:
        return None, findings
    index = None
    files = {weights.path.relative_to(folder).as_posix(): weights.path}
    if weights.is_index:
        index, index_findings = inspect_index(weights.path, read)
        findings += index_findings
        if index is None:
            return None, findings
        # In the order of transformers, and relative to the folder even if the index is in a folder below it.
        files = {name: folder / name for name in sorted(set(index.weight_map.values()))}
    # Before the headers are read, so that a file that changes while they are counts as changed.
    stamps = {path: stamp(path) for path in files.values()}
    stamps |= {} if index is None else {index.path: read.stamps[index.path]}
    headers, missing = _headers(files, index)
    tensors, file_of, twice = _merged(headers)
    findings += [*missing, *twice]
    if index is not None:
        findings += _index_faults(index, headers)
    if not tensors and len(headers) == len(files):
        findings.append(fault("no-tensors", weights.path, "holds no tensor at all", "save or download it again"))
    if weights.kind == "model":
        findings += _stray_shards(folder, names, files)
    notes = tuple(finding for finding in findings if finding.severity != "error")
    return Checkpoint(folder, weights.kind, index, headers, tensors, file_of, notes, stamps), findings


def inspect_index(path: Path, read: JsonFiles | None = None) -> tuple[Index | None, list[Finding]]:
    """Read like :func:`read_index`, but raise nothing; return the index or ``None``, and the findings."""
    document = (JsonFiles() if read is None else read).try_read(path)
    if isinstance(document, Finding):
        return None, [document]
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        kind = json_kind(weight_map) if "weight_map" in document else "missing"
        message = f"weight_map is {kind}; it must be an object that names the file of each tensor"
        return None, [fault("index-weight-map", path, message, "save or download the index again")]
    findings = _weight_map_faults(path, weight_map)
    total_size, notes = _total_size(path, document)
    metadata = document.get("metadata")
    dtype = metadata.get("dtype") if isinstance(metadata, dict) else None
    index = None if findings else Index(path, weight_map, total_size, dtype)
    return index, findings + notes


def _weight_map_faults(path: Path, weight_map: JsonObject) -> list[Finding]:
    findings = []
    wrong = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if wrong:
        kind = json_kind(weight_map[wrong[0]])
        message = f"weight_map holds {kind} for {listed(wrong)}; it must be the name of a file"
        findings.append(fault("index-weight-map", path, message, "save or download the index again"))
    for file in sorted({file for file in weight_map.values() if isinstance(file, str)}):
        reason = not_contained(path.parent, file)
        if reason is not None:
            fix = "do not trust this checkpoint until you know why it names such a file"
            findings.append(fault("index-path", path, reason, fix))
        elif not file.endswith(".safetensors"):
            message = f"weight_map names {file!r}, which is not a safetensors file"
            findings.append(fault("index-path", path, message, "save the model again with safetensors"))
    return findings


def _total_size(path: Path, document: JsonObject) -> tuple[int | None, list[Finding]]:
    metadata = document.get("metadata")
    fix = 'add "metadata": {"total_size": <bytes of all tensors>} to the index'
    if not isinstance(metadata, dict):
        kind = json_kind(metadata) if "metadata" in document else "missing"
        message = f"metadata is {kind}; transformers fails on an index without the object"
        return None, [note("warning", "index-metadata", path, message, fix)]
    total_size = metadata.get("total_size")
    if total_size is None or (type(total_size) is int and total_size >= 0):
        return total_size, []
    message = f"metadata.total_size is {total_size!r}, which is not a number of bytes"
    # Not an error: nothing is loaded by it, and older versions of transformers wrote fractions for packed dtypes.
    return None, [note("warning", "index-metadata", path, message, fix)]


def _headers(files: Mapping[str, Path], index: Index | None) -> tuple[dict[str, Header], list[Finding]]:
    headers: dict[str, Header] = {}
    findings: list[Finding] = []
    for name, path in files.items():
        header = try_header(path)
        if isinstance(header, Header):
            headers[name] = header
        # A missing file of an index has one fault here, instead of one for each tensor that the index places in it.
        elif index is not None and header[0].code in ("not-found", "broken-link"):
            placed = [tensor for tensor, file in index.weight_map.items() if file == name]
            message = header[0].message.rstrip(".")
            message += f"; {index.path.name} places {counted(len(placed), 'tensor')} in it: {listed(placed)}"
            findings.append(fault("missing-shard", path, message, header[0].fix))
        else:
            findings += header
    return headers, findings


def _merged(headers: Mapping[str, Header]) -> tuple[dict[str, TensorInfo], dict[str, Path], list[Finding]]:
    tensors: dict[str, TensorInfo] = {}
    file_of: dict[str, Path] = {}
    twice: dict[tuple[Path, Path], list[str]] = defaultdict(list)
    for header in headers.values():
        for name in header.tensors.keys() & tensors.keys():
            twice[file_of[name], header.path].append(name)
        tensors.update(header.tensors)
        file_of.update(dict.fromkeys(header.tensors, header.path))
    findings = []
    for (first, second), names in twice.items():
        message = f"holds {counted(len(names), 'tensor')} that {str(first)!r} holds too: {listed(sorted(names))}"
        findings.append(fault("tensor-twice", second, message, _SAVE_AGAIN))
    return tensors, file_of, findings


def _index_faults(index: Index, headers: Mapping[str, Header]) -> list[Finding]:
    """Return where the index contradicts the files that could be read."""
    placed: dict[str, list[str]] = defaultdict(list)
    for name, file in index.weight_map.items():
        placed[file].append(name)
    findings = []
    for file, header in headers.items():
        missing = [name for name in placed[file] if name not in header.tensors]
        if missing:
            lacking = counted(len(missing), "tensor")
            message = f"does not hold {lacking} that {index.path.name} places in it: {listed(missing)}"
            findings.append(fault("tensor-missing", header.path, message, _SAVE_AGAIN))
        extra = [name for name in header.tensors if name not in index.weight_map]
        if extra:
            message = f"holds {counted(len(extra), 'tensor')} that {index.path.name} does not name: {listed(extra)}"
            size = sum(header.tensors[name].nbytes for name in extra)
            findings.append(fault("tensor-unindexed", header.path, message, _SAVE_AGAIN, size))
    actual = sum(header.nbytes - header.data_start for header in headers.values())
    complete = len(headers) == len(placed)
    if complete and index.total_size is not None and index.total_size != actual:
        # Not an error: transformers counts a tensor that two names share twice, but writes it once.
        message = f"metadata.total_size is {index.total_size} bytes, and the tensors take {actual}"
        fix = f"set it to {actual}, unless shared tensors explain the difference"
        size = abs(actual - index.total_size)
        findings.append(note("warning", "total-size", index.path, message, fix, size))
    return findings


def _stray_shards(folder: Path, names: Sequence[str], files: Mapping[str, Path]) -> list[Finding]:
    findings = []
    for name in names:
        if name.endswith(".safetensors") and name not in files and not name.startswith("adapter_"):
            path = folder / name
            message = "is not part of the checkpoint that is read, and its tensors are not loaded"
            fix = "delete it if it is left over from an earlier save"
            findings.append(note("warning", "stray-shard", path, message, fix, size_of(path)))
    return findings
