"""The merge of one layer: which weights change, by which method, under which names."""

from __future__ import annotations

import dataclasses
from typing import Literal

from safe_loading._model.peft_layers import TunerModule

from .lora_layers import MergeTarget
from .trainable_tokens import TokenRows

Method = Literal["blocks", "tokens", "peft", "dequantized"]


@dataclasses.dataclass(frozen=True)
class MergeOptions:
    """The arguments of ``merge_lora_inplace``, checked; ``names`` None means the active adapters of each layer."""

    names: tuple[str, ...] | None
    check_finite: bool
    scratch_bytes: int
    unload: bool
    dequantize: bool


@dataclasses.dataclass(eq=False)
class LayerMerge:
    """The merge of one outermost tuner layer: its method, its adapters and the weights that change."""

    path: str
    layer: TunerModule
    method: Method  # row blocks, rows of tokens, peft's own merge, or a plain layer in place of a quantized one
    names: tuple[str, ...]  # the adapters that are merged; of nested layers, those of the outermost
    # The weights that change; empty for the last two methods, and where a tied layer changes the weight already.
    targets: list[MergeTarget | TokenRows] = dataclasses.field(default_factory=list)
    # The layers whose ``merged_adapters`` grow, with the names.
    marks: list[tuple[TunerModule, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    merged_before: tuple[str, ...] = ()  # the adapters that were merged already
    # Of a mixed model: the layers of several methods around one module, from the inside, with what each merges.
    levels: list[tuple[TunerModule, tuple[str, ...]]] = dataclasses.field(default_factory=list)

    def name_of(self, target: MergeTarget | TokenRows) -> str:
        """Return the name of a weight in the unloaded base model."""
        # peft's wrappers add these parts to the paths, and unloading takes them away again.
        for path, module in self.layer.named_modules():
            if module is target.owner:
                inner = ".".join(p for p in path.split(".") if p not in ("base_layer", ""))
                outer = ".".join(p for p in self.path.split(".") if p not in ("base_layer", "token_adapter"))
                return ".".join(filter(None, (outer, inner, target.attribute)))
        return f"{self.path}.{target.attribute}"
