"""Every class of transformers that tests/tiny_models.py can make: merged in memory and on disk, to the same bits."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import save_adapter
from tiny_models import causal_lm_classes, image_text_classes, saved, skip_unless_buildable

from safe_loading import load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

# peft refuses an adapter on the projections of Mamba's layers, and DoRA on fused experts.
MAMBA = frozenset(f"{name}ForCausalLM" for name in ("FalconH1", "FalconMamba", "Mamba2", "Mamba", "NemotronH"))
# Its config says float32, whatever it was saved in, so that is what it would be loaded and merged in.
IN_FLOAT32 = frozenset({"XLNetLMHeadModel"})
CLASSES = sorted({*causal_lm_classes(), *image_text_classes()})
CASES = [(name, dora) for name in CLASSES for dora in (False, True)]
CHOSEN = [("Qwen3MoeForCausalLM", False), ("GPT2LMHeadModel", True), *random.Random(7).sample(CASES, 6)]


def expected_refusal(name: str, message: str, *, dora: bool) -> bool:
    return (name in MAMBA and "incompatible with Mamba-based models" in message) or (
        dora and message == "lora.ParamWrapper does not work with use_dora=True."
    )


def state(kind: Any, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    return model.state_dict(), {what: sorted(map(str, names)) for what, names in info.items()}


@pytest.mark.parametrize(
    ("name", "dora"),
    [*CHOSEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in CHOSEN)],
)
def test_a_merge_in_memory_and_one_on_disk_are_the_same(tmp_path: Path, name: str, dora: bool) -> None:
    kind: Any = getattr(transformers, name)
    base, adapter, output = tmp_path / "base", tmp_path / "adapter", tmp_path / "output"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved(name, tmp_path / "float32")
        kind.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16).save_pretrained(base, max_shard_size="60KB")
        config: dict[str, Any] = {"target_modules": "all-linear", "task_type": None, "use_dora": dora}
        refusal, merged = None, {}
        try:
            save_adapter(adapter, base, auto_class=kind, **config)
            dtype: Any = torch.bfloat16 if name in IN_FLOAT32 else "auto"
            merged = merge_lora_inplace(load_peft_on_rank(base, adapter, auto_class=kind, dtype=dtype)).state_dict()
        except ValueError as error:
            refusal = str(error)
        if refusal is not None:
            assert expected_refusal(name, refusal, dora=dora), refusal
            return
        merge_lora_checkpoint(base, adapter, output)
        before, found = state(kind, base)
        after, found_after = state(kind, output)
    assert found_after == found
    assert after.keys() == merged.keys()
    assert all(torch.equal(after[key].to(tensor.dtype), tensor) for key, tensor in merged.items())
    assert name in IN_FLOAT32 or all(after[key].dtype == tensor.dtype for key, tensor in merged.items())
    assert any(not torch.equal(after[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("HrmTextForCausalLM", {"target_modules": "all-linear", "bias": "all"}),
        ("Step3p7ForConditionalGeneration", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ],
)
def test_what_is_trained_beside_the_factors_is_saved_as_it_is_written(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    skip_unless_buildable(name)
    kind: Any = getattr(transformers, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved(name, tmp_path / "base")
        adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", auto_class=kind, task_type=None, **config)
        model = merge_lora_inplace(load_peft_on_rank(tmp_path / "base", adapter, auto_class=kind))
        expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path / "memory")
        merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "disk")
        for folder in ("memory", "disk"):
            found, _ = state(kind, tmp_path / folder)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), folder
