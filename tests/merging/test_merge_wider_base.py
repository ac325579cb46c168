"""An adapter in 16 bits that brings weights of its base, which is in 32 on disk: the output is the merge in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import load_file

from safe_loading import load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

BRINGS: dict[str, Any] = {
    "embedding and head with factors": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("brings", BRINGS)
def test_the_output_has_the_dtype_of_the_base_and_the_bits_of_the_merge_in_memory(
    tmp_path: Path, brings: str, tied: bool
) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.bfloat16, **BRINGS[brings])
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    merge_lora_inplace(load_peft_on_rank(base, adapter)).save_pretrained(tmp_path / "saved")
    out, saved = on_disk(tmp_path / "out"), on_disk(tmp_path / "saved")
    assert {tensor.dtype for tensor in out.values()} == {torch.float32}
    assert out.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in out.items())
