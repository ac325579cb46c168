"""How far predict_memory is from what can-i-finetune-this measured of LoRA and QLoRA on an RTX 4080, row by row.

The rows are the project's ``benchmarks/results``: Qwen2.5 of 0.5 to 7 billion parameters, adapters on the projections
of attention, paged 8-bit AdamW, and the most that torch 2.6 allocated and reserved in two or three steps of
transformers 5.8 and peft 0.19. The step is that of its ``bench/runner.py``: bases in 4 bits are prepared by peft, the
model's cache is left on, and a variable holds the output until the next forward pass has returned. Give the folder of
results: ``python benchmarks/can_i_finetune.py RESULTS``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from _common import GIB, headline, options, table, with_published, write_json
from peft import LoraConfig
from published_generation import config
from transformers import BitsAndBytesConfig

from safe_loading import Workload, predict_memory

QUICK = 3
RTX_4080 = (8, 9)
MADE: Any = BitsAndBytesConfig  # whose __init__ has no types
NF4 = MADE(
    load_in_4bit=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
)


def forecast(run: dict[str, Any]) -> tuple[float, float]:
    """Return the forecast of a run in GiB: allocated and reserved."""
    in_4_bits = run["method"] == "qlora"
    # peft's preparation asks for reentrant checkpoints
    checkpointing = {"use_reentrant": True} if in_4_bits else True
    workload = Workload.train(
        run["micro_batch_size"],
        run["seq_len"],
        optimizer=run["optimizer"],
        gradient_checkpointing=checkpointing if run["gradient_checkpointing"] else False,
        use_cache=True,
        adapter=LoraConfig(
            r=run["lora_rank"],
            lora_alpha=run["lora_alpha"],
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            task_type="CAUSAL_LM",
        ),
    )
    size = run["model_id"].removeprefix("Qwen/Qwen2.5-").removesuffix("-Instruct")
    options_of_4_bits: dict[str, Any] = {"quantization_config": NF4, "prepare_for_kbit": "peft"} if in_4_bits else {}
    found = predict_memory(
        config(size, "BF16"),
        workload,
        attn_implementation=run["attention_implementation"],
        capability=RTX_4080,
        keep_outputs="across_steps",
        **options_of_4_bits,
    )
    return found.allocated_peak_bytes / GIB, found.reserved_peak_bytes / GIB


def compare(file: Path) -> dict[str, Any]:
    """Forecast one result, and say how far it is from what was measured, in percent."""
    result = json.loads(file.read_text(encoding="utf-8"))
    allocated, reserved = forecast(result["config"])
    row: dict[str, Any] = {"row": file.stem.removeprefix("Qwen__Qwen2.5-").replace("-Instruct_", " ")}
    for name, said in (("allocated", allocated), ("reserved", reserved)):
        measured = result["measured"][f"peak_{name}_gb"]  # which are GiB
        row |= {name: measured, f"{name} forecast": said, f"{name} off": 100 * (said / measured - 1)}
    return row


def main() -> None:
    """Compare and print."""
    where = "the folder of results: benchmarks/results of the repository DaoyuanLi2816/can-i-finetune-this"
    args = with_published(options(__doc__, f"the first {QUICK} rows"), "RESULTS", where)
    warnings.simplefilter("ignore")
    print(headline())
    files = sorted(args.published.glob("Qwen*.json"))
    rows = []
    for file in files[:QUICK] if args.quick else files:
        rows.append(compare(file))
        print(rows[-1], file=sys.stderr, flush=True)
    kinds = ("allocated", "reserved")
    cells = [
        (
            row["row"],
            *(
                f"{row[kind + of]:{form}}"
                for kind in kinds
                for of, form in (("", ".4f"), (" forecast", ".4f"), (" off", "+.2f"))
            ),
        )
        for row in rows
    ]
    header = ("row", *(title for kind in kinds for title in (f"{kind} GiB", "forecast", "%")))
    print(table("At most, in GiB", header, cells))
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
