"""Forecasts of a Trainer under DeepSpeed, by its arguments alone, beside what its ranks ask of PyTorch's allocator.

`Workload.from_training_args` and `Spread.from_training_args` read each case from the arguments that the Trainer gets.
It runs on two real ranks over simulated H100s, with every value computed: run it in the environment that
tests/simulated_cuda/make_venv.py makes, with DeepSpeed installed there. Elsewhere it says so and ends with status 75.
Setting the engine up is left out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from _common import CANNOT_RUN, headline, options, table, write_json
from _simulated_cards import on_zero_ranks, simulated
from _zero_cases import LORA, SIZES

RANKS, ROWS, TOKENS = 2, 2, 64
FILLED_IN = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
SMALL = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
BY_SIZE = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
THIRD = {"overlap_comm": True, "sub_group_size": 1e9, **dict.fromkeys(BY_SIZE, "auto")}
HALF = {"bf16": True}
HOST = {"device": "cpu", "pin_memory": True}
ON_HOST = {"stage": 3, **THIRD, "offload_optimizer": HOST, "offload_param": HOST}
TURNS = {"stage": 2, **SMALL, "round_robin_gradients": True}
# The name of a case: its zero_optimization, other arguments of the Trainer, and whether an adapter is trained.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "ZeRO-1": ({"stage": 1, **SMALL}, HALF, False),
    "ZeRO-2": ({"stage": 2, **SMALL}, HALF, False),
    "ZeRO-2, overlap_comm": ({"stage": 2, "overlap_comm": True, **SMALL}, HALF, False),
    "ZeRO-2, float32": ({"stage": 2, **SMALL}, {}, False),
    "ZeRO-2, LoRA": ({"stage": 2, **SMALL}, HALF, True),
    "ZeRO-2, checkpointing, two micro-batches": (
        {"stage": 2, **SMALL},
        {**HALF, "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        False,
    ),
    "ZeRO-2, round robin": (TURNS, HALF, False),
    "ZeRO-2, round robin, LoRA, offload_optimizer": ({**TURNS, "offload_optimizer": HOST}, HALF, True),
    "ZeRO-3": ({"stage": 3, **THIRD}, HALF, False),
    "ZeRO-3, LoRA": ({"stage": 3, **THIRD}, HALF, True),
    "ZeRO-3, offload_param": (ON_HOST, HALF, False),
    "ZeRO-3, offload_param, LoRA, checkpointing": (ON_HOST, {**HALF, "gradient_checkpointing": True}, True),
    "ZeRO-3, two micro-batches": ({"stage": 3, **THIRD}, {**HALF, "gradient_accumulation_steps": 2}, False),
}


def main() -> int:
    """Run the cases, print the table, and return the exit status."""
    args = options(__doc__, "every third case").parse_args()
    if importlib.util.find_spec("deepspeed") is None or not simulated():
        print("needs DeepSpeed and simulated CUDA devices (tests/simulated_cuda/make_venv.py)")
        return CANNOT_RUN
    rows = []
    for name in list(CASES)[:: 3 if args.quick else 1]:
        asked, forecast = _on_ranks(name)
        off = max((forecast[rank] - asked[rank] for rank in range(RANKS)), key=abs)
        rows.append((name, max(asked), off, f"{100 * off / max(asked):+.4f}"))
    print(headline([f"deepspeed {importlib.metadata.version('deepspeed')}"]))
    header = ("arguments", "asked for", "forecast - real", "%")
    print(table("Bytes of the rank that is furthest off", header, rows))
    write_json(args.json, {"rows": [dict(zip(header, row, strict=True)) for row in rows]})
    return 0


def _on_ranks(name: str) -> tuple[list[int], list[int]]:
    """Return the most bytes that each rank asked for in a case, and the forecast of each."""
    found = on_zero_ranks(Path(__file__), RANKS, [name])
    return [rank["asked"] for rank in found], found[0]["forecast"]


def rank_of(folder: str, name: str) -> None:
    """Train on this rank, and write what it asked for; a group has ended by then, so that the forecast can be made."""
    import torch
    import torch.distributed as dist
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from safe_loading import Spread, Workload, predict_memory

    torch.Tensor.__repr__ = object.__repr__  # type: ignore[assignment]  # as in _zero_rank.py
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    zero, given, adapted = CASES[name]
    settings: dict[str, Any] = {"bf16": {"enabled": "auto"}, **dict.fromkeys(FILLED_IN, "auto")}
    settings["zero_optimization"] = zero
    settings["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own has to be compiled
    said: dict[str, Any] = {"max_steps": 3, "report_to": [], "save_strategy": "no", "disable_tqdm": True, **given}
    args = TrainingArguments(folder, per_device_train_batch_size=ROWS, deepspeed=settings, **said)
    dtype = "bfloat16" if args.bf16 else "float32"
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, dtype))
    model = get_peft_model(model, LORA) if adapted else model

    class SetUp(TrainerCallback):
        """The end of the setting up, which the forecast leaves out."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    row = {name: [5] * TOKENS for name in ("input_ids", "labels")} | {"attention_mask": [1] * TOKENS}
    rows: Any = [row] * 64  # which a Trainer takes, and its annotation does not
    Trainer(model, args, train_dataset=rows, callbacks=[SetUp()]).train()
    torch.cuda.synchronize()
    result: dict[str, Any] = {"asked": torch.cuda.memory_stats()["requested_bytes.all.peak"]}
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        adapter = LORA if adapted else None
        step = Workload.from_training_args(args, TOKENS, adapter)
        job = Spread.from_training_args(args, RANKS, adapter, hidden_size=SIZES["hidden_size"])
        found = predict_memory(LlamaConfig(**SIZES), step, spread=job, capability=(9, 0), dtype=dtype)
        result["forecast"] = [size + found.components["workspaces"] for _, size in sorted(found.ranks.items())]
    Path(folder, os.environ["RANK"]).write_text(json.dumps(result))


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_of(*sys.argv[1:])
    else:
        sys.exit(main())
