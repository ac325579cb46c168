"""Starts that take a part out of the base's weight before training, repeated by peft's own code on one weight."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.lora import layer as lora

# What they compute follows from the weight alone. The others need data (CorDA, LoRA-GA), random numbers
# (pissa_niter_4) or a quantization that the file does not name (LoftQ).
REPEATABLE = ("pissa", "olora")


@dataclasses.dataclass(frozen=True)
class BaseChangingInit:
    """One adapter's start on one layer.

    Attributes:
        kind: ``init_lora_weights`` of the adapter.
        rank: The layer's rank.
        scaling: The layer's scaling.
        transposed: Whether the weight is stored as (inputs, outputs).
    """

    kind: str
    rank: int
    scaling: float
    transposed: bool

    def taken_from(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what the start leaves of a weight, in its dtype; needs several times the weight in float32."""
        base = SimpleNamespace(weight=torch.nn.Parameter(weight.clone(), requires_grad=False))
        factors = {name: {"start": torch.nn.Linear(1, 1, bias=False)} for name in ("lora_A", "lora_B")}
        layer: Any = SimpleNamespace(
            get_base_layer=lambda: base,
            fan_in_fan_out=self.transposed,
            r={"start": self.rank},
            scaling={"start": self.scaling},
            **factors,
        )
        with torch.no_grad():
            if self.kind == "olora":
                lora.LoraLayer.olora_init(layer, "start")  # type: ignore[no-untyped-call]  # peft's
            else:
                lora.LoraLayer.pissa_init(layer, "start", self.kind)  # type: ignore[no-untyped-call]  # peft's
        left: torch.Tensor = base.weight.data
        return left.contiguous()


def kind_of(config: PeftConfig) -> str:
    """Return ``init_lora_weights`` as text, in lower case."""
    return str(getattr(config, "init_lora_weights", "")).lower()


def start_of(layer: Any, name: str, config: PeftConfig) -> BaseChangingInit | None:
    """Return the start of one adapter on one layer, or None when it leaves the weight as it is."""
    if kind_of(config) not in REPEATABLE or type(layer) is not lora.Linear:
        return None
    return BaseChangingInit(kind_of(config), layer.r[name], layer.scaling[name], layer.fan_in_fan_out)
