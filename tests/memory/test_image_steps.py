"""Steps with images, of every class of images and text of tests/tiny_models.py: forecast and measured."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import transformers
from allocator import peak_above_start
from allocator_truth import above_start, generation
from image_batches import ROWS, image_batch
from tiny_models import image_text_classes, skip_unless_buildable, tiny_config

from safe_loading import ArgumentError, TraceError, Workload, audit_model
from safe_loading._memory.trace.trace_step import trace_step

# Their tiny models do not run with images for real either: they take none, or need what no batch here has.
WITHOUT = {
    "EvollaForProteinText2Text",
    "Gemma4UnifiedForConditionalGeneration",
    "Mistral4ForCausalLM",
    "PI0ForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
    "UdopForConditionalGeneration",
}
DEPENDS_ON_VALUES = "Glm5NextForConditionalGeneration"
CLASSES = [name for name in image_text_classes() if name not in WITHOUT]
SAMPLE = {
    *random.Random(35).sample(CLASSES, 3),
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
}
EVERY = [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in CLASSES]
GENERATING = [
    "Qwen2VLForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
]


def model_and_batch(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    skip_unless_buildable(name)
    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny_config(name)).train()
    return model, image_batch(model)


@pytest.mark.parametrize("name", EVERY)
def test_a_training_step_with_images(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = model_and_batch(name)
        workload = Workload.train(ROWS, batch["input_ids"].shape[1], optimizer="none")
        if name == DEPENDS_ON_VALUES:
            with pytest.raises(TraceError, match="depends on values"):
                trace_step(model, workload, inputs=batch)
            return
        trace = trace_step(model, workload, inputs=batch)
        extra = {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}
        like = batch.get("decoder_input_ids", batch["input_ids"])

        def step() -> None:
            arguments = {name: tensor.clone() for name, tensor in batch.items()}
            labels = torch.full_like(like, 5)
            loss = model(**arguments, labels=labels, **extra).loss
            loss.backward()

        assert above_start(trace, "forward", "backward") == peak_above_start(step)


@pytest.mark.parametrize(
    "name", [GENERATING[0], *(pytest.param(name, marks=pytest.mark.slow) for name in GENERATING[1:])]
)
def test_generation_with_images(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = model_and_batch(name)
        rows, columns = batch["input_ids"].shape
        trace = trace_step(model, Workload.generate(rows, columns), inputs=batch)
        measured = generation(model, rows, columns, batch)
    assert above_start(trace, "prefill", "decode") == pytest.approx(measured, rel=1e-3)


def idefics(padding: int, *, meta: bool) -> Any:
    """Trace a step in whose second row `padding` of two images are padding."""
    model, batch = model_and_batch("Idefics3ForConditionalGeneration")
    pixels = batch["pixel_values"].expand(-1, 2, -1, -1, -1).contiguous()
    pixels[1, 2 - padding :] = 0
    ids = torch.full((2, 24), 5)
    count = int((batch["input_ids"][0] == model.config.image_token_id).sum())
    ids[0, : 2 * count] = ids[1, : (2 - padding) * count] = model.config.image_token_id
    inputs = {"input_ids": ids, "pixel_values": pixels.to("meta") if meta else pixels}
    return trace_step(model, Workload.train(2, 24, optimizer="none"), inputs=inputs)


def test_images_that_are_padding_are_seen_in_pixels_and_else_assumed_away() -> None:
    whole, padded = idefics(0, meta=False), idefics(1, meta=False)
    assert above_start(padded, "forward", "backward") < above_start(whole, "forward", "backward")
    assumed = idefics(0, meta=True)
    assert assumed.devices[0].peak_bytes == whole.devices[0].peak_bytes
    assert whole.assumptions == ()
    assert any("not 0" in said for said in assumed.assumptions)


def test_a_step_of_pictures_and_their_texts() -> None:
    """As of transformers' run_clip.py, whose collator asks for the loss."""
    vision = {"num_hidden_layers": 2, "image_size": 32, "patch_size": 8, "num_attention_heads": 2, "hidden_size": 32}
    text = {"num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 2, "hidden_size": 32}
    model: Any = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).train()
    batch = {"input_ids": torch.full((ROWS, 8), 5), "pixel_values": torch.zeros(ROWS, 3, 32, 32)}
    step = Workload.train(ROWS, 8, optimizer="none")
    with pytest.raises(ArgumentError, match=r"return_loss is a bool; .* leave return_loss out, which a step sets"):
        audit_model(model, step, inputs={**batch, "return_loss": True})  # type: ignore[dict-item]  # is the test
    assert not [found for found in audit_model(model, step, inputs=batch).findings if found.severity != "info"]
    trace = trace_step(model, step, inputs=batch)

    def run() -> None:
        model(**{name: tensor.clone() for name, tensor in batch.items()}, return_loss=True).loss.backward()

    assert above_start(trace, "forward", "backward") == pytest.approx(peak_above_start(run), abs=256)  # numbers
