"""What an adapter_config.json must not make peft do; every field of the installed peft is one that is judged."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_loading._checkpoint.adapter_config import SIZES, adapter_config_faults

CONFIG = Path("adapter/adapter_config.json")
PROMPT = {"prompt_embeddings": (4, 64)}
FLAN_T5_XL = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 20, "num_layers": 24, "token_dim": 2048}
LORA = {
    "base_model.model.layers.0.q_proj.lora_A.weight": (8, 64),
    "base_model.model.layers.0.q_proj.lora_B.weight": (64, 8),
}
# Numbers that make nothing larger: factors, seeds, steps, limits and indices.
NO_SIZES = {
    "alpha", "asa_importance_beta", "asa_schedule_exponent", "asa_uncertainty_beta", "auxiliary_loss_weight",
    "beta1", "beta2", "boft_dropout", "cayley_neumann_eps", "d_initial", "deft_dropout", "delora_lambda",
    "deltaT", "encoder_dropout", "eps", "final_warmup", "frod_dropout", "generator_seed",
    "global_scaling_weight", "gralora_dropout", "hira_dropout", "init_logits_std", "init_scale",
    "init_theta_d_bound", "init_v_bound", "init_vector_bank_bound", "init_warmup", "layers_to_transform",
    "lora_alpha", "lora_dropout", "mask_interval", "miss_dropout", "module_dropout", "opt_loss_decay_factor",
    "opt_projection_epsilon", "opt_projection_format_epsilon", "orth_reg_weight", "proj_seed",
    "projection_prng_key", "projection_seed", "prompt_tuning_init_task", "psoft_alpha", "psoft_dropout",
    "psoft_svd_lowrank_niter", "pvera_dropout", "randlora_alpha", "randlora_dropout", "random_loc_seed",
    "random_seed", "rank_dropout", "regularization_alpha", "scaling", "scaling_pass_value", "shadow_alpha",
    "shadow_dropout", "softmax_temperature", "sparse_rate", "sparsity", "svd_threshold", "tfinal", "tinit",
    "tinylora_dropout", "token_indices", "total_step", "unilora_dropout", "vblora_dropout", "vera_dropout",
    "weight_tying", "xlora_dropout_p",
}  # fmt: skip


def codes(config: dict[str, Any], shapes: Any = None) -> list[str]:
    return [fault.code for fault in adapter_config_faults(CONFIG, config, shapes)]


def fields() -> Iterator[tuple[str, Any]]:
    """Every field of every method of the installed peft, with its type."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    for config in PEFT_TYPE_TO_CONFIG_MAPPING.values():
        types = typing.get_type_hints(config)
        yield from ((field.name, types[field.name]) for field in dataclasses.fields(config))


def parts(kind: Any) -> Iterator[Any]:
    yield kind
    for inner in typing.get_args(kind):
        yield from parts(inner)


def test_each_number_that_peft_reads_is_a_size_or_not() -> None:
    numbers = {name for name, kind in fields() if {int, float} & {kind, *typing.get_args(kind)}}
    assert numbers - SIZES - NO_SIZES == set(), "is it a size, which adapter_config.py bounds?"
    assert set() == SIZES & NO_SIZES


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({"peft_type": "LORA", "r": 8, "lora_alpha": 1e6, "rank_pattern": {"q_proj": 64}}, LORA),
        ({"peft_type": "LORA", "r": 512}, None),  # a pickle, whose header nobody can read
        (FLAN_T5_XL, None),
        (FLAN_T5_XL, {}),  # a pointer of Git LFS
        ({"peft_type": "ADALORA", "r": 8, "init_r": 96, "total_step": 10**9}, LORA),
        (
            {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4, "token_dim": 64, "prompt_tuning_init": "TEXT"},
            PROMPT,
        ),
        (
            {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2, "num_transformer_submodules": 2, "token_dim": 64},
            PROMPT,
        ),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4, "num_layers": 2, "token_dim": 16}, PROMPT),
        ({"peft_type": "P_TUNING", "num_virtual_tokens": 4, "token_dim": 64, "encoder_hidden_size": 4096}, PROMPT),
        ({"peft_type": "VERA", "r": 256, "projection_prng_key": 2**40}, {"vera_lambda_d": (256,)}),
        ({"peft_type": "LORA", "r": 4, "layer_replication": [[0, 60], [20, 80]]}, LORA),
        ({"peft_type": "LORA", "r": 4, "trainable_token_indices": list(range(20_000))}, {"delta": (20_000, 8)}),
        ({"peft_type": "SHADOW", "shadow_model": "mirror"}, {}),
        ({"peft_type": "LORA", "init_lora_weights": "pissa_niter_64", "loftq_config": {"loftq_iter": 5}}, LORA),
        ({"peft_type": "LORA", "init_lora_weights": "pissa_niter_many"}, LORA),  # peft refuses it
        ({"peft_type": "PSOFT", "psoft_svd": "lowrank", "psoft_svd_lowrank_niter": 10}, {}),
        ({"peft_type": "LORA", "r": 4, "megatron_config": {"x": 1}, "megatron_core": "megatron.core"}, LORA),
        ({"peft_type": "LORA", "r": 4, "megatron_config": None, "megatron_core": "megatron.core"}, LORA),
    ],
)
def test_what_training_writes_is_fine(config: dict[str, Any], shapes: Any) -> None:
    assert codes(config, shapes) == []


@pytest.mark.parametrize(
    ("config", "shapes", "code"),
    [
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 10**9, "token_dim": 64}, PROMPT, "config-size"),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 10**4, "token_dim": 10**4}, PROMPT, "config-size"),
        (
            {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4, "num_layers": 9999, "token_dim": 9999},
            PROMPT,
            "config-size",
        ),
        ({**FLAN_T5_XL, "num_virtual_tokens": 9999}, None, "config-size"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING", "num_tasks": 9999, "num_ranks": 9999}, PROMPT, "config-size"),
        ({"peft_type": "P_TUNING", "encoder_num_layers": 10**5}, PROMPT, "config-size"),
        ({"peft_type": "LOHA", "r": 10**300}, LORA, "config-size"),
        ({"peft_type": "LOKR", "rank_pattern": {"q": 10**8}}, LORA, "config-size"),
        ({"peft_type": "LORA", "layer_replication": [[0, 10**9]]}, LORA, "config-size"),
        ({"peft_type": "LORA", "layers_to_transform": list(range(20_000))}, LORA, "config-size"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa_niter_1000000000"}, LORA, "config-size"),
        (
            {"peft_type": "LORA", "init_lora_weights": "loftq", "loftq_config": {"loftq_iter": 10**9}},
            LORA,
            "config-size",
        ),
        ({"peft_type": "PSOFT", "psoft_svd": "lowrank", "psoft_svd_lowrank_niter": 10**9}, {}, "config-size"),
        ({"peft_type": "XLORA", "adapters": {"a": "who/else"}}, {}, "config-path"),
        ({"peft_type": "SHADOW", "shadow_model": "/etc"}, {}, "config-path"),
        ({"peft_type": "LORA", "megatron_config": {"x": 1}, "megatron_core": "this"}, LORA, "config-code"),
        (
            {"peft_type": "LORA", "megatron_config": {"x": 1}, "megatron_core": "megatron.core.evil"},
            LORA,
            "config-code",
        ),
    ],
)
def test_what_no_file_explains_is_refused(config: dict[str, Any], shapes: Any, code: str) -> None:
    assert codes(config, shapes) == [code]
