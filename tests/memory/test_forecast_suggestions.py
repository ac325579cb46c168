"""``MemoryForecast.suggestions``: changes that take less, each forecast as its own call is, listed by their cost."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, GptOssConfig, LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, MemoryForecast, Spread, Workload, predict_memory
from safe_loading._memory.forecast.report import Suggestion
from safe_loading._memory.forecast.suggestions import suggestions_table

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=2,
    num_attention_heads=8,
    dtype="bfloat16",
)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
STEP = Workload.train(4, 256, adapter=LORA)
_FIELDS = tuple(vars(Workload.weights_only()))


def changed(forecast: MemoryForecast, suggestion: Suggestion) -> MemoryForecast:
    """Return the forecast of a call in which the arguments are written as the suggestion says."""
    names: dict[str, Any] = {"Spread": Spread, "BitsAndBytesConfig": BitsAndBytesConfig, "torch": torch}
    arguments: Mapping[str, Any] = eval(f"dict({suggestion.change})", names)
    step = {name: value for name, value in arguments.items() if name in _FIELDS}
    step |= {"sequence_length": arguments["context_length"]} if "context_length" in arguments else {}
    options = {name: value for name, value in arguments.items() if name not in {*_FIELDS, "context_length"}}
    return predict_memory(CONFIG, forecast.workload.replace(**step), **options)


def names_of(suggestions: tuple[Suggestion, ...]) -> list[str]:
    return [suggestion.change.partition("=")[0] for suggestion in suggestions]


def test_every_change_takes_less_and_is_forecast_as_it_is_written() -> None:
    forecast = predict_memory(CONFIG, STEP)
    found = forecast.suggestions(forecast.total_bytes - 1)
    assert names_of(found) == [
        "gradient_checkpointing",
        "batch_size",
        "optimizer",
        "activation_offload",
        "quantization_config",
        "sequence_length",
    ]
    for suggestion in found:
        assert suggestion.forecast.total_bytes < forecast.total_bytes
        assert suggestion.forecast == changed(forecast, suggestion)
        assert suggestion.fits is suggestion.forecast.fits(forecast.total_bytes - 1)
    assert found[1].change == "batch_size=2, gradient_accumulation_steps=2"
    assert "fits" in suggestions_table(found, "h100")


def test_changes_that_are_not_enough_alone_are_tried_together() -> None:
    forecast = predict_memory(CONFIG, STEP)
    alone = forecast.suggestions(forecast.context_bytes + 1)
    assert not any(suggestion.fits for suggestion in alone)
    least = min(suggestion.forecast.total_bytes for suggestion in alone)
    together = forecast.suggestions(least - 1)[-1]
    assert together.fits
    assert together.change.startswith("gradient_checkpointing=True, batch_size=1, gradient_accumulation_steps=4")
    assert together.forecast == changed(forecast, together)


def test_where_one_card_is_not_enough_cards_are_tried_with_the_other_changes() -> None:
    forecast = predict_memory(CONFIG, Workload.train(4, 256))
    step = forecast.workload.replace(gradient_checkpointing=True)
    spread = predict_memory(CONFIG, step, spread=Spread.fsdp2(8))
    found = forecast.suggestions(spread.total_bytes)
    assert [suggestion.fits for suggestion in found] == [False] * (len(found) - 1) + [True]
    assert found[-1].change == "gradient_checkpointing=True, spread=Spread.fsdp2(8)"
    assert found[-1].forecast == spread


def test_only_changes_that_apply_are_listed() -> None:
    full = predict_memory(CONFIG, Workload.train(1, 64), attn_implementation="eager")
    names = set(names_of(full.suggestions(full.context_bytes + 1)))
    assert {"optimizer", "spread"} <= names
    assert not {"quantization_config", "batch_size"} & names, "nf4 is not trained"
    generation = predict_memory(CONFIG, Workload.generate(64, 512))
    assert generation.suggestions(1) == (), "the context alone takes more"
    assert names_of(generation.suggestions(generation.total_bytes - 1))[:2] == ["batch_size", "quantization_config"]


def test_flash_attention_is_listed_where_its_kernels_run() -> None:
    config = GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, dtype="bfloat16")  # eager by itself
    cases: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
        ({}, {}, True),
        ({"dtype": "float16"}, {}, True),
        ({"dtype": "float32"}, {"autocast": "bfloat16"}, True),
        ({"dtype": "float32"}, {}, False),
        ({"capability": (7, 5)}, {}, False),
    ]
    for options, step, runs in cases:
        forecast = predict_memory(config, Workload.train(1, 1024, **step), **options)
        changes = [each.change for each in forecast.suggestions(forecast.total_bytes - 1)]
        assert ('attn_implementation="flash_attention_2"' in changes) == runs, (options, step)


def test_a_pair_of_preferences_stays_whole() -> None:
    config = LlamaConfig(**SIZES, dtype="bfloat16")
    rows = {"batch_size=1", "batch_size=2", "batch_size=3"}
    for step, whole in (
        (Workload.train(6, 64, pair_loss="orpo"), {"batch_size=2"}),
        (Workload.train(6, 64, reference="model"), {"batch_size=2"}),
        (Workload.train(2, 64, reference="model"), set()),
        (Workload.grpo(2, 32, 32, reference="model"), {"batch_size=1"}),
        (Workload.train(2, 64), {"batch_size=1"}),
    ):
        forecast = predict_memory(config, step)
        for part in (50, 99):
            limit = forecast.context_bytes + (forecast.total_bytes - forecast.context_bytes) * part // 100
            found = {each.change.partition(",")[0] for each in forecast.suggestions(limit)}
            assert found & rows <= whole, step


def test_a_forecast_keeps_no_model_alive() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    forecast = predict_memory(model, STEP)
    assert "quantization_config" not in names_of(forecast.suggestions(forecast.total_bytes - 1)), (
        "the model is built already"
    )
    del model
    gc.collect()
    for lost in (forecast, pickle.loads(pickle.dumps(forecast))):
        assert lost == forecast
        with pytest.raises(ArgumentError, match="does not know its model any more"):
            lost.suggestions(1)
