"""The folder of a workload's adapter, whose config a verb reads once for all of its traces."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.paths import path_text
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError, CheckpointNotFound

if TYPE_CHECKING:
    from peft import PeftConfig

    from safe_loading._checkpoint.adapter_folder import AdapterFolder
    from safe_loading._model.layout.source_model import ModelSource

Folder = str | os.PathLike[str]


class ReadAdapter(os.PathLike[str]):
    """The folder or hub id of an adapter, equal to the one that was passed, with its config."""

    def __init__(self, folder: Folder, config: PeftConfig, facts: AdapterFolder) -> None:
        self.folder = folder
        self._config = config
        self._facts = facts

    @property
    def config(self) -> PeftConfig:
        """A copy of the config, to which peft may write as it attaches the adapter."""
        return copy.deepcopy(self._config)

    def config_on(self, base: torch.nn.Module) -> tuple[PeftConfig, AbstractContextManager[None]]:
        """A copy of the config as it is attached to a base, and the context in which peft builds it."""
        from safe_loading._loading.config_on_base import config_on_base

        return config_on_base(self.config, self._facts, base)

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def __str__(self) -> str:
        return os.fspath(self.folder)

    def __repr__(self) -> str:
        return repr(self.folder)

    def __eq__(self, other: object) -> bool:
        return self.folder == (other.folder if isinstance(other, ReadAdapter) else other)

    def __hash__(self) -> int:
        return hash(self.folder)


def with_read_adapter(workload: Workload) -> Workload:
    """Return a workload whose adapter's folder, if it has one, was read."""
    if not isinstance(workload.adapter, (str, os.PathLike)):
        return workload
    return dataclasses.replace(workload, adapter=read_adapter(workload.adapter))


def read_adapter(folder: Folder) -> ReadAdapter:
    """Return an adapter's folder with its config; one that was read before is not read again."""
    if isinstance(folder, ReadAdapter):
        return folder
    from safe_loading._loading.peft_config import read_peft_config

    return ReadAdapter(folder, *read_peft_config(folder))


def base_and_workload(source: ModelSource, workload: Workload) -> tuple[ModelSource, Workload, Path | None]:
    """Return the base that an adapter's folder names, the workload with it, and its config; other models as passed."""
    if not isinstance(source, (str, os.PathLike)):
        return source, workload, None
    folder = Path(path_text(source, "model")).expanduser()
    if not os.path.lexists(folder / ADAPTER_CONFIG):
        return source, workload, None
    read = read_adapter(os.fspath(folder))
    base = read.config.base_model_name_or_path
    if not base or not isinstance(base, str):
        raise ArgumentError(
            f"{folder} names no base model ({base!r:.80}). Pass the base, and this adapter in the workload."
        )
    return base, workload if workload.adapter is not None else workload.replace(adapter=read), folder / ADAPTER_CONFIG


@contextmanager
def naming_base(config: Path | None) -> Iterator[None]:
    """Inside, a base that is not found is told with the config of the adapter that names it, if one does."""
    try:
        yield
    except CheckpointNotFound as error:
        if config is None:
            raise
        elsewhere = "if it lies elsewhere now, pass it, and this adapter in the workload"
        raise CheckpointNotFound(f"{error} {config} names this base; {elsewhere}.") from error


def as_passed(workload: Workload) -> Workload:
    """Return the workload with the folder that the caller passed, to be read anew by the next call."""
    read = workload.adapter
    return dataclasses.replace(workload, adapter=read.folder) if isinstance(read, ReadAdapter) else workload
