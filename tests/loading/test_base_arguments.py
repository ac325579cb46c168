"""The arguments of a load as people write them: taken, or refused by name before anything is read."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from faults import adapters as faults
from loaded_models import TOKENS, logits, two_steps
from models import Made, save_adapter
from safetensors.torch import load_file, save_file
from tiny_models import saved
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CLIPModel,
    CLIPVisionModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from safe_loading import (
    AdapterError,
    ArgumentError,
    CheckpointError,
    EngineError,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    verify_merge,
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A BERT without its pooler, and an adapter for it."""
    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(BertConfig(**sizes, vocab_size=99), add_pooling_layer=False).save_pretrained(folder / "base")
        base = BertModel.from_pretrained(folder / "base", add_pooling_layer=False)
        config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["query"], init_lora_weights=False)
        peft.get_peft_model(base, config).save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def test_an_argument_of_the_constructor_is_known_to_the_check_before_the_load(bert: tuple[Path, Path]) -> None:
    base, adapter = bert
    model = load_peft_on_rank(base, adapter, base_kwargs={"add_pooling_layer": False})
    assert model.load_report.ok
    plain = peft.PeftModel.from_pretrained(BertModel.from_pretrained(base, add_pooling_layer=False), adapter)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).last_hidden_state, plain(TOKENS).last_hidden_state)


def test_embeddings_of_a_model_of_masked_words_are_loaded_and_merged_without_the_pooler_that_it_lacks(
    bert: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = bert
    BertForMaskedLM.from_pretrained(base).save_pretrained(tmp_path / "masked")
    without: dict[str, Any] = {"base_kwargs": {"add_pooling_layer": False}}
    advice = r"does not fill the BertModel.*or base_kwargs=\{'add_pooling_layer': False\} where only the last"
    for refused in (
        lambda: load_peft_on_rank(tmp_path / "masked", adapter),
        lambda: merge_lora_checkpoint(tmp_path / "masked", adapter, tmp_path / "none"),
    ):
        with pytest.raises(CheckpointError, match=advice):
            refused()
    with torch.no_grad():
        expected = load_peft_on_rank(base, adapter, **without)(TOKENS).last_hidden_state
        loaded = load_peft_on_rank(tmp_path / "masked", adapter, **without)
        assert torch.equal(loaded(TOKENS).last_hidden_state, expected)
        merge_lora_checkpoint(tmp_path / "masked", adapter, tmp_path / "merged", **without)
        merged = BertModel.from_pretrained(tmp_path / "merged", add_pooling_layer=False)
        assert torch.allclose(merged(TOKENS).last_hidden_state, expected, atol=1e-6)
    assert verify_merge(tmp_path / "masked", adapter, tmp_path / "merged", **without).ok
    assert BertForMaskedLM.from_pretrained(tmp_path / "merged", output_loading_info=True)[1]["missing_keys"] == set()


@pytest.mark.parametrize(
    ("name", "nearest"), [("add_poling_layer", "add_pooling_layer"), ("attn_implementatoin", "attn")]
)
def test_a_typo_is_named_with_what_is_near(bert: tuple[Path, Path], name: str, nearest: str) -> None:
    base, adapter = bert
    with pytest.raises(ArgumentError, match=f"base_kwargs.*{name}.*nearest: {nearest}"):
        load_peft_on_rank(base, adapter, base_kwargs={name: False})


@pytest.mark.parametrize("name", ["num_labels", "attn_implementation", "ignore_mismatched_sizes", "weights_only"])
def test_what_transformers_takes_is_taken(tiny_llama: Path, tiny_adapter: Path, name: str) -> None:
    value = {"num_labels": 3, "attn_implementation": "eager"}.get(name, True)
    assert load_peft_on_rank(tiny_llama, tiny_adapter, base_kwargs={name: value}).load_report.ok


def test_dtypes_and_classes_by_name(tiny_llama: Path, tiny_adapter: Path) -> None:
    by_name = load_peft_on_rank(
        tiny_llama, tiny_adapter, dtype="bfloat16", adapter_dtype="torch.float16", auto_class="LlamaForCausalLM"
    )
    by_value = load_peft_on_rank(
        tiny_llama, tiny_adapter, dtype=torch.bfloat16, adapter_dtype=torch.float16, auto_class=LlamaForCausalLM
    )
    assert {key: tensor.dtype for key, tensor in by_name.state_dict().items()} == {
        key: tensor.dtype for key, tensor in by_value.state_dict().items()
    }
    load_adapter_on_rank(by_name, tiny_adapter, "second", adapter_dtype="bf16")
    assert by_name.load_report.parts[0].dtypes == {"bfloat16": 18}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"auto_class": "LlamaForCausal"}, "not a class"),
        ({"auto_class": GPT2LMHeadModel}, "GPT2Config.*LlamaConfig"),
        ({"dtype": "bfloat61"}, "floating-point"),
        ({"dtype": "int8"}, "floating-point"),
        ({"adapter_dtype": "auto"}, "floating-point"),
        ({"active": ["default"]}, "base_model.set_adapter"),
        ({"base_kwargs": {"load_in_4bit": True, "quantization_config": {}}}, "leave .*load_in_4bit"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tiny_llama: Path, tiny_adapter: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        load_peft_on_rank(tiny_llama, tiny_adapter, **arguments)


def test_a_config_that_is_passed_is_the_one_of_the_check_and_of_the_load(tiny_llama: Path, tmp_path: Path) -> None:
    """As the scripts of transformers pass it, with a number of labels that the folder does not say."""
    config = AutoConfig.from_pretrained(tiny_llama, num_labels=3, pad_token_id=0, rms_norm_eps=0.25)
    before = config.to_dict()
    plain = peft.get_peft_model(
        AutoModelForSequenceClassification.from_pretrained(tiny_llama, config=config),
        peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False),
    )
    plain.save_pretrained(tmp_path / "adapter")
    options: dict[str, Any] = {"config": config, "attn_implementation": "eager"}
    model = load_peft_on_rank(tiny_llama, tmp_path / "adapter", base_kwargs=options)
    assert (model.config.rms_norm_eps, model.config._attn_implementation) == (0.25, "eager")
    assert (config.to_dict(), config._attn_implementation) == (before, None)
    assert torch.allclose(logits(model), logits(plain.eval()), atol=1e-6)
    with pytest.raises(ArgumentError, match=r"base_kwargs\['config'\].*of the config that differ.*num_labels"):
        merge_lora_checkpoint(tiny_llama, tmp_path / "adapter", tmp_path / "out", base_kwargs={"config": config})
    fields = {"num_labels": 3, "rms_norm_eps": 0.25}
    merge_lora_checkpoint(tiny_llama, tmp_path / "adapter", tmp_path / "out", base_kwargs=fields)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", pad_token_id=0)
    assert torch.allclose(logits(merged.eval()), logits(model), atol=1e-5)


def test_a_config_of_peft_is_changed_in_the_adapter_s_folder(
    tiny_llama: Path, tiny_adapter: Path, tmp_path: Path
) -> None:
    """``config=`` of PeftModel.from_pretrained: the scale of the folder's would be used, and not that of this one."""
    adapter = shutil.copytree(tiny_adapter, tmp_path / "adapter")
    config: Any = peft.PeftConfig.from_pretrained(adapter)
    config.lora_alpha *= 2
    for words in ({"config": config}, {"base_kwargs": {"config": config}}):
        with pytest.raises(ArgumentError, match=r"config.*config\.save_pretrained\(folder\)"):
            load_peft_on_rank(tiny_llama, adapter, **words)
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), adapter, config=config)
    config.save_pretrained(adapter)
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, adapter)), logits(plain))


@pytest.mark.parametrize(
    ("name", "value", "answer", "instead"),
    [
        ("adapter_name", "mine", "{name: folder or hub id}", {}),
        ("adapter_kwargs", {"revision": "v2"}, "adapter_revision= and adapter_subfolder=", {"adapter_revision": None}),
        ("state_dict", {}, "put the values into a model, and pass that as the base", {}),
        ("config", "folder", "pass a config of transformers", {}),
        ("use_flash_attention_2", True, "use attn_implementation=", {"attn_implementation": "eager"}),
        ("use_auth_token", True, "use token=", {"token": "hf_none"}),
        ("ephemeral_gpu_offload", True, "leave it out: the norms of a DoRA are read", {}),
    ],
)
def test_what_transformers_would_ignore_or_knows_no_more_is_answered_with_its_place(
    tiny_llama: Path, tiny_adapter: Path, name: str, value: Any, answer: str, instead: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError) as caught:
        load_peft_on_rank(tiny_llama, tiny_adapter, base_kwargs={name: value})
    assert answer in str(caught.value)
    if name != "config":
        with pytest.raises(ArgumentError) as caught:
            load_peft_on_rank(tiny_llama, tiny_adapter, **{name: value})
        assert answer in str(caught.value)
    else:
        instead = {"base_kwargs": {"config": AutoConfig.from_pretrained(tiny_llama)}}
    base = AutoModelForCausalLM.from_pretrained(tiny_llama) if name == "state_dict" else tiny_llama
    adapter = {"mine": tiny_adapter} if name == "adapter_name" else tiny_adapter
    assert load_peft_on_rank(adapter=adapter, base_model=base, **instead).load_report.ok


def test_several_active_adapters_as_the_refusal_says(tiny_llama: Path, tiny_adapter: Path) -> None:
    model = load_peft_on_rank(tiny_llama, {"a": tiny_adapter, "b": tiny_adapter})
    one = logits(model)
    model.base_model.set_adapter(["a", "b"])
    assert model.active_adapters == ["a", "b"]
    assert not torch.equal(logits(model), one)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_number_of_bits_as_an_argument(made: Made, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    base = made.llama(torch.bfloat16, hidden_size=64, intermediate_size=128)
    adapter = made.adapter(base)
    from transformers import BitsAndBytesConfig

    short = load_peft_on_rank(base, adapter, base_kwargs={f"load_in_{bits}bit": True})
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    assert torch.equal(
        logits(short), logits(load_peft_on_rank(base, adapter, base_kwargs={"quantization_config": config}))
    )
    assert load_peft_on_rank(base, adapter, base_kwargs={f"load_in_{bits}bit": False}).load_report.ok


def test_a_folder_under_the_home(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(tiny_llama, tmp_path / "base")

    def named(config: dict[str, Any]) -> None:
        config.update(base_model_name_or_path="~/base", revision="main")

    faults.edited(tiny_adapter, tmp_path / "adapter", config=named)
    assert load_peft_on_rank("~/adapter").load_report.ok
    assert load_peft_on_rank("~/base", "~/adapter").load_report.ok


def test_a_mapping_for_another_type_of_base_is_not_built(tmp_path: Path, tiny_llama: Path) -> None:
    """Of LlamaForCausalLM, transformers would make a model in the default sizes, of 7 billion parameters."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 101, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, task_type=None)
    mapping = json.loads((adapter / "adapter_config.json").read_text())["auto_mapping"]
    assert mapping["base_model_class"] == "LlamaForCausalLM"
    with pytest.raises(AdapterError, match="GPT2LMHeadModel"):
        load_peft_on_rank(tmp_path / "base", adapter)


def test_keys_of_the_base_are_mapped_as_asked(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, torch.Tensor] = {}
    for path in tiny_llama.glob("*.safetensors"):
        tensors |= load_file(path)
    renamed = {key.replace("model.layers.", "blocks."): tensor for key, tensor in tensors.items()}
    save_file(renamed, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    mapping = {"^blocks\\.": "model.layers."}
    model = load_peft_on_rank(tmp_path / "base", tiny_adapter, base_kwargs={"key_mapping": mapping})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", key_mapping=mapping)
    assert torch.equal(logits(model.get_base_model()), logits(peft.PeftModel.from_pretrained(plain, tiny_adapter)))
    assert torch.equal(logits(model), logits(two_steps(tiny_adapter, tiny_llama)))


def test_keys_of_the_adapter_are_mapped_as_asked(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    def rename(tensors: faults.Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("base_model.model.model.layers", "base_model.model.decoder.blocks")] = tensors.pop(key)

    renamed = faults.edited(tiny_adapter, tmp_path / "renamed", tensors=rename)
    truth = logits(two_steps(tiny_adapter, tiny_llama))
    with pytest.raises(AdapterError, match="decoder"):
        load_peft_on_rank(tiny_llama, renamed)
    mapping = {r"^decoder\.blocks": "model.layers"}
    model = load_peft_on_rank(tiny_llama, renamed, key_mapping=mapping)
    assert torch.equal(logits(model), truth)
    assert len(model.load_report.parts[1].renamed) == 18
    load_adapter_on_rank(model, renamed, "second", key_mapping=mapping)
    load_adapter_on_rank(model, renamed, "default", hotswap=True, key_mapping=mapping)
    model.set_adapter("second")
    assert torch.equal(logits(model), truth)

    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    base._checkpoint_conversion_mapping = mapping  # as a class of remote code may have it
    model = load_peft_on_rank(base, renamed)
    load_adapter_on_rank(model, renamed, "second")
    assert torch.equal(logits(model), truth)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_a_package_that_the_attention_needs_is_named_and_not_the_config(tiny_llama: Path, tiny_adapter: Path) -> None:
    with pytest.raises(
        EngineError, match=r"FlashAttention2.*Ask for .*attn_implementation=\"sdpa\", or install"
    ) as caught:
        load_peft_on_rank(tiny_llama, tiny_adapter, attn_implementation="flash_attention_2")
    assert "config.json" not in str(caught.value)
    assert load_peft_on_rank(tiny_llama, tiny_adapter, attn_implementation="sdpa").load_report.ok


def test_a_tower_is_loaded_and_merged_from_a_folder_of_its_own(tmp_path: Path) -> None:
    """transformers takes the config of a tower out of that of the whole, and its weights out of the same files."""
    saved("CLIPModel", tmp_path / "whole")
    tower = CLIPVisionModel.from_pretrained(tmp_path / "whole")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    trained = peft.get_peft_model(tower, config)
    trained.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ArgumentError, match=r"CLIPVisionModel\.from_pretrained\(base\)\.save_pretrained\(folder\)"):
        load_peft_on_rank(tmp_path / "whole", tmp_path / "adapter", auto_class=CLIPVisionModel)
    said = r"trained on a CLIPVisionModel \(auto_mapping\).*CLIPVisionModel\.from_pretrained\(base\)\.save_pretrained"
    with pytest.raises(AdapterError, match=said):  # the class that the adapter names, which nobody asked for
        load_peft_on_rank(tmp_path / "whole", tmp_path / "adapter")
    with pytest.raises(AdapterError, match=said):
        load_peft_on_rank(tmp_path / "adapter", CLIPModel.from_pretrained(tmp_path / "whole"))
    with pytest.raises(AdapterError, match=said):
        merge_lora_checkpoint(tmp_path / "whole", tmp_path / "adapter", tmp_path / "not written")
    CLIPVisionModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "tower")
    model = load_peft_on_rank(tmp_path / "tower", tmp_path / "adapter")
    assert model.load_report.ok
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.state_dict().items())
    merge_lora_checkpoint(tmp_path / "tower", tmp_path / "adapter", tmp_path / "merged")
    merged: Any = CLIPVisionModel.from_pretrained(tmp_path / "merged")
    images = torch.ones(1, 3, 32, 32)
    with torch.no_grad():
        expected = trained.eval()(pixel_values=images).last_hidden_state
        assert torch.allclose(merged(pixel_values=images).last_hidden_state, expected, atol=1e-5)
