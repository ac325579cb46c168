"""BitNet's bases, packed and rounded in the forward pass: planned as they load, and merged into plain weights alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import pack_weights

from safe_loading import (
    MergeError,
    Workload,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    plan_device_map,
    predict_memory,
)
from safe_loading._model.quantized.sizes import bytes_of

# As published: microsoft's bitnet-b1.58-2B-4T and its master weights, and Llama3-8B-1.58 of HF1BitLLM.
KINDS: dict[str, dict[str, Any]] = {
    "packed, unpacked by the load": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "packed": {},
    "rounded in each forward pass": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
TOKENS = torch.arange(24).view(2, 12) % 101
WITH_ADAPTERS = ("packed, unpacked by the load", "rounded in each forward pass")
SCALE = 0.0625  # so that a merge that forgets it is far off


@pytest.fixture(autouse=True)
def without_a_compiler() -> Iterator[None]:
    """transformers unpacks the weights with compiled functions, which leave traces in the environment."""
    with torch.compiler.set_stance("force_eager"):
        yield


def save_bitnet(folder: Path, kind: str) -> Path:
    """Save a Llama whose layers are BitNet's of one kind, in one file."""
    plain = save_llama(folder.with_name("plain"), torch.bfloat16, hidden_size=64, intermediate_size=128)
    tensors: dict[str, torch.Tensor] = {}
    for file in plain.glob("*.safetensors"):
        tensors |= load_file(file)
    if KINDS[kind].get("quantization_mode") != "online":
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            signs = tensors[name].float().sign() * (tensors[name].float().abs() > 0.01)
            tensors[name] = pack_weights(signs)
            divides = KINDS[kind].get("linear_class") is None
            tensors[f"{name}_scale"] = torch.tensor([1 / SCALE if divides else SCALE], dtype=torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", "modules_to_not_convert": None, **KINDS[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_and_a_forecast_count_what_transformers_loads(tmp_path: Path, kind: str) -> None:
    base = save_bitnet(tmp_path / "base", kind)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    loaded = sum(map(bytes_of, [*model.parameters(), *model.buffers()]))
    assert check_checkpoint(base).findings == ()
    (use,) = plan_device_map(base, {"cpu": "1GB"}, workload=Workload.generate(1, 16)).devices
    assert use.weights + use.buffers == loaded
    assert predict_memory(base, Workload.weights_only()).components["weights"] <= loaded
    assert predict_memory(base, Workload.generate(1, 16)).allocated_peak_bytes > loaded


def adapted(base: Path, adapter: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a base with its adapter, the logits of both, and of the base alone."""
    model: Any = load_peft_on_rank(base, adapter).eval()
    with torch.no_grad(), model.disable_adapter():
        without = model(TOKENS).logits.double()
    with torch.no_grad():
        return model, model(TOKENS).logits.double(), without


@pytest.mark.parametrize("kind", WITH_ADAPTERS)
def test_a_merge_is_refused_but_into_plain_layers_which_compute_the_same(tmp_path: Path, kind: str) -> None:
    base = save_bitnet(tmp_path / "base", kind)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.bfloat16)
    model, expected, without = adapted(base, adapter)
    with pytest.raises(MergeError, match=r"AutoBitLinear rounds or scales its weight .* dequantize=True"):
        merge_lora_inplace(model)
    merged: Any = merge_lora_inplace(model, dequantize=True)
    assert type(merged.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    with torch.no_grad():
        logits = merged(TOKENS).logits.double()
    added = (expected - without).norm()
    assert added > 0.1 * without.norm()
    # the plain layers do not round their input to 8 bits
    assert (logits - expected).norm() < 0.1 * added
    merged.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "packed" in kind])
def test_a_merge_on_disk_decodes_packed_weights(tmp_path: Path, kind: str) -> None:
    base = save_bitnet(tmp_path / "base", kind)
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "plain", dtype=torch.bfloat16)
    with pytest.raises(MergeError, match="dequantize=True"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in written if name.endswith("weight_scale")]
    assert check_checkpoint(tmp_path / "out").ok
    if kind in WITH_ADAPTERS:
        merged = merge_lora_inplace(load_peft_on_rank(base, adapter), dequantize=True).state_dict()
        assert all(torch.equal(tensor, merged[name]) for name, tensor in written.items())
    else:  # peft has no layer for BitLinear
        merge_lora_checkpoint(base, _of_zeros(adapter, tmp_path / "zeros"), tmp_path / "same", dequantize=True)
        engine: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "same", dtype=torch.bfloat16)
        layer, ours = engine.model.layers[1].mlp.down_proj, plain.model.layers[1].mlp.down_proj
        assert type(layer).__name__ == "BitLinear"
        assert torch.equal(ours.weight, _unpacked(layer.weight) * SCALE)


def _of_zeros(adapter: Path, folder: Path) -> Path:
    """Copy an adapter that adds nothing."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(zeros, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Unpack as the format says: the rows of a quarter have the same two bits."""
    return torch.cat([((packed >> shift) & 3).to(torch.bfloat16) - 1 for shift in (0, 2, 4, 6)])


def test_plain_master_weights_are_refused_on_disk_with_a_road(tmp_path: Path) -> None:
    base = save_bitnet(tmp_path / "base", "rounded in each forward pass")
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.bfloat16)
    for options in ({}, {"dequantize": True}):
        with pytest.raises(MergeError, match=r"Load it, call merge_lora_inplace\(dequantize=True\)"):
            merge_lora_checkpoint(base, adapter, tmp_path / "out", **options)
