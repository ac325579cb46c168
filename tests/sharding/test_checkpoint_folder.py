"""Copies of a checkpoint that differ only in values: their digests, which the ranks compare, differ too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from safe_loading._sharding.checkpoint_folder import _digest
from safe_loading._sharding.open_source import open_source

NAMES = [f"{number}.weight" for number in range(5)]


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(128, 256, bias=False) for _ in range(5)])


def digest(folder: Path) -> str:
    return _digest(open_source(folder, layers()))


@pytest.mark.parametrize("changed", [*NAMES, None])
def test_two_steps_of_a_training_have_two_digests(tmp_path: Path, changed: str | None) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    file = "model.safetensors"
    save_file(layers().state_dict(), first / file, metadata={"format": "pt"})
    shutil.copytree(first, second)
    assert digest(first) == digest(second)
    state = load_file(first / file)
    if changed is not None:
        state[changed] += 1e-3
    save_file(state, second / file, metadata={"format": "pt"})
    assert (digest(first) == digest(second)) == (changed is None)


def test_a_file_smaller_than_a_sample_is_hashed_whole(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        save_file({"weight": torch.full((1, 1), float(number))}, tmp_path / str(number) / "model.safetensors")
    small = nn.Linear(1, 1, bias=False)
    one, other = (_digest(open_source(tmp_path / str(number), small)) for number in range(2))
    assert one != other
