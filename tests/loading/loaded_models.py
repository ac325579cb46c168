"""What the tests of loading compare: logits, an adapter's tensors, and the whole state of a model.

A test of a load compares ``logits(load_peft_on_rank(...))`` with ``logits(two_steps(...))``, bit by bit. A test of a
refusal compares ``state(model)`` before and after.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

TOKENS = torch.arange(1, 25).reshape(2, 12)


def logits(model: torch.nn.Module) -> torch.Tensor:
    """The logits of a model for the same tokens each time."""
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def two_steps(adapter: Path, base: Path, **options: Any) -> PeftModel:
    """The plain way, transformers and then peft, without peft's cast of the adapter to float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), adapter, autocast_adapter_dtype=False, **options
        )


def adapter_tensors(model: PeftModel, name: str = "default") -> dict[str, torch.Tensor]:
    """The LoRA tensors of an adapter, by the keys of its file."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {key.replace(f".{name}", ""): tensor for key, tensor in tensors if ".lora_" in key and f".{name}" in key}


def state(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that a refused call must not change: tree, classes, flags, storage and config, but not the bits."""
    modules = {path: (id(m), type(m), m.training, sorted(vars(m))) for path, m in model.named_modules()}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {
        "modules": modules,
        "tensors": {key: (id(t), t.data_ptr(), t.dtype, t.device, t.requires_grad) for key, t in tensors},
        "hooks": sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()),
        "config": json.dumps(model.config.to_dict(), default=str, sort_keys=True),
    }
