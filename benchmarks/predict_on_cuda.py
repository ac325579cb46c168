"""Forecasts beside PyTorch's own CUDA allocator: one row for each model, kind of step, card and way onto the card.

It needs the simulated devices of tests/simulated_cuda: run it in the environment that make_venv.py makes there, where
every card can be chosen. Elsewhere it says so and ends with status 75.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any

from _common import table
from _simulated_cards import over_rows

WORST = 20


def measure(row: Any) -> dict[str, Any]:
    """Forecast a row, then run it, in a process without a context."""
    from _cuda_rows import forecast, run

    found = forecast(row)
    predicted = {"forecast_allocated": found.allocated_peak_bytes, "forecast_reserved": found.reserved_peak_bytes}
    return {**predicted, **run(row)}


def all_rows() -> list[Any]:
    """Return the rows, which import torch."""
    from _cuda_rows import rows

    return list(rows())


def report(found: list[dict[str, Any]]) -> None:
    """Print how far the forecasts are off: by family, and each row that is off."""
    ran = [row for row in found if "error" not in row]
    for row in ran:
        row["off"] = 100 * (row["forecast_allocated"] / row["allocated"] - 1)
        row["reserved_off"] = 100 * (row["forecast_reserved"] / row["reserved"] - 1)
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in ran:
        groups[row["family"]].append(row)
        groups[f"all on {row['card']}"].append(row)
        groups["all"].append(row)
    header = ("rows", "number", "exact %", "within 0.1 %", "worst %", "reserved: mean %", "worst %")
    print(table("Forecast less torch's allocator", header, [(name, *_summary(rows)) for name, rows in groups.items()]))
    off = sorted((row for row in ran if row["off"] or row["reserved_off"]), key=lambda row: -abs(row["off"]))
    columns = ("row", "allocated", "forecast - real", "reserved", "forecast - real")
    print(table(f"The {WORST} rows that are furthest off", columns, map(_cells, off[:WORST])))
    failed = [(row["row"], row["error"][:90]) for row in found if "error" in row]
    if failed:
        print(table("Could not be run or forecast", ("row", "error"), failed))


def _summary(rows: list[dict[str, Any]]) -> tuple[object, ...]:
    exact = sum(row["forecast_allocated"] == row["allocated"] for row in rows)
    near = sum(abs(row["off"]) <= 0.1 for row in rows)
    reserved = [abs(row["reserved_off"]) for row in rows]
    worst = max(abs(row["off"]) for row in rows)
    shares = (f"{100 * exact / len(rows):.0f}", f"{100 * near / len(rows):.0f}")
    return (len(rows), *shares, f"{worst:.3f}", f"{statistics.mean(reserved):.2f}", f"{max(reserved):.2f}")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    allocated, reserved = row["allocated"], row["reserved"]
    return (
        row["row"],
        allocated,
        row["forecast_allocated"] - allocated,
        reserved,
        row["forecast_reserved"] - reserved,
    )


if __name__ == "__main__":
    sys.exit(over_rows(__doc__, measure, report, all_rows))
