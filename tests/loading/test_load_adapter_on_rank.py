from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from faults import adapters as faults
from loaded_models import TOKENS, adapter_tensors, logits, state, two_steps
from models import SIZES, Made, save_adapter, save_llama
from peft import LoHaConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, RegNetConfig, RegNetModel

from safe_loading import (
    AdapterError,
    AdapterExists,
    ArgumentError,
    DeviceError,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    wrap_fsdp_meta_safe,
)


@pytest.fixture
def model(tiny_llama: Path, tiny_adapter: Path) -> PeftModel:
    return load_peft_on_rank(tiny_llama, tiny_adapter)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return save_adapter(tmp_path_factory.mktemp("other"), tiny_llama, seed=5, lora_alpha=3)


def test_a_second_adapter_is_exact_and_not_active(
    tmp_path: Path, model: PeftModel, tiny_llama: Path, tiny_adapter: Path
) -> None:
    second = save_adapter(tmp_path / "second", tiny_llama, dtype=torch.bfloat16, target_modules="all-linear", r=2)
    before = torch.get_rng_state()
    report = load_adapter_on_rank(model, second, "second")
    assert torch.equal(torch.get_rng_state(), before)
    assert model.active_adapter == "default"
    assert torch.equal(logits(model), logits(two_steps(tiny_adapter, tiny_llama)))
    on_file = load_file(second / faults.WEIGHTS)
    loaded = adapter_tensors(model, "second")
    assert loaded.keys() == on_file.keys()
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == torch.bfloat16 for k, v in on_file.items())
    assert [part.name for part in report.parts] == ["second"]
    assert report.bytes == sum(tensor.nbytes for tensor in on_file.values())
    assert model.load_report is report


def test_modules_to_save_of_a_second_adapter(tmp_path: Path, model: PeftModel, tiny_llama: Path) -> None:
    second = save_adapter(tmp_path / "second", tiny_llama, modules_to_save=["lm_head"])
    load_adapter_on_rank(model, second, "second")
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(two_steps(second, tiny_llama)))


def test_weights_of_the_base_are_found_under_the_layers_of_other_adapters(tmp_path: Path) -> None:
    """Biases of bias="all" lie under another adapter's layers here; peft drops them without a word."""
    base = save_llama(tmp_path / "base", attention_bias=True)
    first = save_adapter(tmp_path / "first", base, target_modules=["q_proj", "k_proj"])
    second = save_adapter(tmp_path / "second", base, target_modules=["v_proj"], bias="all")
    model = load_peft_on_rank(base, first)
    report = load_adapter_on_rank(model, second, "second", strict=False)
    assert {"base-changed-again", "base-weight-replaced"} == {finding.code for finding in report.findings}
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(two_steps(second, base)))


def test_an_embedding_that_was_saved_under_the_layer_of_another_adapter(tmp_path: Path, tiny_llama: Path) -> None:
    model = load_peft_on_rank(tiny_llama, save_adapter(tmp_path / "head", tiny_llama, target_modules=["lm_head"]))
    load_adapter_on_rank(model, save_adapter(tmp_path / "words", tiny_llama, target_modules=["embed_tokens"]), "words")
    model.save_pretrained(tmp_path / "both")
    assert any("embed_tokens.base_layer" in key for key in load_file(tmp_path / "both" / faults.WEIGHTS))
    found = load_peft_on_rank(tiny_llama, tmp_path / "both")
    assert torch.equal(logits(found), logits(model))
    assert found.load_report.ok
    merge_lora_checkpoint(tiny_llama, tmp_path / "both", tmp_path / "merged")
    expected = merge_lora_inplace(found).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(merged[name], value) for name, value in expected.items())


def test_a_taken_name_is_refused(model: PeftModel, other: Path) -> None:
    before = state(model)
    with pytest.raises(AdapterExists, match="hotswap=True"):
        load_adapter_on_rank(model, other, "default")
    assert state(model) == before


def test_a_fault_leaves_the_model_as_it_was(tmp_path: Path, model: PeftModel, other: Path) -> None:
    bad = faults.edited(other, tmp_path / "bad", tensors=faults.transposed("layers.0.self_attn.q_proj.lora_A"))
    before, expected = state(model), logits(model)
    scalings = [dict(m.scaling) for m in model.modules() if hasattr(m, "scaling") and isinstance(m.scaling, dict)]
    with pytest.raises(AdapterError, match="q_proj"):
        load_adapter_on_rank(model, bad, "bad")
    assert state(model) == before
    assert list(model.peft_config) == ["default"]
    assert scalings == [dict(m.scaling) for m in model.modules() if isinstance(getattr(m, "scaling", None), dict)]
    assert torch.equal(logits(model), expected)


def test_a_trainable_one_does_not_make_the_first_trainable(model: PeftModel, other: Path) -> None:
    load_adapter_on_rank(model, other, "second", is_trainable=True)
    trainable = {key for key, p in model.named_parameters() if p.requires_grad}
    assert trainable == {key for key, _ in model.named_parameters() if ".second." in key}


def test_the_model_decides_the_device(model: PeftModel, other: Path, tiny_llama: Path) -> None:
    with pytest.raises((DeviceError, ValueError)):
        load_adapter_on_rank(model, other, "second", device="meta")
    with pytest.raises(AdapterError, match="load_peft_on_rank"):
        load_adapter_on_rank(AutoModelForCausalLM.from_pretrained(tiny_llama), other, "second")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- hot swap


@needs("peft", "0.20")
def test_a_swap_keeps_the_tensors_and_takes_values_and_scaling(model: PeftModel, other: Path, tiny_llama: Path) -> None:
    pointers = {key: p.data_ptr() for key, p in model.named_parameters()}
    report = load_adapter_on_rank(model, other, "default", hotswap=True)
    assert {key: p.data_ptr() for key, p in model.named_parameters()} == pointers
    assert torch.equal(logits(model), logits(two_steps(other, tiny_llama)))
    assert model.peft_config["default"].lora_alpha == 3
    assert report.parts[0].source == str(other)


@needs("peft", "0.20")
@pytest.mark.parametrize("name", ["foo", "de", "self_attn", "layers"])  # peft#3780; "base_model" has a "de", too
@pytest.mark.parametrize("kind", [{}, {"use_dora": True}])
def test_a_swap_leaves_the_adapters_whose_keys_hold_its_name(
    tmp_path: Path, tiny_llama: Path, name: str, kind: dict[str, Any]
) -> None:
    one, two = (save_adapter(tmp_path / str(seed), tiny_llama, seed=seed, **kind) for seed in (1, 2))
    model = load_peft_on_rank(tiny_llama, adapter={name: one, f"{name}bar": one, "fr": one})
    load_adapter_on_rank(model, two, name, hotswap=True)
    for other, folder in {name: two, f"{name}bar": one, "fr": one}.items():
        model.set_adapter(other)
        assert torch.equal(logits(model), logits(two_steps(folder, tiny_llama))), other


@needs("peft", "0.20")
def test_a_smaller_rank_of_a_convolution_is_padded_group_by_group(tmp_path: Path) -> None:
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "groups_width": 4, "layer_type": "x"}
    RegNetModel(RegNetConfig(**sizes)).save_pretrained(tmp_path / "base")
    for r in (8, 4):
        config = LoraConfig(target_modules=["convolution"], r=r, lora_alpha=4, init_lora_weights=False)
        get_peft_model(RegNetModel.from_pretrained(tmp_path / "base"), config).save_pretrained(tmp_path / str(r))
    model = load_peft_on_rank(tmp_path / "base", tmp_path / "8")
    load_adapter_on_rank(model, tmp_path / "4", "default", hotswap=True)
    expected = PeftModel.from_pretrained(RegNetModel.from_pretrained(tmp_path / "base"), tmp_path / "4")
    image = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    assert torch.allclose(model(image).last_hidden_state, expected(image).last_hidden_state, atol=1e-5)


@needs("peft", "0.20")
@pytest.mark.parametrize("kind", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}])
def test_swaps_of_every_kind(tmp_path: Path, tiny_llama: Path, kind: dict[str, Any]) -> None:
    one = save_adapter(tmp_path / "one", tiny_llama, seed=1, **kind)
    two = save_adapter(tmp_path / "two", tiny_llama, seed=2, **kind)
    model = load_peft_on_rank(tiny_llama, one)
    load_adapter_on_rank(model, two, "default", hotswap=True)
    assert torch.equal(logits(model), logits(two_steps(two, tiny_llama)))


@needs("peft", "0.20")
def test_a_swap_takes_the_patterns_of_its_config(tmp_path: Path, tiny_llama: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 5}}
    one, two = (save_adapter(tmp_path / str(seed), tiny_llama, seed=seed, **patterns) for seed in (1, 2))
    model = load_peft_on_rank(one, tiny_llama)
    load_adapter_on_rank(model, two, "default", hotswap=True)
    assert torch.equal(logits(model), logits(two_steps(two, tiny_llama)))


@needs("peft", "0.20")
def test_a_swap_takes_the_patterns_of_parameters(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(**SIZES, **sizes)).save_pretrained(tmp_path / "base")
    fused: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    fused |= {"rank_pattern": {"experts.down_proj": 8}, "alpha_pattern": {"experts.gate_up_proj": 3}}
    one, two = (save_adapter(tmp_path / str(seed), tmp_path / "base", seed=seed, **fused) for seed in (1, 2))
    model = load_peft_on_rank(tmp_path / "base", one)
    load_adapter_on_rank(model, two, "default", hotswap=True)
    assert torch.equal(logits(model), logits(two_steps(two, tmp_path / "base")))


@needs("peft", "0.20")
def test_a_swap_of_an_embedding_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    one, two = (
        save_adapter(tmp_path / str(seed), tiny_llama, seed=seed, target_modules=["embed_tokens"]) for seed in (1, 2)
    )
    model = load_peft_on_rank(tiny_llama, one)
    before = logits(model)
    with pytest.raises(AdapterError, match="peft cannot swap a LoRA on an embedding"):
        load_adapter_on_rank(model, two, "default", hotswap=True)
    assert torch.equal(logits(model), before)


@needs("peft", "0.20")
@pytest.mark.parametrize("rslora", [False, True])
def test_a_smaller_rank_is_swapped_in_and_can_be_saved(tmp_path: Path, tiny_llama: Path, rslora: bool) -> None:
    model = load_peft_on_rank(tiny_llama, save_adapter(tmp_path / "large", tiny_llama, use_rslora=rslora))
    small = save_adapter(tmp_path / "small", tiny_llama, r=2, use_rslora=rslora)
    load_adapter_on_rank(model, small, "default", hotswap=True)
    assert torch.allclose(logits(model), logits(two_steps(small, tiny_llama)), atol=1e-6)
    model.save_pretrained(tmp_path / "saved")
    assert torch.allclose(logits(load_peft_on_rank(tiny_llama, tmp_path / "saved")), logits(model), atol=1e-6)


@needs("peft", "0.20")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("rank", [4, 2])
def test_an_adapter_is_swapped_into_one_that_is_split_over_ranks(tmp_path: Path, tiny_llama: Path, rank: int) -> None:
    model = wrap_fsdp_meta_safe(load_peft_on_rank(tiny_llama, save_adapter(tmp_path / "first", tiny_llama)))
    second = save_adapter(tmp_path / "second", tiny_llama, seed=1, r=rank)
    load_adapter_on_rank(model, second, "default", hotswap=True)  # type: ignore[arg-type]  # it stays a PeftModel
    assert torch.allclose(logits(model), logits(two_steps(second, tiny_llama)), atol=1e-6)


@needs("peft", "0.20")
def test_a_smaller_rank_of_fused_experts_is_padded_expert_by_expert(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(**SIZES, **sizes)).save_pretrained(tmp_path / "base")
    fused: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    large, small = (save_adapter(tmp_path / f"rank {r}", tmp_path / "base", seed=r, r=r, **fused) for r in (4, 2))
    model = load_peft_on_rank(tmp_path / "base", large)
    load_adapter_on_rank(model, small, "default", hotswap=True)  # peft appends all zeros to the last expert's rows
    assert torch.allclose(logits(model), logits(two_steps(small, tmp_path / "base")), atol=1e-6)
    model.save_pretrained(tmp_path / "saved")
    assert torch.allclose(logits(load_peft_on_rank(tmp_path / "base", tmp_path / "saved")), logits(model), atol=1e-6)


_BLOCKS = {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": [], "nblocks": 2, "match_strict": False}
OTHER_LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an aLoRA into a LoRA": ({}, {"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens is \[5, 6\], not None"),
    "a LoRA into an aLoRA": ({"alora_invocation_tokens": [5, 6]}, {}, r"alora_invocation_tokens is None, not \[5, 6\]"),
    "other tokens": (
        {"trainable_token_indices": [1, 2]},
        {"trainable_token_indices": [3, 4]},
        r"trainable_token_indices is \[3, 4\], not \[1, 2\]",
    ),
    "a LoRA of groups": ({}, {"use_qalora": True, "qalora_group_size": 1}, "use_qalora is True, not False"),
    "a smaller rank of blocks": (
        {"use_bdlora": _BLOCKS},
        {"use_bdlora": _BLOCKS, "r": 2},
        r"have blocks \(use_bdlora\)",
    ),
}


@needs("peft", "0.20")
@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_an_adapter_whose_layers_compute_otherwise_has_a_name_of_its_own(
    kind: str, tmp_path: Path, tiny_llama: Path
) -> None:
    first, second, reason = OTHER_LAYERS[kind]
    one = save_adapter(tmp_path / "one", tiny_llama, seed=1, **first)
    two = save_adapter(tmp_path / "two", tiny_llama, seed=2, **second)
    model = load_peft_on_rank(tiny_llama, one)
    before = logits(model)
    with pytest.raises(AdapterError, match=rf"{reason}.*Load it under another name"):
        load_adapter_on_rank(model, two, "default", hotswap=True)
    assert torch.equal(logits(model), before)
    load_adapter_on_rank(model, two, "second")
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(two_steps(two, tiny_llama)))


@needs("peft", "0.20")
def test_a_swap_takes_the_invocation_tokens_of_its_config(tmp_path: Path, tiny_llama: Path) -> None:
    one, two = (
        save_adapter(tmp_path / str(token), tiny_llama, seed=token, alora_invocation_tokens=[token]) for token in (5, 7)
    )
    model = load_peft_on_rank(tiny_llama, one)
    load_adapter_on_rank(model, two, "default", hotswap=True)
    assert torch.equal(logits(model), logits(two_steps(two, tiny_llama)))


@needs("peft", "0.20")
def test_an_interrupted_swap_is_undone(model: PeftModel, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_loading._loading import hot_swap as swap

    before, expected = state(model), logits(model)
    engine = swap._set_scalings

    def interrupted(*arguments: Any) -> None:
        engine(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(swap, "_set_scalings", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_adapter_on_rank(model, other, "default", hotswap=True)
    assert state(model) == before
    assert torch.equal(logits(model), expected)


@needs("peft", "0.20")
def test_a_merged_adapter_is_not_swapped(model: PeftModel, other: Path) -> None:
    model.merge_adapter()
    with pytest.raises(AdapterError, match="unmerge_adapter"):
        load_adapter_on_rank(model, other, "default", hotswap=True)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
        LoHaConfig(target_modules=["q_proj"], init_weights=False),
    ],
)
def test_nothing_is_loaded_beside_a_merged_adapter(tmp_path: Path, tiny_llama: Path, config: PeftConfig) -> None:
    """peft takes it out of the weights while it adds another, and weights are on meta then: it was added twice."""
    for name in ("first", "second"):
        base = AutoModelForCausalLM.from_pretrained(tiny_llama)
        get_peft_model(base, config).save_pretrained(tmp_path / name)
    model = load_peft_on_rank(tiny_llama, tmp_path / "first")
    merge_lora_inplace(model, unload=False)
    before, expected = state(model), logits(model)
    for strict in (True, False):
        with pytest.raises(AdapterError, match=r"\['default'\] are merged.*Call model.unmerge_adapter\(\) first"):
            load_adapter_on_rank(model, tmp_path / "second", "second", strict=strict)
        assert state(model) == before
        assert torch.equal(logits(model), expected)
    model.unmerge_adapter()
    load_adapter_on_rank(model, tmp_path / "second", "second")
    model.set_adapter("second")
    torch.testing.assert_close(logits(model), logits(two_steps(tmp_path / "second", tiny_llama)))
    base = merge_lora_inplace(model, adapter_names=["second"])
    load_adapter_on_rank(load_peft_on_rank(base, tmp_path / "first"), tmp_path / "second", "third")


@needs("peft", "0.20")
def test_an_adapter_alike_is_loaded_beside_one_that_is_merged_elsewhere(
    tiny_llama: Path, tiny_adapter: Path, made: Made
) -> None:
    first, second = (made.adapter(tiny_llama, seed=seed, target_modules=["k_proj"]) for seed in (1, 2))
    model = load_peft_on_rank(tiny_llama, {"default": tiny_adapter, "first": first})
    merge_lora_inplace(model, unload=False)
    expected = logits(model)
    load_adapter_on_rank(model, second, "second")
    assert torch.equal(logits(model), expected)
    assert model.get_base_model().model.layers[0].self_attn.q_proj.merged_adapters == ["default"]
    model.set_adapter("second")
    torch.testing.assert_close(logits(model), logits(two_steps(second, tiny_llama)))


@pytest.mark.filterwarnings("error:strict=False")
def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(tmp_path: Path, model: PeftModel, other: Path) -> None:
    bad = faults.edited(other, tmp_path / "bad", tensors=faults.without("layers.1.self_attn.q_proj.lora_B"))
    before = state(model)
    with pytest.raises(UserWarning, match="strict=False"):
        load_adapter_on_rank(model, bad, "bad", strict=False)
    assert state(model) == before


@needs("peft", "0.20")
@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"r": 8}, r"\[8, 32\]"),
        ({"target_modules": ["q_proj"]}, "the new one does not"),
        ({"target_modules": "all-linear"}, "no such tensor"),
        ({"use_dora": True}, "use_dora"),
        ({"dtype": torch.bfloat16}, "adapter_dtype"),
    ],
)
def test_a_swap_that_does_not_fit_changes_nothing(
    tmp_path: Path, model: PeftModel, tiny_llama: Path, changed: dict[str, Any], word: str
) -> None:
    bad = save_adapter(tmp_path / "bad", tiny_llama, seed=3, **changed)
    before, expected = state(model), logits(model)
    with pytest.raises(AdapterError, match=word):
        load_adapter_on_rank(model, bad, "default", hotswap=True)
    assert state(model) == before
    assert torch.equal(logits(model), expected)


@needs("peft", "0.20")
@pytest.mark.parametrize("argument", [{"strict": False}, {"is_trainable": True}, {"proxy": "x"}])
def test_arguments_without_effect_are_refused(model: PeftModel, other: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        load_adapter_on_rank(model, other, "default", hotswap=True, **argument)


def test_a_swap_needs_an_adapter_of_that_name(model: PeftModel, other: Path) -> None:
    with pytest.raises(AdapterError, match="default"):
        load_adapter_on_rank(model, other, "nobody", hotswap=True)


@needs("peft", "0.20")
def test_a_compiled_forward_sees_the_swap_without_compiling_again(
    tmp_path: Path, model: PeftModel, other: Path
) -> None:
    compiles = 0

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        nonlocal compiles
        compiles += 1
        return graph.forward

    forward = torch.compile(model, backend=count)
    with torch.no_grad():
        forward(input_ids=TOKENS)
        first = compiles
        same_scaling = faults.edited(other, tmp_path / "same", config=lambda c: c.update(lora_alpha=8))
        load_adapter_on_rank(model, same_scaling, "default", hotswap=True)
        swapped = forward(input_ids=TOKENS).logits
    assert compiles == first
    assert torch.allclose(swapped, logits(model), atol=1e-6)


def test_folders_are_not_kept_open(tmp_path: Path, model: PeftModel, other: Path) -> None:
    copied = Path(shutil.copytree(other, tmp_path / "copied"))
    load_adapter_on_rank(model, copied, "second")
    expected = adapter_tensors(model, "second")[
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    ].clone()
    shutil.rmtree(copied)
    now = adapter_tensors(model, "second")["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert torch.equal(now, expected)


def test_save_llama_is_not_rewritten(tmp_path: Path) -> None:
    # the fixtures are shared by the whole session; two saves of one seed are the same bytes
    one, two = save_llama(tmp_path / "one"), save_llama(tmp_path / "two")
    assert [p.read_bytes() for p in sorted(one.glob("*.safetensors"))] == [
        p.read_bytes() for p in sorted(two.glob("*.safetensors"))
    ]


@needs("peft", "0.20")
def test_an_adapter_without_tokens_is_loaded_and_swapped_beside_one_that_trained_some(
    tiny_llama: Path, made: Made
) -> None:
    """peft asks every adapter for tokens where one has any: a KeyError of its own."""
    tokens = made.adapter(tiny_llama, trainable_token_indices=[1, 5, 7])
    plain, swapped = made.adapter(tiny_llama, seed=2), made.adapter(tiny_llama, seed=3)
    wanted = {adapter: logits(load_peft_on_rank(tiny_llama, adapter)) for adapter in (tokens, plain, swapped)}
    model = load_peft_on_rank(tiny_llama, tokens)
    load_adapter_on_rank(model, plain, "plain")
    for name, adapter in (("default", tokens), ("plain", plain), ("default", tokens)):
        model.set_adapter(name)
        assert torch.equal(logits(model), wanted[adapter])
    load_adapter_on_rank(model, swapped, "plain", hotswap=True)
    model.set_adapter("plain")
    assert torch.equal(logits(model), wanted[swapped])


@needs("peft", "0.20")
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_tokens_of_a_module_that_another_adapter_has_a_copy_of_are_refused(
    tmp_path: Path, made: Made, module: str
) -> None:
    """peft loads them, and its forward fails."""
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    saved = made.adapter(base, target_modules=["q_proj"], modules_to_save=[module])
    tokens = made.adapter(base, target_modules=["q_proj"], trainable_token_indices=[1, 5])
    model = load_peft_on_rank(base, saved)
    before, expected = state(model), logits(model)
    with pytest.raises(AdapterError, match=rf"it trains tokens of '[\w.]*{module}'.*Load it with a base of its own"):
        load_adapter_on_rank(model, tokens, "tokens")
    assert state(model) == before
    assert torch.equal(logits(model), expected)
    with pytest.raises(AdapterError, match="it trains tokens of"):
        load_peft_on_rank(base, {"saved": saved, "tokens": tokens})
    assert torch.equal(logits(load_peft_on_rank(base, tokens)), logits(two_steps(tokens, base)))


@needs("peft", "0.20")  # before, it saved all of them
def test_an_adapter_with_the_name_of_modules_is_told_as_peft_saves_others_without_them(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, other: Path
) -> None:
    wanted = {"other": logits(two_steps(other, tiny_llama)), "self_attn": logits(two_steps(tiny_adapter, tiny_llama))}
    model = load_peft_on_rank(tiny_llama, {"self_attn": tiny_adapter, "other": other})
    (finding,) = model.load_report.findings
    assert (finding.code, finding.where) == ("adapter-named-as-module", "adapter 'self_attn'")
    model.save_pretrained(tmp_path / "saved")  # peft#3584
    assert len(load_file(tmp_path / "saved" / "other" / faults.WEIGHTS)) < len(load_file(other / faults.WEIGHTS))
    assert not load_peft_on_rank(tiny_llama, {"self_attn": tiny_adapter}).load_report.findings

    assert "load it under another name" in str(finding)
    model = load_peft_on_rank(tiny_llama, {"attention": tiny_adapter})
    assert not load_adapter_on_rank(model, other, "other").findings
    model.save_pretrained(tmp_path / "renamed")
    for name, key in (("attention", "self_attn"), ("other", "other")):
        assert torch.equal(logits(two_steps(tmp_path / "renamed" / name, tiny_llama)), wanted[key])
    report = load_adapter_on_rank(model, tiny_adapter, "layers")
    assert [finding.code for finding in report.findings] == ["adapter-named-as-module"]
