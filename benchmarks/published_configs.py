"""Every config of a folder of published ones through check_checkpoint, plan_device_map and predict_memory.

Printed is a line for each: the bytes that its weights are planned with, what they take by the number of parameters
that transformers builds (2 bytes each; no figure for a quantized model), the CPU seconds, and why one is refused. Give
the folder that holds ``configs`` and ``expected.json``: ``python benchmarks/published_configs.py FIELD``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import headline, options, table, with_published, write_json

from safe_loading import Workload, check_checkpoint, plan_device_map, predict_memory
from safe_loading.errors import SafeLoadingError

QUICK = 8
EXACT = 1e-4  # of the bytes: buffers, and what a class keeps in float32


def answered(call: Callable[[], Any]) -> tuple[Any, str, float]:
    """Return the answer of a call, why it was refused (or what else it raised), and its CPU seconds."""
    began = time.process_time()
    try:
        answer, problem = call(), ""
    except SafeLoadingError as error:
        answer, problem = None, f"{type(error).__name__}: {error}"
    except Exception as error:
        answer, problem = None, f"FOREIGN {type(error).__name__}: {error}"
    return answer, problem, time.process_time() - began


def facts_of(config: Path, expected: dict[str, Any], *, steps: bool) -> dict[str, Any]:
    """Return what the functions say of one config, alone in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(config, Path(folder) / "config.json")
        report, foreign, seconds = answered(lambda: check_checkpoint(folder))
        plan, refused, planning = answered(lambda: plan_device_map(folder, {0: "40TB"}, verify=False))
        facts = {
            "name": config.stem,
            "codes": [] if report is None else [finding.code for finding in report.findings],
            "planned": None if plan is None else plan.devices[0].used,
            "expected": None if expected.get("quantized") else 2 * expected.get("parameters", 0) or None,
            "seconds": {"check": seconds, "plan": planning},
            "refused": refused.replace(folder, config.stem) or foreign,
            "why": expected.get("why", ""),
        }
        if steps and not refused:
            step = Workload.train(batch_size=1, sequence_length=128)
            forecast, facts["untrained"], facts["seconds"]["predict"] = answered(lambda: predict_memory(folder, step))
            facts["step"] = None if forecast is None else forecast.allocated_peak_bytes
    return facts


def row_of(facts: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one config."""
    sizes = ["" if facts[name] is None else f"{facts[name]:,}" for name in ("planned", "expected")]
    seconds = (facts["seconds"].get(name) for name in ("check", "plan", "predict"))
    said = facts["refused"] or facts.get("untrained", "")
    return (facts["name"], *sizes, *("" if each is None else f"{each:.1f}" for each in seconds), said[:80])


def main() -> int:
    """Run the configs and print the table."""
    parser = options(__doc__, quick=f"the first {QUICK} configs")
    parser.add_argument("--steps", action="store_true", help="also forecast a training step of 1 x 128 tokens")
    arguments = with_published(parser, "FIELD", "the folder of published configs, which lies beside the repository")
    expected = json.loads((arguments.published / "expected.json").read_text())
    files = sorted((arguments.published / "configs").glob("*.json"))[: QUICK if arguments.quick else None]
    every = [facts_of(file, expected.get(file.stem, {}), steps=arguments.steps) for file in files]
    header = ("config", "planned", "expected", "check s", "plan s", "step s", "refused")
    known = [facts for facts in every if facts["expected"] and facts["planned"]]
    wrong = [facts for facts in known if abs(facts["planned"] / facts["expected"] - 1) > EXACT]
    said = [facts["refused"] for facts in every if facts["refused"]]
    notes = [
        f"{len(every)} configs: {len(known)} planned whose bytes are known, {len(wrong)} wrong; {len(said)} refused; "
        f"{sum(text.startswith('FOREIGN') for text in said)} other errors; at most "
        f"{max(facts['seconds']['plan'] for facts in every):.1f} CPU s for a plan",
    ]
    print(headline())
    print(table("Published configs", header, map(row_of, every), notes))
    write_json(arguments.json, {"configs": every})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
