"""The ways to load a base and its adapter that load_peft.py compares, and the checkpoints that it loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from safe_loading import load_adapter_on_rank, load_peft_on_rank
from safe_loading._model.formats.convertible import default_dtype


class Method(Protocol):
    """One way to load: from disk, onto a base that is loaded, a later adapter, another one in its place."""

    def load(self, base: str, adapter: str, device: torch.device) -> Any:
        """Load the base and its adapter onto the device."""

    def attach(self, base: Any, adapter: str, device: torch.device) -> Any:
        """Put the adapter on a base that is on the device."""

    def later(self, model: Any, adapter: str) -> None:
        """Load a second adapter."""

    def swap(self, model: Any, adapter: str) -> None:
        """Put another adapter's values in the second one's place."""


def load_base(base: str, device: torch.device) -> Any:
    """Load a base onto one device, the plain way."""
    return AutoModelForCausalLM.from_pretrained(base, device_map={"": device})


class TwoStep:
    """transformers loads the base, peft the adapter."""

    options: dict[str, Any] = {}  # noqa: RUF012 - overridden below, never written to

    def load(self, base: str, adapter: str, device: torch.device) -> Any:
        """Load the base and its adapter onto the device."""
        return self.attach(load_base(base, device), adapter, device)

    def attach(self, base: Any, adapter: str, device: torch.device) -> Any:
        """Put the adapter on a base that is on the device."""
        return PeftModel.from_pretrained(base, adapter, **self.options)

    def later(self, model: Any, adapter: str) -> None:
        """Load a second adapter."""
        model.load_adapter(adapter, "second", **self.options)

    def swap(self, model: Any, adapter: str) -> None:
        """Put another adapter's values in the second one's place."""
        hotswap_adapter(model, adapter, "second")


class PeftDefault(TwoStep):
    """One call of peft. It attaches as the two steps do."""

    def load(self, base: str, adapter: str, device: torch.device) -> Any:
        """Load the base and its adapter onto the device."""
        where = "cpu" if device.type == "cpu" else device.index
        return AutoPeftModelForCausalLM.from_pretrained(adapter, device_map={"": where})


class TwoStepLowMemory(TwoStep):
    """The same with peft's meta initialization."""

    options = {"low_cpu_mem_usage": True}  # noqa: RUF012 - see above


class Transformers:
    """transformers loads both."""

    def load(self, base: str, adapter: str, device: torch.device) -> Any:
        """Load the base and its adapter onto the device."""
        return self.attach(load_base(base, device), adapter, device)

    def attach(self, base: Any, adapter: str, device: torch.device) -> Any:
        """Put the adapter on a base that is on the device."""
        base.load_adapter(adapter)
        return base

    def later(self, model: Any, adapter: str) -> None:
        """Load a second adapter."""
        model.load_adapter(adapter, "second")

    def swap(self, model: Any, adapter: str) -> None:
        """Put another adapter's values in the second one's place."""
        model.load_adapter(adapter, "second", hotswap=True)


class SafeLoading:
    """This library."""

    def load(self, base: str, adapter: str, device: torch.device) -> Any:
        """Load the base and its adapter onto the device."""
        return load_peft_on_rank(base, adapter, device=device)

    def attach(self, base: Any, adapter: str, device: torch.device) -> Any:
        """Put the adapter on a base that is on the device."""
        return load_peft_on_rank(base, adapter, device=device)

    def later(self, model: Any, adapter: str) -> None:
        """Load a second adapter."""
        load_adapter_on_rank(model, adapter, "second")

    def swap(self, model: Any, adapter: str) -> None:
        """Put another adapter's values in the second one's place."""
        load_adapter_on_rank(model, adapter, "second", hotswap=True)


METHODS: dict[str, Method] = {
    "peft default": PeftDefault(),
    "two-step": TwoStep(),
    "two-step low_cpu_mem": TwoStepLowMemory(),
    "transformers": Transformers(),
    "safe_loading": SafeLoading(),
}


def save_base(folder: Path, hidden: int, layers: int, dtype: torch.dtype) -> None:
    """Save a Llama with random weights."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        vocab_size=8000,
    )
    with default_dtype(dtype):
        model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="200MB")


def save_adapter(folder: Path, base: Path, rank: int, dtype: torch.dtype, seed: int) -> None:
    """Save a LoRA adapter of every linear layer, each tensor random and of exactly ``dtype``."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(os.fspath(folder))
    file = folder / "adapter_model.safetensors"
    # fresh values: what peft drew may have been rounded to the base's dtype already
    tensors = {name: (torch.randn(tensor.shape) / 64).to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def differing(model: Any, adapter: str) -> tuple[int, int]:
    """Return how many tensors of the adapter file are in the model with other bits or another dtype, of how many."""
    file = load_file(f"{adapter}/adapter_model.safetensors")
    held = dict(model.named_parameters())
    wrong = 0
    for key, value in file.items():
        name = key.replace(".weight", ".default.weight")
        tensor = held.get(name)
        if tensor is None:  # transformers' load_adapter wraps nothing
            tensor = held[name.removeprefix("base_model.model.")]
        same = tensor.dtype == value.dtype and torch.equal(_bits(tensor.detach().cpu()), _bits(value))
        wrong += not same
    return wrong, len(file)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
