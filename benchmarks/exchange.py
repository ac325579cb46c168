"""What agreeing costs: ``Ranks.exchange`` over the store, next to torch's ``all_gather_object`` of the same small dict.

Each is called many times in turns by 2 and by 4 real ranks on gloo, each time after a barrier; the slowest rank counts.
``Waiting.work`` is what a bounded wait adds to a collective that is there already.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import headline, median, options, promise, ratio, spawn, table, write_json

PROMISED_MS = 2.0


def rank_main(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Be one rank: return the seconds of every call."""
    import torch
    import torch.distributed as dist

    from safe_loading._ranks.exchange import Ranks
    from safe_loading._ranks.waiting import Waiting

    rank, world = spec["rank"], spec["world"]
    dist.init_process_group("gloo", init_method=f"file://{spec['meeting']}", rank=rank, world_size=world)
    ranks = Ranks.resolve()
    wait = Waiting(ranks, "add", torch.device("cpu"), 60)
    payload = {"rank": rank, "digest": "0" * 64}
    held: list[Any] = [None] * world
    calls: dict[str, Callable[[], object]] = {
        "Ranks.exchange": lambda: ranks.exchange("agree", payload, timeout=60),
        "all_gather_object": lambda: dist.all_gather_object(held, payload),
        "all_reduce, Waiting.work": lambda: wait.work(dist.all_reduce(torch.ones(1), async_op=True)),
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(spec["repeats"] + 5):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if number >= 5:
                seconds[name].append(time.perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, "20 repeats", 200)
    args = parser.parse_args()
    repeats = 20 if args.quick else args.repeats
    rows, facts = [], {}
    for world in (2, 4):
        specs = [{"world": world, "rank": rank, "repeats": repeats} for rank in range(world)]
        found = spawn([__file__, "--rank"], specs, {"OMP_NUM_THREADS": "1"}, 500)
        slowest = {name: median(map(max, zip(*(each[name] for each in found), strict=True))) for name in found[0]}
        facts[world] = slowest
        for name, peer in (("Ranks.exchange", "all_gather_object"), ("all_reduce, Waiting.work", "all_reduce")):
            added = (slowest[name] - (slowest[peer] if name != "Ranks.exchange" else 0)) * 1000
            kept = promise(added <= PROMISED_MS, quick=args.quick)
            row = f"{slowest[name] * 1000:.2f}", f"{slowest[peer] * 1000:.2f}", ratio(slowest[name], slowest[peer])
            rows.append((f"{name}, {world} ranks", *row, f"{added:.2f}", kept))
    print(headline())
    notes = [f"ms, median of {repeats} calls of the slowest rank; promise: at most {PROMISED_MS:g} ms added"]
    print(table("Agreeing", ("call", "ms", "peer", "ratio", "added", "promise"), rows, notes))
    write_json(args.json, {"seconds": facts})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        spec = json.loads(sys.argv[-1])
        Path(spec["result"]).write_text(json.dumps(rank_main(spec)))
    else:
        main()
