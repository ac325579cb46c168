"""Many adapters on one base: the CPU seconds of each later load, and its memory, next to peft's ``load_adapter``.

Beside them the load of the base with its first adapter from their folders. Both methods load the same adapters of all
linear layers, one after the other, each in a process of its own. The base is narrow, because the cost is of modules and
not of bytes. Each adapter of ours gives the logits that it gives alone.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _common import anonymous_bytes, headline, median, mib, options, promise, ratio, spawn, table, write_json

CHILD = (str(Path(__file__).resolve()), "--child")
METHODS = ("peft", "safe_loading")
PROMISED_OF_PEFT = 1.0


def child(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Load as many adapters as asked by one method; return the seconds of each and what the process holds more."""
    import torch
    from _peft_methods import load_base
    from peft import PeftModel

    from safe_loading import load_adapter_on_rank, load_peft_on_rank

    warnings.simplefilter("ignore")
    base, first, second = (str(Path(spec["folder"]) / name) for name in ("base", "first", "second"))
    add: Callable[[Any, str], object]
    if spec["method"] == "peft":
        add = lambda model, name: model.load_adapter(second, name, autocast_adapter_dtype=False)  # noqa: E731
    else:
        add = lambda model, name: load_adapter_on_rank(model, second, name)  # noqa: E731

    def start() -> Any:
        if spec["method"] == "peft":
            return PeftModel.from_pretrained(load_base(base, torch.device("cpu")), first, autocast_adapter_dtype=False)
        return load_peft_on_rank(base, first, device="cpu")

    add(start(), "warm-up")
    model: Any = None
    whole = []
    for _ in range(5):
        gc.collect()
        began = time.process_time()
        model = start()
        whole.append(time.process_time() - began)
    gc.collect()
    before, seconds = anonymous_bytes(), []
    for number in range(spec["adapters"]):
        gc.collect()  # not while the clock runs: it would meet one load and not another
        gc.disable()
        began = time.process_time()
        add(model, f"adapter{number}")
        seconds.append(time.process_time() - began)
        gc.enable()
    gc.collect()
    held = anonymous_bytes() - before
    model.set_adapter(f"adapter{spec['adapters'] - 1}")
    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.float().sum().item()
    return {"base": median(whole), "seconds": seconds, "held": held, "logits": logits}


def make(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Make the base and two adapters; return the bytes of one."""
    import torch
    from _peft_methods import save_adapter, save_base

    folder = Path(spec["folder"])
    torch.manual_seed(0)
    save_base(folder / "base", spec["hidden"], spec["layers"], torch.bfloat16)
    for seed, name in ((1, "first"), (2, "second")):
        save_adapter(folder / name, folder / "base", spec["rank"], torch.bfloat16, seed)
    return {"bytes": (folder / "second" / "adapter_model.safetensors").stat().st_size}


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, "six adapters on a small base")
    parser.add_argument("--adapters", type=int, default=100, help="how many are loaded after the first")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    if args.quick:
        args.adapters, args.layers, args.hidden = 6, 4, 64
    with tempfile.TemporaryDirectory() as folder:
        spec = {"folder": folder, "layers": args.layers, "hidden": args.hidden, "rank": args.rank}
        made = spawn(CHILD, [{**spec, "part": "make"}], {}, 300)[0]
        found = {
            method: spawn(CHILD, [{**spec, "method": method, "adapters": args.adapters}], {}, 1200)[0]
            for method in METHODS
        }
    print(headline())
    ours, plain = found["safe_loading"]["seconds"], found["peft"]["seconds"]
    middle = len(plain) // 2
    rows = []
    for method, facts in found.items():
        times = facts["seconds"]
        shown = (facts["base"], times[0], median(times[middle - 1 : middle + 2]), median(times[-3:]))
        held = mib(facts["held"]), ratio(facts["held"], made["bytes"] * args.adapters)
        rows.append((method, *(f"{seconds:.3f}" for seconds in shown), f"{sum(times):.1f}", *held))
    last, first = median(ours[-3:]), median(ours[:3])
    of_peft = max(own / other for own, other in zip(ours, plain, strict=True))
    kept = promise(of_peft <= PROMISED_OF_PEFT, quick=args.quick)
    notes = [
        f"{args.adapters} adapters of {mib(made['bytes'])} MiB; each column of seconds but `all later` is of one load",
        f"promise: no load takes more than {PROMISED_OF_PEFT:g}x of peft's; {of_peft:.2f}x at most: {kept}",
        f"safe_loading: the last takes {last / first:.2f}x of the second; peft: {median(plain[-3:]) / plain[0]:.2f}x",
        f"the last adapter's outputs are the same: {found['peft']['logits'] == found['safe_loading']['logits']}",
    ]
    header = (
        "CPU seconds",
        "base and first",
        "second",
        f"{middle}th later",
        "last",
        "all later",
        "MiB held",
        "of the files",
    )
    print(table("Later adapters", header, rows, notes))
    write_json(args.json, {"found": found, "made": made})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        given = json.loads(sys.argv[2])
        done = make(given) if given.get("part") == "make" else child(given)
        Path(given["result"]).write_text(json.dumps(done))
    else:
        main()
