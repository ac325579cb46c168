from __future__ import annotations

import pytest

from safe_loading import ArgumentError
from safe_loading._loading.key_names import canonical_key, check_key_mapping, layer_indices, renames, summarize

Q = "base_model.model.model.layers.0.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "key",
    [
        Q,
        f"module.{Q}",
        f"module.module.{Q}",
        f"_orig_mod.{Q}",
        f"_fsdp_wrapped_module.{Q}",
        f"_orig_mod.module._fsdp_wrapped_module.{Q}",
        "base_model.model.module.model.layers.0.q_proj.lora_A.weight",
        "base_model.model._fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.q_proj.lora_A.weight",
        "base_model.model.model.layers.0._checkpoint_wrapped_module.q_proj.lora_A.weight",
        "model.layers.0.q_proj.lora_A.weight",
        "module.model.layers.0.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.q_proj.lora_A.default.weight",
        "base_model.model.model.layers.0.q_proj.lora_A.my adapter.weight",
    ],
)
def test_every_wrapper_leads_to_the_key_that_peft_writes(key: str) -> None:
    assert canonical_key(key) == Q


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("base_model.model.e.lora_embedding_A.default", "base_model.model.e.lora_embedding_A"),
        ("base_model.model.e.lora_embedding_A", "base_model.model.e.lora_embedding_A"),
        ("base_model.model.q.lora_B.bias", "base_model.model.q.lora_B.bias"),
        ("base_model.model.q.lora_B.x.bias", "base_model.model.q.lora_B.bias"),
        ("base_model.model.q.lora_magnitude_vector", "base_model.model.q.lora_magnitude_vector"),
        ("base_model.model.q.lora_magnitude_vector.d.weight", "base_model.model.q.lora_magnitude_vector.weight"),
        ("base_model.model.mod_orig_mod.q.lora_A.weight", "base_model.model.mod_orig_mod.q.lora_A.weight"),
        ("base_model.model.experts.base_layer.lora_A.weight", "base_model.model.experts.base_layer.lora_A.weight"),
    ],
)
def test_what_is_not_a_wrapper_stays(key: str, expected: str) -> None:
    assert canonical_key(key) == expected


def test_a_model_with_a_child_called_module_keeps_it() -> None:
    key = "base_model.model.module.q.lora_A.weight"
    assert canonical_key(key, own_module=True) == key
    assert canonical_key(key) != key


def test_prompt_learning_keys_have_no_prefix() -> None:
    assert canonical_key("prompt_embeddings", prompt_learning=True) == "prompt_embeddings"
    assert canonical_key("module.prompt_embeddings", prompt_learning=True) == "prompt_embeddings"


def test_two_keys_for_one_tensor_are_a_problem() -> None:
    changed, problems = renames([Q, f"module.{Q}"])
    assert changed == {f"module.{Q}": Q}
    assert len(problems) == 1
    assert Q in problems[0]
    assert f"module.{Q}" in problems[0]


@pytest.mark.parametrize("name", ["default", "my adapter"])
def test_a_saved_module_in_a_raw_state_dict_loses_the_name_of_the_adapter(name: str) -> None:
    raw = f"base_model.model.score.modules_to_save.{name}.dense.weight"
    changed, problems = renames([Q.replace("lora_A", f"lora_A.{name}"), raw])
    assert (changed[raw], problems) == ("base_model.model.score.dense.weight", [])
    # a second copy that peft writes, without the name of an adapter
    copies = ["base_model.model.lm_head.modules_to_save.weight", "base_model.model.score.modules_to_save.dense.weight"]
    assert renames([Q, *copies]) == ({}, [])


def test_what_stands_before_peft_s_prefix_is_a_wrapper_s_unless_the_base_has_a_peft_model_in_it() -> None:
    for prefix in ("model.", "pretrained_model.", "language_model.", "base_model.model.", "state_dict.model."):
        assert renames([prefix + Q], own_peft=False)[0] == {prefix + Q: Q}
    inside = f"base_model.model.llm.{Q}"
    assert renames([inside], own_peft=True) == ({}, [])


def test_summary_counts_and_shows_one() -> None:
    changed, _ = renames([f"module.{Q}", f"module.{Q.replace('lora_A', 'lora_B')}"])
    assert summarize(changed) == f"2 key(s) renamed, for example {f'module.{Q}'!r} to {Q!r}"


def test_layer_indices() -> None:
    expert = "base_model.model.model.layers.2.mlp.experts.60.w1.lora_A.weight"
    assert layer_indices([Q, "base_model.model.h.11.c_attn.lora_A.weight", "lm_head.weight", expert]) == {0, 2, 11}


@pytest.mark.parametrize("replacement", [r"\g<name>", r"\1", "\\", None], ids=str)
def test_a_replacement_that_is_none_is_named(replacement: object) -> None:
    with pytest.raises(ArgumentError, match=r"no regular expression with a replacement.*Correct it"):
        check_key_mapping({"^visual": replacement})  # type: ignore[dict-item]  # as a caller without types may write it
    check_key_mapping({"^visual": "model.visual"})
