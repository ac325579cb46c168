"""How far predict_memory is from what PEFT's maintainers measured, method by method, next to the formulas of two peers.

The measured rows are PEFT's published comparison of its methods (``method_comparison/MetaMathQA/results`` in its
repository): Llama-3.2-3B in bfloat16 on an L40S, four rows a step, AdamW, and the most that was reserved in 5000 steps.
One thing is not published: how long the longest batch was. The row of LoRA with rank 32 tells it and is not counted;
nothing is fitted to any other row. The step is that of PEFT's script (``run.py`` beside the results): the model's cache
is on, the loop holds the output through the backward pass, batches come sorted by length in buckets of 20 with the
longest first, and every 10 steps the cache of the allocator is emptied, so that the longest of a bucket finds it empty.
Give the folder of results: ``python benchmarks/published_memory.py RESULTS``. AdaLoRA and OSF compute otherwise since
the rows were recorded: for these two put the ``src`` of PEFT's commit d787f51 on ``PYTHONPATH``.
Peers are asked where they are installed: ``pip install fitcheck-llm==0.3.1 torch-kitsune==0.7.0``.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import MIB, headline, options, table, with_published, write_json
from peft import PeftConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM, LlamaConfig

from safe_loading import Workload, predict_memory
from safe_loading.errors import SafeLoadingError

QUICK = 3
ROWS, LENGTH, TOLD_THE_LENGTH = 4, 703, "lora rank32"
L40S = (8, 9)
SIZES: dict[str, Any] = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
PARAMETERS = 3_212_749_824


def config() -> LlamaConfig:
    """Return the config of Llama-3.2-3B, as far as memory depends on it."""
    return LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])


def adapter(saved: dict[str, Any] | None) -> PeftConfig | None:
    """Return the adapter of a result; None for full training. Fields that this peft no longer has are left out."""
    if saved is None:
        return None
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[saved["peft_type"]]
    # what AdaLoRA's ranks were in the end, which they are not when the peak is reached
    saved = {name: value for name, value in saved.items() if name != "rank_pattern" or saved["peft_type"] != "ADALORA"}
    known = set(inspect.signature(kind).parameters) - {"auto_mapping", "peft_type", "peft_version"}
    made: PeftConfig = kind(**{name: value for name, value in saved.items() if name in known})
    return made


def forecast(saved: dict[str, Any] | None, *, in_float32: bool = True) -> float:
    """Return the MiB that are reserved for the longest batch, in which some rows are padded.

    PEFT's script casts an adapter to float32, or tells peft to leave it in the dtype of the model, as for OSF.
    """
    ids = torch.full((ROWS, LENGTH), 5)
    mask = torch.ones_like(ids)
    mask[1:, -LENGTH // 16 :] = 0
    attached = adapter(saved)
    step = Workload.train(ROWS, LENGTH, optimizer="adamw_foreach", adapter=attached, use_cache=True)
    model: Any = config()
    if attached is not None and not in_float32:
        model = get_peft_model(on_meta(), attached, autocast_adapter_dtype=False)
        step = step.replace(adapter=None)
    found = predict_memory(
        model,
        step,
        dtype=None if isinstance(model, torch.nn.Module) else torch.bfloat16,
        capability=L40S,
        keep_outputs=True,  # of the batch before it is short: the shortest of its bucket
        empties_cache=True,
        loaded_by="device_map",
        inputs={"input_ids": ids, "attention_mask": mask, "labels": ids.clone()},
    )
    return found.reserved_peak_bytes / MIB


def on_meta() -> Any:
    """Return the model without memory, in bfloat16."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config(), dtype=torch.bfloat16)


def fitcheck(saved: dict[str, Any] | None) -> float | None:
    """Return what fitcheck-llm's formula says with its allowance for a process, for LoRA and full training."""
    try:
        from fitcheck.config_parser import ModelConfig  # type: ignore[import-not-found]  # installed or not
        from fitcheck.estimator import TrainingConfig, estimate  # type: ignore[import-not-found]  # the same
        from fitcheck.gpu_db import GPU_DB  # type: ignore[import-not-found]  # the same
    except ImportError:
        return None
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    model = ModelConfig("Llama-3.2-3B", PARAMETERS, *(SIZES[n] for n in names), SIZES["vocab_size"], 128, True)
    rank, targets = (None, []) if saved is None else (saved["r"], saved["target_modules"])
    step = TrainingConfig(batch_size=ROWS, seq_len=LENGTH, lora_rank=rank, lora_targets=targets, flash_attn=True)
    return float(estimate(model, step, GPU_DB["l40s"]).total_mib)


def kitsune(saved: dict[str, Any] | None) -> float | None:
    """Return what torch-kitsune's formulas say, for LoRA and full training."""
    try:
        from kitsune.predict import estimator, lora_estimator  # type: ignore[import-not-found]  # the same
    except ImportError:
        return None
    model = on_meta()
    how: dict[str, Any] = {"batch_size": ROWS, "dtype": torch.bfloat16}
    if saved is None:
        return float(estimator.predict_memory(model, (LENGTH,), optimizer="adamw", **how).total_bytes / MIB)
    lora = lora_estimator.LoRAConfig(rank=saved["r"], target_modules=tuple(saved["target_modules"]))
    return float(lora_estimator.estimate_lora_memory(model, (LENGTH,), config=lora, **how).total_bytes / MIB)


PEERS: dict[str, Callable[[dict[str, Any] | None], float | None]] = {"fitcheck-llm": fitcheck, "torch-kitsune": kitsune}


def compare(file: Path) -> dict[str, Any]:
    """Forecast one result, and say how far each is from what was measured, in percent."""
    result = json.loads(file.read_text(encoding="utf-8"))
    saved = result["run_info"]["peft_config"]
    measured = result["train_info"]["accelerator_memory_max"] / MIB
    row: dict[str, Any] = {"row": file.stem.replace("--llama-3.2-3B-", " "), "measured": measured}
    try:
        cast = result["run_info"]["train_config"]["autocast_adapter_dtype"]
        row["ours"] = 100 * (forecast(saved, in_float32=cast) / measured - 1)
    except (SafeLoadingError, ImportError) as error:
        row["why not"] = str(error).splitlines()[0]
    # formulas know LoRA and nothing else
    for name, formula in PEERS.items() if saved is None or saved["peft_type"] == "LORA" else ():
        said = formula(saved)
        row[name] = None if said is None else 100 * (said / measured - 1)
    return row


def once_each(files: list[Path]) -> list[Path]:
    """Return the results without those of the same method and the same peak, which differ in the learning rate."""
    seen: dict[tuple[str, int], Path] = {}
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        peak = result["train_info"]["accelerator_memory_max"]
        seen.setdefault((file.stem.split("--")[0], peak), file)
    return list(seen.values())


def main() -> None:
    """Compare and print."""
    where = "the folder of PEFT's published results: method_comparison/MetaMathQA/results of its repository"
    args = with_published(options(__doc__, f"the first {QUICK} rows"), "RESULTS", where)
    warnings.simplefilter("ignore")
    print(headline())
    files = once_each(sorted(args.published.glob("*.json")))
    rows = []
    for file in files[:QUICK] if args.quick else files:
        rows.append(compare(file))
        print(rows[-1], file=sys.stderr, flush=True)
    cells = [(r["row"], f"{r['measured']:.0f}", *(_cell(r.get(who)) for who in ("ours", *PEERS))) for r in rows]
    print(table("Each row", ("row", "measured MiB", "ours %", *(f"{name} %" for name in PEERS)), cells))
    summary = []
    for who in ("ours", *PEERS):
        off = [r[who] for r in rows if r.get(who) is not None and r["row"] != TOLD_THE_LENGTH]
        if off:
            sizes = sorted(map(abs, off))
            mean, within = sum(sizes) / len(sizes), sum(size <= 1 for size in sizes)
            summary.append((who, len(off), f"{mean:.2f}", f"{sizes[-1]:.2f}", within, f"{min(off):+.2f}"))
    print(table("Reserved at most, by row", ("who", "rows", "mean %", "worst %", "within 1 %", "lowest %"), summary))
    for row in rows:
        if "why not" in row:
            print(f"no forecast: {row['row']}: {row['why not']}")
    write_json(args.json, {"rows": rows})


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


if __name__ == "__main__":
    main()
