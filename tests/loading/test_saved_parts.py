"""Folders of a part of a model that was saved alone: no auto class knows its type, and its own class loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import save_adapter
from peft import PeftModel

from safe_loading import (
    CheckpointError,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    meta_model,
    plan_device_map,
    verify_merge,
)

SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "hidden_size": 32, "block_size": 32}
WORDS = {"input_vocab_size": 61, "output_vocab_size": 61}
CODE2WAV: dict[str, Any] = {
    "codebook_size": 16,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_quantizers": 2,
    "decoder_dim": 32,
    "upsample_rates": (2, 2),
    "upsampling_ratios": (2, 2),
}
# The second has no model type at all.
PARTS: dict[str, dict[str, Any]] = {"BarkSemanticModel": {**SIZES, **WORDS}, "Qwen3OmniMoeCode2Wav": CODE2WAV}


def save_part(name: str, folder: Path) -> Any:
    """Save the part with random weights, and return its class."""
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    kind(kind.config_class(**PARTS[name])).save_pretrained(folder)
    return kind


@pytest.mark.parametrize("name", PARTS)
def test_a_saved_part_is_loaded_merged_planned_and_checked(tmp_path: Path, name: str) -> None:
    kind = save_part(name, base := tmp_path / "base")
    adapter = save_adapter(
        tmp_path / "adapter", base, auto_class=kind, target_modules="all-linear", task_type=None, inference_mode=True
    )
    report = check_checkpoint(base)
    assert report.ok, str(report)
    assert not report.findings, str(report)
    assert type(meta_model(base)) is kind

    plain = kind.from_pretrained(base)
    plan = plan_device_map(base, {0: "1GB"}, verify=False)
    held = [*plain.parameters(), *plain.buffers()]
    assert sum(use.used for use in plan.devices) == sum(each.numel() * each.itemsize for each in held)

    theirs = PeftModel.from_pretrained(plain, adapter).state_dict()
    roads: list[dict[str, Any]] = [{}, {"auto_class": kind}, {"base_kwargs": {"attn_implementation": "eager"}}]
    for options in roads:
        ours = load_peft_on_rank(base, adapter, **options)
        assert type(ours.get_base_model()) is kind
        assert ours.state_dict().keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in ours.state_dict().items())

    merged = merge_lora_inplace(load_peft_on_rank(base, adapter)).state_dict()
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    on_disk = kind.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(value, on_disk[key]) for key, value in merged.items())
    assert verify_merge(base, adapter, tmp_path / "merged").ok


def test_a_type_that_the_named_class_does_not_have_stays_unknown(tmp_path: Path) -> None:
    save_part("BarkSemanticModel", tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    for named in (["BarkFineModel"], ["no such class"], ["PreTrainedConfig"], ["models"]):
        path.write_text(json.dumps({**document, "architectures": named}))
        with pytest.raises(CheckpointError, match="does not know the model type 'semantic'"):
            meta_model(tmp_path)
