"""The folder of a workload's adapter, whose config a verb reads once for all of its traces."""

from __future__ import annotations

import copy
import dataclasses
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from safe_loading._core.workload import Workload

if TYPE_CHECKING:
    from peft import PeftConfig

    from safe_loading._checkpoint.adapter_folder import AdapterFolder

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


def as_passed(workload: Workload) -> Workload:
    """Return the workload with the folder that the caller passed, to be read anew by the next call."""
    read = workload.adapter
    return dataclasses.replace(workload, adapter=read.folder) if isinstance(read, ReadAdapter) else workload
