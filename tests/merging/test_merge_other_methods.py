"""Other methods than LoRA, merged by peft's own code in float64: in memory and on disk to the same bits."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from engines import skip_unless_transformers_takes_peft
from models import save_adapter, save_llama
from peft.tuners.tuners_utils import BaseTunerLayer
from test_lora_update import nearest
from test_merge_lora_checkpoint import TOKENS, loaded, on_disk
from tiny_models import saved as saved_as_published
from transformers import AutoModel, AutoModelForCausalLM, Wav2Vec2Config, Wav2Vec2Model

from safe_loading import (
    AdapterError,
    MergeError,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    verify_merge,
)
from safe_loading._merging.disk import write_tensors

LINEAR = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
SQUARE = {"target_modules": ["q_proj", "o_proj"]}
METHODS: dict[str, Any] = {
    "IA3": peft.IA3Config(**LINEAR, feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(**LINEAR, r=4),
    "LoKr": peft.LoKrConfig(**LINEAR, r=4),
    "OFT": peft.OFTConfig(**LINEAR, oft_block_size=8),
    "BOFT": peft.BOFTConfig(**LINEAR, boft_block_size=8),
    "HRA": peft.HRAConfig(**LINEAR, r=4),
    "VeRA": peft.VeraConfig(**SQUARE, r=4),
    "RandLora": peft.RandLoraConfig(**SQUARE, r=4),
    "FourierFT": peft.FourierFTConfig(**LINEAR, n_frequency=20),
    "MiSS": peft.MissConfig(**LINEAR, r=4),
    "C3A": peft.C3AConfig(**LINEAR, block_size=8),
    "RoAd": peft.RoadConfig(**LINEAR, group_size=8),
    "WaveFT": peft.WaveFTConfig(**LINEAR, n_frequency=20),
    "DeLoRA": peft.DeloraConfig(**LINEAR, r=4),
    "GraLoRA": peft.GraloraConfig(**LINEAR, r=8),
    "PVeRA": peft.PveraConfig(**SQUARE, r=4),
    "Supertuning": peft.SupertuningConfig(**LINEAR, sparsity=0.9),
    "TinyLoRA": peft.TinyLoraConfig(**SQUARE, u=8),
    "VB-LoRA": peft.VBLoRAConfig(**SQUARE, num_vectors=8, vector_length=16),
    "VB-LoRA, saved without its logits": peft.VBLoRAConfig(
        **SQUARE, num_vectors=8, vector_length=16, save_only_topk_weights=True
    ),
    "trainable tokens": peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[1, 5, 7]),
    "a saved head beside": peft.IA3Config(**LINEAR, feedforward_modules=["down_proj"], modules_to_save=["lm_head"]),
}
IN_MEMORY_ALONE: dict[str, Any] = {
    "AdaLoRA": peft.AdaLoraConfig(**LINEAR, init_r=4, target_r=2, total_step=10),
    "SHiRA": peft.ShiraConfig(**LINEAR, r=2, random_seed=0),
    "PSOFT": peft.PsoftConfig(**SQUARE, r=8),
    "UniLoRA": peft.UniLoraConfig(**SQUARE, theta_d_length=64),
    "BEFT": peft.BeftConfig(target_modules=["v_proj"]),
    "HiRA": peft.HiraConfig(**LINEAR, r=4),
    "GLoRA": peft.GloraConfig(**LINEAR),  # on layers with a bias, which it makes of the weight too
    "OSF": peft.OSFConfig(**SQUARE, effective_rank=8),
    "LN tuning": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "LN tuning, a saved head beside": peft.LNTuningConfig(
        target_modules=["input_layernorm"], modules_to_save=["lm_head"]
    ),
}


def saved(folder: Path, base: Path, config: Any, *, seed: int = 0) -> Path:
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(str(folder))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    folder = tmp_path_factory.mktemp("bases")
    model: Any = AutoModelForCausalLM.from_pretrained(save_llama(folder / "zeros", attention_bias=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).save_pretrained(folder / str(dtype))
    return {dtype: folder / str(dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("method", METHODS)
def test_the_merge_on_disk_is_that_in_memory_to_the_bit_and_computes_what_the_adapter_does(
    tmp_path: Path, bases: dict[torch.dtype, Path], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = saved(tmp_path / "adapter", bases[torch.float32], METHODS[method])
    for number, (dtype, base) in enumerate(bases.items()):
        monkeypatch.setattr(write_tensors, "BLOCK_BYTES", 999)
        out = tmp_path / f"out{number}"
        if method == "a saved head beside" and dtype != torch.float32:
            continue  # a head in float32 behind a model in bfloat16 computes nothing
        model = load_peft_on_rank(base, adapter)
        expected = logits(model)
        merge_lora_checkpoint(base, adapter, out)
        merged = merge_lora_inplace(model)
        assert merged.merge_report.ok
        merged.save_pretrained(tmp_path / f"memory{number}")
        found, other = on_disk(out), on_disk(tmp_path / f"memory{number}")
        assert found.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in found.items())
        before = on_disk(base)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in found.items())
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        assert torch.allclose(logits(loaded(out)), expected, atol=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_the_merge_by_peft_is_called_right(tmp_path: Path, bases: dict[torch.dtype, Path], method: str) -> None:
    """It rounds on its way: in float32, in 16 bits with factors in float32, and with factors in 16 bits."""
    adapter = saved(tmp_path / "adapter", bases[torch.float32], METHODS[method])
    for number, (dtype, cast) in enumerate(((torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True))):
        base: Any = AutoModelForCausalLM.from_pretrained(bases[dtype], dtype=dtype)
        model: Any = peft.PeftModel.from_pretrained(base, str(adapter), autocast_adapter_dtype=not cast)
        (model.to(dtype) if cast else model).merge_and_unload().save_pretrained(tmp_path / f"{number}")
        check = verify_merge(bases[dtype], adapter, tmp_path / f"{number}")
        assert check.ok, str(check)
        assert not verify_merge(bases[dtype], adapter, bases[dtype]).ok


def test_a_delta_is_added_in_float64_and_rounded_once(tmp_path: Path, bases: dict[torch.dtype, Path]) -> None:
    base = bases[torch.bfloat16]
    adapter = saved(tmp_path / "adapter", bases[torch.float32], METHODS["LoHa"])
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    found, before = on_disk(tmp_path / "out"), on_disk(base)
    model: Any = load_peft_on_rank(base, adapter).double()
    for path, module in model.named_modules():
        if isinstance(module, peft.tuners.loha.LoHaLayer):
            name = f"{path.removeprefix('base_model.model.')}.weight"
            exact = before[name].double() + module.get_delta_weight("default").detach()
            assert torch.equal(found[name], nearest(exact, torch.bfloat16))


def test_the_bias_that_a_method_changes_is_merged_too(tmp_path: Path, bases: dict[torch.dtype, Path]) -> None:
    base = bases[torch.float32]
    merge_lora_checkpoint(base, saved(tmp_path / "adapter", base, METHODS["IA3"]), tmp_path / "out")
    found, before = on_disk(tmp_path / "out"), on_disk(base)
    assert not torch.equal(
        found["model.layers.0.self_attn.q_proj.bias"], before["model.layers.0.self_attn.q_proj.bias"]
    )


@pytest.mark.parametrize("method", IN_MEMORY_ALONE)
def test_what_is_not_merged_on_disk_is_refused_with_the_way_in_memory(
    tmp_path: Path, bases: dict[torch.dtype, Path], method: str
) -> None:
    base = bases[torch.float32]
    adapter = saved(tmp_path / "adapter", base, IN_MEMORY_ALONE[method])
    with pytest.raises(MergeError, match=r"is not merged on disk\. Load it with load_peft_on_rank, merge it"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    model = load_peft_on_rank(base, adapter)
    expected = logits(model)
    merge_lora_inplace(model).save_pretrained(tmp_path / "out")
    assert torch.allclose(logits(loaded(tmp_path / "out")), expected, atol=1e-5)


SEVERAL: dict[str, Any] = {
    **{name: METHODS[name] for name in ("IA3", "LoHa", "OFT", "BOFT", "HRA", "VeRA", "RoAd", "VB-LoRA")},
    "DoRA": peft.LoraConfig(**LINEAR, r=4, use_dora=True),
    "PiSSA": peft.LoraConfig(**LINEAR, r=4, init_lora_weights="pissa"),
    "OLoRA": peft.LoraConfig(**LINEAR, r=4, init_lora_weights="olora"),
}


def two(tmp_path: Path, base: Path, config: Any, other: Any = None) -> list[Path]:
    first = saved(tmp_path / "first", base, copy.deepcopy(config))
    return [first, saved(tmp_path / "second", base, copy.deepcopy(other or config), seed=1)]


@pytest.mark.parametrize("method", SEVERAL)
def test_two_adapters_are_merged_into_what_the_model_computes_with_both(
    tmp_path: Path, bases: dict[torch.dtype, Path], method: str
) -> None:
    base = bases[torch.float32]
    adapters = two(tmp_path, base, SEVERAL[method])
    model = load_peft_on_rank(base, dict(zip("ab", adapters, strict=True)))
    model.base_model.set_adapter(["a", "b"])
    wanted = logits(model)
    merge_lora_checkpoint(base, adapters, tmp_path / "merged")
    assert verify_merge(base, adapters, tmp_path / "merged").ok
    assert torch.allclose(logits(loaded(tmp_path / "merged")), wanted, atol=1e-5)
    marked = merge_lora_inplace(model, unload=False)
    assert torch.allclose(logits(marked), wanted, atol=1e-5)
    if method in ("OFT", "IA3", "LoHa"):
        marked.unmerge_adapter()
        assert torch.allclose(logits(marked), wanted, atol=1e-4)
    assert torch.allclose(logits(merge_lora_inplace(model)), wanted, atol=1e-4)


@pytest.mark.parametrize("config", [METHODS["C3A"], IN_MEMORY_ALONE["OSF"]], ids=["C3A", "OSF"])
def test_adapters_that_peft_runs_otherwise_than_it_merges_them_are_refused(
    tmp_path: Path, bases: dict[torch.dtype, Path], config: Any
) -> None:
    base = bases[torch.float32]
    adapters = two(tmp_path, base, config)
    model = load_peft_on_rank(base, dict(zip("ab", adapters, strict=True)))
    wanted = logits(model)
    with pytest.raises(MergeError, match=r"computes something else\. Merge one of them"):
        merge_lora_inplace(model, adapter_names=["a", "b"])
    if config in METHODS.values():
        with pytest.raises(MergeError, match=r"computes something else\. Merge one of them"):
            merge_lora_checkpoint(base, adapters, tmp_path / "merged")
    assert torch.allclose(logits(merge_lora_inplace(model, adapter_names=["a"])), wanted, atol=1e-5)


MIXED: dict[str, Any] = {
    "LoRA": peft.LoraConfig(**SQUARE, r=4),
    "DoRA": peft.LoraConfig(**SQUARE, r=4, use_dora=True),
    "LoHa": peft.LoHaConfig(**SQUARE, r=4),
    "OFT": peft.OFTConfig(**SQUARE, oft_block_size=8),
    "LoRA elsewhere": peft.LoraConfig(target_modules=["o_proj", "down_proj"], r=2),
}


def mixed(base: Path, inner: str, outer: str) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_pretrained(base)
        model: Any = peft.get_peft_model(plain, copy.deepcopy(MIXED[inner]), "inner", mixed=True)
        model.add_adapter("outer", copy.deepcopy(MIXED[outer]))
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "hada_", "oft_")):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.mark.parametrize("active", [["inner", "outer"], ["inner"], ["outer"]], ids=" and ".join)
@pytest.mark.parametrize(
    ("inner", "outer"),
    [("LoRA", "LoHa"), ("LoHa", "LoRA"), ("LoRA", "OFT"), ("OFT", "LoRA elsewhere"), ("DoRA", "OFT"), ("LoHa", "OFT")],
)
def test_the_layers_of_a_mixed_model_are_merged_from_the_inside(
    bases: dict[torch.dtype, Path], inner: str, outer: str, active: list[str]
) -> None:
    model = mixed(bases[torch.float32], inner, outer)
    model.set_adapter(active)
    wanted = logits(model)
    marked = merge_lora_inplace(model, unload=False)
    assert torch.allclose(logits(marked), wanted, atol=1e-5)
    marked.unmerge_adapter()
    assert torch.allclose(logits(marked), wanted, atol=1e-4)
    merged = merge_lora_inplace(model)
    assert not any(isinstance(module, BaseTunerLayer) for module in merged.modules())
    assert torch.allclose(logits(merged), wanted, atol=1e-4)


def test_a_mixed_model_that_cannot_be_merged_is_as_it_was(bases: dict[torch.dtype, Path]) -> None:
    model = mixed(bases[torch.float32], "LoHa", "DoRA")
    model.set_adapter(["inner", "outer"])
    wanted = logits(model)
    with pytest.raises(MergeError, match="is a DoRA around adapters of another method"):
        merge_lora_inplace(model)
    assert torch.equal(logits(model), wanted)
    model = mixed(bases[torch.float32], "LoHa", "LoRA")
    model.set_adapter(["inner", "outer"])
    with torch.no_grad():
        model.base_model.model.model.layers[1].self_attn.q_proj.base_layer.hada_w1_a["inner"][0] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MergeError, match="its adapter 'inner' holds NaN"):
        merge_lora_inplace(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if not tensor.isnan().any())


@pytest.mark.parametrize("other", [{"init_lora_weights": "olora"}, {"r": 2}])
def test_starts_that_take_different_parts_out_of_the_base_are_refused(
    tmp_path: Path, bases: dict[torch.dtype, Path], other: dict[str, Any]
) -> None:
    base = bases[torch.float32]
    second = peft.LoraConfig(**{**LINEAR, "r": 4, "init_lora_weights": "pissa", **other})
    adapters = two(tmp_path, base, SEVERAL["PiSSA"], second)
    with pytest.raises(MergeError, match=r"take different parts out of it.*Merge one of them"):
        merge_lora_checkpoint(base, adapters, tmp_path / "merged")
    with pytest.raises(AdapterError, match=r"base-changed-again"):
        load_peft_on_rank(base, dict(zip("ab", adapters, strict=True)))
    merge_lora_checkpoint(base, adapters[1], tmp_path / "merged")
    wanted = logits(load_peft_on_rank(base, adapters[1]))
    assert torch.allclose(logits(loaded(tmp_path / "merged")), wanted, atol=1e-5)


@pytest.mark.parametrize("method", ["AdaLoRA", "SHiRA", "PSOFT", "HiRA", "LoHa"])
def test_a_merge_that_leaves_the_adapters_can_be_undone(
    tmp_path: Path, bases: dict[torch.dtype, Path], method: str
) -> None:
    base = bases[torch.float32]
    adapter = saved(tmp_path / "adapter", base, {**METHODS, **IN_MEMORY_ALONE}[method])
    model: Any = load_peft_on_rank(base, adapter)
    expected = logits(model)
    merge_lora_inplace(model, unload=False)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    model.unmerge_adapter()
    assert torch.allclose(logits(model), expected, atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, tensor in model.unload().state_dict().items():
        assert torch.allclose(tensor, plain[name], atol=1e-5), name


def test_a_layer_that_an_adapter_leaves_alone_is_not_marked(tmp_path: Path, bases: dict[torch.dtype, Path]) -> None:
    """Else ``set_adapter`` would find it merged, and run the base in the place of its own adapter."""
    base = bases[torch.float32]
    one, two = (
        saved(tmp_path / name, base, peft.LoHaConfig(target_modules=[name], r=4)) for name in ("q_proj", "v_proj")
    )
    model: Any = load_peft_on_rank(base, {"one": one, "two": two})
    expected = logits(model)
    merge_lora_inplace(model, adapter_names=["two"], unload=False)
    attention = model.get_base_model().model.layers[0].self_attn
    assert (attention.q_proj.merged_adapters, attention.v_proj.merged_adapters) == ([], ["two"])
    assert {weight.name.rsplit(".", 1)[-1] for weight in model.merge_report.weights} == {"v_proj"}
    merge_lora_inplace(model, adapter_names=["one", "two"], unload=False)
    assert (attention.q_proj.merged_adapters, attention.v_proj.merged_adapters) == (["one"], ["two"])
    assert {weight.adapters for weight in model.merge_report.weights} == {("one",)}
    model.unmerge_adapter()
    assert torch.allclose(logits(model), expected, atol=1e-5)


@pytest.mark.parametrize(
    "config", [peft.LilyConfig(**SQUARE, r=8), peft.PolyConfig(**SQUARE, task_type="CAUSAL_LM")], ids=["LILY", "POLY"]
)
def test_what_depends_on_the_input_is_kept_as_an_adapter(
    tmp_path: Path, bases: dict[torch.dtype, Path], config: peft.PeftConfig
) -> None:
    base = bases[torch.float32]
    adapter = saved(tmp_path / "adapter", base, config)
    reason = rf"{config.peft_type.value} adds depends on the input, so no weight holds it\. Keep the adapter"
    with pytest.raises(MergeError, match=reason):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    model: Any = load_peft_on_rank(base, adapter)
    with pytest.raises(MergeError, match=rf"q_proj: what {reason}\.$"):
        merge_lora_inplace(model)
    tasks = {"task_ids": torch.zeros(1, dtype=torch.long)} if isinstance(config, peft.PolyConfig) else {}
    model(input_ids=torch.arange(3, 11)[None], **tasks)


def test_what_x_lora_weighs_is_merged_one_by_one(tmp_path: Path, bases: dict[torch.dtype, Path]) -> None:
    """Its layers are those of LoRA, and their plain sum is not what the model computes."""
    base = bases[torch.float32]
    names = {name: saved(tmp_path / name, base, peft.LoraConfig(**LINEAR, r=4)) for name in "01"}
    model: Any = AutoModelForCausalLM.from_pretrained(base, use_cache=False)
    config = peft.XLoraConfig(
        hidden_size=model.config.hidden_size, adapters={name: str(path) for name, path in names.items()}
    )
    model = peft.get_peft_model(model, config)
    expected = logits(model)
    for chosen in (None, ["0"], ["default"]):
        with pytest.raises(
            MergeError, match=r"XLORA adds depends on the input.* To merge one of the LoRAs \['0', '1'\]"
        ):
            merge_lora_inplace(model, adapter_names=chosen)
    assert torch.equal(logits(model), expected)
    alone: Any = load_peft_on_rank(base, names["0"])  # what the error advises
    expected = logits(alone)
    assert torch.allclose(logits(merge_lora_inplace(alone)), expected, atol=1e-5)


class Integrated(torch.nn.Sequential):
    """A model into which its library put the layers of peft, as diffusers does."""

    _hf_peft_config_loaded = False

    def add_adapter(self, config: peft.LoraConfig) -> None:
        peft.inject_adapter_in_model(config, self, "default")
        self._hf_peft_config_loaded, self.peft_config = True, {"default": config}

    def active_adapters(self) -> list[str]:
        return ["default"]


@pytest.mark.parametrize("unload", [True, False])
def test_layers_that_another_library_put_in_itself_are_merged(unload: bool) -> None:
    inputs = torch.rand(2, 8)
    model = Integrated(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False))
    expected, before = model(inputs), model[0].get_base_layer().weight.clone()
    merged: Any = merge_lora_inplace(model, unload=unload)
    assert merged is model
    assert torch.allclose(merged(inputs), expected, atol=1e-6)
    assert hasattr(merged, "peft_config") is not unload
    if unload:
        assert [type(layer) for layer in merged] == [torch.nn.Linear] * 2
        merged.add_adapter(peft.LoraConfig(r=2, target_modules=["0"]))
        assert torch.allclose(merged(inputs), expected, atol=1e-6)
    else:
        merged[0].unmerge()
        assert torch.allclose(merged[0].get_base_layer().weight, before, atol=1e-6)


@pytest.mark.parametrize("method", [peft.LoHaConfig, peft.LoraConfig])
def test_a_weight_that_is_computed_at_each_use_is_refused(tmp_path: Path, method: Any) -> None:
    """Wav2Vec2 norms the weight of one convolution; peft's merge leaves that as it is, without a word."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    few = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1}
    ends = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 1, "vocab_size": 40}
    base = tmp_path / "base"
    Wav2Vec2Model(Wav2Vec2Config(**sizes, **few, **ends)).save_pretrained(base)
    model: Any = peft.get_peft_model(AutoModel.from_pretrained(base), method(target_modules=["conv"], r=2))
    model.save_pretrained(tmp_path / "adapter")
    for merge in (
        lambda: merge_lora_checkpoint(base, tmp_path / "adapter", tmp_path / "out"),
        lambda: merge_lora_inplace(load_peft_on_rank(base, tmp_path / "adapter")),
    ):
        with pytest.raises(MergeError, match=r"pos_conv_embed\.conv: its weight is computed from other tensors"):
            merge()


def test_a_prompt_cannot_be_merged_anywhere(tmp_path: Path, bases: dict[torch.dtype, Path]) -> None:
    base = bases[torch.float32]
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(MergeError, match=r"adds inputs and no weights, so it cannot be merged\. Keep the adapter"):
        merge_lora_checkpoint(base, saved(tmp_path / "adapter", base, config), tmp_path / "out")


def test_a_merged_value_that_is_not_finite_leaves_everything_as_it_was(
    tmp_path: Path, bases: dict[torch.dtype, Path]
) -> None:
    base = bases[torch.float32]
    model: Any = load_peft_on_rank(base, saved(tmp_path / "adapter", base, METHODS["LoHa"]))
    layer = model.base_model.model.model.layers[2].mlp.down_proj
    layer.hada_w1_a["default"].data[:] = 1e30
    layer.hada_w2_a["default"].data[:] = 1e30
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MergeError, match=r"everything is as it was.*\n.*down_proj: its merged weight holds NaN"):
        merge_lora_inplace(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_that_transformers_loaded_is_merged(tmp_path: Path, tiny_llama: Path, fields: Any) -> None:
    skip_unless_transformers_takes_peft()
    adapter = save_adapter(tmp_path / "adapter", tiny_llama, **fields)
    second = save_adapter(tmp_path / "second", tiny_llama, seed=3)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.load_adapter(str(adapter), adapter_name="first")
    model.load_adapter(str(second), adapter_name="second")
    model.set_adapter("first")
    expected = model.eval()(TOKENS).logits
    merged = merge_lora_inplace(model)
    assert merged is model
    assert not any(isinstance(module, BaseTunerLayer) for module in merged.modules())
    assert torch.allclose(merged(TOKENS).logits, expected, atol=1e-5)
    wanted = merge_lora_inplace(load_peft_on_rank(adapter, tiny_llama)).state_dict()
    found = merged.state_dict()
    assert found.keys() == wanted.keys()
    if not fields.get("use_dora"):  # of which transformers 5.23 leaves the magnitudes at their start
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    merged.save_pretrained(tmp_path / "merged")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    assert all(torch.equal(again.state_dict()[name], value) for name, value in found.items())
    merged.load_adapter(str(second))  # as into a model that never had one
    merged.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("target", ["v_proj", "embed_tokens"])
def test_an_adapter_of_transformers_own_call_is_merged_into_a_tied_base(tmp_path: Path, target: str) -> None:
    """peft asks the tuner for its targets, to warn of ties, and transformers' call leaves none behind."""
    skip_unless_transformers_takes_peft()
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=[target])
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_adapter(str(adapter))
    merged = merge_lora_inplace(model)
    expected = merge_lora_inplace(load_peft_on_rank(base, adapter))
    assert merged.config.tie_word_embeddings == expected.config.tie_word_embeddings
    found, wanted = merged.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_experts_are_saved_as_on_disk_after_an_adapter_that_transformers_loaded(tmp_path: Path) -> None:
    """Its load leaves the names of an adapter's tensors behind as those of the model, which saving writes."""
    skip_unless_transformers_takes_peft()
    saved_as_published("MixtralForCausalLM", tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.load_adapter(str(adapter))
    merge_lora_inplace(model).save_pretrained(tmp_path / "merged")
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "expected")
    found, expected = on_disk(tmp_path / "merged"), on_disk(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
