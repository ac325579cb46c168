"""Outputs that are not the base's shape: untied, resized, with a new head, cast, cut into other files."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults import adapters as faults
from models import KINDS, Made, save_adapter, save_llama
from peft import LoraConfig, PeftConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_merge_lora_checkpoint import TOKENS, check_same, loaded, on_disk, reference, tensor_bytes
from test_merge_lora_inplace_ties import ENDS, adapted, family
from test_merge_lora_inplace_ties import logits as end_logits
from tiny_models import saved
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from safe_loading import (
    ArgumentError,
    DeviceError,
    MergeError,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    verify_merge,
)
from safe_loading._checkpoint.index import read_checkpoint
from safe_loading._merging.weights.rounding import round_into


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def plain(base: Path, adapter: Path, **options: Any) -> torch.Tensor:
    """The logits of base and adapter, which the output must have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits(load_peft_on_rank(base, adapter, **options))


# ------------------------------------------------------------------------------------------------------ ties


@pytest.mark.parametrize("kind", ["embedding", "head", "modules to save"])
def test_an_adapter_of_one_of_two_tied_weights_unties_them(tmp_path: Path, kind: str) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, **KINDS[kind])
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.allclose(logits(model), plain(base, adapter), atol=1e-4)
    assert [finding.code for finding in report.findings] == ["no-longer-tied"]
    assert "no-longer-tied" in str(report)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert [tensor.name for tensor in report.of("added")] == ["lm_head.weight"]
    out, before = on_disk(tmp_path / "out"), on_disk(base)
    assert torch.equal(out["model.embed_tokens.weight"], before["model.embed_tokens.weight"]) == (kind != "embedding")
    assert torch.equal(out["lm_head.weight"], before["model.embed_tokens.weight"]) == (kind == "embedding")
    assert tensor_bytes(tmp_path / "out") == tensor_bytes(base) + 101 * 32 * 4


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]},
        # a target that peft does not take for an embedding, so that the base's rows are not in the file
        {"target_modules": ["model.embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_of_two_tied_weights_is_added_to_and_the_other_replaced(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype
) -> None:
    base = save_llama(tmp_path / "base", dtype, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=dtype, **config)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert [finding.code for finding in report.findings] == ["no-longer-tied"]
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    assert torch.allclose(logits(loaded(tmp_path / "out")), plain(base, adapter), atol=tolerance)
    expected, found = on_disk(reference(base, adapter, tmp_path / "reference")), on_disk(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_the_finding_of_two_tied_weights_that_are_both_replaced_has_the_size_of_what_replaces_them(
    tmp_path: Path,
) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, modules_to_save=["lm_head", "embed_tokens"])
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert [(finding.code, finding.bytes) for finding in report.findings] == [("no-longer-tied", 2 * 101 * 32 * 4)]


@pytest.mark.parametrize("end", ENDS)
def test_on_disk_as_in_memory_an_adapter_of_one_end_takes_tied_weights_apart(tmp_path: Path, end: str) -> None:
    name, config = ENDS[end]
    if config.get("ia3"):
        pytest.skip("not a LoRA")
    base = family(name)
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, dict(config))
    expected = end_logits(model)
    model.save_pretrained(str(tmp_path / "adapter"))
    report = merge_lora_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert {finding.code for finding in report.findings} == {"no-longer-tied"}
    merged = loaded(tmp_path / "out", type(base))
    assert torch.allclose(end_logits(merged), expected, atol=1e-5)
    in_memory = merge_lora_inplace(load_peft_on_rank(tmp_path / "base", tmp_path / "adapter", auto_class=type(base)))
    theirs = in_memory.state_dict()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in merged.state_dict().items())


def test_a_t5_of_the_hub_keeps_its_scaling(tmp_path: Path) -> None:
    # older files neither hold the flag nor scale_decoder_outputs, which T5's config derives from it
    base = family("T5")
    base.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("tie_word_embeddings", "scale_decoder_outputs")})
    )
    model = adapted(base, {"target_modules": ["lm_head"]})
    model.save_pretrained(str(tmp_path / "adapter"))
    report = merge_lora_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert torch.allclose(end_logits(loaded(tmp_path / "out", type(base))), end_logits(model), atol=1e-5)
    (finding,) = report.findings
    assert "stays as it is, because this class computes by it" in finding.message


def test_two_of_three_tied_weights_are_replaced(tmp_path: Path) -> None:
    from transformers import ProphetNetForCausalLM

    saved("ProphetNetForCausalLM", tmp_path / "base")
    options = {"auto_class": ProphetNetForCausalLM, "task_type": None, "target_modules": ["query_proj"]}
    own = {"modules_to_save": ["lm_head", "prophetnet.decoder.word_embeddings"]}
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", **options, **own)
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out")
    expected = plain(tmp_path / "base", adapter, auto_class=ProphetNetForCausalLM)
    assert torch.allclose(logits(loaded(tmp_path / "out", ProphetNetForCausalLM)), expected, atol=1e-4)


@pytest.mark.parametrize("config", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": {"lm_head": [3, 4]}}])
def test_what_no_checkpoint_of_a_class_holds_is_not_missed_where_a_tie_ends(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """Marian's sinusoids are computed, and never saved."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 60, "pad_token_id": 0}
    special = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    MarianMTModel(MarianConfig(**layers, **sizes, **special)).save_pretrained(tmp_path / "base")
    options = {"auto_class": MarianMTModel, "task_type": None, "target_modules": ["q_proj"]}
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", **options, **config)
    model = load_peft_on_rank(tmp_path / "base", adapter, auto_class=MarianMTModel)
    expected = merge_lora_inplace(model).state_dict()
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out", auto_class=MarianMTModel)
    found = MarianMTModel.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["query"], trainable_token_indices={"word_embeddings": [1, 2]}),
        TrainableTokensConfig(target_modules=["word_embeddings"], token_indices=[1, 2]),
    ],
    ids=["beside a LoRA", "alone"],
)
def test_tokens_of_a_tied_head_with_a_bias_are_refused(tmp_path: Path, config: PeftConfig) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=101, **sizes)).save_pretrained(tmp_path / "base")
    adapter = tmp_path / "adapter"
    get_peft_model(BertForMaskedLM.from_pretrained(tmp_path / "base"), config).save_pretrained(str(adapter))
    with pytest.raises(MergeError, match=r"cls.predictions.decoder: peft computes .* without its bias"):
        merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out")


def test_a_saved_head_of_a_tied_base_is_the_merge_in_memory(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.bfloat16, modules_to_save=["lm_head"])
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    expected, found = on_disk(reference(base, adapter, tmp_path / "reference")), on_disk(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_both_of_two_tied_weights_change_once_and_stay_tied(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    targets = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
    adapter = save_adapter(tmp_path / "adapter", base, **targets)
    check_same(base, adapter, tmp_path)
    model = loaded(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.allclose(logits(model), plain(base, adapter), atol=1e-4)


def test_a_second_name_of_a_tied_weight_on_disk_is_merged_alike(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    targets = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
    adapter = save_adapter(tmp_path / "adapter", base, **targets)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.norm.weight"]
    tensors = {**load_file(base / shard), "lm_head.weight": on_disk(base)["model.embed_tokens.weight"].clone()}
    save_file(tensors, base / shard, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = shard
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    out = on_disk(tmp_path / "out")
    assert torch.equal(out["lm_head.weight"], out["model.embed_tokens.weight"])
    assert not torch.equal(out["lm_head.weight"], tensors["lm_head.weight"])
    assert len(report.of("re-tied")) == 1


@pytest.mark.parametrize(
    "config", [{"modules_to_save": ["predictions"]}, {"target_modules": ["query", "word_embeddings"], "bias": "all"}]
)
def test_a_head_with_tied_weights_inside_and_a_bias_of_two_names(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=101, **sizes)).save_pretrained(tmp_path / "base")
    options = {"auto_class": BertForMaskedLM, "task_type": None, "target_modules": ["query"], **config}
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", **options)
    report = merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out")
    assert {tensor.name for tensor in report.of("added")} == {
        f"cls.predictions.decoder.{n}" for n in ("weight", "bias")
    }
    expected = plain(tmp_path / "base", adapter, auto_class=BertForMaskedLM)
    assert torch.allclose(logits(loaded(tmp_path / "out", BertForMaskedLM)), expected, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_head_whose_bias_has_two_names_is_written_with_both(tmp_path: Path, tied: bool) -> None:
    from transformers import BertConfig, BertForMaskedLM

    kind: Any = BertForMaskedLM
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    kind(BertConfig(vocab_size=101, tie_word_embeddings=tied, **sizes)).bert.save_pretrained(tmp_path / "base")
    options = {"auto_class": kind, "task_type": None, "target_modules": ["query"], "modules_to_save": ["cls"]}
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", **options)
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out", auto_class=kind)
    merged, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.allclose(logits(merged), plain(tmp_path / "base", adapter, auto_class=kind), atol=1e-5)
    assert verify_merge(tmp_path / "base", adapter, tmp_path / "out", auto_class=kind).ok


def test_two_deltas_of_the_two_names_of_one_weight_make_it_two(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16, tie_word_embeddings=True)
    targets = {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.bfloat16, **targets)
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    expected, found = on_disk(reference(base, adapter, tmp_path / "reference")), on_disk(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert torch.allclose(logits(loaded(tmp_path / "out")), plain(base, adapter), atol=0.02)


# ------------------------------------------------------------------------------------------------ vocabulary, heads


def resized(tmp_path: Path, base: Path, rows: int, **config: Any) -> Path:
    """An adapter trained on the base with another vocabulary, as trainers save it."""
    larger = tmp_path / "larger"
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model.resize_token_embeddings(rows)
    model.save_pretrained(larger)
    return save_adapter(tmp_path / "adapter", larger, dtype=torch.float32, **config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [96, 110])
def test_a_resized_vocabulary(tmp_path: Path, rows: int, tied: bool) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    saved = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True} if tied else {}
    saved = saved or {"modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = resized(tmp_path, base, rows, **saved)
    for folder, size in ((base, 101), (adapter, rows)):
        (folder / "tokenizer.json").write_text(json.dumps({"size": size}))
        (folder / "tokenizer_config.json").write_text("{}")
    (base / "special_tokens_map.json").write_text("{}")
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.config.vocab_size == rows == len(model.lm_head.weight)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.allclose(logits(model), plain(tmp_path / "larger", adapter), atol=1e-4)
    names = {"model.embed_tokens.weight"} if tied else {"model.embed_tokens.weight", "lm_head.weight"}
    assert {tensor.name for tensor in report.of("replaced")} == names
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == {"size": rows}
    assert not (tmp_path / "out" / "special_tokens_map.json").exists()
    assert "tokenizer-of-adapter" in {finding.code for finding in report.findings}


def test_a_lora_on_a_resized_embedding_needs_both_weights(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = resized(tmp_path, base, 110, target_modules=["embed_tokens", "lm_head"])  # peft saves both weights then
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert torch.allclose(logits(loaded(tmp_path / "out")), plain(tmp_path / "larger", adapter), atol=1e-4)
    lacking = faults.edited(adapter, tmp_path / "lacking", tensors=faults.without("lm_head.base_layer"))
    with pytest.raises(MergeError, match=r"lm_head.weight: the adapter's vocabulary has 110 rows and the base's 101"):
        merge_lora_checkpoint(base, lacking, tmp_path / "no")
    # the advice: into the base with the new vocabulary
    merge_lora_checkpoint(tmp_path / "larger", lacking, tmp_path / "advised")
    assert torch.allclose(logits(loaded(tmp_path / "advised")), plain(tmp_path / "larger", adapter), atol=1e-4)


def resizing(kind: Any) -> Any:
    """Something whose ``from_pretrained`` gives the model of that class a larger vocabulary in memory."""

    def from_pretrained(path: Path, **options: Any) -> Any:
        torch.manual_seed(0)
        model = kind.from_pretrained(path, **options)
        model.resize_token_embeddings(110, mean_resizing=False)
        return model

    return SimpleNamespace(from_pretrained=from_pretrained)


@pytest.mark.parametrize("own", [["embed_tokens", "lm_head"], ["embed_tokens"], []])
@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_was_resized_in_memory(tmp_path: Path, tied: bool, own: list[str]) -> None:
    # peft then writes both ends as save_embedding_layers does, and a saved module under all of its names in the model
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)

    larger_class = resizing(AutoModelForCausalLM)
    options = {"modules_to_save": own or None, "ensure_weight_tying": tied and len(own) == 1}
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=larger_class, **options)
    assert not own or any(".original_module." in name for name in on_disk(adapter))
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.config.vocab_size == 110 == len(model.lm_head.weight)
    larger = larger_class.from_pretrained(base, dtype="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(logits(model), logits(PeftModel.from_pretrained(larger, str(adapter))), atol=1e-4)
    assert torch.allclose(
        logits(model), logits(load_peft_on_rank(larger_class.from_pretrained(base), adapter)), atol=1e-4
    )


def test_an_untied_vocabulary_that_grew_in_memory_alone_is_merged_there(tmp_path: Path) -> None:
    """The rows that the head grew are in no file: only a model in memory has them, or a base saved with them."""
    base, larger_class = save_llama(tmp_path / "base"), resizing(AutoModelForCausalLM)
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=larger_class, target_modules=["embed_tokens"])
    larger = larger_class.from_pretrained(base)
    with pytest.raises(MergeError, match=r"lm_head.weight: .*or save the base with the new vocabulary, and merge into"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    model = load_peft_on_rank(larger_class.from_pretrained(base), adapter)
    expected = logits(model)
    merge_lora_inplace(model).save_pretrained(tmp_path / "saved")
    larger.save_pretrained(tmp_path / "larger")
    merge_lora_checkpoint(tmp_path / "larger", adapter, tmp_path / "out")
    for folder in ("out", "saved"):
        assert torch.allclose(logits(loaded(tmp_path / folder)), expected, atol=1e-5)


GROWN: dict[str, dict[str, Any]] = {
    "new tokens": {"trainable_token_indices": [103, 105, 109]},
    "old and new tokens": {"trainable_token_indices": {"embed_tokens": [5, 103, 109]}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "both alike": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("kind", GROWN)
def test_a_tied_vocabulary_that_grew_is_trained_by_rows_or_factors(tmp_path: Path, kind: str) -> None:
    base, larger_class = save_llama(tmp_path / "base", tie_word_embeddings=True), resizing(AutoModelForCausalLM)
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=larger_class, **GROWN[kind])
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = logits(PeftModel.from_pretrained(larger_class.from_pretrained(base), str(adapter)))
    model = load_peft_on_rank(larger_class.from_pretrained(base), adapter)
    assert torch.allclose(logits(model), theirs, atol=1e-5)
    merge_lora_inplace(model).save_pretrained(tmp_path / "saved")
    for folder in ("out", "saved"):
        assert torch.allclose(logits(loaded(tmp_path / folder)), theirs, atol=1e-4)
    out, saved_too = on_disk(tmp_path / "out"), on_disk(tmp_path / "saved")
    assert out.keys() == saved_too.keys()
    assert all(torch.equal(tensor, saved_too[name]) for name, tensor in out.items())


@pytest.mark.parametrize("own", [["word_embeddings"], []])
def test_a_resized_head_with_a_bias(tmp_path: Path, own: list[str]) -> None:
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    RobertaForMaskedLM(RobertaConfig(vocab_size=101, **sizes)).save_pretrained(tmp_path / "base")

    larger_class = resizing(RobertaForMaskedLM)
    options = {"task_type": None, "target_modules": ["query"], "modules_to_save": own or None}
    adapter = save_adapter(
        tmp_path / "adapter", tmp_path / "base", auto_class=larger_class, ensure_weight_tying=bool(own), **options
    )
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out")
    found = logits(loaded(tmp_path / "out", RobertaForMaskedLM))
    expected = logits(load_peft_on_rank(larger_class.from_pretrained(tmp_path / "base"), adapter))
    assert found.shape == expected.shape == (*TOKENS.shape, 110)
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_config_with_infinity_stays_one_when_it_changes(tmp_path: Path) -> None:
    base, saved_too = tmp_path / "base", ["embed_tokens", "lm_head"]
    saved("BambaForCausalLM", base)
    before = json.loads((base / "config.json").read_text())
    assert before["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    adapter = resized(tmp_path, base, 260, target_modules=["q_proj"], modules_to_save=saved_too)
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert loaded(tmp_path / "out").config.time_step_limit[1] == math.inf
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**before, "vocab_size": 260}


@pytest.mark.parametrize("labels", [2, 5])
def test_a_new_head_for_another_task(tmp_path: Path, labels: int) -> None:
    base = save_llama(tmp_path / "base", pad_token_id=0)
    adapter = save_seq_cls(tmp_path / "adapter", base, labels)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    model = loaded(tmp_path / "out", AutoModelForSequenceClassification)
    assert model.config.num_labels == labels
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    theirs = plain(base, adapter, base_kwargs={"num_labels": labels})
    assert torch.allclose(logits(model), theirs, atol=1e-4)
    assert [tensor.name for tensor in report.of("added")] == ["score.weight"]
    assert report.dropped == ("lm_head.weight",)
    assert "tensors-left-behind" in {finding.code for finding in report.findings}


def test_a_head_of_other_labels_than_the_base_s(tmp_path: Path) -> None:
    """As ``ignore_mismatched_sizes`` makes one over a base that was trained for other labels."""
    plain_base = save_llama(tmp_path / "plain", pad_token_id=0)
    AutoModelForSequenceClassification.from_pretrained(plain_base).save_pretrained(tmp_path / "base")
    adapter = save_seq_cls(tmp_path / "adapter", tmp_path / "base", 5)
    report = merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out")
    model = loaded(tmp_path / "out", AutoModelForSequenceClassification)
    assert model.config.num_labels == len(model.config.id2label) == 5
    theirs = plain(tmp_path / "base", adapter, base_kwargs={"num_labels": 5})
    assert torch.allclose(logits(model), theirs, atol=1e-4)
    assert [tensor.name for tensor in report.of("replaced")] == ["score.weight"]
    assert verify_merge(tmp_path / "base", adapter, tmp_path / "out").ok
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["score.weight"][4] += 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert not verify_merge(tmp_path / "base", adapter, tmp_path / "out").ok


NAMES = {"id2label": {0: "no", 1: "yes", 2: "both"}, "label2id": {"no": 0, "yes": 1, "both": 2}}


@pytest.mark.parametrize("asked", [NAMES, {"num_labels": 3, **NAMES}], ids=["names", "number and names"])
@pytest.mark.parametrize("has_head", [False, True])
def test_labels_that_are_named_have_their_names_in_the_output(
    tmp_path: Path, asked: dict[str, Any], has_head: bool
) -> None:
    base = save_llama(tmp_path / "base", pad_token_id=0)
    adapter = save_seq_cls(tmp_path / "adapter", base, 3)
    if has_head:  # of two labels
        AutoModelForSequenceClassification.from_pretrained(base).save_pretrained(base)
    merge_lora_checkpoint(base, adapter, tmp_path / "out", base_kwargs=asked)
    model = loaded(tmp_path / "out", AutoModelForSequenceClassification)
    assert (model.config.id2label, model.config.label2id) == (NAMES["id2label"], NAMES["label2id"])
    assert torch.allclose(logits(model), plain(base, adapter, base_kwargs=asked), atol=1e-4)
    assert verify_merge(base, adapter, tmp_path / "out", base_kwargs=asked).ok


@pytest.mark.parametrize("asked", [{}, {"num_labels": 3}, NAMES], ids=["found in the adapter", "number", "names"])
def test_a_head_of_other_labels_of_a_task_that_peft_does_not_know(tmp_path: Path, asked: dict[str, Any]) -> None:
    """An adapter for images has no ``task_type``, and its head is told by its tensors alone."""
    base, sizes = tmp_path / "base", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = ViTConfig(**sizes, num_attention_heads=4, image_size=16, patch_size=8, num_labels=5)
    ViTForImageClassification(config).save_pretrained(base)

    class Loader:
        @staticmethod
        def from_pretrained(path: Path, **options: Any) -> Any:
            options |= {"num_labels": 3, "ignore_mismatched_sizes": True}
            return ViTForImageClassification.from_pretrained(path, **options)

    head = {"task_type": None, "target_modules": "all-linear", "modules_to_save": ["classifier"]}
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=Loader, **head)
    merge_lora_checkpoint(base, adapter, tmp_path / "out", base_kwargs=asked)
    model = loaded(tmp_path / "out", ViTForImageClassification)
    theirs = merge_lora_inplace(load_peft_on_rank(base, adapter, device="cpu", base_kwargs={"num_labels": 3}))
    assert model.config.num_labels == 3
    found = model.state_dict()
    assert not [name for name, tensor in theirs.state_dict().items() if not torch.equal(tensor, found[name])]
    assert verify_merge(base, adapter, tmp_path / "out", base_kwargs=asked).ok


@pytest.mark.parametrize(
    "asked",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rms_norm_eps": 0.5, "max_position_embeddings": 512, "use_cache": False},
        {"pad_token_id": None, "attn_implementation": "eager"},
        {"num_labels": 3},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_fields_of_the_config_that_are_passed_are_those_of_the_output(tmp_path: Path, asked: dict[str, Any]) -> None:
    base = save_llama(tmp_path / "base", pad_token_id=0)
    adapter = save_adapter(tmp_path / "adapter", base)
    merge_lora_checkpoint(base, adapter, tmp_path / "out", base_kwargs=asked)
    theirs = merge_lora_inplace(load_peft_on_rank(base, adapter, device="cpu", base_kwargs=asked))
    theirs.save_pretrained(tmp_path / "theirs")
    one, other = (AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("out", "theirs"))
    assert {**one, "_name_or_path": None} == {**other, "_name_or_path": None}
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(tmp_path / "theirs")))
    assert verify_merge(base, adapter, tmp_path / "theirs", base_kwargs=asked).ok
    assert verify_merge(base, adapter, tmp_path / "out", base_kwargs=asked).ok


def save_seq_cls(folder: Path, base: Path, labels: int) -> Path:
    class Loader:
        @staticmethod
        def from_pretrained(path: Path, **options: Any) -> Any:
            return AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=labels, ignore_mismatched_sizes=True, **options
            )

    return save_adapter(folder, base, auto_class=Loader, task_type="SEQ_CLS")


def test_a_head_that_nobody_has_is_refused(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", pad_token_id=0)
    adapter = save_seq_cls(tmp_path / "adapter", base, 3)
    lacking = faults.edited(
        adapter,
        tmp_path / "lacking",
        tensors=faults.without("score"),
        config=lambda config: config.update(modules_to_save=[], task_type="CAUSAL_LM"),
    )
    merge_lora_checkpoint(base, lacking, tmp_path / "out")  # without its head it is an adapter of the language model
    assert loaded(tmp_path / "out").config.architectures == ["LlamaForCausalLM"]


# ---------------------------------------------------------------------------------------------- tokenizer, template


def test_the_base_s_tokenizer_is_kept_as_it_is(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    for name, data in {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "{{ 1 }}"}.items():
        (adapter / name).write_text(data)
    (base / "tokenizer.json").write_text('{"other": 1}')
    (base / "tokenizer_config.json").write_text("{}")
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out", tokenizer="base")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"other": 1}'
    assert [finding.code for finding in report.findings] == ["tokenizer-of-base"]
    (base / "chat_template.jinja").write_text("{{ 2 }}")
    merge_lora_checkpoint(base, adapter, tmp_path / "second", tokenizer="base")
    assert (tmp_path / "second" / "chat_template.jinja").read_text() == "{{ 2 }}"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (base / name).unlink()
    merge_lora_checkpoint(base, adapter, tmp_path / "third")
    assert (tmp_path / "third" / "tokenizer.json").read_text() == "{}"


# ------------------------------------------------------------------------------------------------- dtype and shards


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["all linear", "dora", "modules to save", "trainable tokens", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_dtype_is_rounded_once_from_the_exact_sum(
    tmp_path: Path, made: Made, dtype: torch.dtype, kind: str
) -> None:
    own = torch.bfloat16 if dtype is torch.float32 else torch.float32
    base = made.llama(own)
    # With a LoRA of the head peft saves the head itself, which must not be rounded before the sum.
    adapter = made.adapter(base, dtype=own if kind == "head" else torch.float32, **KINDS[kind])
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out", dtype=dtype)
    assert kind != "head" or next(tensor for tensor in report.tensors if tensor.name == "lm_head.weight").max_delta
    exact = on_disk(reference(base, adapter, tmp_path / "reference", dtype=torch.float64))
    found = on_disk(tmp_path / "out")
    assert found.keys() == exact.keys()
    for name, tensor in found.items():
        wanted = torch.empty(tensor.shape, dtype=dtype)
        round_into(exact[name].double(), wanted)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, wanted), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert loaded(tmp_path / "out").dtype == dtype
    assert report.of("cast")
    assert not report.of("copied")


def test_a_value_that_the_new_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    shard = read_checkpoint(base).file_of["model.norm.weight"]
    tensors = load_file(shard)
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(MergeError, match=r"model.norm.weight.*largest number of F16 \(65504\)"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out", dtype="float16")
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dtype="bfloat16")
    edit = faults.edited(
        save_adapter(tmp_path / "head", base, modules_to_save=["lm_head"]),
        tmp_path / "large head",
        tensors=lambda held: {name: held[name] * (1e8 if "lm_head" in name else 1) for name in held},
    )
    save_file({**tensors, "model.norm.weight": torch.ones(32)}, shard, metadata={"format": "pt"})
    with pytest.raises(MergeError, match=r"lm_head.weight.*largest number of F16"):
        merge_lora_checkpoint(base, edit, tmp_path / "third", dtype="float16")


def test_integers_and_what_must_stay_float32_keep_their_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["norm"])
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in on_disk(tmp_path / "out").items()}
    assert {dtype for name, dtype in dtypes.items() if "norm" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "norm" not in name} == {torch.bfloat16}


@pytest.mark.parametrize("size", [20_000, "30KB", "1GB"])
def test_files_are_cut_as_save_pretrained_cuts_them(tmp_path: Path, size: int | str) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, modules_to_save=["lm_head"])
    whole = merge_lora_checkpoint(base, adapter, tmp_path / "whole")
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out", max_shard_size=size)
    found = on_disk(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in on_disk(tmp_path / "whole").items())
    assert {t.name: t.xxh3_128 for t in report.tensors} == {t.name: t.xxh3_128 for t in whole.tensors}
    out = read_checkpoint(tmp_path / "out")
    assert not out.findings
    files = sorted(path.name for path in (tmp_path / "out").glob("model*"))
    if size == "1GB":
        assert files == ["model.safetensors"]
    else:
        limit = 20_000 if size == 20_000 else 30_000
        count = len(out.headers)
        names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        assert files == [*names, "model.safetensors.index.json"]
        assert all(sum(t.nbytes for t in h.tensors.values()) <= limit for h in out.headers.values())
        assert out.index is not None
        assert out.index.total_size == tensor_bytes(tmp_path / "out")
    loaded(tmp_path / "out")


def test_one_file_is_cut_into_several(tmp_path: Path) -> None:
    save_llama(tmp_path / "shards")
    AutoModelForCausalLM.from_pretrained(tmp_path / "shards").save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base")
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out", max_shard_size="40KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    expected = on_disk(reference(tmp_path / "base", adapter, tmp_path / "reference"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in on_disk(tmp_path / "out").items())
    loaded(tmp_path / "out")


def test_sizes_dtypes_and_devices_that_make_no_sense(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    for options in ({"max_shard_size": "5 apples"}, {"max_shard_size": 0}, {"dtype": "int8"}, {"dtype": "no"}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "out", **options)
    with pytest.raises((DeviceError, ArgumentError), match="device"):
        merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "out", device="cuda:77")
    with pytest.raises(ArgumentError, match="base_revision"):
        merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "out", base_kwargs={"revision": "x"})
    with pytest.raises(ArgumentError, match="for hub ids"):
        merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "out", base_revision="x")


def test_subfolders(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "repo" / "model")
    shutil.copytree(tiny_adapter, tmp_path / "adapters" / "best")
    folders = {"base_subfolder": "model", "adapter_subfolder": "best"}
    merge_lora_checkpoint(tmp_path / "repo", tmp_path / "adapters", tmp_path / "out", **folders)
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "plain")
    ours, theirs = on_disk(tmp_path / "out"), on_disk(tmp_path / "plain")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_the_report_tells_the_largest_change_and_the_time(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    before, after = on_disk(base), on_disk(tmp_path / "out")
    for tensor in report.tensors:
        largest = (after[tensor.name].double() - before[tensor.name].double()).abs().max().item()
        assert tensor.max_delta == (pytest.approx(largest, rel=1e-2) if tensor.action == "merged" else None)
        assert tensor.seconds > 0
        assert tensor.dtype == "BF16"
    document = json.loads((tmp_path / "out" / "merge_report.json").read_text())
    assert all(document["tensors"][t.name]["max_delta"] == t.max_delta for t in report.tensors)


def test_what_a_class_keeps_in_float32_has_the_dtype_of_the_file_and_the_same_sum(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    lora = LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["wo"], init_lora_weights=False)
    base: Any = T5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    merge_lora_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    model = load_peft_on_rank(tmp_path / "adapter", tmp_path / "base", dtype=torch.float16)
    kept = {name: tensor for name, tensor in merge_lora_inplace(model).state_dict().items() if ".wo." in name}
    found = on_disk(tmp_path / "out")
    assert len(kept) == 2
    for name, tensor in kept.items():
        assert (tensor.dtype, found[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(tensor.to(torch.bfloat16), found[name])
