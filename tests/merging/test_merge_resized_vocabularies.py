"""Adapters of a vocabulary that was resized in memory, class by class: loaded, merged in memory and on disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from models import save_adapter
from peft import PeftModel
from test_merge_lora_checkpoint_orders import save_first_inkling
from tiny_models import saved, skip_unless_buildable

from safe_loading import MergeError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

TOKENS = torch.arange(1, 13)[None] + 2
# What transformers saves of them with another vocabulary, it does not load again.
NOT_SAVED = ["MllamaForCausalLM", "DeepseekV4ForCausalLM", "T5Gemma2ForConditionalGeneration"]
CLASSES = [
    "BloomForCausalLM",
    "OpenAIGPTLMHeadModel",
    "InklingForConditionalGeneration",
    "CamembertForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration",
]


def logits(model: Any) -> torch.Tensor:
    inputs = {"input_ids": TOKENS, **({"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {})}
    with torch.no_grad():
        return model(**inputs).logits


class Case:
    """A tiny base of a class, whose vocabulary gets a few rows more or fewer in memory before it is trained."""

    def __init__(self, folder: Path, name: str, rows: int, **config: Any) -> None:
        if not hasattr(transformers, name):
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        self.kind, self.base = getattr(transformers, name), folder / "base"
        if name.startswith("InklingFor"):
            save_first_inkling(self.base)
        else:
            skip_unless_buildable(name)
            saved(name, self.base)
        plain = self.kind.from_pretrained(self.base)
        self.rows = plain.config.get_text_config().vocab_size + rows
        own = {id(module): path.rpartition(".")[2] for path, module in plain.named_modules()}
        ends = [plain.get_input_embeddings(), plain.get_output_embeddings()]
        tied = ends[0].weight is ends[1].weight
        saved_too = [own[id(end)] for end in ends[: 1 if tied else 2]]
        if name.startswith("T5Gemma2"):
            tied, saved_too = False, ["embed_tokens"]
        if not config:
            config = {"modules_to_save": saved_too, "ensure_weight_tying": tied}
        targets: dict[str, Any] = {"target_modules": "all-linear"}
        if name in NOT_SAVED:  # grouped layers of DeepSeek V4, and the head of T5Gemma 2, are no plain linear ones
            targets = {"target_modules": ["q_a_proj", "q_proj", "v_proj", "kv_proj", "down_proj"]}
        larger = SimpleNamespace(from_pretrained=self.larger)
        options: Any = {"auto_class": larger, "task_type": None, **targets, **config}
        self.adapter = save_adapter(folder / "adapter", self.base, **options)

    def larger(self, path: Path | None = None, **options: Any) -> Any:
        """The base with the other vocabulary, as it was trained."""
        torch.manual_seed(0)
        model = self.kind.from_pretrained(path or self.base, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.resize_token_embeddings(self.rows, mean_resizing=False)
        return model


@pytest.mark.parametrize("rows", [7, pytest.param(-9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CLASSES)
def test_a_resized_vocabulary_is_loaded_and_merged(tmp_path: Path, name: str, rows: int) -> None:
    case = Case(tmp_path, name, rows)
    expected = logits(PeftModel.from_pretrained(case.larger(), str(case.adapter)))
    model = load_peft_on_rank(case.larger(), case.adapter)
    assert torch.equal(logits(model), expected)
    merge_lora_inplace(model).save_pretrained(tmp_path / "memory")
    merge_lora_checkpoint(case.base, case.adapter, tmp_path / "disk")
    states = [case.kind.from_pretrained(tmp_path / folder).state_dict() for folder in ("memory", "disk")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][key], value) for key, value in states[0].items())
    assert torch.allclose(logits(case.kind.from_pretrained(tmp_path / "disk")), expected, atol=1e-5)


def save_and_load(case: Case, folder: Path) -> Any:
    case.larger().save_pretrained(folder)
    return case.kind.from_pretrained(folder)


@pytest.mark.parametrize("name", NOT_SAVED)
def test_what_transformers_cannot_save_is_merged_in_memory_alone(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path, name, 7)
    with pytest.raises((RuntimeError, StrictDataclassError)):  # else it could be written to disk too
        save_and_load(case, tmp_path / "larger")
    advice = rf"transformers saves no {name} .*call resize_token_embeddings\({case.rows}\), and pass it to load_peft_on"
    with pytest.raises(MergeError, match=advice):
        merge_lora_checkpoint(case.base, case.adapter, tmp_path / "out")
    expected = logits(PeftModel.from_pretrained(case.larger(), str(case.adapter)))
    model = load_peft_on_rank(case.larger(), case.adapter)
    assert torch.equal(logits(model), expected)
    assert torch.allclose(logits(merge_lora_inplace(model)), expected, atol=1e-5)


def test_trained_rows_that_the_base_lacks_need_a_base_that_has_them(tmp_path: Path) -> None:
    # peft does not see that the vocabulary of a model with a nested config grew, and saves no embedding
    name = "MossTranscribeDiarizeForConditionalGeneration"
    case = Case(tmp_path, name, 7, trainable_token_indices=[3, 256])
    with pytest.raises(MergeError, match=r"trains row 256, the base has 251 rows.*resize_token_embeddings\(257\)"):
        merge_lora_checkpoint(case.base, case.adapter, tmp_path / "out")
    case.larger().save_pretrained(tmp_path / "larger")
    expected = logits(PeftModel.from_pretrained(case.larger(), str(case.adapter)))
    merge_lora_checkpoint(tmp_path / "larger", case.adapter, tmp_path / "out")
    assert torch.allclose(logits(case.kind.from_pretrained(tmp_path / "out")), expected, atol=1e-5)
