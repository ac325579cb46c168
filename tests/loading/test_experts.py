from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from faults import adapters as faults
from models import save_adapter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from safe_loading import (
    AdapterError,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)

pytestmark = [needs("peft", "0.20"), needs("transformers", "5.10")]

LAYERS, EXPERTS, RANK, ALPHA = 2, 3, 4, 8
# What peft does not give the experts of a fused base, as fields of the config.
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "an alpha of one projection": {"alpha_pattern": {"DOWN": 20}},
    "an alpha of one expert": {"alpha_pattern": {r"experts\.1\.DOWN": 20, r"experts\.2\.UP": 3}},
    "an alpha of one layer": {"alpha_pattern": {r"layers\.1\..*": 5}},
    "a rank of one projection": {"rank_pattern": {"UP": 2}},
    "a rank of one expert": {"rank_pattern": {r"experts\.1\.DOWN": 6, r"experts\.0\.UP": 2}},
    "ranks, alphas and rslora": {
        "rank_pattern": {r"experts\.1\.DOWN": 6},
        "alpha_pattern": {r"experts\.0\.UP": 3},
        "use_rslora": True,
    },
    "one layer": {"layers_to_transform": [1]},
    "one layer and rslora": {"layers_to_transform": [0], "use_rslora": True},
    "dropout": {"lora_dropout": 0.05},
    "some experts": {"exclude_modules": r".*experts\.2\..*"},
    "some projections": {"target_modules": ["q_proj", "UP", "DOWN"]},
}
NAMES = {"Mixtral": ("w1", "w3", "w2"), "Qwen3Moe": ("gate_proj", "up_proj", "down_proj")}


def save_mixture(folder: Path, kind: str) -> Path:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    sizes |= {"vocab_size": 101, "intermediate_size": 20, "num_key_value_heads": 2, "num_experts": EXPERTS}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    of_qwen = {"moe_intermediate_size": 20, "num_experts_per_tok": 2, "head_dim": 8}
    sizes |= {"num_local_experts": EXPERTS} if kind == "Mixtral" else of_qwen
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    model.save_pretrained(folder)
    return folder


def with_names(value: Any, kind: str) -> Any:
    if isinstance(value, str):
        return value.replace("UP", NAMES[kind][1]).replace("DOWN", NAMES[kind][2])
    if isinstance(value, list):
        return [with_names(item, kind) for item in value]
    return {with_names(k, kind): with_names(v, kind) for k, v in value.items()} if isinstance(value, dict) else value


def save_expert_adapter(
    folder: Path, base: Path, kind: str, fields: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter with a LoRA for each expert, and what it adds to each tensor of the base, worked out by hand."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    fields = with_names(fields, kind)
    plain = save_adapter(folder / "plain", base, target_modules=["q_proj"], r=RANK, lora_alpha=ALPHA)
    config = LoraConfig(
        **{"target_modules": ["q_proj", *NAMES[kind]], "r": RANK, "lora_alpha": ALPHA, **fields}  # type: ignore[arg-type]
    )
    weights = load_file(base / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    deltas: dict[str, torch.Tensor] = {}
    torch.manual_seed(1)
    for key, weight in weights.items():
        path = key.removesuffix(".weight")
        if not (".experts." in path or path.endswith(("q_proj", ".gate"))) or not check_target_module_exists(
            config, path
        ):
            continue
        rank, alpha = (
            patterns.get(get_pattern_key(list(patterns), path), otherwise)
            for patterns, otherwise in ((config.rank_pattern, RANK), (config.alpha_pattern, ALPHA))
        )
        a, b = torch.randn(rank, weight.shape[1]) / 8, torch.randn(weight.shape[0], rank) / 8
        tensors[f"base_model.model.{path}.lora_A.weight"] = a = a.to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b = b.to(dtype)
        deltas[key] = alpha / (math.sqrt(rank) if config.use_rslora else rank) * (b.double() @ a.double())

    def replace(old: faults.Tensors) -> None:
        old.clear()
        old.update(tensors)

    changes = {"target_modules": sorted(config.target_modules or ()), **fields}
    return faults.edited(plain, folder / "adapter", tensors=replace, config=lambda c: c.update(changes)), deltas


def off(folder: Path, base: Path, deltas: dict[str, torch.Tensor]) -> float:
    """How far the weights in a folder are from the base with the deltas, relative to the largest delta."""
    after = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    before = load_file(base / "model.safetensors")
    assert after.keys() == before.keys()
    largest = max(float(delta.abs().max()) for delta in deltas.values())
    errors = (after[key].double() - value.double() - deltas.get(key, 0) for key, value in before.items())
    return max(float(error.abs().max()) for error in errors) / largest


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("kind", NAMES)
def test_experts_get_the_rank_and_scaling_of_their_own_config(tmp_path: Path, kind: str, fields: str) -> None:
    base = save_mixture(tmp_path / "base", kind)
    adapter, deltas = save_expert_adapter(tmp_path, base, kind, FIELDS[fields])
    assert sum(".experts." in key for key in deltas) >= LAYERS * EXPERTS
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert off(tmp_path / "merged", base, deltas) < 1e-6
    model = load_peft_on_rank(base, adapter)
    tokens = torch.arange(1, 25).reshape(2, 12)
    with torch.no_grad():
        found = model(tokens).logits
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    assert torch.allclose(found, wanted, atol=1e-5)
    merge_lora_inplace(model).save_pretrained(tmp_path / "in memory")
    assert off(tmp_path / "in memory", base, deltas) < 1e-6


def test_scalings_that_16_bits_would_round_widen_the_factors(tmp_path: Path) -> None:
    base = save_mixture(tmp_path / "base", "Mixtral")
    fields = FIELDS["an alpha of one expert"]
    adapter, deltas = save_expert_adapter(tmp_path, base, "Mixtral", fields, torch.bfloat16)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert off(tmp_path / "merged", base, deltas) < 1e-6
    model = load_peft_on_rank(base, adapter)
    assert {finding.code for finding in model.load_report.findings} == {"expert-factors-widened"}
    merge_lora_inplace(model).save_pretrained(tmp_path / "in memory")
    assert off(tmp_path / "in memory", base, deltas) < 1e-6


def test_a_later_adapter_of_single_experts(tmp_path: Path) -> None:
    base = save_mixture(tmp_path / "base", "Mixtral")
    first, _ = save_expert_adapter(tmp_path / "first", base, "Mixtral", {})
    second, deltas = save_expert_adapter(tmp_path / "second", base, "Mixtral", FIELDS["ranks, alphas and rslora"])
    model = load_peft_on_rank(base, {"first": first, "second": second})
    merge_lora_inplace(model, adapter_names=["second"]).save_pretrained(tmp_path / "in memory")
    assert off(tmp_path / "in memory", base, deltas) < 1e-6


def test_dropout_is_a_finding_and_refused_where_it_would_be_trained_with(tmp_path: Path) -> None:
    base = save_mixture(tmp_path / "base", "Mixtral")
    adapter, _ = save_expert_adapter(tmp_path, base, "Mixtral", {"lora_dropout": 0.05})
    model = load_peft_on_rank(base, adapter)
    assert [finding.code for finding in model.load_report.findings] == ["lora-dropout-ignored"]
    with pytest.raises(AdapterError, match="lora_dropout"):
        load_peft_on_rank(base, adapter, is_trainable=True)


@pytest.mark.parametrize("kind", NAMES)
def test_routers_alone_have_no_dropout_either(tmp_path: Path, kind: str) -> None:
    base = save_mixture(tmp_path / "base", kind)
    fields = {"target_modules": ["q_proj", "gate"], "lora_dropout": 0.05}
    adapter, deltas = save_expert_adapter(tmp_path, base, kind, fields)
    assert sum(key.endswith(".gate.weight") for key in deltas) == LAYERS
    model = load_peft_on_rank(base, adapter)
    assert [finding.code for finding in model.load_report.findings] == ["lora-dropout-ignored"]
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert off(tmp_path / "merged", base, deltas) < 1e-6
    merge_lora_inplace(model).save_pretrained(tmp_path / "in memory")
    assert off(tmp_path / "in memory", base, deltas) < 1e-6
    with pytest.raises(AdapterError, match="lora_dropout"):
        load_peft_on_rank(base, adapter, is_trainable=True)


@pytest.mark.parametrize("part", ["experts.1.w2.", "experts.1.w1."])
def test_an_expert_that_the_config_names_and_the_file_lacks_is_refused(tmp_path: Path, part: str) -> None:
    base = save_mixture(tmp_path / "base", "Mixtral")
    adapter, _ = save_expert_adapter(tmp_path, base, "Mixtral", {"use_rslora": True})
    cut = faults.edited(adapter, tmp_path / "cut", tensors=faults.without(part))
    with pytest.raises(AdapterError):
        load_peft_on_rank(base, cut)
    with pytest.raises(AdapterError):
        merge_lora_checkpoint(base, cut, tmp_path / "merged")


# Dense and shared layers have the names of experts, for which peft takes them (peft#3711).
_SHARED, _DENSE = "model.layers.1.mlp.shared_experts", "model.layers.0.mlp"
_LEAVES = ("gate_proj", "up_proj", "down_proj")
_BARE = {"target_modules": ["q_proj", *_LEAVES], "peft_version": "0.18.1"}
BESIDE_EXPERTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "shared, by full names": (
        {"target_modules": [f"{_SHARED}.{leaf}" for leaf in _LEAVES]},
        [f"{_SHARED}.{leaf}" for leaf in _LEAVES],
    ),
    "shared, by their last parts": (
        {"target_modules": ["q_proj", "shared_experts.down_proj"]},
        [f"{_SHARED}.down_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"],
    ),
    "shared, by a pattern": ({"target_modules": r".*shared_experts\.up_proj"}, [f"{_SHARED}.up_proj"]),
    "shared, with routers": (
        {"target_modules": ["gate", "shared_experts.up_proj"]},
        [f"{_SHARED}.up_proj", "model.layers.1.mlp.gate"],
    ),
    "dense": ({"target_modules": [f"{_DENSE}.up_proj"]}, [f"{_DENSE}.up_proj"]),
    "one layer": ({"target_modules": ["down_proj"], "layers_to_transform": [0]}, [f"{_DENSE}.down_proj"]),
    "a peft that converts no config": (
        _BARE,
        [
            *(f"{owner}.{leaf}" for owner in (_DENSE, _SHARED) for leaf in _LEAVES),
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.self_attn.q_proj",
        ],
    ),
}


def save_beside_experts(folder: Path, base: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter of modules beside the experts, and what it adds to each tensor of the base, worked out by hand."""
    fields, paths = BESIDE_EXPERTS[kind]
    weights, tensors, deltas = load_file(base / "model.safetensors"), {}, {}
    torch.manual_seed(1)
    for path in paths:
        rows, columns = weights[f"{path}.weight"].shape
        a, b = torch.randn(RANK, columns) / 8, torch.randn(rows, RANK) / 8
        tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
        deltas[f"{path}.weight"] = ALPHA / RANK * (b.double() @ a.double())

    def replace(old: faults.Tensors) -> None:
        old.clear()
        old.update(tensors)

    plain = save_adapter(folder / "plain", base, target_modules=["q_proj"], r=RANK, lora_alpha=ALPHA)
    return faults.edited(plain, folder / "adapter", tensors=replace, config=lambda c: c.update(fields)), deltas


@pytest.fixture
def with_shared(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"vocab_size": 101, "intermediate_size": 24, "num_key_value_heads": 2, "n_routed_experts": EXPERTS}
    sizes |= {"moe_intermediate_size": 20, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1}
    torch.manual_seed(0)
    Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, topk_group=1)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", BESIDE_EXPERTS)
def test_layers_with_the_names_of_experts_are_none(tmp_path: Path, with_shared: Path, kind: str) -> None:
    adapter, deltas = save_beside_experts(tmp_path, with_shared, kind)
    assert check_checkpoint(adapter).ok
    merge_lora_checkpoint(with_shared, adapter, tmp_path / "merged")
    assert off(tmp_path / "merged", with_shared, deltas) < 1e-6
    model = load_peft_on_rank(with_shared, {"first": adapter})
    load_adapter_on_rank(model, adapter, "second")
    merge_lora_inplace(model, adapter_names=["second"]).save_pretrained(tmp_path / "in memory")
    assert off(tmp_path / "in memory", with_shared, deltas) < 1e-6


def test_a_file_without_the_experts_that_its_config_adapts_is_refused(tmp_path: Path, with_shared: Path) -> None:
    adapter, deltas = save_beside_experts(tmp_path, with_shared, "a peft that converts no config")
    newer = faults.edited(adapter, tmp_path / "newer", config=lambda c: c.update(peft_version="0.21.2"))
    with pytest.raises(AdapterError, match="the file has no tensor of any") as refused:
        load_peft_on_rank(with_shared, newer)
    assert len(refused.value.problems) == 1
    field = "{" + str(refused.value).split("put ")[1].split(" into")[0] + "}"
    without = faults.edited(newer, tmp_path / "without", config=lambda c: c.update(json.loads(field)))
    merge_lora_checkpoint(with_shared, without, tmp_path / "merged")
    assert off(tmp_path / "merged", with_shared, deltas) < 1e-6


def test_a_rank_that_the_config_contradicts_is_refused(tmp_path: Path) -> None:
    base = save_mixture(tmp_path / "base", "Mixtral")
    adapter, _ = save_expert_adapter(tmp_path, base, "Mixtral", {})
    wrong = faults.edited(adapter, tmp_path / "wrong", config=lambda c: c.update(rank_pattern={"w2": 2}))
    with pytest.raises(AdapterError, match=r"the config gives them the rank 2.*correct r and rank_pattern"):
        load_peft_on_rank(base, wrong)
    corrected = faults.edited(wrong, tmp_path / "corrected", config=lambda c: c.update(rank_pattern={}))
    ours, plain = load_peft_on_rank(base, corrected).state_dict(), load_peft_on_rank(base, adapter).state_dict()
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_the_nearest_names_of_an_expert_s_are_none_of_peft_s_own(tmp_path: Path) -> None:
    base = save_mixture(tmp_path / "base", "Qwen3Moe")
    plain, _ = save_expert_adapter(tmp_path, base, "Qwen3Moe", {})

    def add(tensors: faults.Tensors) -> None:
        own = {key: value.clone() for key, value in tensors.items() if ".experts.0.gate_proj." in key}
        tensors |= {key.replace(".0.gate_proj.", ".w1."): value for key, value in own.items()}

    adapter = faults.edited(plain, tmp_path / "with more", tensors=add)
    with pytest.raises(AdapterError, match=r"no module '[\w.]+experts\.w1' \(nearest: ") as refused:
        load_peft_on_rank(adapter, base)
    assert ".lora_" not in str(refused.value).split("nearest: ")[1].split(")")[0]
