"""A forecast says which parts of a model did not run in its step."""

from __future__ import annotations

import pytest
from image_batches import image_batch
from peft import LoraConfig
from tiny_models import skip_unless_buildable, tiny_config
from transformers import Qwen2_5_VLForConditionalGeneration

from safe_loading import Spread, Workload, predict_memory

NAME = "Qwen2_5_VLForConditionalGeneration"
LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def idle(notes: tuple[str, ...]) -> list[str]:
    return [note for note in notes if "did not run" in note]


@pytest.mark.parametrize("adapter", [None, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("spread", [None, Spread.fsdp2(ranks=2), Spread.fsdp1(ranks=2)], ids=str)
def test_a_tower_that_a_step_of_text_leaves_out_is_named(adapter: LoraConfig | None, spread: Spread | None) -> None:
    skip_unless_buildable(NAME)
    forecast = predict_memory(tiny_config(NAME), Workload.train(2, 16, adapter=adapter), spread=spread)
    (note,) = idle(forecast.notes)
    assert note.startswith("model.visual did not run in a step of tokens alone; pass inputs= if yours has more.")


def test_with_images_the_tower_runs() -> None:
    skip_unless_buildable(NAME)
    batch = image_batch(Qwen2_5_VLForConditionalGeneration(tiny_config(NAME)))
    rows, columns = batch["input_ids"].shape
    forecast = predict_memory(tiny_config(NAME), Workload.train(rows, columns), inputs=batch)
    assert idle(forecast.notes) == []
    assert forecast.components["saved_activations"] > 0


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BertForMaskedLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("workload", [Workload.train(2, 16), Workload.generate(1, 16)], ids=str)
def test_a_model_of_text_has_no_such_part(name: str, workload: Workload) -> None:
    assert idle(predict_memory(tiny_config(name), workload, auto_class=name).notes) == []
