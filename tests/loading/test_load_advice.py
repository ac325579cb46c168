"""The advice of errors and findings about loading, taken: what a message names is done, and the model is right."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_methods import METHODS, save_trained
from engines import needs
from faults import adapters as faults
from models import save_adapter, save_llama
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from safe_loading import (
    AdapterError,
    AdapterExists,
    ArgumentError,
    CheckpointError,
    CheckpointNotFound,
    DeviceError,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
)

TOKENS = torch.arange(1, 13)[None]
Config = dict[str, Any]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def change_config(folder: Path, **entries: Any) -> None:
    """Set entries of a folder's config; None takes one out."""
    name = faults.CONFIG if (folder / faults.CONFIG).exists() else "config.json"
    config = json.loads((folder / name).read_text())
    config.update(entries)
    (folder / name).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / faults.WEIGHTS if (folder / faults.WEIGHTS).exists() else folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors) or tensors, file, metadata={"format": "pt"})


def spoiled(tensors: dict[str, torch.Tensor], spoil: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    spoil(tensors)
    return tensors


KEY = "base_model.model.model.layers.1.self_attn.v_proj"
# What the adapter is made with, what is wrong with its config and its tensors, the advice, and how the config is then
# mended; None: it is the tensor that is mended.
MENDED: dict[str, tuple[Config, Config, Callable[[Any], Any], str, Config | None]] = {
    "ranks": ({}, {"r": 16}, lambda _: None, r"or correct r and rank_pattern in adapter_config\.json", {"r": 4}),
    "targets": (
        {},
        {"target_modules": ["q_proj", "down_proj"]},
        lambda _: None,
        "add the module to target_modules in adapter_config.json",
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    ),
    "a module that is not listed": (
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": None},
        lambda _: None,
        "add 'lm_head' to modules_to_save in adapter_config.json",
        {"modules_to_save": ["lm_head"]},
    ),
    "the tensor of a module that is not listed": (
        {},
        {},
        lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(101, 32)}),
        "add 'lm_head' to modules_to_save in adapter_config.json, or remove the tensor",
        None,
    ),
    "a module without its tensor": (
        {},
        {"modules_to_save": ["lm_head"]},
        lambda _: None,
        "or take the module out of the config",
        {"modules_to_save": None},
    ),
    "a field of an older peft": (
        {},
        {"of_long_ago": 3},
        lambda _: None,
        "remove the field if an older one did",
        {"of_long_ago": None},
    ),
    "a missing tensor": (
        {},
        {},
        lambda tensors: tensors.pop(f"{KEY}.lora_A.weight"),
        "or save the adapter again",
        None,
    ),
    "two keys of one tensor": (
        {},
        {},
        lambda tensors: tensors.update({f"module.{KEY}.lora_A.weight": torch.zeros(4, 32)}),
        "keep one of them",
        None,
    ),
    "magnitudes": ({"use_dora": True}, {"use_dora": False}, lambda _: None, "set use_dora to true", {"use_dora": True}),
    "no magnitudes": ({}, {"use_dora": True}, lambda _: None, "set use_dora to false", {"use_dora": False}),
    "no biases": ({}, {"lora_bias": True}, lambda _: None, "set lora_bias to false", {"lora_bias": False}),
    "NaN": ({}, {}, lambda tensors: tensors[f"{KEY}.lora_A.weight"].fill_(torch.nan), "an earlier checkpoint", None),
    "integers": (
        {},
        {},
        lambda tensors: tensors.update({f"{KEY}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)}),
        "save the adapter again",
        None,
    ),
}


@pytest.mark.parametrize("kind", MENDED)
def test_an_adapter_loads_once_it_is_mended(tmp_path: Path, tiny_llama: Path, kind: str) -> None:
    made, config, tensors, advice, mended = MENDED[kind]
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, **made)
    expected = logits(load_peft_on_rank(tiny_llama, adapter))
    good = (adapter / faults.WEIGHTS).read_bytes()
    change_config(adapter, **config)
    change_tensors(adapter, lambda found: spoiled(found, tensors))
    with pytest.raises((AdapterError, CheckpointError), match=advice):
        load_peft_on_rank(tiny_llama, adapter)
    (adapter / faults.WEIGHTS).write_bytes(good)
    change_config(adapter, **(mended or {}))
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, adapter)), expected)


@pytest.mark.parametrize(
    ("task", "head"), [("SEQ_CLS", "score"), ("TOKEN_CLS", "score"), ("QUESTION_ANS", "qa_outputs")]
)
def test_an_adapter_without_the_head_of_its_task_loads_without_the_task(
    tmp_path: Path, tiny_llama: Path, task: str, head: str
) -> None:
    """As one has it that was trained inside a model of somebody's own, with the task of another class in its config."""
    adapter = save_adapter(tmp_path / "adapter", tiny_llama)
    expected = logits(load_peft_on_rank(tiny_llama, adapter))
    change_config(adapter, task_type=task, modules_to_save=["qa_outputs" if task == "QUESTION_ANS" else "score"])
    kind = {"QUESTION_ANS": "QuestionAnswering", "SEQ_CLS": "SequenceClassification"}.get(task, "TokenClassification")
    base = getattr(transformers, f"LlamaFor{kind}").from_pretrained(tiny_llama)
    with pytest.raises(AdapterError, match=f"set task_type to null in it, since {task} brings this head") as caught:
        load_peft_on_rank(base, adapter)
    assert "take the module out of the config" in str(caught.value)
    change_config(adapter, modules_to_save=None)
    with pytest.raises(AdapterError, match="task_type"):  # peft adds the head again
        load_peft_on_rank(base, adapter)
    change_config(adapter, task_type=None)
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, adapter)), expected)


def test_a_base_that_no_config_names_is_passed(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter", config=lambda c: c.update(base_model_name_or_path=None))
    with pytest.raises(AdapterError, match=r"names no base model\. Pass base_model=\."):
        load_peft_on_rank(adapter)
    found = check_checkpoint(adapter).findings
    assert [finding.fix for finding in found if finding.code == "adapter-base"] == [
        "pass base_model= when you load it."
    ]
    assert load_peft_on_rank(adapter, base_model=tiny_llama).load_report.ok


def test_an_adapter_in_a_subfolder_is_named(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    shutil.copytree(tiny_adapter, tmp_path / "run" / "best")
    with pytest.raises(CheckpointError, match=r"pass adapter_subfolder=\."):
        load_peft_on_rank(tiny_llama, tmp_path / "run")
    assert load_peft_on_rank(tiny_llama, tmp_path / "run", adapter_subfolder="best").load_report.ok


def test_weights_that_are_not_there_are_copied(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    shutil.copytree(tiny_adapter, tmp_path / "copy", ignore=shutil.ignore_patterns(faults.WEIGHTS))
    with pytest.raises(CheckpointNotFound, match=rf"no {faults.WEIGHTS}\. Copy or download it, too\."):
        load_peft_on_rank(tiny_llama, tmp_path / "copy")
    shutil.copy(tiny_adapter / faults.WEIGHTS, tmp_path / "copy")
    assert load_peft_on_rank(tiny_llama, tmp_path / "copy").load_report.ok


def test_an_adapter_beside_a_base_gets_a_folder_of_its_own(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    for file in tiny_adapter.iterdir():
        shutil.copy(file, base)
    with pytest.raises(AdapterError, match=r"Move the adapter's files to a folder of their own\."):
        load_peft_on_rank(base, tiny_adapter)
    found = [finding for finding in check_checkpoint(base).findings if finding.code == "adapter-beside"]
    assert found[0].fix == "keep the adapter in a folder of its own."
    own = tmp_path / "own"
    own.mkdir()
    for file in tiny_adapter.iterdir():
        shutil.move(base / file.name, own)
    assert torch.equal(logits(load_peft_on_rank(base, own)), logits(load_peft_on_rank(tiny_llama, tiny_adapter)))


def test_the_first_adapter_is_loaded_by_the_other_function(tiny_llama: Path, tiny_adapter: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(AdapterError, match=r"Use load_peft_on_rank for the first adapter\."):
        load_adapter_on_rank(base, tiny_adapter, "one")
    model = load_peft_on_rank(base, tiny_adapter)
    with pytest.raises(AdapterError, match="Use load_adapter_on_rank to add one, or pass the plain base"):
        load_peft_on_rank(model, tiny_adapter)
    load_adapter_on_rank(model, tiny_adapter, "two")
    expected = logits(model)
    model.set_adapter("two")
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(load_peft_on_rank(model.unload(), tiny_adapter)), expected)


def test_a_base_of_a_peft_model_and_one_of_transformers_name_the_way_to_the_next_adapter(
    tiny_llama: Path, tiny_adapter: Path
) -> None:
    expected = logits(load_peft_on_rank(tiny_llama, tiny_adapter))
    around = load_peft_on_rank(tiny_llama, tiny_adapter)
    for refused in (
        lambda: load_peft_on_rank(around.get_base_model(), tiny_adapter),
        lambda: load_adapter_on_rank(around.get_base_model(), tiny_adapter, "two"),
    ):
        with pytest.raises(AdapterError, match=r"a PeftModel around it: pass that one.*what its unload\(\) returns"):
            refused()
    for refused in (
        lambda: load_peft_on_rank(torch.nn.DataParallel(around), tiny_adapter),
        lambda: load_adapter_on_rank(torch.compile(around), tiny_adapter, "two"),
    ):
        with pytest.raises(AdapterError, match=r"PeftModel in it, model\.(module|_orig_mod): pass that one.*unload"):
            refused()
    load_adapter_on_rank(torch.compile(around)._orig_mod, tiny_adapter, "two")
    assert torch.equal(logits(load_peft_on_rank(around.unload(), tiny_adapter)), expected)
    of_transformers = AutoModelForCausalLM.from_pretrained(tiny_llama)
    of_transformers.load_adapter(str(tiny_adapter), "one")
    for refused in (
        lambda: load_peft_on_rank(of_transformers, tiny_adapter),
        lambda: load_adapter_on_rank(of_transformers, tiny_adapter, "two"),
    ):
        with pytest.raises(AdapterError, match=r"its own `model\.load_adapter\(\)`, or load the base anew"):
            refused()
    of_transformers.load_adapter(str(tiny_adapter), "two")
    of_transformers.set_adapter("two")
    assert torch.equal(logits(of_transformers), expected)
    both = load_peft_on_rank(tiny_llama, {"one": tiny_adapter, "two": tiny_adapter})
    assert torch.equal(logits(both), expected)


def test_an_adapter_of_another_method_is_loaded_with_a_base_of_its_own(
    tiny_llama: Path, tiny_adapter: Path, tmp_path: Path
) -> None:
    other = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), IA3Config(task_type="CAUSAL_LM"))
    other.save_pretrained(str(tmp_path / "ia3"))
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    advice = r"different peft types\..*Load it with a base of its own: load_peft_on_rank\(base_model, adapter\)"
    with pytest.raises(AdapterError, match=advice):
        load_adapter_on_rank(model, tmp_path / "ia3", "other")
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, tmp_path / "ia3")), logits(other))


def test_each_way_out_of_a_name_that_is_taken(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    other = save_adapter(tmp_path / "other", tiny_llama, seed=1)
    expected = logits(load_peft_on_rank(tiny_llama, other))
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    advice = r"Choose another name, call model\.delete_adapter\('default'\) first, or pass hotswap=True"
    with pytest.raises(AdapterExists, match=advice):
        load_adapter_on_rank(model, other, "default")
    load_adapter_on_rank(model, other, "other")
    model.set_adapter("other")
    assert torch.equal(logits(model), expected)
    model.delete_adapter("default")
    load_adapter_on_rank(model, other, "default")
    model.set_adapter("default")
    assert torch.equal(logits(model), expected)
    swapped = load_peft_on_rank(tiny_llama, tiny_adapter)
    load_adapter_on_rank(swapped, other, "default", hotswap=True)
    assert torch.equal(logits(swapped), expected)


SWAPS: dict[str, tuple[Config, Config, str]] = {
    "a larger rank": ({}, {"r": 8}, "load it under another name"),
    "other layers": ({}, {"target_modules": ["k_proj"]}, "load it under another name"),
    "an embedding": ({"target_modules": ["embed_tokens"]}, {"target_modules": ["embed_tokens"]}, "another name"),
    "a smaller rank with patterns": ({"alpha_pattern": {"q_proj": 3}}, {"r": 2}, "Load it under another name"),
    "fewer layers": ({}, {"target_modules": ["q_proj"]}, "load it under another name; peft would fill the rest"),
}


@pytest.mark.parametrize("kind", SWAPS)
def test_what_cannot_be_swapped_in_has_a_name_of_its_own(tmp_path: Path, tiny_llama: Path, kind: str) -> None:
    loaded, swapped, advice = SWAPS[kind]
    first = save_adapter(tmp_path / "first", tiny_llama, **loaded)
    second = save_adapter(tmp_path / "second", tiny_llama, seed=1, **swapped)
    model = load_peft_on_rank(tiny_llama, first)
    with pytest.raises(AdapterError, match=advice):
        load_adapter_on_rank(model, second, "default", hotswap=True)
    load_adapter_on_rank(model, second, "second")
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_llama, second)))


def test_a_swap_of_another_dtype_and_of_a_merged_adapter(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    other = save_adapter(tmp_path / "other", tiny_llama, seed=1, dtype=torch.bfloat16)
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    with pytest.raises(AdapterError, match=r"pass adapter_dtype=torch\.float32, or load it under another name"):
        load_adapter_on_rank(model, other, "default", hotswap=True)
    model.merge_adapter()
    with pytest.raises(AdapterError, match=r"Call model\.unmerge_adapter\(\) first\."):
        load_adapter_on_rank(model, other, "default", hotswap=True, adapter_dtype=torch.float32)
    model.unmerge_adapter()
    load_adapter_on_rank(model, other, "default", hotswap=True, adapter_dtype=torch.float32)
    expected = logits(load_peft_on_rank(tiny_llama, other, adapter_dtype=torch.float32))
    assert torch.allclose(logits(model), expected, atol=1e-5)


def test_factors_of_8_bits_are_cast(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    folder = shutil.copytree(tiny_adapter, tmp_path / "adapter")
    change_tensors(folder, lambda found: {key: each.to(torch.float8_e4m3fn) for key, each in found.items()})
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    for load in (
        lambda **options: load_peft_on_rank(tiny_llama, folder, **options),
        lambda **options: load_adapter_on_rank(model, folder, "second", **options),
    ):
        with pytest.raises(AdapterError, match=r"no forward pass would run.* pass adapter_dtype=torch\.bfloat16"):
            load()
        load(adapter_dtype=torch.bfloat16)
    assert not check_checkpoint(folder, base_model=tiny_llama).ok
    model.set_adapter("second")
    assert logits(model).isfinite().all()
    assert merge_lora_checkpoint(tiny_llama, folder, tmp_path / "merged").ok


def test_values_that_a_dtype_does_not_hold_are_cast_to_another(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    folder = shutil.copytree(tiny_adapter, tmp_path / "adapter")
    change_tensors(folder, lambda found: {key: each * 1e8 for key, each in found.items()})
    with pytest.raises(AdapterError, match=r"pass another adapter_dtype=, such as torch\.bfloat16"):
        load_peft_on_rank(tiny_llama, folder, adapter_dtype="float16")
    assert load_peft_on_rank(tiny_llama, folder, adapter_dtype=torch.bfloat16).load_report.ok


def test_fewer_layers_than_the_base_has_are_loaded_without_strict(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, layers_to_transform=[0])
    first = {"num_hidden_layers": 1}
    with pytest.raises(CheckpointError, match=r"or strict=False where base_kwargs= asks for a part of it"):
        load_peft_on_rank(tiny_llama, adapter, base_kwargs=first)
    model = load_peft_on_rank(tiny_llama, adapter, base_kwargs=first, strict=False)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama, **first), adapter)
    assert torch.equal(logits(model), logits(plain))


def test_two_values_of_a_tied_weight_are_one_or_untied(tmp_path: Path, tiny_adapter: Path) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    shutil.rmtree(base)
    model.save_pretrained(base)
    tied = logits(load_peft_on_rank(base, tiny_adapter))
    own = torch.randn(101, 32)
    change_tensors(base, lambda tensors: tensors.update({"lm_head.weight": own}))
    for flag, codes in ((True, ["base-untied"]), (False, [])):
        change_config(base, tie_word_embeddings=flag)
        loaded = load_peft_on_rank(base, tiny_adapter)
        findings = loaded.load_report.findings
        assert [finding.code for finding in findings] == codes
        assert all("set tie_word_embeddings to false in config.json if both" in finding.fix for finding in findings)
        assert torch.equal(loaded.get_base_model().lm_head.weight, own)
    change_config(base, tie_word_embeddings=True)
    change_tensors(base, lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    assert torch.equal(logits(load_peft_on_rank(base, tiny_adapter)), tied)


@pytest.mark.parametrize(("written", "advice"), [("lora", "Write it as 'LORA'"), (None, 'add "peft_type": "LORA"')])
def test_a_method_in_lower_case_or_missing_is_written_as_advised(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, written: str | None, advice: str
) -> None:
    adapter = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    change_config(adapter, peft_type=written)
    with pytest.raises(AdapterError) as refused:
        load_peft_on_rank(tiny_llama, adapter)
    assert advice in str(refused.value)
    change_config(adapter, peft_type="LORA")
    assert torch.equal(
        logits(load_peft_on_rank(tiny_llama, adapter)), logits(load_peft_on_rank(tiny_llama, tiny_adapter))
    )


@pytest.mark.skipif("BONE" in peft.PeftType.__members__, reason="this peft has Bone")
def test_a_method_that_peft_has_renamed_is_written_as_advised(tmp_path: Path, tiny_llama: Path) -> None:
    """Bone of older peft, whose tensors are those of MiSS."""
    adapter = save_trained(METHODS["MiSS"], tiny_llama, tmp_path / "adapter")
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), str(adapter)))
    change_config(adapter, peft_type="BONE", miss_dropout=None, mini_r=None)
    change_tensors(adapter, lambda tensors: {key.replace(".miss_", ".bone_"): tensors[key] for key in tensors})
    mapping = {r"\.bone_": ".miss_"}
    with pytest.raises(AdapterError, match=re.escape(f"Write it as 'MISS', and pass key_mapping={mapping}.")):
        load_peft_on_rank(tiny_llama, adapter)
    change_config(adapter, peft_type="MISS")
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, adapter, key_mapping=mapping)), expected)


def test_the_class_that_a_base_was_saved_as_is_passed(tmp_path: Path, tiny_llama: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification
    auto.from_pretrained(tiny_llama, num_labels=3).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", auto_class=auto, task_type=None)
    with pytest.raises((AdapterError, CheckpointError), match="auto_class= for the class that it was saved as"):
        load_peft_on_rank(tmp_path / "base", adapter, auto_class="AutoModelForCausalLM")
    ours = load_peft_on_rank(tmp_path / "base", adapter, auto_class=auto)
    plain = PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), str(adapter))
    change_config(tmp_path / "base", pad_token_id=0)
    for model in (ours, plain):
        model.config.pad_token_id = 0
    assert torch.equal(logits(ours), logits(plain))


def to_integers(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "kept")
    change_tensors(folder, lambda tensors: {k: v.int() if "q_proj" in k else v for k, v in tensors.items()})


BASES: dict[str, tuple[Callable[[Path], Any], str, Callable[[Path], Any]]] = {
    "without its config": (
        lambda folder: (folder / "config.json").rename(folder / "away"),
        "copy the model's config.json here",
        lambda folder: (folder / "away").rename(folder / "config.json"),
    ),
    "without a model type": (
        lambda folder: change_config(folder, model_type=None),
        'set "model_type" to the architecture, such as "llama"',
        lambda folder: change_config(folder, model_type="llama"),
    ),
    "fewer layers in the config": (
        lambda folder: change_config(folder, num_hidden_layers=2),
        "or correct its config",
        lambda folder: change_config(folder, num_hidden_layers=3),
    ),
    "the prefix of a wrapper": (
        lambda folder: change_tensors(folder, faults.with_prefix("_orig_mod.")),
        "or rename the tensors, such as to 'lm_head.weight'",
        lambda folder: change_tensors(folder, lambda t: {k.removeprefix("_orig_mod."): v for k, v in t.items()}),
    ),
    "a pickle beside it": (
        lambda folder: torch.save({}, folder / "training_args.bin"),
        "delete those that are not needed",
        lambda folder: (folder / "training_args.bin").unlink(),
    ),
    "integers": (
        to_integers,
        "save it again with `save_pretrained`",
        lambda folder: shutil.move(folder.parent / "kept", folder / "model.safetensors"),
    ),
    "two names of a tensor": (
        lambda folder: change_tensors(folder, lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()})),
        "delete the one that is left over",
        lambda folder: change_tensors(folder, lambda t: {k: v for k, v in t.items() if k != "norm.weight"}),
    ),
}


@pytest.mark.parametrize("kind", BASES)
def test_a_base_is_sound_once_the_finding_is_mended(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, kind: str
) -> None:
    spoil, advice, mend = BASES[kind]
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(base)
    assert check_checkpoint(base).ok
    spoil(base)
    assert any(advice in finding.fix for finding in check_checkpoint(base).findings)
    mend(base)
    assert check_checkpoint(base).findings == ()
    assert torch.equal(
        logits(load_peft_on_rank(base, tiny_adapter)), logits(load_peft_on_rank(tiny_llama, tiny_adapter))
    )


@pytest.mark.parametrize(
    ("words", "better"),
    [
        ({"base_kwargs": {"torch_dtype": torch.float32}}, {"dtype": torch.float32}),
        ({"base_kwargs": {"revision": "main"}}, {"base_revision": None}),
        ({"base_kwargs": {"device_map": "cpu"}}, {"device": "cpu"}),
        ({"base_kwargs": {"subfolder": "x"}}, {"base_subfolder": ""}),
        ({"base_kwargs": {"output_loading_info": True}}, {}),
        ({"adapter_dtype": "int8"}, {"adapter_dtype": "bfloat16"}),
        ({"adapter_dtype": "float8_e4m3fn"}, {"adapter_dtype": "bfloat16"}),
    ],
)
def test_arguments_of_other_names_have_one_here(
    tiny_llama: Path, tiny_adapter: Path, words: Config, better: Config
) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(better), 'leave it out')}"):
        load_peft_on_rank(tiny_llama, tiny_adapter, **words)
    assert load_peft_on_rank(tiny_llama, tiny_adapter, **better).load_report.ok


def test_a_path_that_is_wrong_is_checked(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="Check the path"):
        load_peft_on_rank(tiny_llama, tmp_path / "no adapter")


def test_patterns_that_were_sorted_are_put_into_the_order_of_the_training(tmp_path: Path, tiny_llama: Path) -> None:
    """peft takes the first key that matches, and writes the keys sorted."""
    of_one = "model.layers.1.mlp.down_proj"
    scales = {of_one: 64, "down_proj": 2}
    config = LoraConfig(r=4, target_modules=["down_proj"], alpha_pattern=scales, init_lora_weights=False)
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config)
    adapter = tmp_path / "adapter"
    trained.save_pretrained(str(adapter))
    told = rf"gives {re.escape(of_one)} 2 by its key 'down_proj'.* Fix: put '{re.escape(of_one)}' before 'down_proj'"
    for verb in (load_peft_on_rank, lambda *folders: merge_lora_checkpoint(*folders, tmp_path / "merged")):
        with pytest.raises(AdapterError, match=told):
            verb(tiny_llama, adapter)
    assert [found.code for found in check_checkpoint(adapter).findings] == ["pattern-order"]
    change_config(adapter, alpha_pattern=scales)
    assert check_checkpoint(adapter).ok
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, adapter)), logits(trained))
    change_config(adapter, alpha_pattern={"down_proj": 2, f"{of_one}s": 64})  # which matches nothing
    assert load_peft_on_rank(tiny_llama, adapter).load_report.ok


def test_ranks_that_were_sorted_are_put_into_the_order_of_the_training(tmp_path: Path, tiny_llama: Path) -> None:
    """The shapes tell which key came first, and so for the scales under the same keys."""
    ranks = {"down_proj": 2, "1.mlp.down_proj": 3}
    scales = dict.fromkeys(ranks, 4) | {"1.mlp.down_proj": 9}
    patterns: Any = {"rank_pattern": ranks, "alpha_pattern": scales}
    config = LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False, **patterns)
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config)
    adapter = tmp_path / "adapter"
    trained.save_pretrained(str(adapter))
    told = (
        r"gives model\.layers\.1\.mlp\.down_proj 3 by its key '1\.mlp\.down_proj' and 2, the rank that it has in the "
        r"file, by its key 'down_proj'.* Fix: put 'down_proj' before '1\.mlp\.down_proj' in rank_pattern, and in alpha_"
    )
    for verb in (load_peft_on_rank, lambda *folders: merge_lora_checkpoint(*folders, tmp_path / "merged")):
        with pytest.raises(AdapterError, match=told):
            verb(tiny_llama, adapter)
    assert "pattern-order" in [found.code for found in check_checkpoint(adapter).findings]
    change_config(adapter, **patterns)
    assert check_checkpoint(adapter).ok
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, adapter)), logits(trained))


@needs("peft", "0.20")
def test_a_saved_router_is_made_again_over_its_adapters(tmp_path: Path, tiny_llama: Path) -> None:
    """peft writes the names of the adapters that Arrow chooses among, and does not read them."""

    def routed(adapters: list[Path]) -> Any:
        base = AutoModelForCausalLM.from_pretrained(tiny_llama)
        return peft.create_arrow_model(base, [str(path) for path in adapters], peft.ArrowConfig(top_k=1, rng_seed=0))

    of_tasks = {"target_modules": ["q_proj"], "task_type": None}
    adapters = [save_adapter(tmp_path / str(seed), tiny_llama, seed=seed, **of_tasks) for seed in (1, 2)]
    model = routed(adapters)
    model.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=r"Make it again over .*'task_0', 'task_1'.*peft\.create_arrow_model"):
        load_peft_on_rank(tmp_path / "arrow_router", tiny_llama)
    again = routed([tmp_path / "task_0", tmp_path / "task_1"])
    assert torch.equal(logits(again), logits(model))


def test_a_package_that_an_adapter_needs_is_told_with_the_field_that_asks_for_it(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    adapter = shutil.copytree(tiny_adapter, tmp_path / "adapter")
    change_config(adapter, megatron_config={"x": 1}, megatron_core="megatron.core")
    with pytest.raises(AdapterError, match=r"No module named 'megatron'\. Install it, or set megatron_config to null"):
        load_peft_on_rank(adapter, tiny_llama)
    change_config(adapter, megatron_config=None)
    assert torch.equal(
        logits(load_peft_on_rank(adapter, tiny_llama)), logits(load_peft_on_rank(tiny_adapter, tiny_llama))
    )


def test_a_start_that_peft_does_not_make_without_its_data_is_told(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    adapter = shutil.copytree(tiny_adapter, tmp_path / "adapter")
    change_config(adapter, init_lora_weights="corda")
    with pytest.raises(AdapterError, match=r"from data that is in no file.*convert it to a plain LoRA"):
        load_peft_on_rank(adapter, tiny_llama)


def test_trained_biases_of_all_layers_are_told_once_for_each_module(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", attention_bias=True)
    model = load_peft_on_rank(save_adapter(tmp_path / "adapter", base, bias="all"), base)
    replaced = [each for each in model.load_report.findings if each.code == "base-weight-replaced"]
    assert len(replaced) == 4  # of q_proj, k_proj, v_proj and o_proj
    assert all(finding.message.endswith("The same in 2 more, of layers [0, 1, 2].") for finding in replaced)


@needs("peft", "0.17")
@pytest.mark.parametrize("first", ["rows", "words"])
def test_adapters_that_wrap_an_embedding_in_two_ways_have_bases_of_their_own(
    tmp_path: Path, tiny_llama: Path, first: str
) -> None:
    adapters = {
        "rows": save_adapter(tmp_path / "rows", tiny_llama, trainable_token_indices=[1, 2]),
        "words": save_adapter(tmp_path / "words", tiny_llama, target_modules=["embed_tokens", "q_proj"]),
    }
    second = next(name for name in adapters if name != first)
    model = load_peft_on_rank({first: adapters[first]}, tiny_llama)
    with pytest.raises(AdapterError, match=r"Load it with a base of its own: load_peft_on_rank") as refused:
        load_adapter_on_rank(model, adapters[second], second)
    assert str(refused.value).count("\n") <= 1  # peft shows the whole module, over many lines
    assert load_peft_on_rank(adapters[second], tiny_llama).load_report.ok


@needs("peft", "0.20")  # an older one does not see that the parameters are others
def test_adapters_of_other_parameters_have_bases_of_their_own(tmp_path: Path, tiny_llama: Path) -> None:
    """peft#2710: of target_parameters all adapters of a model have the same."""
    both = save_adapter(
        tmp_path / "both", tiny_llama, target_modules=[], target_parameters=["q_proj.weight", "v_proj.weight"]
    )
    one = save_adapter(tmp_path / "one", tiny_llama, target_modules=[], target_parameters=["q_proj.weight"])
    model = load_peft_on_rank({"both": both}, tiny_llama)
    with pytest.raises(AdapterError, match=r"target_parameters.*Load it with a base of its own: load_peft_on_rank"):
        load_adapter_on_rank(model, one, "one")
    assert load_peft_on_rank(one, tiny_llama).load_report.ok


@pytest.mark.parametrize("method", ["on disk", "in memory"])
def test_a_config_that_selects_nothing_is_told_by_the_layers_of_its_file(
    method: str, tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """An adapter of a base with images on the text model, and one of layers that its config leaves out (peft#3610)."""

    def load(adapter: Path) -> object:
        if method == "on disk":
            return merge_lora_checkpoint(tiny_llama, adapter, tmp_path / "merged", overwrite=True)
        return load_peft_on_rank(tiny_llama, adapter)

    def of_language_model(tensors: faults.Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("model.model.layers", "model.model.language_model.layers")] = tensors.pop(key)

    pattern = {"target_modules": r".*language_model.*(q_proj|v_proj|down_proj)"}
    edits: dict[str, Any] = {"tensors": of_language_model, "config": lambda c: c.update(pattern)}
    with_images = faults.edited(tiny_adapter, tmp_path / "images", **edits)
    advice = r"The file is of 'model\.language_model\.layers\.0\..*', which the base does not have: pass the one"
    with pytest.raises(AdapterError, match=advice):
        load(with_images)
    left_out = {"layers_to_transform": [7], "layers_pattern": "layers"}
    nothing = faults.edited(tiny_adapter, tmp_path / "nothing", config=lambda c: c.update(left_out))
    advice = r"The file is of 'model\.layers\.0\..*', which the base has: correct target_modules, .*layers_to_transform"
    with pytest.raises(AdapterError, match=advice):
        load(nothing)
    load(tiny_adapter)


def test_a_base_that_is_offloaded_to_disk_is_merged_on_disk(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """As in peft#2213, peft#774 and alpaca-lora#368."""
    names = [
        "model.embed_tokens",
        "model.rotary_emb",
        *(f"model.layers.{n}" for n in range(3)),
        "model.norm",
        "lm_head",
    ]
    spread = {name: "disk" if name == "model.layers.1" else "cpu" for name in names}
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, device_map=spread, offload_folder=str(tmp_path / "one"))
    with pytest.raises(DeviceError, match=r"Or merge on disk, with merge_lora_checkpoint, and load that with the same"):
        load_peft_on_rank(base, tiny_adapter)
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", device_map=spread, offload_folder=str(tmp_path / "two")
    )
    assert torch.allclose(logits(merged), logits(load_peft_on_rank(tiny_llama, tiny_adapter)), atol=1e-5)


def test_rows_of_a_vocabulary_that_no_file_holds_are_told(tmp_path: Path, tiny_llama: Path) -> None:
    """Of a LoRA on the embedding, where the head has a weight of its own that peft does not save."""
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    base.resize_token_embeddings(120)
    targets = ["q_proj", "embed_tokens"]
    get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")).save_pretrained(str(tmp_path))
    with pytest.raises(AdapterError, match="new rows that the file does not hold are drawn anew, and not those of its"):
        load_peft_on_rank(tiny_llama, tmp_path)
    resized = AutoModelForCausalLM.from_pretrained(tiny_llama)
    resized.resize_token_embeddings(120)
    assert load_peft_on_rank(resized, tmp_path).load_report.ok


def test_the_rows_of_one_rank_are_gathered(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    """Shards of FSDP2, as ``state_dict`` leaves them: those of two ranks are loaded once they are put together."""
    whole = load_file(tiny_adapter / "adapter_model.safetensors")
    ranks = []
    for rank in range(2):
        folder = Path(shutil.copytree(tiny_adapter, tmp_path / f"rank {rank}"))
        part = {key: value.chunk(2)[rank].contiguous() for key, value in whole.items()}
        save_file(part, folder / "adapter_model.safetensors")
        with pytest.raises(AdapterError, match=r"Save it again, gathered, if these are the rows of one rank of 2"):
            load_peft_on_rank(tiny_llama, folder)
        ranks.append(part)
    save_file({key: torch.cat([part[key] for part in ranks]) for key in whole}, folder / "adapter_model.safetensors")
    assert load_peft_on_rank(tiny_llama, folder).load_report.ok


def test_a_rank_is_corrected_together_with_its_scaling(tiny_llama: Path, tmp_path: Path) -> None:
    """peft#3737: add_weighted_adapter forgets the rank_pattern, with a scaling of 1 for every rank."""
    base = LlamaForCausalLM.from_pretrained(tiny_llama)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2}, init_lora_weights=False)
    model = get_peft_model(base, config).eval()
    model.add_weighted_adapter(["default"], [1.0], "sum", combination_type="linear")
    model.set_adapter("sum")
    model.save_pretrained(str(tmp_path), selected_adapters=["sum"])
    folder = tmp_path / "sum"
    facts = json.loads((folder / faults.CONFIG).read_text())
    if not facts["rank_pattern"]:  # releases of peft that write it need no correction
        with pytest.raises(AdapterError, match=r"correct r and rank_pattern .*, and alpha_pattern with them"):
            load_peft_on_rank(tiny_llama, folder)
        change_config(folder, rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 2})
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        found = load_peft_on_rank(tiny_llama, folder)(input_ids=tokens).logits
        assert torch.equal(found, model(input_ids=tokens).logits)
