"""LayerDrop: a forecast is of a step that skips no layer, as the largest of a training is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start, tokens
from transformers import BartConfig, BartForConditionalGeneration, Wav2Vec2Config, Wav2Vec2Model

from safe_loading import Workload, predict_memory
from safe_loading._memory.trace.trace_step import trace_step

STEP = Workload.train(2, 16, optimizer="none")
SOUND = {"input_values": torch.zeros(2, 4000)}


def text_model(rate: float) -> Any:
    """A model whose modules keep the rate themselves."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {f"{side}_{name}": 64 for side in ("encoder", "decoder") for name in ("ffn_dim",)}
    config = BartConfig(
        vocab_size=251,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_position_embeddings=64,
        encoder_layerdrop=rate,
        decoder_layerdrop=rate,
        **sizes,
    )
    return BartForConditionalGeneration(config)


def sound_model(rate: float) -> Any:
    """A model whose config alone has the rate."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=[32] * 3,
        conv_stride=[5, 4, 4],
        conv_kernel=[10, 4, 4],
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        layerdrop=rate,
    )
    return Wav2Vec2Model(config)


def peak(model: Any, inputs: dict[str, torch.Tensor] | None, seed: int = 0) -> int:
    workload = STEP if inputs is None else Workload.train(2, 16, optimizer="none", labels=False)
    return above_start(trace_step(model, workload, inputs=inputs, seed=seed), "forward", "backward")


@pytest.mark.parametrize(("made", "inputs"), [(text_model, None), (sound_model, SOUND)])
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_no_layer_is_skipped_whatever_the_rate_and_the_seed(made: Any, inputs: Any, rate: float) -> None:
    expected = peak(made(0.0), inputs)
    assert [peak(made(rate), inputs, seed) for seed in range(2)] == [expected] * 2


def test_the_step_is_the_largest_of_those_that_run() -> None:
    """Of steps that skip layers none takes more, and one that skips none takes as much."""
    model = text_model(0.5)
    forecast = peak(model, None)
    model.train()

    def step() -> None:
        batch = {**tokens(model, 2, 16), "labels": torch.full((2, 16), 5)}
        loss = model(**batch, use_cache=False).loss
        loss.backward()

    measured = []
    for seed in range(12):
        torch.manual_seed(seed)
        model.zero_grad()
        measured.append(peak_above_start(step))
    assert min(measured) < 0.9 * forecast
    assert max(measured) <= forecast * 1.001


@pytest.mark.parametrize("made", [text_model, sound_model])
def test_the_model_and_its_config_keep_their_rate(made: Any) -> None:
    model = made(0.25)
    before = model.config.to_dict()
    kept = {name: vars(module).get("layerdrop") for name, module in model.named_modules()}
    trace_step(model, Workload.train(2, 16, labels=False), inputs=SOUND if made is sound_model else None)
    assert model.config.to_dict() == before
    assert {name: vars(module).get("layerdrop") for name, module in model.named_modules()} == kept


def test_a_forecast_says_so_where_there_is_a_rate() -> None:
    said = "LayerDrop is taken to skip no layer"
    assert any(note.startswith(said) for note in predict_memory(text_model(0.1), STEP).notes)
    assert not any(said in note for note in predict_memory(text_model(0.0), STEP).notes)
    assert not any(said in note for note in predict_memory(text_model(0.1), Workload.generate(2, 16)).notes)
