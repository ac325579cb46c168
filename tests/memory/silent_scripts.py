"""Silent troubles that people reported to the trackers, each as a short script and as its healthy twin.

A script is made with ``right=False`` as in the thread, and with ``right=True`` as it should be. A test trains both for
three steps, saves them and loads them again, so that the trouble is seen and not assumed, and audits both before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import SIZES
from peft import (
    LoraConfig,
    get_peft_model,
)
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

HIDDEN = SIZES["hidden_size"]
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
TOKENS = torch.arange(32).reshape(2, 16) + 3


@dataclasses.dataclass
class Script:
    """A model and what it is trained with.

    Attributes:
        model: As the training loop has it.
        trains: Parts of the names of what the user wants trained; every such parameter has to change.
        keeps: Parts of the names of what must not change.
        optimizer: None makes one of all that requires gradients, as trainers do.
        arguments: Attributes of a trainer's arguments.
        again: Loads what was saved, as people do; None loads the adapter onto a new base, or the model by its class.
        save: None calls ``save_pretrained``.
        recomputes: Whether the layers are to be checkpointed.
        round_trip: Whether the audit goes that way too.
        inputs: What the model takes beside tokens and labels, or in their place; None for what it is not to get.
        trainer: What an audit gets beside the arguments: callbacks and the like.
        also: Returns further troubles after the three steps.
        after_a_step: Runs after each step of the optimizer.
    """

    model: Any
    trains: tuple[str, ...] = ("lora_",)
    keeps: tuple[str, ...] = ()
    optimizer: Any = None
    again: Callable[[Path], Any] | None = None
    save: Callable[[Path], Any] | None = None
    recomputes: bool = False
    round_trip: bool = False
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
    also: Callable[[], set[str]] = set
    after_a_step: Callable[[int], Any] = lambda _: None


class Trouble(NamedTuple):
    """A thread, the code that finds its trouble, what three steps show, and the script; see `SILENT` for None."""

    thread: str
    code: str | None
    seen: str
    make: Callable[[bool, Path], Script]


TROUBLES: dict[str, Trouble] = {}
# Why an audit says nothing: of a wish of which nothing is left, or because today's engines do better.
SILENT = {
    "targets_that_another_library_drops": "nothing in the adapter's config names what was wanted",
    "a_part_that_was_to_be_trained_before_the_adapter": "get_peft_model freezes the base, on purpose",
    "half_of_the_experts": "an adapter on a part of the layers is the rule",
    "a_pattern_that_leaves_a_layer_out": "of a pattern nobody can say what it was to match",
}


def trouble(thread: str, code: str | None, seen: str) -> Callable[[Any], Any]:
    """Enter a script into the table under its name."""

    def enter(make: Callable[[bool, Path], Script]) -> Callable[[bool, Path], Script]:
        TROUBLES[make.__name__] = Trouble(thread, code, seen, make)
        return make

    return enter


def mended(thread: str) -> Callable[[Any], Any]:
    """Enter a script whose trouble today's engines no longer make: an audit must not speak of it any more."""
    return trouble(thread, None, "")


def base(cls: Any = LlamaForCausalLM, config: Any = LlamaConfig, **changes: Any) -> Any:
    """A model with the same values each time, as one that is loaded from a checkpoint."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config(**{**SIZES, **changes})).train()


def halved(model: Any) -> Any:
    """The parameters in bfloat16, and the buffers as they were, as a load makes them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model


def adapted(model: Any = None, **fields: Any) -> Any:
    """A model with an adapter of the same values each time: what is lost must not depend on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(base() if model is None else model, LoraConfig(**{**LORA, **fields})).train()


def saved(folder: Path, **fields: Any) -> Path:
    """An adapter that was trained before."""
    model = adapted(init_lora_weights=False, **fields)
    model.save_pretrained(folder / "trained-before")
    return folder / "trained-before"


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
