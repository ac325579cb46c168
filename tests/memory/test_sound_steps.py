"""Steps of models that listen: the loss over paths of texts (CTC), and layers computed again without embeddings."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from allocator import peak_above_start
from allocator_truth import above_start
from tiny_models import tiny_config

from safe_loading import Workload, audit_model, predict_memory
from safe_loading._memory.trace.trace_step import trace_step

ROWS, TEXT, SAMPLES = 2, 8, 8000
NARROW = {"conv_dim": (32,) * 7, "layerdrop": 0.0, "mask_time_prob": 0.0}


def listener(name: str) -> Any:
    config: Any = tiny_config(name)
    for field, value in NARROW.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    return getattr(transformers, name)(config).train()


def sounds() -> dict[str, torch.Tensor]:
    return {"input_values": torch.ones(ROWS, SAMPLES)}


def of_unequal_length() -> torch.Tensor:
    labels = torch.full((ROWS, TEXT), 5)
    labels[1, 3:] = -100
    return labels


def measured(model: Any, labels: torch.Tensor) -> int:
    def step() -> None:
        batch = {name: tensor.clone() for name, tensor in sounds().items()}
        batch["labels"] = labels.clone()
        loss = model(**batch).loss
        loss.backward()

    gc.collect()
    return peak_above_start(step)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("Wav2Vec2ForCTC", False),
        ("Wav2Vec2ForCTC", True),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in ("HubertForCTC", "WavLMForCTC", "Wav2Vec2ForSequenceClassification")
        ),
    ],
)
def test_a_step_over_sounds(name: str, checkpointing: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = listener(name)
        workload = Workload.train(ROWS, TEXT, checkpointing, optimizer="none")
        trace = trace_step(model, workload, inputs=sounds())
        if checkpointing:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        labels = torch.full((ROWS, TEXT) if name.endswith("CTC") else (ROWS,), 1)
        assert above_start(trace, "forward", "backward") == measured(model, labels)


def test_the_longest_of_given_texts_decides() -> None:
    model, labels = listener("Wav2Vec2ForCTC"), of_unequal_length()
    trace = trace_step(model, Workload.train(ROWS, TEXT, optimizer="none"), inputs={**sounds(), "labels": labels})
    assert above_start(trace, "forward", "backward") == measured(model, labels)


def test_an_audit_runs_the_step() -> None:
    report = audit_model(listener("Wav2Vec2ForCTC"), Workload.train(ROWS, TEXT), inputs=sounds(), forecast=False)
    assert "SL126" not in {finding.code for finding in report.findings}


def test_a_class_freezes_positions_that_are_trained_in_a_model_from_a_folder(tmp_path: Path) -> None:
    """`from_pretrained` makes each parameter anew, so that Whisper's sinusoids are trained as all else is."""
    torch.manual_seed(0)
    made: Any = transformers.WhisperForConditionalGeneration(tiny_config("WhisperForConditionalGeneration"))
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path)
    of_folder = transformers.AutoConfig.from_pretrained(tmp_path)
    texts = torch.full((ROWS, TEXT), 5)
    inputs = {"input_features": torch.ones(ROWS, 80, 128), "decoder_input_ids": texts, "labels": texts}
    workload = Workload.train(ROWS, TEXT)

    def peak(source: Any) -> int:
        return predict_memory(source, workload, inputs=inputs).allocated_peak_bytes

    frozen = made.model.encoder.embed_positions.weight
    assert not frozen.requires_grad
    assert loaded.model.encoder.embed_positions.weight.requires_grad
    assert peak(tmp_path) == peak(of_folder) == peak(loaded) >= peak(made) + 2 * frozen.nbytes
    assert peak(made.config) == peak(made)
