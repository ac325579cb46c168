"""How far predict_memory is from what Qwen measured of its own models while they generate, row by row.

The rows are those of the speed benchmark of Qwen2.5 on one A100: one row of 1 to 129,024 tokens, 2048 tokens more by
``generate()`` of transformers 4.46 with flash attention, ``torch.cuda.max_memory_allocated()`` in GiB with two digits.
The peak of a long prompt is in its forward pass, that of one token at the end. There transformers 4.46 copied keys and
values for all heads (``repeat_kv``) before flash attention, which that of today does not: these bytes are put in. Rows
over several GPUs and of AutoGPTQ's 4 bits are left out: its kernel of exllama keeps a dequantized weight. Give the page
as it was with these models, ``git show a912d23:docs/source/benchmark/speed_benchmark.rst`` in a clone of QwenLM/Qwen3:
``python benchmarks/published_generation.py RST``.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _common import GIB, headline, options, table, with_published, write_json
from transformers import PreTrainedConfig, Qwen2Config

from safe_loading import Workload, predict_memory

QUICK = 8
NEW_TOKENS = 2048
AMPERE = (8, 0)
DIGIT = 0.005  # GiB, by which a published figure may be rounded
# hidden_size, intermediate_size, layers, heads, heads of keys and values, vocabulary
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
    "14B": (5120, 13824, 48, 40, 8, 152064),
    "32B": (5120, 27648, 64, 40, 8, 152064),
    "72B": (8192, 29568, 80, 64, 8, 152064),
}
TIED = ("0.5B", "1.5B", "3B")
GROUPS: dict[str, Any] = {"group_size": 128}
CODES: dict[str, dict[str, Any] | None] = {
    "BF16": None,
    "GPTQ-Int8": {**GROUPS, "quant_method": "gptq", "bits": 8, "desc_act": False, "sym": True},
    "AWQ": {**GROUPS, "quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
}


class Row(NamedTuple):
    """A row of the page."""

    size: str
    codes: str
    length: int
    measured: float  # GiB


def rows_of(page: str) -> Iterator[Row]:
    """Yield the rows of the page's tables for transformers, on one GPU and in formats that are forecast."""
    model, length = "", 0
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 7 or cells[0] == "Model":
            continue
        model, length = cells[0] or model, int(cells[1] or length)
        size = re.fullmatch(r"Qwen2\.5-([\d.]+B)-Instruct", model)
        codes, gpus, memory = cells[2], cells[3], cells[5]
        if size is not None and codes in CODES and gpus == "1" and re.fullmatch(r"\d+\.\d+", memory):
            yield Row(size[1], codes, length, float(memory))


def config(size: str, codes: str) -> PreTrainedConfig:
    """Return the config of a model, as far as memory depends on it."""
    hidden, intermediate, layers, heads, kept, vocabulary = SIZES[size]
    made = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kept,
        vocab_size=vocabulary,
        tie_word_embeddings=size in TIED,
        max_position_embeddings=32768,
        dtype="bfloat16" if CODES[codes] is None else "float16",
    )
    made.architectures = ["Qwen2ForCausalLM"]
    if (settings := CODES[codes]) is not None:
        made.quantization_config = dict(settings)
    return made


def compare(row: Row) -> dict[str, Any]:
    """Forecast one row, and say how far it is from what was measured, in percent."""
    workload = Workload.generate(1, row.length, new_tokens=NEW_TOKENS)
    found = predict_memory(
        config(row.size, row.codes), workload, attn_implementation="flash_attention_2", capability=AMPERE
    )
    prompt, end = found.phases["prompt"], found.phases["end"]
    copies = 2 * 2 * SIZES[row.size][0] * (row.length + NEW_TOKENS)
    forecast = (found.allocated_peak_bytes - max(prompt, end) + max(prompt, end + copies)) / GIB
    return {**row._asdict(), "forecast": forecast, "off": 100 * (forecast / row.measured - 1)}


def main() -> None:
    """Compare and print."""
    where = "the page of measurements: docs/source/benchmark/speed_benchmark.rst of QwenLM/Qwen2.5 at a912d23"
    args = with_published(options(__doc__, f"the first {QUICK} rows"), "RST", where)
    warnings.simplefilter("ignore")
    print(headline())
    wanted = sorted(rows_of(Path(args.published).read_text(encoding="utf-8")))
    rows = []
    for row in wanted[:QUICK] if args.quick else wanted:
        rows.append(compare(row))
        print(rows[-1], file=sys.stderr, flush=True)
    cells = [
        (
            f"{r['size']} {r['codes']}, {r['length']} tokens",
            f"{r['measured']:.2f}",
            f"{r['forecast']:.3f}",
            f"{r['off']:+.2f}",
        )
        for r in rows
    ]
    print(table("Allocated at most", ("row", "measured GiB", "forecast", "%"), cells))
    for name, chosen in (
        ("long prompts", [r for r in rows if r["length"] > 1]),
        ("one token", [r for r in rows if r["length"] == 1]),
    ):
        within = sum(abs(r["forecast"] - r["measured"]) <= DIGIT for r in chosen)
        print(f"{name}: {within} of {len(chosen)} are what was measured, to its last digit")
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
