"""Plans beside PyTorch's own CUDA allocator: what a plan calls fitting runs under the plan's limits and caps.

Each row of predict_on_cuda.py is planned with the least limit that the planner calls fitting, loaded by the plan after
``plan.enforce()``, and run; every second row of an A100 on two of them, too. It needs the simulated devices of
tests/simulated_cuda: run it in the environment that make_venv.py makes there.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from _common import mib, table
from _simulated_cards import over_rows


def measure(row: Any) -> dict[str, Any]:
    """Plan a row and run it, in a process without a context."""
    from _cuda_plans import run_planned

    return run_planned(row.planned, row.cards)


def all_rows() -> list[Any]:
    """Return the rows, which import torch."""
    from _cuda_plans import planned_rows

    return list(planned_rows())


def report(found: list[dict[str, Any]]) -> None:
    """Print how far the tensors were from the limits: by family, and each row that broke a promise."""
    ran = [row for row in found if "error" not in row]
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in ran:
        for name in (row["family"], f"on {len(row['cards'])} {row['card']}", "all"):
            groups[name].append(row)
    header = (
        "rows",
        "number",
        "tensors <= limit",
        "equal",
        "loading <= limit",
        "reserved <= cap",
        "least %",
        "spare",
    )
    notes = [
        "tensors: the peak of what was asked of torch's allocator while steps ran, without cuBLAS's scratch",
        "equal: on the fullest card, to the byte; least %: of the limit, on the fullest card, in the worst row",
        "spare: MiB of a card's cap that were not reserved, at most",
    ]
    order = sorted(groups, key=lambda name: (name == "all", name.startswith("on ")))
    rows = [(name, *_summary(groups[name])) for name in order]
    print(table("Limits as narrow as the planner calls fitting", header, rows, notes))
    over = [(row["row"], *_excess(row)) for row in ran if not _kept(row)]
    if over:
        print(table("Over a limit", ("row", "tensors - limit", "loading - limit"), over))
    unproven = [row["row"] for row in ran if not row["verified"]]
    if unproven:
        print(table("Not verified", ("row",), [(name,) for name in unproven]))
    failed = [(row["row"], row["error"][:90]) for row in found if "error" in row]
    if failed:
        print(table("Could not be planned or run", ("row", "error"), failed))


def _excess(row: dict[str, Any]) -> tuple[int, int]:
    """Return by how many bytes the fullest card is over its limit, while steps run and before; less than 0 is room."""
    cards = row["cards"]
    return max(c["tensors"] - c["limit"] for c in cards), max(c["loading"] - c["limit"] for c in cards)


def _kept(row: dict[str, Any]) -> bool:
    return max(_excess(row)) <= 0


def _summary(rows: list[dict[str, Any]]) -> tuple[object, ...]:
    cards = [card for row in rows for card in row["cards"]]
    excess = [_excess(row) for row in rows]
    least = min(max(card["tensors"] / card["limit"] for card in row["cards"]) for row in rows)
    return (
        len(rows),
        sum(steps <= 0 for steps, _ in excess),
        sum(steps == 0 for steps, _ in excess),
        sum(loading <= 0 for _, loading in excess),
        sum(all(card["reserved"] <= card["cap"] for card in row["cards"]) for row in rows),
        f"{100 * least:.1f}",
        mib(max(card["cap"] - card["reserved"] for card in cards)),
    )


if __name__ == "__main__":
    sys.exit(over_rows(__doc__, measure, report, all_rows))
