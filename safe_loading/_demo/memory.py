"""Chapter: what a wrapper around a model costs a trainer, from the config alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig

from safe_loading import Workload, predict_memory
from safe_loading._core.bars import draw_bars
from safe_loading._core.report import format_bytes, text_table
from safe_loading._memory.forecast.report import MemoryForecast, forecast_bar
from safe_loading.errors import SafeLoadingError

# The sizes of Llama-3-8B, and of a step that many take with it.
_SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
}
_STEP = Workload.train(batch_size=4, sequence_length=1024)
_ORDERS = {
    "prepared, then wrapped": "checkpointing is on",
    "wrapped, then prepared": "the wrapper hides the model, and checkpointing stays off",
}


def chapter(folder: Path) -> str:
    """Forecast the step in both orders, draw them in `folder`, and return the table."""
    # peft knows 8-bit layers only where bitsandbytes is installed
    quantized = importlib.util.find_spec("bitsandbytes") is not None
    right, wrong = forecasts(quantized=quantized)
    if wrong.total_bytes < 1.5 * right.total_bytes:
        raise SafeLoadingError("The forecast of the wrong order is not what it was.")
    picture = folder / "memory.svg"
    bars = [forecast_bar(found, order) for order, found in zip(_ORDERS, (right, wrong), strict=True)]
    picture.write_text(draw_bars(bars), encoding="utf-8")
    rows = [
        (
            order,
            *(format_bytes(found.components[part]) for part in ("weights", "saved_activations")),
            _total(found),
            why,
        )
        for (order, why), found in zip(_ORDERS.items(), (right, wrong), strict=True)
    ]
    return "\n".join(
        [
            f"memory: Llama-3-8B in {8 if quantized else 16} bits with LoRA, 4 x 1024 tokens, from the config alone",
            f"  no weight was loaded; the picture is {picture.name} in the demo's folder",
            "",
            text_table(("order", "weights", "saved activations", "in all", ""), rows),
        ]
    )


def forecasts(*, quantized: bool = True) -> tuple[MemoryForecast, MemoryForecast]:
    """Return the forecasts of the right order and the wrong one."""
    adapter = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    found = []
    for checkpointing in (True, False):
        make: Any = BitsAndBytesConfig
        sizes: Any = {**_SIZES, **({"quantization_config": make(load_in_8bit=True)} if quantized else {})}
        config = LlamaConfig(**sizes)
        step = _STEP.replace(gradient_checkpointing=checkpointing, adapter=adapter)
        found.append(predict_memory(config, step))
    return found[0], found[1]


def _total(forecast: MemoryForecast) -> str:
    return format_bytes(forecast.total_bytes)
