"""Forecasts of ZeRO beside DeepSpeed's own engine: what its ranks allocate, by PyTorch's own CUDA allocator.

Each case runs on real ranks over simulated H100s, with every value computed: run it in the environment that
tests/simulated_cuda/make_venv.py makes, with DeepSpeed installed there. Elsewhere it says so and ends with status 75.
Allocated is what the rank that takes the most has in blocks of the allocator; asked for is what each rank asked of it,
and the difference shown is that of the rank whose forecast is furthest off. Setting the engine up is left out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path

from _common import CANNOT_RUN, headline, options, table, write_json
from _simulated_cards import on_zero_ranks, simulated

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the cases, print the table, and return the exit status."""
    args = options(__doc__, "every fourth case").parse_args()
    if importlib.util.find_spec("deepspeed") is None or not simulated():
        print("needs DeepSpeed and simulated CUDA devices (tests/simulated_cuda/make_venv.py)")
        return CANNOT_RUN
    from _zero_cases import CASES, forecast

    wanted = {name: CASES[name] for name in list(CASES)[:: 4 if args.quick else 1]}
    real: dict[str, list[list[int]]] = {}
    together = defaultdict[tuple[int, str], list[str]](list)
    for name, case in wanted.items():  # an engine of ZeRO-3 is never freed
        together[case.ranks, name if case.stage == 3 else ""].append(name)
    for (ranks, _), names in together.items():
        real |= _peaks(names, ranks)
    rows = []
    for name, case in wanted.items():
        found = forecast(case)
        allocated = max(of_rank[0] for of_rank in real[name])
        off = found.allocated_peak_bytes - allocated
        asked = [of_rank[1] - found.components["workspaces"] for of_rank in real[name]]
        furthest = max((found.ranks[rank] - size for rank, size in enumerate(asked)), key=abs)
        rows.append((name, allocated, off, f"{100 * off / allocated:+.2f}", max(asked), furthest))
    print(headline([f"deepspeed {importlib.metadata.version('deepspeed')}"]))
    header = ("job", "allocated", "forecast - real", "%", "asked for", "furthest")
    print(table("Bytes of a rank", header, rows))
    write_json(args.json, {"rows": [dict(zip(header, row, strict=True)) for row in rows]})
    return 0


def _peaks(names: list[str], ranks: int) -> dict[str, list[list[int]]]:
    """Run cases on ranks of their own, and return what each rank had allocated and asked for."""
    found = on_zero_ranks(HERE / "_zero_rank.py", ranks, names)
    return {name: [of_rank[name] for of_rank in found] for name in names}


if __name__ == "__main__":
    sys.exit(main())
