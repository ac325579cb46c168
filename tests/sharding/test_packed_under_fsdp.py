"""Folders that bitsandbytes packed, under FSDP: loaded on every rank, then wrapped; from meta and in 8 bits refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter

from safe_loading import ArgumentError, CheckpointError, load_peft_on_rank, meta_model, wrap_fsdp_meta_safe

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from packed import packing, save_packed, save_plain

TOKENS = torch.arange(24).view(2, 12) % 101


def step(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss of a training step and its gradients."""
    loss = model.train()(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.detach(), [getattr(gradient, "_local_tensor", gradient) for gradient in found]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "nf4 as bfloat16"])
def test_a_packed_folder_is_loaded_and_then_wrapped(tmp_path: Path, kind: str, width: int) -> None:
    plain = save_plain(tmp_path / "plain", width)
    base, adapter = save_packed(plain, tmp_path / "base", kind), save_adapter(tmp_path / "adapter", plain)
    with pytest.raises(
        ArgumentError, match=r"with from_pretrained on every rank, then call wrap_fsdp_meta_safe\(model\)"
    ):
        meta_model(base)
    with pytest.raises(CheckpointError, match=r"Load the folder on every rank with from_pretrained"):
        wrap_fsdp_meta_safe(meta_model(plain, quantization_config=packing(kind)), base)
    loss, gradients = step(load_peft_on_rank(adapter, base, is_trainable=True))
    for version in (1, 2) if kind == "nf4 as bfloat16" else (2,):
        model = wrap_fsdp_meta_safe(load_peft_on_rank(adapter, base, is_trainable=True), version=version)
        found, own = step(model)
        assert torch.equal(found, loss)
        if version == 2:
            assert len(own) == len(gradients)
            assert all(torch.equal(*pair) for pair in zip(own, gradients, strict=True))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
def test_eight_bits_are_refused_with_a_road_that_works(tmp_path: Path, version: Any) -> None:
    plain = save_plain(tmp_path / "plain")
    adapter = save_adapter(tmp_path / "adapter", plain)
    model = load_peft_on_rank(adapter, plain, base_kwargs={"quantization_config": packing("int8")})
    with pytest.raises(ArgumentError, match=r"14 weights in 8 bits.*q_proj.*Load the base in 4 bits"):
        wrap_fsdp_meta_safe(model, version=version)
    assert torch.isfinite(model(TOKENS).logits).all()
    road = load_peft_on_rank(
        adapter, plain, is_trainable=True, base_kwargs={"quantization_config": packing("nf4 as bfloat16")}
    )
    assert torch.isfinite(step(wrap_fsdp_meta_safe(road, version=version))[0])
