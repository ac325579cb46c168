"""LoRA inits that change the base weight (PiSSA, OLoRA), repeated by peft's own code on one weight."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.lora import layer as lora

# What these subtract follows from the weight alone. The others need data (CorDA, LoRA-GA), random numbers
# (pissa_niter_4) or a quantization that the file does not name (LoftQ).
REPEATABLE = ("pissa", "olora")


@dataclasses.dataclass(frozen=True, eq=False)
class BaseChangingInit:
    """How one adapter changed the weight of one layer before it was trained; ``kind`` is its ``init_lora_weights``."""

    kind: str
    rank: int
    scaling: float
    transposed: bool  # whether the weight is stored as (inputs, outputs)
    # Where the disk holds row (``dim`` 0) or column i of the model's weight; None where in the same order.
    order: torch.Tensor | None = None
    dim: int = 0

    def is_like(self, other: BaseChangingInit) -> bool:
        """Return whether another init takes the same part out of the same weight."""
        return (self.kind, self.rank, self.scaling) == (other.kind, other.rank, other.scaling)

    def subtract_from(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight that remains after the init, in its dtype; needs several times the weight in float32."""
        if self.order is not None:  # the bits of a decomposition depend on the order, which must be the model's
            inner = dataclasses.replace(self, order=None)
            left = inner.subtract_from(weight.index_select(self.dim, self.order))
            return torch.empty_like(weight).index_copy_(self.dim, self.order, left)
        base = SimpleNamespace(weight=torch.nn.Parameter(weight.clone(), requires_grad=False))
        # peft's methods read these attributes of the layer alone, and put what is left into the base's weight.
        facts = {"r": {"init": self.rank}, "scaling": {"init": self.scaling}, "fan_in_fan_out": self.transposed}
        factors = {name: {"init": torch.nn.Linear(1, 1, bias=False)} for name in ("lora_A", "lora_B")}
        layer: Any = SimpleNamespace(get_base_layer=lambda: base, **facts, **factors)
        with torch.no_grad():
            if self.kind == "olora":
                lora.LoraLayer.olora_init(layer, "init")  # type: ignore[no-untyped-call]  # peft's
            else:
                lora.LoraLayer.pissa_init(layer, "init", self.kind)  # type: ignore[no-untyped-call]  # peft's
        remainder: torch.Tensor = base.weight.data
        return remainder.contiguous()


def init_kind(config: PeftConfig) -> str:
    """Return ``init_lora_weights`` as text, in lower case."""
    return str(getattr(config, "init_lora_weights", "")).lower()


def init_of(layer: lora.LoraLayer, name: str, config: PeftConfig) -> BaseChangingInit | None:
    """Return how an adapter changed the weight of one layer, or None when it left the weight as it was."""
    if init_kind(config) not in REPEATABLE or type(layer) is not lora.Linear:
        return None
    return BaseChangingInit(init_kind(config), layer.r[name], layer.scaling[name], layer.fan_in_fan_out)
