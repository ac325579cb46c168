"""What the tests of wrapping share: mixins at the top of a module, so that pickle finds them, and tiny models."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from models import SIZES, save_llama
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import Transparent

TOKENS = torch.arange(1, 25).reshape(2, 12)
__all__ = ["SIZES", "TOKENS", "AuxLoss", "Count", "Plain", "Second", "llama", "lora", "peft_llama", "save_llama"]


class Count(Transparent):
    """Counts its calls and leaves the output as it is."""

    calls: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


class Second(Transparent):
    """Notes the order of the calls."""

    order: list[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.order.append("Second")
        return super().__call__(*args, **kwargs)


class AuxLoss(Transparent):
    """Adds a term to the loss and scales the logits."""

    coefficient: float = 0.5

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        if getattr(out, "loss", None) is not None:
            out.loss = out.loss + self.coefficient * out.logits.float().square().mean()
        return out


class Plain(torch.nn.Module):
    """The wrapper that people write first."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def llama(dtype: torch.dtype = torch.float32, *, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A Llama of three tiny layers with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**SIZES, **config})).to(dtype)


def lora(**options: Any) -> LoraConfig:
    """A LoRA config whose lora_B does not start at zero."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**config, "init_lora_weights": False, **options})


def peft_llama(base: torch.nn.Module | None = None, *, seed: int = 0, **options: Any) -> Any:
    """A PeftModel over a tiny Llama."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        return get_peft_model(llama(seed=seed) if base is None else base, lora(**options))
