"""Merges into codes under kill -9, a full and a broken disk: codes and scales are the base's or the merged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import needs
from faults.merge_sweep import files, swept
from models import save_adapter, save_llama
from rank_server import RankServer
from test_merge_lora_checkpoint_codes import save_fp8
from test_merge_lora_checkpoint_expert_codes import adapter_of
from test_merge_lora_checkpoint_quantized import gpt_oss, on_disk

from safe_loading import merge_lora_checkpoint

SEED = 11


def fp8_base(root: Path) -> None:
    """A base whose scales lie in a file of their own, so that one task writes to two files at once."""
    save_fp8(root / "base", [16, 24], apart=True)
    plain = save_llama(root / "plain", torch.bfloat16)
    for name, seed in (("adapter", 3), ("other", 5)):
        save_adapter(root / name, plain, seed=seed)


def mxfp4_base(root: Path) -> None:
    packed, plain = gpt_oss(root)
    packed.rename(root / "base")
    adapter_of(root / "adapter", plain, lora_alpha=8)
    adapter_of(root / "other", plain, lora_alpha=4)


@needs("transformers", "5.10")
@pytest.mark.parametrize(("make", "of_codes"), [(fp8_base, "_scale_inv"), (mxfp4_base, "_scales")])
@pytest.mark.parametrize(
    ("sample", "targets"),
    [
        (2, ["replaced"]),
        pytest.param(40, ["new", "replaced"], marks=pytest.mark.slow, id="many"),
        pytest.param(0, [], marks=pytest.mark.slow, id="all"),
    ],
)
def test_a_fault_at_any_call_leaves_no_codes_without_their_scales(
    faulting_server: RankServer,
    tmp_path: Path,
    make: Callable[[Path], None],
    of_codes: str,
    sample: int,
    targets: list[str],
) -> None:
    make(tmp_path)
    merge_lora_checkpoint(tmp_path / "base", tmp_path / "other", tmp_path / "old")
    found = swept(faulting_server, tmp_path, sample, SEED, targets)
    assert {target: each["problems"] for target, each in found.items()} == {target: [] for target in found}
    merge_lora_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "whole")
    for target, each in found.items():
        moved = "rename" if target == "new" else "renameat2"  # which exchanges two folders
        assert {"pwrite64", "fsync", moved} <= set(each["calls"]), target
        assert files(tmp_path / target / "counted" / "out") == files(tmp_path / "whole"), target
    before, after = on_disk(tmp_path / "base"), on_disk(tmp_path / "whole")
    assert any(not before[name].equal(after[name]) for name in before if name.endswith(of_codes))
