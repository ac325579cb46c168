"""Adapters with a head of another number of labels than the base has: the head decides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SIZES, save_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BrosConfig,
    BrosSpadeELForTokenClassification,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5Model,
)

from safe_loading import (
    AdapterError,
    Workload,
    audit_model,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    verify_merge,
)
from safe_loading._model.layout.layout import own_key_mapping
from safe_loading._sharding.weightless import later_weights_of, load_later

LABELS = 3


def classifier(path: Path, labels: int | None = None) -> Any:
    sizes: dict[str, Any] = {} if labels is None else {"num_labels": labels, "ignore_mismatched_sizes": True}
    return AutoModelForSequenceClassification.from_pretrained(path, **sizes)


@pytest.fixture
def adapter(tmp_path: Path, tiny_llama: Path) -> Path:
    classifier(tiny_llama, LABELS).save_pretrained(tmp_path / "trained on")
    auto: Any = AutoModelForSequenceClassification
    return save_adapter(tmp_path / "adapter", tmp_path / "trained on", auto_class=auto, task_type="SEQ_CLS")


@pytest.mark.parametrize("given", [{}, {"num_labels": LABELS}], ids=["by the file", "by the caller"])
@pytest.mark.parametrize("has_a_head", [False, True], ids=["body", "classifier"])
def test_the_head_of_an_adapter_says_how_many_labels_there_are(
    tmp_path: Path, tiny_llama: Path, adapter: Path, has_a_head: bool, given: dict[str, int]
) -> None:
    """As of reward models, of one label, whose base says nothing of labels, which means two."""
    base = tiny_llama
    if has_a_head:
        base = tmp_path / "base"
        classifier(tiny_llama, 2).save_pretrained(base)
    assert check_checkpoint(adapter, base_model=base).ok
    model = load_peft_on_rank(adapter, base, base_kwargs=given)
    first = torch.arange(1, 13)[None]
    expected = PeftModel.from_pretrained(classifier(base, LABELS), str(adapter)).eval()
    assert model.get_base_model().config.num_labels == LABELS
    assert torch.equal(model(first).logits, expected(first).logits)
    merge_lora_checkpoint(base, adapter, tmp_path / "on disk", base_kwargs=given)
    merge_lora_inplace(model).save_pretrained(tmp_path / "in memory")
    for folder in ("on disk", "in memory"):
        merged = classifier(tmp_path / folder).eval()
        assert merged.config.num_labels == LABELS
        assert torch.allclose(merged(first).logits, expected(first).logits, atol=1e-5)


def test_a_layer_of_a_head_that_is_saved_alone_replaces_that_of_the_base(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 101}
    RobertaForSequenceClassification(RobertaConfig(**sizes, num_hidden_layers=2)).save_pretrained(tmp_path / "base")
    trained = classifier(tmp_path / "base", LABELS)
    config = LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier.out_proj"])
    get_peft_model(trained, config).save_pretrained(tmp_path / "adapter")
    model = load_peft_on_rank(tmp_path / "base", tmp_path / "adapter")
    plain = PeftModel.from_pretrained(classifier(tmp_path / "base", LABELS), str(tmp_path / "adapter")).eval()
    first = torch.arange(1, 13)[None]
    assert torch.equal(model(first).logits, plain(first).logits)


def test_a_number_of_labels_that_the_adapter_contradicts_is_refused_with_the_right_one(
    tiny_llama: Path, adapter: Path
) -> None:
    with pytest.raises(AdapterError, match=r"the file has \[3, 32\], the model has \[5, 32\]") as refused:
        load_peft_on_rank(adapter, tiny_llama, base_kwargs={"num_labels": 5})
    fix = re.search(r"base_kwargs=\{'num_labels': (\d+)\}", str(refused.value))
    assert fix is not None
    load_peft_on_rank(adapter, tiny_llama, base_kwargs={"num_labels": int(fix[1])})


def test_a_head_whose_task_no_config_names_is_loaded_by_its_class(tmp_path: Path, tiny_llama: Path) -> None:
    """transformers saves the adapters that it put in itself without a task (sentence-transformers#3980)."""
    auto: Any = AutoModelForSequenceClassification
    trained = classifier(tiny_llama)
    trained.add_adapter(LoraConfig(target_modules=["q_proj"], modules_to_save=["score"], init_lora_weights=False))
    trained.save_pretrained(tmp_path / "adapter")
    first = torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = trained.eval()(first).logits
    with pytest.raises(AdapterError, match=r"pass the class that has it, such as auto_class=(\w+)") as refused:
        load_peft_on_rank(tiny_llama, tmp_path / "adapter")
    assert auto.__name__ in str(refused.value)
    model = load_peft_on_rank(tiny_llama, tmp_path / "adapter", auto_class=auto)
    assert torch.equal(model(first).logits, expected)
    merge_lora_checkpoint(tiny_llama, tmp_path / "adapter", tmp_path / "merged", auto_class=auto)
    assert torch.allclose(classifier(tmp_path / "merged").eval()(first).logits, expected, atol=1e-5)


def test_an_encoder_that_was_saved_alone_is_loaded_alone(tmp_path: Path) -> None:
    """As sentence-t5: the auto class of the task makes a decoder too, at random, which no file holds."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    T5EncoderModel(config).save_pretrained(tmp_path / "base")
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    options: dict[str, Any] = {"task_type": "FEATURE_EXTRACTION", "target_modules": ["q", "v"]}
    encoder: Any = T5EncoderModel
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", auto_class=encoder, **options)
    model = load_peft_on_rank(adapter, tmp_path / "base")
    plain = PeftModel.from_pretrained(encoder.from_pretrained(tmp_path / "base"), str(adapter))
    tokens = torch.arange(1, 25).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens)[0], plain(input_ids=tokens)[0])
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "merged")
    assert verify_merge(tmp_path / "base", adapter, tmp_path / "merged").ok
    assert check_checkpoint(adapter).ok
    auto: Any = AutoModel
    of_both = save_adapter(tmp_path / "of both", tmp_path / "whole", auto_class=auto, **options)
    assert type(load_peft_on_rank(of_both, tmp_path / "whole").get_base_model()) is T5Model


def test_a_head_of_another_size_that_no_adapter_replaces_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    classifier(tiny_llama, 2).save_pretrained(tmp_path / "base")
    plain = save_adapter(tmp_path / "adapter", tiny_llama)
    auto: Any = AutoModelForSequenceClassification
    with pytest.raises(ValueError, match=r"score\.weight"):
        load_peft_on_rank(plain, tmp_path / "base", auto_class=auto, base_kwargs={"num_labels": LABELS})


def test_a_head_that_the_auto_class_of_the_task_does_not_make_is_that_of_the_base(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    torch.manual_seed(0)
    config = BrosConfig(**sizes, num_attention_heads=4, max_position_embeddings=32, dim_bbox_sinusoid_emb_2d=8)
    BrosSpadeELForTokenClassification(config).save_pretrained(base := tmp_path / "base")
    kind: Any = BrosSpadeELForTokenClassification
    options = {"target_modules": ["query", "key"], "task_type": "TOKEN_CLS"}  # the head has a key as the layers have
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=kind, **options)
    model = load_peft_on_rank(adapter, base)
    assert type(model.get_base_model()) is kind
    assert [finding.code for finding in model.load_report.findings] == ["base-class-chosen"]
    expected = PeftModel.from_pretrained(kind.from_pretrained(base), str(adapter)).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert verify_merge(base, adapter, tmp_path / "merged").ok
    merged, on_disk = merge_lora_inplace(model).state_dict(), kind.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(value, on_disk[key]) for key, value in merged.items())


@pytest.mark.parametrize("name", ["default", "mine"])
def test_a_head_of_several_layers_whose_biases_peft_wrote_twice_is_read(tmp_path: Path, name: str) -> None:
    """With bias="all" peft writes a saved module's biases by the names that the model has for them, too."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    torch.manual_seed(0)
    kind: Any = RobertaForSequenceClassification
    kind(RobertaConfig(**sizes, num_attention_heads=4)).save_pretrained(base := tmp_path / "base")
    config = LoraConfig(target_modules=["query"], bias="all", task_type="SEQ_CLS")
    trained = get_peft_model(kind.from_pretrained(base), config, adapter_name=name)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.requires_grad, alpha=0.1)
    trained.save_pretrained(tmp_path / "adapter")
    adapter = tmp_path / "adapter" / ("" if name == "default" else name)
    keys = load_file(adapter / "adapter_model.safetensors").keys()
    assert f"base_model.model.classifier.modules_to_save.{name}.dense.bias" in keys
    assert "base_model.model.classifier.dense.bias" in keys
    model = load_peft_on_rank(adapter, base)
    first = torch.arange(1, 13)[None]
    expected = trained.eval()(first).logits
    assert torch.equal(model(first).logits, expected)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert torch.allclose(kind.from_pretrained(tmp_path / "merged").eval()(first).logits, expected, atol=1e-5)
    assert verify_merge(base, adapter, tmp_path / "merged").ok


def test_a_lora_inside_a_saved_head_is_told_and_loads_once_it_is_summed(tmp_path: Path) -> None:
    """PeftModelForTokenClassification names its heads as saved only after the LoRAs are made, as all did once."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    torch.manual_seed(0)
    kind: Any = RobertaForSequenceClassification
    kind(RobertaConfig(**sizes, num_attention_heads=4)).save_pretrained(base := tmp_path / "base")
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["query", "out_proj"], task_type="TOKEN_CLS")
    trained = get_peft_model(kind.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.requires_grad, alpha=0.1)
    trained.save_pretrained(adapter := tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    path = "base_model.model.classifier.out_proj"
    with pytest.raises(AdapterError, match=r"LoRA in 'classifier\.out_proj', inside the module 'classifier'") as told:
        load_peft_on_rank(adapter, base, auto_class=kind)
    assert len(told.value.problems) == 1
    assert f"write '{path}.weight' into the file in place of it" in str(told.value)
    update = tensors.pop(f"{path}.lora_B.weight") @ tensors.pop(f"{path}.lora_A.weight") * 6 / 4
    tensors[f"{path}.weight"] = tensors.pop(f"{path}.base_layer.weight") + update
    tensors[f"{path}.bias"] = tensors.pop(f"{path}.base_layer.bias")
    save_file(tensors, adapter / "adapter_model.safetensors")
    model = load_peft_on_rank(adapter, base, auto_class=kind)
    first = torch.arange(1, 13)[None]
    assert torch.allclose(model(first).logits, trained.eval()(first).logits, atol=1e-5)


class Retriever(LlamaModel):
    """A model whose own ``from_pretrained`` renames what an older class saved, as colpali-engine's do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.custom_text_proj = nn.Linear(config.hidden_size, 8)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, key_mapping: Any = None, **options: Any) -> Any:
        mapping = {r"^decoder\.": "", **(key_mapping or {})}
        return super().from_pretrained(*args, key_mapping=mapping, **options)

    def forward(self, input_ids: Any = None, **options: Any) -> Any:  # type: ignore[override]
        return self.custom_text_proj(super().forward(input_ids, **options)[0])


@pytest.fixture
def renamed_base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Retriever(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = {f"decoder.{k}" if k.startswith("layers.") else k: v for k, v in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return tmp_path / "base"


def test_the_names_that_a_class_maps_itself_are_those_of_its_load(tmp_path: Path, renamed_base: Path) -> None:
    kind: Any = Retriever
    options = {"target_modules": ["q_proj", "custom_text_proj"], "task_type": "FEATURE_EXTRACTION"}
    adapter = save_adapter(tmp_path / "adapter", renamed_base, auto_class=kind, **options)
    first = torch.arange(1, 13)[None]
    expected = PeftModel.from_pretrained(kind.from_pretrained(renamed_base), adapter, is_trainable=True)
    assert check_checkpoint(renamed_base).ok  # by its headers: transformers lacks its class
    load: Any = PreTrainedModel.from_pretrained
    options = {"key_mapping": own_key_mapping(kind)}  # as its own function calls the one of load_at_prepare
    found = later_weights_of(load_later(load.__func__, kind, renamed_base, **options))
    assert found is not None
    assert found[1].source is not None  # every weight has its place
    model = load_peft_on_rank(adapter, renamed_base, auto_class=kind)
    assert type(model.get_base_model()) is kind
    assert torch.equal(model(first), expected.eval()(first))
    codes = {found.code for found in audit_model(expected.train(), Workload.train(1, 8), round_trip=True).findings}
    assert "SL140" not in codes
    merge_lora_checkpoint(renamed_base, adapter, tmp_path / "merged", auto_class=kind)
    merged = kind.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(first), expected.eval()(first), atol=1e-5)
    assert verify_merge(renamed_base, adapter, tmp_path / "merged", auto_class=kind).ok


def test_a_class_of_another_package_is_named_where_that_of_transformers_has_no_such_layer(tmp_path: Path) -> None:
    kind: Any = Retriever
    kind(LlamaConfig(**SIZES)).save_pretrained(base := tmp_path / "base")
    options = {"target_modules": ["q_proj", "custom_text_proj"], "task_type": "FEATURE_EXTRACTION"}
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=kind, **options)
    told = r"names Retriever, which transformers does not have, and LlamaModel was taken\. Pass auto_class=Retriever,"
    with pytest.raises(AdapterError, match=told):
        load_peft_on_rank(adapter, base)
    with pytest.raises(AdapterError, match=told):
        merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert load_peft_on_rank(adapter, base, auto_class=kind).load_report.ok
    merge_lora_checkpoint(base, adapter, tmp_path / "merged", auto_class=kind)
