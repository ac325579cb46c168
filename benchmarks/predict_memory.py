"""How far predict_memory is from measured peaks, next to the formula of their archive, and from malloc.

The measured rows are those of the fitcheck-llm source archive, which pip downloads into a scratch folder: training
steps on a Tesla T4, LoRA over 16-bit and NF4 bases, eager and memory-efficient attention. They are read as facts, and
none of the archive's code is run. Each row is forecast from a config of the sizes that it states. Then real steps of
small models on the CPU are compared with their traces: every byte that the CPU's allocator reports, by torch.profiler.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _common import MIB, headline, options, table, write_json
from _threaded_load import in_threads
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

from safe_loading import Workload, predict_memory
from safe_loading._memory.trace.allocator import replay
from safe_loading._memory.trace.trace_step import trace_step

ARCHIVE = "fitcheck-llm==0.3.1"
TESLA_T4 = (7, 5)
QUICK = 3
DRAWS = 9


def measured_rows() -> list[dict[str, Any]]:
    """Return the archive's rows that name the model's sizes, repeats left out."""
    with tempfile.TemporaryDirectory() as name:
        pip = [sys.executable, "-m", "pip", "download", ARCHIVE, "--no-deps", "--no-binary", ":all:", "-q", "-d", name]
        subprocess.run(pip, check=True, timeout=300)
        with tarfile.open(next(Path(name).glob("*.tar.gz"))) as archive:
            files = {Path(m.name).name: m for m in archive.getmembers() if "/data/measurements/" in m.name}

            def read(file: str) -> Any:
                content = archive.extractfile(files[file])
                return json.load(content) if content is not None else None

            found = [
                {**read(row["file"])["runs"][row["index"]], "role": row["role"]}
                for row in read("manifest.json")["rows"]
                if row["role"] in ("calibration", "holdout")
            ]
    return [row for row in found if "model_config" in row]


def config_of(row: dict[str, Any]) -> PreTrainedConfig:
    """Return a config of the sizes that a row states, quantized as it was."""
    sizes, name = row["model_config"], row["model_id"]
    kind = "qwen2" if "Qwen" in name else "mistral" if "mistral" in name else "llama"
    config = AutoConfig.for_model(
        kind,
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_attention_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        intermediate_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        tie_word_embeddings=sizes["tie_word_embeddings"],
        **({"head_dim": sizes["head_dim"]} if kind != "qwen2" else {}),
        **({"sliding_window": None} if kind == "mistral" else {}),
    )
    config.name_or_path = name
    if row["run"]["quantization"] == "nf4":
        make: Any = BitsAndBytesConfig
        config.quantization_config = make(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        )
    return config


def _never(*_: object) -> bool:
    """What a Mock with a `return_value` would do, but for its arguments, which it keeps alive: keys and values."""
    return False


def forecast(row: dict[str, Any]) -> Any:
    """Return the forecast of a row's step."""
    run = row["run"]
    adapter = LoraConfig(
        r=run["lora_rank"], lora_alpha=2 * run["lora_rank"], target_modules=run["lora_targets"], task_type="CAUSAL_LM"
    )
    workload = Workload.train(
        run["batch_size"],
        run["seq_len"],
        gradient_checkpointing=run["grad_checkpoint"],
        optimizer="adamw_foreach",
        adapter=adapter,
    )
    # the archive's loop repeated keys and values before SDPA, since its kernel on a T4 takes no grouped heads
    with mock.patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", _never):
        return predict_memory(
            config_of(row),
            workload,
            capability=TESLA_T4,
            dtype=torch.float16,
            attn_implementation=run["attn_impl"],
            prepare_for_kbit="peft",
            keep_outputs=True,
        )


def compare(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Forecast each row, and say how far it is from what was measured."""
    for row in rows:
        began, run, truth, formula = time.process_time(), row["run"], row["measured"], row["predicted"]
        found = forecast(row)
        yield {
            "model": row["model_id"].split("/")[-1],
            "step": f"{run['quantization']} {run['attn_impl']} {run['batch_size']}x{run['seq_len']}",
            "group": _group(row),
            "measured": truth["peak_allocated_mib"],
            "allocated": _percent(found.allocated_peak_bytes / MIB, truth["peak_allocated_mib"]),
            # the archive's runs are those of torch 2.10
            "reserved": _percent(
                replay(found.events, oldest_first=False).reserved_peak_bytes / MIB, truth["peak_reserved_mib"]
            ),
            "in_threads": [] if run["quantization"] == "none" else _in_threads(found, truth["peak_reserved_mib"]),
            "formula": _percent(formula["total_mib"] - formula["overhead_mib"], truth["peak_allocated_mib"]),
            "formula_process": _percent(formula["total_mib"], truth["process_mib"]),
            "process": _percent(found.total_bytes / MIB, truth["process_mib"]),
            "seconds": time.process_time() - began,
        }


def _in_threads(found: Any, truth: float) -> list[float]:
    """Return how far the reserved peak is off when the load is that of older engines, least first."""
    runs = (replay(in_threads(found.events, seed), oldest_first=False) for seed in range(DRAWS))
    peaks = [run.reserved_peak_bytes / MIB for run in runs]
    return sorted(_percent(peak, truth) for peak in peaks)


def _group(row: dict[str, Any]) -> str:
    quantized: str = row["run"]["quantization"]
    return quantized + (" hold-out" if row["role"] == "holdout" else "")


def _percent(value: float, truth: float) -> float:
    return 100 * (value / truth - 1)


def against_malloc() -> Iterator[tuple[str, int, int]]:
    """Yield a name, the traced peak and the real peak of one step on the CPU, above the weights."""
    tiny = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512}
    tiny |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    for kind, extra in (
        ("llama", {}),
        ("qwen2", {}),
        ("gemma2", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ):
        for checkpointing in (False, True):
            config = AutoConfig.for_model(kind, **tiny, **extra)
            build: Any = AutoModelForCausalLM.from_config
            model = build(config)
            model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
            workload = Workload.train(2, 256, gradient_checkpointing=checkpointing, optimizer="none")
            trace = trace_step(model, workload)
            use = next(iter(trace.devices.values()))
            resident = sum(made.bytes for made in trace.allocations if made.phase == "load")
            real = _real_peak(model, workload)
            yield f"{kind}{', checkpointed' if checkpointing else ''}", use.peak_bytes - resident, real


def _real_peak(model: Any, workload: Workload) -> int:
    model.train()
    if workload.gradient_checkpointing:
        model.enable_input_require_grads()
        # the states of the random generators lie on the host, whatever the device
        options = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    tokens = torch.ones(workload.batch_size, workload.sequence_length, dtype=torch.long)
    seen: Any = None
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
            batch = {"input_ids": tokens.clone(), "attention_mask": tokens.clone(), "labels": tokens.clone()}
            model(**batch, use_cache=False).loss.backward()
        seen = running
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def cost() -> tuple[str, str, str]:
    """Forecast a step of Llama-3-8B, and return its peak, the CPU seconds and the process's largest resident size."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    config.architectures = ["LlamaForCausalLM"]
    adapter = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    workload = Workload.train(4, 1024, gradient_checkpointing=True, adapter=adapter)
    began = time.process_time()
    found = predict_memory(config, workload, dtype=torch.bfloat16)
    seconds = time.process_time() - began
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{found.allocated_peak_bytes / 2**30:.1f}", f"{seconds:.1f}", f"{resident:.0f}"


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, f"the {QUICK} rows of the smallest models")
    parser.add_argument("--group", choices=("none", "nf4", "nf4 hold-out", "malloc", "8B"), help="only these")
    args = parser.parse_args()
    print(headline())
    if args.group in (None, "8B"):  # first, since the largest resident size is of the whole process
        columns = ("peak GiB", "CPU s", "resident MiB, imports included")
        print(table("What the forecast of Llama-3-8B costs", columns, [cost()]))
    archive = [] if args.group in ("malloc", "8B") else measured_rows()
    rows = sorted(archive, key=lambda row: row["model_config"]["num_params"])
    rows = [row for row in rows if args.group in (None, _group(row))]
    found = list(compare(rows[:QUICK] if args.quick else rows))
    groups = sorted({row["group"] for row in found})
    summary = [_summary(group, [row for row in found if row["group"] == group]) for group in groups]
    header = (
        "base",
        "rows",
        "allocated, mean %",
        "worst %",
        "formula, mean %",
        "worst %",
        "reserved, mean %",
        "worst %",
    )
    cells = [(f"{row['model']} {row['step']}", *_cells(row)) for row in found]
    if cells:
        print(table("Each row", ("row", "measured MiB", "ours %", "formula %", "reserved %", "CPU s"), cells))
        print(table("Allocated and reserved bytes against a Tesla T4", header, summary))
    threaded = [(f"{row['model']} {row['step']}", *_spread(row)) for row in found if row["in_threads"]]
    if threaded:
        ways = ("row", "one at a time, %", "four threads: least %", "median %", "most %", "measured is between")
        print(table(f"Reserved bytes by the way of loading, {DRAWS} draws", ways, threaded))
    steps = against_malloc() if args.group in (None, "malloc") else ()
    malloc = [(name, ours, real, f"{_percent(ours, real):+.3f}") for name, ours, real in steps]
    if malloc:
        print(table("Against the CPU's allocator", ("step", "traced bytes", "real bytes", "%"), malloc))
    write_json(args.json, {"rows": found, "malloc": malloc})


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shown = (row["allocated"], row["formula"], row["reserved"])
    return (f"{row['measured']:.1f}", *(f"{value:+.3f}" for value in shown), f"{row['seconds']:.1f}")


def _spread(row: dict[str, Any]) -> tuple[str, ...]:
    off = row["in_threads"]
    shown = (row["reserved"], off[0], off[len(off) // 2], off[-1])
    return (*(f"{value:+.3f}" for value in shown), "yes" if off[0] <= 0 <= off[-1] else "no")


def _summary(group: str, rows: list[dict[str, Any]]) -> tuple[object, ...]:
    parts: list[object] = [group, len(rows)]
    for name in ("allocated", "formula", "reserved"):
        values = [abs(row[name]) for row in rows]
        parts += [f"{sum(values) / len(values):.3f}", f"{max(values):.3f}"]
    return tuple(parts)


if __name__ == "__main__":
    main()
