"""Chapter three: two ranks wrap the first chapter's base, and the memory of each beside the naive road."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safe_loading._core.report import format_bytes, text_table
from safe_loading.errors import SafeLoadingError

from .torchrun import run_ranks

_WIDTH = 32
_HEADER = ("rank", "road", "memory for weights", "", "read", "sent", "logits")


def chapter(folder: Path) -> str:
    """Start two ranks that wrap the base by both roads, and return the table with its bars."""
    found = run_ranks("safe_loading._demo.fsdp_rank", folder, 2, "fsdp")
    if not all(facts["equal"] and facts["naive_equal"] for facts in found):
        raise SafeLoadingError("The demo's wrap is not what it promises: the logits differ from one process.")
    most = max(facts["naive"] for facts in found)
    rows = [row for rank, facts in enumerate(found) for row in _rows(rank, facts, most)]
    return "\n".join(
        [
            "",
            "wrap_fsdp_meta_safe: each rank reads its own bytes, and no weight travels",
            "  two ranks of torchrun (gloo) on the CPU; counted on each rank, the naive road's before it is sharded",
            "",
            text_table(_HEADER, rows),
        ]
    )


def _rows(rank: int, facts: dict[str, Any], most: int) -> list[tuple[str, ...]]:
    def bar(size: int) -> str:
        return "#" * max(1, round(_WIDTH * size / most))

    ours = (format_bytes(facts["local"]), bar(facts["local"]), format_bytes(facts["read"]), format_bytes(facts["sent"]))
    naive = (format_bytes(facts["naive"]), bar(facts["naive"]), format_bytes(facts["model"]), "0 B")
    return [(str(rank), "safe_loading", *ours, "equal"), (str(rank), "load, then fully_shard", *naive, "equal")]
