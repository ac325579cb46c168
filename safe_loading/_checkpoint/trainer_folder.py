"""The folders that a Trainer saves to resume from, and the files that a killed save has left out. Imports no torch.

transformers writes the weights first, then the states of the optimizer, the scheduler and the random numbers, and
``trainer_state.json`` last. ``resume_from_checkpoint=True`` takes the folder with the highest number, whole or not.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from safe_loading._core.report import Finding, errors_of

from .faults import listed, note
from .files import try_open
from .index import inspect_checkpoint
from .weight_files import ADAPTER_CONFIG, ADAPTER_SINGLE, MODEL_SINGLE, names_in

_FOLDER = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"
# Of each part the name that is missed, and the names that it has: of one process, FSDP, XLA and DeepSpeed.
_PARTS = {
    "optimizer.pt": re.compile(r"optimizer(\.pt|\.bin|_\d+)|rank\d+-of-\d+-optimizer\.pt|global_step\d+"),
    "scheduler.pt": re.compile(r"scheduler\.pt|global_step\d+"),
    "rng_state.pth": re.compile(r"rng_state(_\d+)?\.pth"),
}
_SHARDED_WEIGHTS = re.compile(r"pytorch_model_fsdp(_\d+|\.bin)|global_step\d+")
# Of other programs that call their folders so: accelerate's save_state, LLaMA-Factory's second trainer.
_OF_OTHERS = re.compile(r"random_states_\d+\.pkl|CHECKPOINT_COMPLETE")
_OF_RANK = re.compile(r"rng_state_(\d+)\.pth")
_ZIPPED = re.compile(r"(optimizer|scheduler|rng_state|pytorch_model_fsdp).*\.(pt|pth|bin)")
_DISTRIBUTED = re.compile(r"(optimizer|pytorch_model_fsdp)_\d+")  # folders, whose .metadata torch writes last
_MISSING = ("weights-missing", "missing-shard")


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, in the order of their steps."""
    names = names_in(run)
    found = [] if isinstance(names, Finding) else [(int(name[11:]), name) for name in names if _FOLDER.fullmatch(name)]
    return [run / name for _, name in sorted(found) if (run / name).is_dir()]


def last_whole(run: Path) -> Path | None:
    """Return the latest checkpoint of a run that a Trainer can resume from; None if there is none."""
    return next((path for path in reversed(checkpoints_of(run)) if not _faults(path)), None)


def half_checkpoint(folder: Path) -> Finding | None:
    """Return the finding of a Trainer's checkpoint that is not whole, with the last whole one of its run."""
    folder = folder if folder.name else folder.absolute()
    faults = _faults(folder)
    if not faults:
        return None
    message = f"is a Trainer's checkpoint that was not saved to its end: {', '.join(faults)}"
    if folder.name in [path.name for path in checkpoints_of(folder.parent)[-1:]]:  # none where the run is not listed
        message += ". As the latest of its run it is what resume_from_checkpoint=True takes"
    whole = last_whole(folder.parent)
    fix = "delete it, and train from the start: no whole checkpoint of this run was found"
    if whole is not None:
        fix = f"pass resume_from_checkpoint={str(whole)!r}, the last whole one of this run, or delete this folder"
    return note("warning", "half-checkpoint", folder, message, fix)


def _faults(folder: Path) -> list[str]:
    """Return the faults of a Trainer's checkpoint, as texts; none for a folder that is none, or is whole."""
    names = names_in(folder)
    if isinstance(names, Finding) or not _FOLDER.fullmatch(folder.name) or not _is_of_a_trainer(folder, names):
        return []
    missing, damaged = list[str](), list[str]()
    if not any(_SHARDED_WEIGHTS.fullmatch(name) for name in names):
        missing, damaged = _weights(folder, names)
    parts = {part: [name for name in names if have.fullmatch(name)] for part, have in _PARTS.items()}
    if _STATE not in names or any(parts.values()):  # with save_only_model=True there is none
        missing += [part for part, have in parts.items() if not have]
        ranks = {int(of_rank[1]) for name in names if (of_rank := _OF_RANK.fullmatch(name))}
        missing += [f"rng_state_{rank}.pth" for rank in range(max(ranks, default=0)) if rank not in ranks]
    if _STATE not in names:
        missing.append(_STATE)
    damaged += _cut_short(folder, names)
    said = [f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
    return said + ([f"{listed(damaged)} {'is' if len(damaged) == 1 else 'are'} damaged"] if damaged else [])


def _is_of_a_trainer(folder: Path, names: list[str]) -> bool:
    """Return whether a folder of that name is a Trainer's own, and not the weights alone of a model."""
    if _STATE not in names and any(_OF_OTHERS.fullmatch(name) for name in names):
        return False
    if _STATE in names or any(part.fullmatch(name) for part in _PARTS.values() for name in names):
        return True
    return any((other / _STATE).is_file() for other in checkpoints_of(folder.parent))


def _weights(folder: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """Return the files of weights that are missing, and those that are damaged."""
    if any((folder / name / ADAPTER_CONFIG).is_file() for name in names):  # several adapters
        return [], []
    _, findings = inspect_checkpoint(folder)
    errors = [each for each in errors_of(findings) if each.code != "pickle-only"]
    missing = [_file_of(folder, each) for each in errors if each.code in _MISSING]
    return missing, list(dict.fromkeys(_file_of(folder, each) for each in errors if each.code not in _MISSING))


def _file_of(folder: Path, finding: Finding) -> str:
    if finding.code == "weights-missing":
        return ADAPTER_SINGLE if (folder / ADAPTER_CONFIG).exists() else MODEL_SINGLE
    return Path(finding.where).name


def _cut_short(folder: Path, names: list[str]) -> Iterator[str]:
    """Yield the names of states that end before their end; none is unpickled."""
    for name in names:
        path = folder / name
        if _DISTRIBUTED.fullmatch(name) and path.is_dir():
            if not (path / ".metadata").is_file():
                yield name
        elif name == _STATE or _ZIPPED.fullmatch(name):
            file = try_open(path)
            if isinstance(file, Finding):
                yield name
                continue
            with file:
                # the directory of a zip, which torch.save writes, comes last
                if not (_is_json(file.read()) if name == _STATE else zipfile.is_zipfile(file)):
                    yield name


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)  # not strictly: a Trainer writes NaN where the loss was
    except (ValueError, RecursionError):
        return False
    return True
