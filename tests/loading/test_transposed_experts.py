"""LoRAs of gpt-oss's experts, which hold their columns first, gate and up by turns, against updates added by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from faults import adapters as faults
from models import save_adapter
from safetensors.torch import load_file
from test_expert_layouts import COMMON, Adapter, logits, off, weights_in
from test_expert_layouts import save_base as save_base_of
from transformers import AutoConfig, AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)

pytestmark = [needs("peft", "0.20"), needs("transformers", "5.10")]

EXPERTS, RANK, ALPHA = 3, 2, 5
# "single" as tinker-cookbook makes them for vLLM, "listed" as unsloth trains 4 bits.
LAYOUTS = ("fused", "fused by peft 0.17", "grouped", "stacked", "single", "listed", "listed in part")


def save_base(folder: Path, **sizes: Any) -> Path:
    torch.manual_seed(0)
    own = {"num_local_experts": EXPERTS, "layer_types": ["sliding_attention", "full_attention"], **sizes}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **{**COMMON, **own})).save_pretrained(folder)
    return folder


def single(key: str, own: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """The factors of each module of each expert: of gate_up_proj, gate has the even rows and up the odd ones."""
    modules = {"down_proj": (a, b)}
    if own == "gate_up_proj":
        half = RANK // 2
        modules = {"gate_proj": (a[..., :half], b[:, :half, ::2]), "up_proj": (a[..., half:], b[:, half:, 1::2])}
    return {
        f"{key}.{expert}.{name}.lora_{factor}.weight": each[expert].T.contiguous()
        for name, factors in modules.items()
        for factor, each in zip("AB", factors, strict=True)
        for expert in range(EXPERTS)
    }


def save_expert_adapter(folder: Path, base: Path, layout: str) -> Adapter:
    truth, tensors = load_file(base / "model.safetensors"), {}
    torch.manual_seed(1)
    for name in [name for name in truth if name.endswith(("gate_up_proj", "down_proj"))]:
        columns, rows = truth[name].shape[1:]
        a, b = torch.randn(EXPERTS, columns, RANK) / 8, torch.randn(EXPERTS, RANK, rows) / 8
        if layout == "listed in part":  # one expert of each layer, and of its down_proj another one
            b[1 if name.endswith("gate_up_proj") else 0] = b[2] = 0.0
        if layout == "single" and name.endswith("gate_up_proj"):  # of its factors, each takes one half
            b[:, : RANK // 2, 1::2] = b[:, RANK // 2 :, ::2] = 0.0
        truth[name] = (truth[name].double() + ALPHA / RANK * (a.double() @ b.double())).float()
        owner, _, own = name.rpartition(".")
        key = f"base_model.model.{owner}"
        if layout == "grouped":
            grouped = "lora_gate_and_up" if own == "gate_up_proj" else "lora_down"
            tensors |= {f"{key}.{grouped}_A": a, f"{key}.{grouped}_B": b}
            continue
        if layout == "stacked":
            tensors[f"{key}.{own}.lora_A.weight"] = a.transpose(1, 2).contiguous()
            tensors[f"{key}.{own}.lora_B.weight"] = b.transpose(1, 2).contiguous()
            continue
        if layout == "single":
            tensors |= single(key, own, a, b)
            continue
        if layout.startswith("listed"):
            for expert in (one for one in range(EXPERTS) if layout == "listed" or b[one].any()):
                tensors[f"{key}.{own}s.{expert}.lora_A.weight"] = a[expert].T.contiguous()
                tensors[f"{key}.{own}s.{expert}.lora_B.weight"] = b[expert].T.contiguous()
            continue
        key += ".base_layer" if own == "gate_up_proj" else ""
        tensors[f"{key}.lora_A.weight"] = a.transpose(1, 2).reshape(-1, columns).contiguous()
        tensors[f"{key}.lora_B.weight"] = b.permute(2, 1, 0).reshape(rows, -1).contiguous()
    config: dict[str, Any] = {"target_modules": [], "r": RANK, "lora_alpha": ALPHA, "peft_version": "0.19.1"}
    if layout == "grouped":
        config["target_modules"] = ["experts"]
    elif layout == "stacked":
        config["target_modules"] = ["gate_up_proj", "down_proj"]
    elif layout == "single":
        config |= {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
        config |= {"rank_pattern": {"down_proj": RANK}, "r": RANK // 2, "alpha_pattern": {"down_proj": ALPHA}}
        config |= {"lora_alpha": ALPHA / 2}
    elif layout.startswith("listed"):
        config["target_modules"] = sorted({".".join(key.split(".")[-4:-2]) for key in tensors})
    else:
        config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    config |= {"peft_version": "0.17.1"} if layout == "fused by peft 0.17" else {}
    plain = save_adapter(folder / "plain", base, target_modules=["q_proj"], r=RANK)
    edited = faults.edited(plain, folder / "adapter", tensors=lambda _: tensors, config=lambda c: c.update(config))
    return Adapter(edited, truth)


@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 32}, {"intermediate_size": 16}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_adds_to_the_right_columns(tmp_path: Path, layout: str, sizes: dict[str, Any]) -> None:
    base = save_base(tmp_path / "base", **sizes)
    adapter = save_expert_adapter(tmp_path, base, layout)
    merge_lora_checkpoint(base, adapter.folder, tmp_path / "merged")
    assert off(weights_in(tmp_path / "merged"), adapter) < 1e-6
    model = load_peft_on_rank(adapter.folder, base)
    wanted = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert torch.allclose(logits(model), wanted, atol=1e-5)
    load_adapter_on_rank(model, adapter.folder, "later")
    merge_lora_inplace(model, adapter_names=["later"]).save_pretrained(tmp_path / "in memory")
    assert off(weights_in(tmp_path / "in memory"), adapter) < 1e-6


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_fused_experts_whose_module_is_named_load_once_their_parameters_are(tmp_path: Path, family: str) -> None:
    """As prime-rl writes gpt-oss for vLLM; peft refuses the module."""
    base = save_base(tmp_path / "base") if family == "gpt_oss" else save_base_of(tmp_path / "base", family)
    named: dict[str, Any] = {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    wanted = save_adapter(tmp_path / "wanted", base, **named)
    change = {"target_modules": ["experts", "q_proj"], "target_parameters": None}
    adapter = faults.edited(wanted, tmp_path / "adapter", config=lambda c: c.update(change))
    with pytest.raises(AdapterError, match='take "experts" out of target_modules, and write the parameters into'):
        load_peft_on_rank(base, adapter)
    assert {found.code for found in check_checkpoint(adapter).findings} == {"load-refused"}
    again = faults.edited(adapter, tmp_path / "again", config=lambda c: c.update(named))
    assert torch.equal(logits(load_peft_on_rank(base, again)), logits(load_peft_on_rank(base, wanted)))
