"""Chapter six: the memory cost of a misplaced wrapper in a training step, from the config alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig

from safe_loading import Workload, predict_memory
from safe_loading._core.bars import draw_bars
from safe_loading._core.report import format_bytes, text_table
from safe_loading._memory.forecast.report import MemoryForecast, forecast_bar
from safe_loading.errors import SafeLoadingError

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
        raise SafeLoadingError("The forecast of the demo no longer shows what the wrong order costs.")
    picture = folder / "memory.svg"
    bars = [forecast_bar(forecast, order) for order, forecast in zip(_ORDERS, (right, wrong), strict=True)]
    picture.write_text(draw_bars(bars), encoding="utf-8")
    rows = [
        (
            order,
            *(format_bytes(forecast.components[name]) for name in ("weights", "saved_activations")),
            format_bytes(forecast.total_bytes),
            why,
        )
        for (order, why), forecast in zip(_ORDERS.items(), (right, wrong), strict=True)
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
    """Return the forecasts of a step of Llama-3-8B in the right order and in the wrong one."""
    adapter = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    results = []
    for checkpointing in (True, False):
        config = LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )
        if quantized:
            eight_bits = BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]  # not annotated
            config.quantization_config = eight_bits
        step = _STEP.replace(gradient_checkpointing=checkpointing, adapter=adapter)
        results.append(predict_memory(config, step))
    return results[0], results[1]
