"""Right merges of every class that tests/tiny_models.py can make, however they were made, raise no alarm."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import save_adapter
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from test_merge_every_class import CASES, CHOSEN, expected_refusal
from test_verify_merge import codes, verdicts
from tiny_models import saved

from safe_loading import merge_lora_checkpoint, verify_merge


def by_peft(model: PeftModel) -> Any:
    """Plain peft, with the adapter in float32."""
    return model.merge_and_unload()


def by_peft_in_16_bits(model: PeftModel) -> Any:
    """Plain peft, with all in the dtype of the base."""
    return model.to(torch.bfloat16).merge_and_unload()


def by_sums(model: PeftModel, *, wide: bool) -> Any:
    """Weight by weight: all in 16 bits, as axolotl does, or a sum in float32 that is rounded once, as unsloth does."""
    dtype = torch.float32 if wide else torch.bfloat16
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
        weight: torch.Tensor = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
        delta = layer.get_delta_weight("default")  # type: ignore[operator]
        weight.data = (weight.data.to(dtype) + delta.to(dtype)).to(torch.bfloat16)
    return model.unload()


MERGERS: dict[str, Callable[[PeftModel], Any]] = {
    "peft": by_peft,
    "peft in 16 bits": by_peft_in_16_bits,
    "all in 16 bits": lambda model: by_sums(model, wide=False),
    "a float32 sum, rounded once": lambda model: by_sums(model, wide=True),
}

# peft merges the head's LoRA into the embeddings that are tied to it, too.
TRAINS_THE_TIE = ("BlipForConditionalGeneration",)
# CpmAnt has a tie flag and ties nothing; peft takes the flag back.
FIRST = [*CHOSEN, ("CpmAntForCausalLM", False)]


@pytest.mark.parametrize(
    ("name", "dora"),
    [*FIRST, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in FIRST)],
)
def test_right_merges_raise_no_alarm(tmp_path: Path, name: str, dora: bool) -> None:
    kind: Any = getattr(transformers, name)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved(name, tmp_path / "float32")
        kind.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16).save_pretrained(base, max_shard_size="60KB")
        refusal = None
        try:
            config: dict[str, Any] = {"target_modules": "all-linear", "task_type": None, "use_dora": dora}
            save_adapter(adapter, base, auto_class=kind, **config)
        except ValueError as error:
            refusal = str(error)
        if refusal is not None:
            assert expected_refusal(name, refusal, dora=dora), refusal
            return
        merge_lora_checkpoint(base, adapter, tmp_path / "ours")
        check = verify_merge(base, adapter, tmp_path / "ours")
        assert check.ok, str(check)
        assert not codes(check), str(check)
        assert verdicts(check) == {"exact"}, str(check)
        for number, (manner, merge) in enumerate(MERGERS.items()):
            if dora and merge not in (by_peft, by_peft_in_16_bits):
                continue
            loaded = kind.from_pretrained(base, dtype=torch.bfloat16)
            cast = merge is not by_peft_in_16_bits
            model = PeftModel.from_pretrained(loaded, adapter, autocast_adapter_dtype=cast)
            # peft's conversion of keys loses those of some classes without a word
            is_whole = all(p.any() for key, p in model.named_parameters() if ".lora_B." in key)
            merge(model).save_pretrained(tmp_path / str(number))
            check = verify_merge(base, adapter, tmp_path / str(number))
            if not is_whole:
                assert codes(check) in ({"update-absent"}, {"values-differ"}), (manner, str(check))
                continue
            if name in TRAINS_THE_TIE:
                assert not check.ok, (manner, str(check))
                continue
            assert check.ok, (manner, str(check))
            assert not codes(check), (manner, str(check))
            assert verdicts(check) <= {"exact", "rounding", "left out"}, (manner, str(check))


def test_a_config_that_its_class_changed_while_it_was_built_is_no_mistake(tmp_path: Path) -> None:
    """LevitEncoder lengthens a list of its config, so that each save of a loaded model has another one."""
    kind: Any = transformers.LevitForImageClassification
    sizes: Any = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "key_dim": [8, 8, 8]}
    config = transformers.LevitConfig(image_size=32, depths=[1, 1, 1], mlp_ratio=[2, 2, 2], **sizes)
    kind(config).save_pretrained(base := tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=kind, target_modules=["linear"], task_type=None)
    PeftModel.from_pretrained(kind.from_pretrained(base), adapter).merge_and_unload().save_pretrained(tmp_path / "peft")
    stages = [json.loads((tmp_path / each / "config.json").read_text())["down_ops"] for each in ("base", "peft")]
    assert stages[0] != stages[1]
    assert not codes(verify_merge(base, adapter, tmp_path / "peft", auto_class=kind))
    document = json.loads((tmp_path / "peft" / "config.json").read_text())
    document["down_ops"][0][4] = 3
    (tmp_path / "peft" / "config.json").write_text(json.dumps(document))
    assert codes(verify_merge(base, adapter, tmp_path / "peft", auto_class=kind)) == {"merged-config"}
