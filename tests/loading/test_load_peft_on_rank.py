from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import needs
from faults import adapters as faults
from faults.folders import CONTENTS
from loaded_models import TOKENS, adapter_tensors, logits, state, two_steps
from models import KINDS, Made, save_adapter, save_llama
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import saved, skip_unless_buildable
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, modeling_utils

from safe_loading import (
    AdapterError,
    ArgumentError,
    CheckpointError,
    CheckpointNotFound,
    PickleRefused,
    audit_model,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)
from safe_loading._core.engines import is_older
from safe_loading._loading import adapter_file as values
from safe_loading._loading import load as steps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize(("on_disk", "base_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_the_adapter_keeps_every_bit_and_its_dtype(made: Made, on_disk: torch.dtype, base_dtype: torch.dtype) -> None:
    base, adapter = made.llama(base_dtype), made.adapter(made.llama(), dtype=on_disk)
    model = load_peft_on_rank(base, adapter)
    on_file = load_file(adapter / faults.WEIGHTS)
    loaded = adapter_tensors(model)
    assert loaded.keys() == on_file.keys()
    for key, tensor in on_file.items():
        assert loaded[key].dtype == on_disk, key
        assert torch.equal(loaded[key], tensor), key
    assert {p.dtype for k, p in model.named_parameters() if ".lora_" not in k} == {base_dtype}


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_equal_the_plain_two_steps(made: Made, dtype: torch.dtype) -> None:
    base, adapter = made.llama(dtype), made.adapter(made.llama(), dtype=dtype)
    ours = load_peft_on_rank(base, adapter)
    assert torch.equal(logits(ours), logits(two_steps(adapter, base)))
    assert not torch.equal(logits(ours), logits(AutoModelForCausalLM.from_pretrained(base)))


def test_an_adapter_of_float32_on_bfloat16_equals_the_plain_load_too(made: Made) -> None:
    base, adapter = made.llama(torch.bfloat16), made.adapter(made.llama(), dtype=torch.float32)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert torch.equal(logits(load_peft_on_rank(base, adapter)), logits(plain))


def test_casts_happen_only_when_asked_for(tiny_llama: Path, tiny_adapter: Path) -> None:
    model = load_peft_on_rank(tiny_llama, tiny_adapter, dtype=torch.bfloat16, adapter_dtype=torch.float16)
    on_file = load_file(tiny_adapter / faults.WEIGHTS)
    for key, tensor in adapter_tensors(model).items():
        assert torch.equal(tensor, on_file[key].half())
    assert model.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16


def test_the_base_named_by_the_adapter_is_the_default(tiny_llama: Path, tiny_adapter: Path) -> None:
    by_name = load_peft_on_rank(tiny_adapter)
    assert torch.equal(logits(by_name), logits(load_peft_on_rank(tiny_llama, tiny_adapter)))
    assert by_name.get_base_model().name_or_path == str(tiny_llama)


def test_no_random_number_is_drawn(tiny_llama: Path, tiny_adapter: Path) -> None:
    import numpy as np

    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    torch.manual_seed(123)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    load_peft_on_rank(tiny_llama, tiny_adapter)
    load_peft_on_rank(base, tiny_adapter)
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_saving_over_the_adapter_does_not_change_the_model(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    adapter = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    model = load_peft_on_rank(tiny_llama, adapter)
    before = logits(model)
    file = adapter / faults.WEIGHTS
    with file.open("r+b") as handle:
        handle.write(b"\0" * file.stat().st_size)
    assert torch.equal(logits(model), before)


# ---------------------------------------------------------------------------------------------- every kind of LoRA


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_logits_of_the_plain_load(made: Made, kind: str) -> None:
    base = made.llama(attention_bias=True) if kind == "trained bias" else made.llama()
    adapter = made.adapter(base, **KINDS[kind])
    ours, plain = load_peft_on_rank(base, adapter), two_steps(adapter, base)
    assert torch.equal(logits(ours), logits(plain))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for key, tensor in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key
    assert not [key for key, p in (*ours.named_parameters(), *ours.named_buffers()) if p.is_meta]


@pytest.mark.parametrize("kind", ["modules to save", "embedding", "embedding and head saved", "trainable tokens"])
def test_tied_heads_stay_tied(made: Made, kind: str) -> None:
    base = made.llama(tie_word_embeddings=True)
    adapter = made.adapter(base, **KINDS[kind])
    ours, plain = load_peft_on_rank(base, adapter), two_steps(adapter, base)
    assert torch.equal(logits(ours), logits(plain))
    model = ours.get_base_model()
    inner = [getattr(m, "original_module", m) for m in (model.model.embed_tokens, model.lm_head)]
    inner = [getattr(m, "base_layer", m) for m in inner]
    assert inner[0].weight is inner[1].weight


@pytest.mark.parametrize("kind", ["embedding", "embedding and head saved"])
def test_adapters_tied_to_one_another_stay_tied(made: Made, tmp_path: Path, kind: str) -> None:
    base = made.llama(tie_word_embeddings=True)
    config = {"modules_to_save": ["embed_tokens"]} if "saved" in kind else {"target_modules": ["embed_tokens"]}
    adapter = save_adapter(tmp_path / "adapter", base, ensure_weight_tying=True, **config)
    ours, plain = load_peft_on_rank(base, adapter), two_steps(adapter, base)
    assert torch.equal(logits(ours), logits(plain))

    def ties(model: PeftModel) -> set[frozenset[str]]:
        groups: dict[int, set[str]] = {}
        for key, tensor in model.named_parameters(remove_duplicate=False):
            groups.setdefault(tensor.data_ptr(), set()).add(key)
        return {frozenset(group) for group in groups.values() if len(group) > 1}

    assert ties(ours) == ties(plain)
    if any("lm_head.lora" in key for key in load_file(adapter / faults.WEIGHTS)):
        once = faults.edited(adapter, tmp_path / "once", tensors=faults.without("lm_head.lora"))
        assert torch.equal(logits(load_peft_on_rank(base, once)), logits(plain))


@needs("peft", "0.19")
def test_adapters_that_were_tied_and_trained_apart_keep_their_values(tmp_path: Path) -> None:
    """peft ties two factors, then casts those of a base in 16 bits to float32 one by one, which ends the tie."""
    base = save_llama(tmp_path / "base", torch.bfloat16, tie_word_embeddings=True)
    tied = save_adapter(tmp_path / "tied", base, ensure_weight_tying=True, target_modules=["embed_tokens"])

    def train_apart(tensors: faults.Tensors) -> None:
        for key in tensors:
            if "lm_head.lora" in key:
                tensors[key] = tensors[key] * 2 + 1

    tied = faults.edited(tied, tmp_path / "alone", tensors=faults.without("base_layer"))
    apart = faults.edited(tied, tmp_path / "apart", tensors=train_apart)
    on_file = load_file(apart / faults.WEIGHTS)
    assert sum("lm_head.lora" in key for key in on_file) == 2
    ours = get_peft_model_state_dict(load_peft_on_rank(base, apart))
    for key in on_file:
        assert torch.equal(ours[key], on_file[key]), key
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), apart)
    assert torch.equal(logits(load_peft_on_rank(base, apart)), logits(plain))


@needs("peft", "0.20")
@needs("transformers", "5.10")
@pytest.mark.parametrize("layout", ["per expert", "fused"])
def test_experts_of_transformers_4_on_a_fused_model(tmp_path: Path, layout: str) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=3, vocab_size=101)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    if layout == "fused":
        targets = {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
        adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", **targets)
    else:
        adapter = save_adapter(tmp_path / "plain", tmp_path / "base", target_modules=["q_proj"])
        experts = [f"base_model.model.model.layers.{n}.block_sparse_moe.experts.{e}" for n in (0, 1) for e in range(3)]
        shapes = {"w1": (32, 48), "w3": (32, 48), "w2": (48, 32)}

        def add(tensors: faults.Tensors) -> None:
            for expert, (name, (inputs, outputs)) in itertools.product(experts, shapes.items()):
                tensors[f"{expert}.{name}.lora_A.weight"] = torch.randn(4, inputs) / 8
                tensors[f"{expert}.{name}.lora_B.weight"] = torch.randn(outputs, 4) / 8

        adapter = faults.edited(
            adapter, tmp_path / "adapter", tensors=add, config=lambda c: c.update(target_modules=["q_proj", *shapes])
        )
    ours = load_peft_on_rank(tmp_path / "base", adapter)
    assert torch.equal(logits(ours), logits(two_steps(adapter, tmp_path / "base")))
    assert not torch.equal(logits(ours), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base")))


@pytest.mark.parametrize(
    "method", ["AdaLoraConfig", "IA3Config", "VeraConfig", "OFTConfig", "PromptTuningConfig", "PrefixTuningConfig"]
)
def test_other_methods_are_left_to_peft(tmp_path: Path, tiny_llama: Path, method: str) -> None:
    import peft

    prompt = method.startswith("Pr")
    targets = {} if prompt else {"target_modules": ["k_proj", "v_proj", "down_proj"]}
    targets |= {"total_step": 10} if method == "AdaLoraConfig" else {}
    targets |= {"feedforward_modules": ["down_proj"]} if method == "IA3Config" else {}
    targets |= {"target_modules": ["q_proj", "o_proj"]} if method == "VeraConfig" else {}
    targets |= {"num_virtual_tokens": 3} if prompt else {}
    config = getattr(peft, method)(task_type="CAUSAL_LM", **targets)
    trained = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    trained.save_pretrained(tmp_path / "adapter")
    before = torch.get_rng_state()
    ours = load_peft_on_rank(tiny_llama, tmp_path / "adapter")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(ours), logits(two_steps(tmp_path / "adapter", tiny_llama)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["all linear", "dora", "modules to save"])
def test_quantized_bases(made: Made, bits: int, kind: str) -> None:
    pytest.importorskip("bitsandbytes", reason="quantized bases need bitsandbytes")
    from transformers import BitsAndBytesConfig

    base = made.llama(hidden_size=64, intermediate_size=128)
    adapter = made.adapter(base, **KINDS[kind])
    quantized = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantized)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, quantization_config=quantized), adapter, autocast_adapter_dtype=False
    )
    expected = logits(plain)
    ours = load_peft_on_rank(base, adapter, base_kwargs={"quantization_config": quantized})
    assert torch.equal(logits(ours), expected)
    assert torch.equal(logits(load_peft_on_rank(loaded, adapter)), expected)
    kept = type(loaded.model.layers[0].self_attn.q_proj.base_layer.weight).__name__
    assert kept == {4: "Params4bit", 8: "Int8Params"}[bits]


def test_a_classification_head_comes_from_the_adapter(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = save_adapter(
        tmp_path / "adapter", tiny_llama, task_type="SEQ_CLS", auto_class=AutoModelForSequenceClassification
    )
    model = load_peft_on_rank(tiny_llama, adapter)
    assert type(model).__name__ == "PeftModelForSequenceClassification"
    head = next(v for k, v in load_file(adapter / faults.WEIGHTS).items() if k.endswith("score.weight"))
    assert torch.equal(model.get_base_model().score.modules_to_save["default"].weight, head)
    with pytest.raises(AdapterError, match="num_labels"):
        load_peft_on_rank(tiny_llama, adapter, base_kwargs={"num_labels": 5})


def test_a_config_is_rewritten_by_one_injection_alone(tmp_path: Path, tiny_llama: Path) -> None:
    """peft adds the heads of its class to a config at each; one on meta comes first where values are needed."""
    adapter = save_adapter(
        tmp_path / "adapter",
        tiny_llama,
        task_type="SEQ_CLS",
        auto_class=AutoModelForSequenceClassification,
        trainable_token_indices=[1, 2],
    )
    base = AutoModelForSequenceClassification.from_pretrained(tiny_llama)
    expected = PeftModel.from_pretrained(base, adapter).peft_config["default"]
    assert load_peft_on_rank(tiny_llama, adapter).peft_config["default"].to_dict() == expected.to_dict()


# -------------------------------------------------------------------------------------------------- several, active


def test_several_adapters_with_one_active(tmp_path: Path, tiny_llama: Path) -> None:
    one = save_adapter(tmp_path / "one", tiny_llama, seed=1)
    two = save_adapter(tmp_path / "two", tiny_llama, seed=2, target_modules="all-linear", r=2)
    model = load_peft_on_rank({"one": one, "two": two}, active="two")
    assert list(model.peft_config) == ["one", "two"]
    assert model.active_adapter == "two"
    assert torch.equal(logits(model), logits(two_steps(two, tiny_llama)))
    model.set_adapter("one")
    assert torch.equal(logits(model), logits(two_steps(one, tiny_llama)))
    assert [part.name for part in model.load_report.parts] == ["base", "one", "two"]
    assert load_peft_on_rank({"one": one, "two": two}).active_adapter == "one"


def test_trainable_means_the_adapter_alone(tiny_llama: Path, tiny_adapter: Path) -> None:
    model = load_peft_on_rank(tiny_llama, tiny_adapter, is_trainable=True)
    assert {key for key, p in model.named_parameters() if p.requires_grad} == {
        key for key, _ in model.named_parameters() if ".lora_" in key
    }
    assert not model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.training
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    frozen = load_peft_on_rank(tiny_llama, tiny_adapter)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not any(module.training for module in frozen.modules())


def test_a_base_object_is_used_as_it_is(tiny_llama: Path, tiny_adapter: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    weights = {key: p.data_ptr() for key, p in base.named_parameters()}
    model = load_peft_on_rank(base, tiny_adapter)
    assert model.get_base_model() is base
    assert {
        k.replace(".base_layer", ""): p.data_ptr() for k, p in base.named_parameters() if ".lora_" not in k
    } == weights


# ------------------------------------------------------------------------------------------------ what is refused

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def rename_layers(tensors: faults.Tensors) -> faults.Tensors:
    return {key.replace("layers.2.", "layers.7."): value for key, value in tensors.items()}


transpose = faults.transposed(f"{Q0}.lora_A")


def add_head(tensors: faults.Tensors) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(101, 32)


def one_nan(tensors: faults.Tensors) -> None:
    tensors[f"{Q0}.lora_A.weight"][0, 0] = float("nan")


FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing keys": ({"tensors": faults.without("layers.1.self_attn.q_proj.lora_B")}, ["layers.1.self_attn.q_proj"]),
    "keys of a layer that the base does not have": ({"tensors": rename_layers}, ["layers.7.", "no module", "3 layers"]),
    "targets that cover a part": (
        {"config": lambda c: c.update(target_modules=["q_proj"])},
        ["v_proj", "target_modules", "down_proj"],
    ),
    "modules_to_save in the file alone": ({"tensors": add_head}, ["lm_head", "modules_to_save"]),
    "modules_to_save in the config alone": (
        {"config": lambda c: c.update(modules_to_save=["lm_head"])},
        ["lm_head.weight", "modules_to_save"],
    ),
    "lora_alpha absent": ({"config": lambda c: c.pop("lora_alpha")}, ["lora_alpha", "8"]),
    "r absent": ({"config": lambda c: c.pop("r")}, ["r is missing"]),
    "r against the tensors": ({"config": lambda c: c.update(r=16)}, ["[4, 32]", "[16, 32]", "r=16"]),
    "NaN": ({"tensors": one_nan}, [f"{Q0}.lora_A.weight", "1 NaN"]),
    "infinity": (
        {"tensors": faults.filled("layers.2.mlp.down_proj.lora_B", float("inf"))},
        ["layers.2.mlp", "infinite"],
    ),
    "shape": ({"tensors": transpose}, [f"{Q0}.lora_A", "[32, 4]", "[4, 32]"]),
    "unknown peft_type": ({"config": lambda c: c.update(peft_type="LORA9")}, ["LORA9", "Upgrade peft"]),
    "peft_type in lower case": ({"config": lambda c: c.update(peft_type="lora")}, ["'lora'", "Write it as 'LORA'"]),
    "peft_type absent": ({"config": lambda c: c.pop("peft_type")}, ["peft_type", 'add "peft_type": "LORA"']),
    "of no method": ({"config": lambda c: [c.pop(n) for n in ("peft_type", "r")]}, ["must name the method"]),
    "field of a newer peft": (
        {"config": lambda c: c.update(hyper_lora=3, peft_version="9.9.0")},
        ["hyper_lora", "9.9.0", "upgrade peft"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_and_leaves_the_base_as_it_was(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, name: str
) -> None:
    edits, words = FAULTS[name]
    bad = faults.edited(tiny_adapter, tmp_path / "bad", **edits)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    before, bits = state(base), {key: p.clone() for key, p in base.state_dict().items()}
    for base_model in (base, tiny_llama):
        with pytest.raises(AdapterError) as refused:
            load_peft_on_rank(base_model, bad)
        for word in [*words, str(bad)]:
            assert word in str(refused.value)
        assert isinstance(refused.value, ValueError)
    assert state(base) == before
    assert all(torch.equal(p, bits[key]) for key, p in base.state_dict().items())


def test_all_faults_are_listed_at_once(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    def many(tensors: faults.Tensors) -> faults.Tensors:
        one_nan(tensors)
        transpose(tensors)
        return rename_layers(tensors)

    bad = faults.edited(tiny_adapter, tmp_path / "bad", tensors=many, config=lambda c: c.update(hyper_lora=1))
    with pytest.raises(AdapterError) as refused:
        load_peft_on_rank(tiny_llama, bad)
    text = "\n".join(refused.value.problems)
    for word in ("layers.7.", "layers.2.", "[32, 4]", "NaN", "hyper_lora"):
        assert word in text


def test_without_strict_the_rest_is_loaded_and_warned_of_once(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    bad = faults.edited(tiny_adapter, tmp_path / "bad", tensors=faults.without("layers.1.self_attn.q_proj.lora_B"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_peft_on_rank(tiny_llama, bad, strict=False)
    warned = [w for w in caught if "strict=False" in str(w.message)]
    assert len(warned) == 1
    assert "layers.1.self_attn.q_proj.lora_B" in str(warned[0].message)
    assert not model.load_report.ok
    assert [f.code for f in model.load_report.findings if f.severity == "error"] == ["adapter-key-missing"]
    q1 = model.get_base_model().model.layers[1].self_attn.q_proj
    assert not q1.lora_B["default"].weight.any()
    loaded = adapter_tensors(model)
    for key, tensor in load_file(bad / faults.WEIGHTS).items():
        assert torch.equal(loaded[key], tensor)


def test_without_strict_nothing_that_fits_is_still_an_error(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    bad = faults.edited(
        tiny_adapter, tmp_path / "bad", tensors=lambda t: {k.replace("layers", "blocks"): v for k, v in t.items()}
    )
    with pytest.raises(AdapterError, match="blocks"):
        load_peft_on_rank(tiny_llama, bad, strict=False)


def test_an_untrained_adapter_is_a_finding(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    zero = faults.edited(tiny_adapter, tmp_path / "zero", tensors=faults.filled("lora_B", 0.0))
    report = load_peft_on_rank(tiny_llama, zero).load_report
    assert [f.code for f in report.findings] == ["lora-b-zero"]
    assert "changes nothing" in str(report)
    assert report.ok
    assert [f.code for f in merge_lora_checkpoint(tiny_llama, zero, tmp_path / "merged").findings] == ["lora-b-zero"]


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 1), (8, 0)])
def test_an_adapter_with_the_rows_of_one_rank_alone_is_a_finding(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, ranks: int, rank: int
) -> None:
    """Nothing was gathered for the save, or the shards of the other ranks got no gradient (axolotl#3772)."""
    sharded = faults.edited(tiny_adapter, tmp_path / "sharded", tensors=one_shard(ranks, rank))
    report = load_peft_on_rank(tiny_llama, sharded).load_report
    assert [f.code for f in report.findings] == ["lora-b-of-one-rank"]
    assert f"rank {rank} of {ranks}" in str(report)
    merged = merge_lora_checkpoint(tiny_llama, sharded, tmp_path / "merged")
    assert "lora-b-of-one-rank" in {f.code for f in merged.findings}


@pytest.mark.parametrize("whole", ["layers.2.mlp.down_proj", "_proj"], ids=["one layer", "all"])
def test_zeros_in_some_layers_are_not_the_shard_of_a_rank(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, whole: str
) -> None:
    zeroed = faults.edited(tiny_adapter, tmp_path / "zeroed", tensors=one_shard(2, 0, whole))
    assert not load_peft_on_rank(tiny_llama, zeroed).load_report.findings


def test_zeros_in_one_kind_of_layer_are_not_the_shard_of_a_rank(tmp_path: Path, tiny_llama: Path) -> None:
    """A LoRA of queries in a fused layer, say, has zeros for the keys and the values."""
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, target_modules=["q_proj"])
    zeroed = faults.edited(adapter, tmp_path / "zeroed", tensors=one_shard(2, 0))
    assert not load_peft_on_rank(tiny_llama, zeroed).load_report.findings


def one_shard(ranks: int, rank: int, whole: str = "none") -> Callable[[dict[str, torch.Tensor]], None]:
    """Make all rows of lora_B zero but those that one rank has, in all layers but ``whole``."""

    def zero(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if "lora_B" in key and whole not in key:
                for other, rows in enumerate(tensor.chunk(ranks)):
                    rows.mul_(other == rank)

    return zero


def test_a_resized_vocabulary_says_how_to_resize(tmp_path: Path, tiny_llama: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    base.resize_token_embeddings(110)
    base.save_pretrained(tmp_path / "resized")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "resized", modules_to_save=["embed_tokens", "lm_head"])
    with pytest.raises(AdapterError, match=r"resize_token_embeddings\(110\)"):
        load_peft_on_rank(AutoModelForCausalLM.from_pretrained(tiny_llama), adapter)
    resized = AutoModelForCausalLM.from_pretrained(tiny_llama)
    resized.resize_token_embeddings(110)
    assert torch.equal(logits(load_peft_on_rank(resized, adapter)), logits(two_steps(adapter, tmp_path / "resized")))


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="+".join)
def test_a_resized_vocabulary_under_a_lora_has_that_fix_alone(
    tmp_path: Path, tiny_llama: Path, targets: list[str]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    base.resize_token_embeddings(110)
    base.save_pretrained(tmp_path / "resized")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "resized", target_modules=[*targets, "q_proj"])
    with pytest.raises(AdapterError) as refused:
        load_peft_on_rank(AutoModelForCausalLM.from_pretrained(tiny_llama), adapter)
    assert all("resize_token_embeddings(110)" in problem for problem in refused.value.problems)


def test_embeddings_that_peft_saved_too_replace_the_base_s_and_are_reported(tmp_path: Path, tiny_llama: Path) -> None:
    import peft

    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama),
        peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        model.get_base_model().model.embed_tokens.weight.add_(1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    ours = load_peft_on_rank(tiny_llama, tmp_path / "adapter")
    assert torch.equal(logits(ours), logits(two_steps(tmp_path / "adapter", tiny_llama)))
    assert "base-weight-replaced" in [f.code for f in ours.load_report.findings]


def test_another_number_of_layers_is_told_in_one_line(tmp_path: Path, tiny_adapter: Path) -> None:
    deeper = save_llama(tmp_path / "deeper", num_hidden_layers=5)
    with pytest.raises(AdapterError, match="tensors for layers up to 2, the base has 5 layers"):
        load_peft_on_rank(deeper, tiny_adapter)


def test_a_base_with_adapters_is_refused(tiny_llama: Path, tiny_adapter: Path) -> None:
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    with pytest.raises(AdapterError, match="load_adapter_on_rank"):
        load_peft_on_rank(model, tiny_adapter)
    integrated = AutoModelForCausalLM.from_pretrained(tiny_llama)
    integrated.load_adapter(str(tiny_adapter))
    with pytest.raises(AdapterError, match="transformers put them in"):
        load_peft_on_rank(integrated, tiny_adapter)


def test_the_second_of_two_adapters_refused_leaves_the_base_as_it_was(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    bad = faults.edited(tiny_adapter, tmp_path / "bad", tensors=transpose)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    before = state(base)
    with pytest.raises(AdapterError, match="bad"):
        load_peft_on_rank(base, {"good": tiny_adapter, "bad": bad})
    assert state(base) == before


def test_base_weights_that_one_adapter_wrote_come_back_when_the_next_is_refused(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    embedding = save_adapter(tmp_path / "embedding", tiny_llama, target_modules=["embed_tokens"])

    def change(tensors: faults.Tensors) -> None:
        tensors["base_model.model.model.embed_tokens.base_layer.weight"].add_(1)

    writes = faults.edited(embedding, tmp_path / "writes", tensors=change)
    bad = faults.edited(tiny_adapter, tmp_path / "bad", tensors=transpose)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    bits = base.model.embed_tokens.weight.clone()
    with pytest.raises(AdapterError):
        load_peft_on_rank(base, {"a": writes, "b": bad})
    assert torch.equal(base.model.embed_tokens.weight, bits)
    model = load_peft_on_rank(base, {"a": writes})
    assert torch.equal(model.get_base_model().model.embed_tokens.base_layer.weight, bits + 1)


def test_layers_of_another_adapter_inside_the_base_are_refused(tiny_llama: Path, tiny_adapter: Path) -> None:
    inside = load_peft_on_rank(tiny_llama, tiny_adapter).get_base_model()
    with pytest.raises(AdapterError, match="has adapters already"):
        load_peft_on_rank(inside, tiny_adapter)


def test_the_check_before_the_load_knows_the_dtype(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.bfloat16)
    adapter = save_adapter(tmp_path / "saved", base, target_modules=["embed_tokens"], dtype=torch.float32)
    adapter = faults.edited(adapter, tmp_path / "adapter", tensors=faults.trained_further("embed_tokens.base_layer"))
    with pytest.raises(AdapterError, match=r"load the base with dtype=torch\.float32"):
        load_peft_on_rank(base, adapter)
    assert load_peft_on_rank(base, adapter, dtype=torch.float32).load_report.ok


@pytest.mark.parametrize("seed", [1, 2])
def test_what_no_file_fills_can_run_and_is_the_same_whatever_the_seed(made: Made, tmp_path: Path, seed: int) -> None:
    base, adapter = made.llama(torch.bfloat16), made.adapter(made.llama(), dtype=torch.float32)
    bad = faults.edited(adapter, tmp_path / "bad", tensors=faults.without("layers.1.self_attn.q_proj.lora_A"))
    torch.manual_seed(seed)
    with pytest.warns(UserWarning, match="strict=False") as told:
        model = load_peft_on_rank(base, bad, strict=False)
    assert [each.filename for each in told if "strict=False" in str(each.message)] == [__file__]
    assert logits(model).isfinite().all()
    start = adapter_tensors(model)["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
    assert start.dtype == torch.float32
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="strict=False"):
        again = load_peft_on_rank(base, bad, strict=False)
    assert torch.equal(adapter_tensors(again)["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"], start)


@pytest.mark.parametrize(
    ("ignored", "name"),
    [
        ({"dtype": torch.float16}, "dtype"),
        ({"auto_class": object}, "auto_class"),
        ({"base_subfolder": "x"}, "base_subfolder"),
        ({"base_kwargs": {"attn_implementation": "eager", "token": "x"}}, "so attn_implementation would"),
    ],
)
def test_arguments_for_a_base_that_is_loaded_already_are_refused(
    tiny_llama: Path, tiny_adapter: Path, ignored: dict[str, Any], name: str
) -> None:
    with pytest.raises(ArgumentError, match=name):
        load_peft_on_rank(AutoModelForCausalLM.from_pretrained(tiny_llama), tiny_adapter, **ignored)


@pytest.mark.parametrize(
    "prefix", ["_fsdp_wrapped_module.", "module.", "_orig_mod.", "module._orig_mod._fsdp_wrapped_module."]
)
def test_keys_of_wrappers_are_renamed_and_reported(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, prefix: str
) -> None:
    wrapped = faults.edited(tiny_adapter, tmp_path / "wrapped", tensors=faults.with_prefix(prefix))
    model = load_peft_on_rank(tiny_llama, wrapped)
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_llama, tiny_adapter)))
    assert [f.code for f in model.load_report.findings] == ["adapter-keys-renamed"]
    renamed = model.load_report.parts[1].renamed
    assert len(renamed) == len(load_file(tiny_adapter / faults.WEIGHTS))
    assert all(old == prefix + new for old, new in renamed.items())


@pytest.mark.parametrize("prefix", ["model.", "base_model.model.", "pretrained_model.module."])
def test_names_around_peft_s_prefix_are_a_wrapper_s(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, prefix: str
) -> None:
    wrapped = faults.edited(tiny_adapter, tmp_path / "wrapped", tensors=faults.with_prefix(prefix))
    wanted = logits(load_peft_on_rank(tiny_llama, tiny_adapter))
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, wrapped)), wanted)
    assert check_checkpoint(wrapped, base_model=tiny_llama).ok


def test_keys_without_peft_s_prefix_are_renamed(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    bare = faults.edited(
        tiny_adapter,
        tmp_path / "bare",
        tensors=lambda t: {k.removeprefix("base_model.model."): v for k, v in t.items()},
    )
    model = load_peft_on_rank(tiny_llama, bare)
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_llama, tiny_adapter)))


# --------------------------------------------------------------------------------------------------------- sources


def test_a_pickle_is_refused_with_a_command_that_works(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    import subprocess
    import sys

    pickled = faults.as_pickle(tiny_adapter, tmp_path / "pickled")
    with pytest.raises(PickleRefused) as refused:
        load_peft_on_rank(tiny_llama, pickled)
    expected = logits(load_peft_on_rank(tiny_llama, tiny_adapter))
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, pickled, allow_pickle=True)), expected)
    text = str(refused.value)
    command = text[text.index("python -c ") : text.index("\nor pass allow_pickle")]
    command = command.replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(command, shell=True, check=True, timeout=120)
    assert torch.equal(logits(load_peft_on_rank(tiny_llama, pickled)), expected)


@pytest.mark.parametrize("forced", ["0", "1"])
def test_a_hostile_pickle_runs_nothing(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch, forced: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", forced)

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    pickled = faults.as_pickle(tiny_adapter, tmp_path / "pickled")
    torch.save({"a": Hostile()}, pickled / "adapter_model.bin")
    with pytest.raises(ValueError, match="weights_only=True"):
        load_peft_on_rank(tiny_llama, pickled, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_code_of_the_base_runs_only_when_it_is_trusted(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    ran = tmp_path / "ran"
    (base / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((base / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_peft_on_rank(base, tiny_adapter)
    assert not ran.exists()
    model = load_peft_on_rank(base, tiny_adapter, base_kwargs={"trust_remote_code": True})
    assert type(model.get_base_model()).__name__ == "OwnModel"
    assert torch.equal(logits(model), logits(load_peft_on_rank(tiny_llama, tiny_adapter)))


def test_a_base_whose_own_code_is_not_trusted_has_the_class_of_transformers(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    nameless = {"task_type": None, "auto_mapping": None}
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter", config=lambda config: config.update(nameless))
    config = json.loads((base / "config.json").read_text())
    for auto_class in ("AutoModel", "AutoModelForSeq2SeqLM"):  # the one leaves the head out, the other knows no Llama
        config["auto_map"] = {auto_class: "modeling_own.LlamaForCausalLM"}
        (base / "config.json").write_text(json.dumps(config))
        assert type(load_peft_on_rank(base, adapter).get_base_model()).__name__ == "LlamaForCausalLM"


def test_an_adapter_inside_the_base_s_folder_is_refused(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    both = Path(shutil.copytree(tiny_llama, tmp_path / "both"))
    for name in (faults.CONFIG, faults.WEIGHTS):
        shutil.copy(tiny_adapter / name, both / name)
    with pytest.raises(AdapterError, match="holds an adapter too"):
        load_peft_on_rank(both, tiny_adapter)


def test_what_is_loaded_in_inference_mode_can_be_trained(tiny_llama: Path, tiny_adapter: Path) -> None:
    with torch.inference_mode():
        model = load_peft_on_rank(tiny_llama, tiny_adapter, is_trainable=True)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_default_dtype_changes_nothing(tmp_path: Path, tiny_llama: Path) -> None:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config).save_pretrained(tmp_path / "prompt")
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = load_peft_on_rank(tiny_llama, tmp_path / "prompt")
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    (prompt,) = load_file(tmp_path / "prompt" / faults.WEIGHTS).values()
    assert torch.equal(next(model.prompt_encoder.parameters()), prompt)


def test_two_threads_leave_the_generator_as_it_was(tiny_llama: Path, tiny_adapter: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(321)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: load_peft_on_rank(tiny_llama, tiny_adapter), range(8)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(logits(model), logits(models[0])) for model in models)


def test_replicated_layers(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, layer_replication=[[0, 2], [1, 3]])
    ours, plain = load_peft_on_rank(tiny_llama, adapter), two_steps(adapter, tiny_llama)
    assert torch.equal(logits(ours), logits(plain))


def test_a_model_without_embeddings_of_its_own(tmp_path: Path) -> None:
    import peft
    from transformers import CLIPConfig, CLIPModel

    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    vision = {**text, "image_size": 8, "patch_size": 4}
    vision.pop("vocab_size")
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        CLIPModel.from_pretrained(tmp_path / "base"), peft.LoraConfig(target_modules=["q_proj"])
    )
    model.save_pretrained(tmp_path / "adapter")
    loaded = load_peft_on_rank(tmp_path / "base", tmp_path / "adapter")
    assert type(loaded.get_base_model()).__name__ == "CLIPModel"


def test_embeddings_saved_in_a_narrower_dtype_are_widened(tmp_path: Path, tiny_llama: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, target_modules=["embed_tokens"], dtype=torch.bfloat16)
    model = load_peft_on_rank(tiny_llama, adapter)
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    expected = load_file(adapter / faults.WEIGHTS)[key].float()
    assert torch.equal(model.get_base_model().model.embed_tokens.base_layer.weight, expected)


@pytest.mark.parametrize("adapter", ["", 3, ["a"]])
def test_what_is_not_an_adapter_is_named(tiny_llama: Path, adapter: Any) -> None:
    with pytest.raises(ArgumentError, match="is no adapter"):
        load_peft_on_rank(tiny_llama, adapter)


def test_missing_paths_say_what_to_pass(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="is not a folder"):
        load_peft_on_rank(tiny_llama, tmp_path / "nowhere")
    moved = faults.edited(
        tiny_adapter, tmp_path / "moved", config=lambda c: c.update(base_model_name_or_path="/gone/base")
    )
    with pytest.raises(CheckpointNotFound, match="base_model="):
        load_peft_on_rank(moved)
    nameless = faults.edited(tiny_adapter, tmp_path / "nameless", config=lambda c: c.pop("base_model_name_or_path"))
    with pytest.raises(AdapterError, match="base_model="):
        load_peft_on_rank(nameless)
    parent = tmp_path / "parent"
    shutil.copytree(tiny_adapter, parent / "inner")
    with pytest.raises(CheckpointNotFound, match="adapter_subfolder"):
        load_peft_on_rank(tiny_llama, parent)
    assert load_peft_on_rank(tiny_llama, parent, adapter_subfolder="inner") is not None


def test_a_truncated_base_is_refused_before_it_is_loaded(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    broken = Path(shutil.copytree(tiny_llama, tmp_path / "broken"))
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=shard.name):
        load_peft_on_rank(broken, tiny_adapter)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"base_kwargs": {"device_map": "auto"}}, "device="),
        ({"base_kwargs": {"torch_dtype": torch.float16}}, "dtype="),
        ({"active": "other"}, "other"),
        ({"device": "meta"}, "meta"),
        ({"device": 3}, "no accelerator"),
        ({"device": "cpu:3"}, "only CPU"),
        ({"device": True}, "True"),
        ({"device": "nothing"}, "nothing"),
        ({"adapter_dtype": torch.int8}, "int8"),
        ({"adapter_dtype": "bfloat"}, "adapter_dtype='bfloat'"),
        ({"dtype": "flaot16"}, "dtype='flaot16'"),
        ({"ranks": "some"}, "some"),
        ({"ranks": [0, 1]}, "not initialized"),
        ({"adapter_revision": "v2"}, "v2"),
    ],
)
def test_arguments_that_contradict_are_named(tiny_llama: Path, tiny_adapter: Path, arguments: Any, word: str) -> None:
    with pytest.raises((ArgumentError, RuntimeError), match=word):
        load_peft_on_rank(tiny_llama, tiny_adapter, **arguments)


@pytest.mark.parametrize("name", ["a.b", "", "lora_A", "keys", "forward"])
def test_names_that_peft_cannot_keep_are_refused(tiny_llama: Path, tiny_adapter: Path, name: str) -> None:
    with pytest.raises(ArgumentError):
        load_peft_on_rank(tiny_llama, {name: tiny_adapter})


# ---------------------------------------------------------------------------------------------------------- report


def test_the_report_says_what_is_where(
    tiny_llama: Path, tiny_adapter: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="safe_loading"):
        model = load_peft_on_rank(tiny_llama, tiny_adapter)
    report = model.load_report
    base, adapter = report.parts
    assert (report.rank, report.ranks, report.device, report.ok) == (0, 1, "cpu", True)
    assert base.bytes == sum(t.nbytes for t in (*model.get_base_model().parameters(), *model.buffers())) - adapter.bytes
    assert adapter.bytes == sum(t.nbytes for t in load_file(tiny_adapter / faults.WEIGHTS).values())
    assert adapter.dtypes == {"float32": adapter.tensors}
    assert report.bytes == base.bytes + adapter.bytes
    assert str(tiny_adapter) in str(report)
    assert str(report) in caplog.text
    assert json.loads(report.to_json())["parts"][1]["name"] == "default"
    assert "<table>" in report._repr_html_()
    assert capsys.readouterr().out == ""


def test_a_base_that_is_written_again_while_it_is_loaded_is_an_error(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    original = steps.load_base

    def rewritten(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        shard = min(base.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes())
        return result

    monkeypatch.setattr(steps, "load_base", rewritten)
    with pytest.raises(CheckpointError, match=r"1 of 10 files were written while they were read"):
        load_peft_on_rank(base, tiny_adapter)
    monkeypatch.undo()
    load_peft_on_rank(base, tiny_adapter)


@pytest.mark.parametrize(
    "verb",
    [
        "load_peft_on_rank",
        "load_adapter_on_rank",
        pytest.param("hot swap", marks=needs("peft", "0.20")),
        "merge_lora_checkpoint",
    ],
)
def test_an_adapter_that_is_cut_or_written_again_while_it_is_read_is_an_error_and_no_bus_error(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    adapter = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    file, data = adapter / faults.WEIGHTS, (adapter / faults.WEIGHTS).read_bytes()
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    calls: dict[str, Callable[[], Any]] = {
        "load_peft_on_rank": lambda: load_peft_on_rank(tiny_llama, adapter),
        "load_adapter_on_rank": lambda: load_adapter_on_rank(model, adapter, "two"),
        "hot swap": lambda: load_adapter_on_rank(model, adapter, "default", hotswap=True),
        "merge_lora_checkpoint": lambda: merge_lora_checkpoint(tiny_llama, adapter, tmp_path / "out"),
    }
    before, original = state(model), values._read_tensor

    def during(act: Callable[[], Any]) -> Callable[..., Any]:
        def first(*arguments: Any) -> Any:
            made = original(*arguments)
            monkeypatch.setattr(values, "_read_tensor", original)
            act()
            return made

        return first

    for act, message in (
        (lambda: os.truncate(file, 100), r"adapter_model.safetensors became shorter while it was read"),
        (lambda: os.utime(file, ns=(1, 1)), r"adapter_model.safetensors was written again while it was read"),
    ):
        file.write_bytes(data)
        monkeypatch.setattr(values, "_read_tensor", during(act))
        with pytest.raises(CheckpointError, match=message):
            calls[verb]()
    assert state(model) == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_what_the_base_has_beyond_its_class_and_two_values_of_a_tied_weight_are_reported(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    CONTENTS["extra tensor"].change(base)
    findings = load_peft_on_rank(base, tiny_adapter).load_report.findings
    assert [(f.code, f.severity) for f in findings] == [("base-key-unexpected", "warning")]
    assert "'extra'" in findings[0].message
    CONTENTS["tied by the config, not on disk"].change(base)
    loaded = load_peft_on_rank(base, tiny_adapter)
    findings = {finding.code: finding for finding in loaded.load_report.findings}
    assert findings["base-untied"].severity == "warning"
    assert "says tie_word_embeddings=True" in findings["base-untied"].message
    assert loaded.get_base_model().lm_head.weight is not loaded.get_base_model().model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "dora"),
    [
        ("LagunaForCausalLM", False),
        ("Inkling2ForCausalLM", True),
        pytest.param("PI0ForConditionalGeneration", False, marks=pytest.mark.slow),
    ],
)
def test_keys_that_peft_renames_to_nothing_are_loaded(tmp_path: Path, name: str, dora: bool) -> None:
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    saved(name, tmp_path / "base")
    config = {"auto_class": kind, "target_modules": "all-linear", "task_type": None, "use_dora": dora}
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", **config)
    on_file = load_file(adapter / "adapter_model.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = get_peft_model_state_dict(PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), adapter))
    if not is_older("peft", "0.20"):  # which does not rename
        assert any("missing adapter keys" in str(warning.message) for warning in caught)  # else this can go
        assert not all(torch.equal(theirs[key], value) for key, value in on_file.items())
    ours = get_peft_model_state_dict(load_peft_on_rank(tmp_path / "base", adapter, auto_class=kind))
    assert ours.keys() == on_file.keys()
    assert all(torch.equal(ours[key], value) for key, value in on_file.items())


@pytest.mark.parametrize("name", ["CpmAntForCausalLM", "Qwen3VLMoeForConditionalGeneration"])
def test_a_class_that_does_not_tie_is_not_said_to_be_tied(tmp_path: Path, name: str) -> None:
    skip_unless_buildable(name)
    kind = getattr(transformers, name)
    saved(name, tmp_path / "base")
    assert kind.from_pretrained(tmp_path / "base").config.get_text_config().tie_word_embeddings  # a default
    targets = {"auto_class": kind, "target_modules": "all-linear", "task_type": None}
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", **targets)
    model = load_peft_on_rank(tmp_path / "base", adapter, auto_class=kind)
    assert model.load_report.ok
    assert "SL111" not in {finding.code for finding in audit_model(model).findings}
    assert merge_lora_inplace(model).merge_report.findings == ()


def test_a_rank_that_accelerate_launched_for_fsdp_has_a_new_head_as_well(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_adapter(
        tmp_path / "a", tiny_llama, task_type="SEQ_CLS", auto_class=AutoModelForSequenceClassification
    )
    first = load_peft_on_rank(tiny_llama, adapter)
    monkeypatch.setattr(modeling_utils, "is_fsdp_enabled", lambda: True)
    monkeypatch.setattr(modeling_utils, "is_local_dist_rank_0", lambda: False)
    other = load_peft_on_rank(tiny_llama, adapter)
    head = "base_model.model.score.modules_to_save.default.weight"
    assert {tensor.device.type for tensor in other.state_dict().values()} == {"cpu"}
    assert torch.equal(other.get_parameter(head), first.get_parameter(head))
