"""Merges into bases that compressed-tensors packed, before and after the first forward pass has decoded them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed import WHOLE, decoded, load, logits, save_compressed
from peft import LoHaConfig, PeftModel, get_peft_model

from safe_loading import MergeError, load_peft_on_rank, merge_lora_inplace


@pytest.fixture(scope="module", params=WHOLE)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a base that peft can attach to as it is loaded, and an adapter."""
    return save_compressed(tmp_path_factory.mktemp(request.param), request.param)


def merged_plain(base: Path, adapter: Path) -> Any:
    """Return the base decoded while it is loaded, with the adapter merged."""
    return merge_lora_inplace(load_peft_on_rank(base, adapter, base_kwargs={"quantization_config": decoded()}))


@pytest.mark.parametrize("ran", [False, True], ids=["before a forward", "after a forward"])
def test_a_dequantized_model_is_the_one_that_is_decoded_while_loading(folders: Any, ran: bool, tmp_path: Path) -> None:
    base, adapter = folders
    model = load_peft_on_rank(base, adapter)
    if ran:
        logits(model)
    merged, expected = merge_lora_inplace(model, dequantize=True), merged_plain(base, adapter)
    held, wanted = dict(merged.named_parameters()), dict(expected.named_parameters())
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], value) for name, value in wanted.items())
    assert torch.equal(logits(merged), logits(expected))
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(expected))


def test_codes_of_now_are_refused_and_the_advice_works(folders: Any) -> None:
    base, adapter = folders
    model = load_peft_on_rank(base, adapter)
    with pytest.raises(MergeError, match=r"holds codes until the model's first forward pass .* dequantize=True"):
        merge_lora_inplace(model)
    assert torch.equal(logits(model), logits(PeftModel.from_pretrained(load(base), adapter)))


def test_decoded_weights_are_merged_as_plain_ones(folders: Any) -> None:
    base, adapter = folders
    model = load_peft_on_rank(base, adapter)
    logits(model)
    merged, expected = merge_lora_inplace(model), merged_plain(base, adapter)
    held = dict(merged.named_parameters())
    assert all(torch.equal(held[name], value) for name, value in expected.named_parameters())


def test_another_method_is_merged_once_a_forward_pass_has_decoded_the_weights(folders: Any, tmp_path: Path) -> None:
    base = folders[0]
    get_peft_model(load(base), LoHaConfig(target_modules=["q_proj"], r=2, init_weights=False)).save_pretrained(tmp_path)
    model = load_peft_on_rank(base, tmp_path)
    with pytest.raises(MergeError, match="Run a forward pass before the merge"):
        merge_lora_inplace(model)
    logits(model)
    held = dict(merge_lora_inplace(model).named_parameters())
    assert all(torch.equal(held[name], value) for name, value in merged_plain(base, tmp_path).named_parameters())
