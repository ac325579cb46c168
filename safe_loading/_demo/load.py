"""Chapter one: real ranks load a base and its adapter, and compare with the plain two steps bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from safe_loading._core.report import format_bytes, text_table
from safe_loading.errors import SafeLoadingError

from . import checkpoints
from .torchrun import run_ranks

_HEADER = ("rank", "device", "base", "adapter", "dtypes of the adapter", "seconds", "logits", "other devices")


def chapter(folder: Path) -> str:
    """Make the checkpoints, start the ranks, and return the table of what each loaded where."""
    base = checkpoints.make_llama(folder / "base")
    checkpoints.make_adapter(folder / "adapter", base)
    shards = sorted(base.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards)
    devices = torch.accelerator.device_count()
    ranks = 1 if devices == 1 else 2
    found = run_ranks("safe_loading._demo.rank", folder, ranks, "rank")
    rows = [_row(rank, facts) for rank, facts in enumerate(found)]
    wrong = [f"rank {rank}: {facts}" for rank, facts in enumerate(found) if not facts["equal"] or facts["stray"]]
    if wrong:
        raise SafeLoadingError("The demo's load is not what it promises:", wrong)
    where = "the CPU (no accelerator here)" if devices == 0 else f"{devices} accelerator(s)"
    return "\n".join(
        [
            "load_peft_on_rank: a base and its adapter on exactly one device, on every rank",
            f"  made {len(shards)} shards ({format_bytes(size)}) and an adapter in {folder}",
            f"  {ranks} rank(s) of torchrun (gloo) on {where}; 'logits' compares with the plain two-step load",
            "",
            text_table(_HEADER, rows),
        ]
    )


def _row(rank: int, facts: dict[str, Any]) -> tuple[str, ...]:
    base, adapter = facts["parts"]
    return (
        str(rank),
        facts["device"],
        format_bytes(base["bytes"]),
        format_bytes(adapter["bytes"]),
        ", ".join(adapter["dtypes"]),
        f"{base['seconds'] + adapter['seconds']:.2f}",
        "equal" if facts["equal"] else "DIFFERENT",
        f"context on {facts['stray']}" if facts["stray"] else "untouched",
    )
