"""A folder of many files under a small limit of open ones: macOS allows a process 256, a large model has more."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import Made
from transformers import AutoModelForCausalLM

from safe_loading import (
    CheckpointError,
    Workload,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    meta_model,
    plan_device_map,
    predict_memory,
    verify_merge,
    wrap_fsdp_meta_safe,
)
from safe_loading._checkpoint.files import open_regular

FILES = 50
"""Of the folder, at least."""


@pytest.fixture(scope="module")
def folders(made: Made, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("many-files")
    model = AutoModelForCausalLM.from_pretrained(made.llama(num_hidden_layers=8))
    model.save_pretrained(base, max_shard_size="4KB")
    assert len(list(base.glob("*.safetensors"))) > FILES
    return base, made.adapter(made.llama(num_hidden_layers=8), target_modules="all-linear")


@pytest.fixture
def few_files(folders: tuple[Path, Path]) -> Iterator[int]:
    """Fewer files than the folder has may be open beside those that are open already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    fillers = [os.open(os.devnull, os.O_RDONLY)]  # a limit is one of the numbers, not of their count
    while fillers[-1] < last:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    limit = last + 1 + FILES // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_every_verb_works(folders: tuple[Path, Path], one_rank: None, few_files: int, tmp_path: Path) -> None:
    base, adapter = folders
    load_peft_on_rank(base, adapter)
    wrap_fsdp_meta_safe(meta_model(base), base)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged", max_shard_size="4KB")
    assert verify_merge(base, adapter, tmp_path / "merged").ok
    assert check_checkpoint(tmp_path / "merged").ok
    plan_device_map(base, {0: "1GiB"})
    predict_memory(base, Workload.train(1, 8))


def test_where_no_more_files_may_be_open_the_limit_is_named(folders: tuple[Path, Path], few_files: int) -> None:
    opened = []
    try:
        with pytest.raises(CheckpointError, match="may open no more files") as caught:
            opened += [open_regular(path) for path in sorted(folders[0].glob("*.safetensors"))]
    finally:
        for file in opened:
            file.close()
    assert "ulimit -n" in str(caught.value)
