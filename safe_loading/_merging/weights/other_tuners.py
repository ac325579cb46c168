"""The merged weights of methods other than LoRA, by peft's own merge of one layer, in float64."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from peft import PeftConfig, PeftType
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.oft.layer import Conv2d as OFTConv2d
from peft.tuners.oft.layer import OFTRotationModule

from safe_loading._core.names import method_name
from safe_loading._model.peft_layers import TunerModule
from safe_loading._model.tensor_values import is_finite

from .rounding import DTYPES, round_into
from .variants import pads_with_values, why_other_product

# The methods whose layers merge what a tensor of the base becomes from that tensor and the adapter alone, and keep
# nothing of it for the unmerge. By name, as peft calls them: an older one has not all of them. So GLoRA is not among
# them, whose bias depends on the weight too, nor DEFT, FRoD, HiRA and PEANuT, which keep what they merged.
_NAMES = (
    "ADALORA BEFT BOFT C3A DELORA FOURIERFT GRALORA HRA IA3 LOHA LOKR MISS OFT PSOFT PVERA RANDLORA ROAD SHIRA "
    "SUPERTUNING TINYLORA UNILORA VBLORA VERA WAVEFT"
)
KNOWN = frozenset(PeftType[name] for name in _NAMES.split() if name in PeftType.__members__)
# peft's names of methods that merge nowhere: what their layers add is no function of the weight alone.
DEPENDS_ON_THE_INPUT = frozenset({"ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "XLORA"})
# Methods whose layers peft cannot build, or not whole, without the values of the base.
_NEEDS_THE_BASE = frozenset({"ADALORA", "BEFT", "PSOFT", "SHIRA", "UNILORA"})
# Layers that run several adapters otherwise than peft merges them, by what they hold their adapters in.
_ONE_BY_ONE = {
    "c3a_kernel": "peft gives each C3A after the first what the one before it returned, and merges each for itself",
    "osf_svd_params": "peft runs the first of several OSF adapters alone, and merges all",
}
MERGE_ON_DISK = "save the adapter and merge it with merge_lora_checkpoint"


def method_of(config: PeftConfig) -> str:
    """Return the name of an adapter's method for a message."""
    if getattr(config, "monteclora_config", None) is not None:
        return "MonteCLoRA"
    return method_name(config.peft_type)


def is_merged_on_disk(config: PeftConfig) -> bool:
    """Return whether ``merge_lora_checkpoint`` knows the method of an adapter."""
    if config.peft_type == PeftType.LORA:
        return method_of(config) != "MonteCLoRA"  # whose layers draw values when they are built
    return config.peft_type == PeftType.TRAINABLE_TOKENS or (
        config.peft_type in KNOWN and method_of(config) not in _NEEDS_THE_BASE
    )


def of_the_input(*methods: str) -> str:
    """Return the reason why adapters of such methods are not merged."""
    return f"what {', '.join(methods)} adds depends on the input, so no weight holds it. Keep the adapter"


@dataclasses.dataclass(frozen=True, eq=False)
class TunerMerge:
    """The merge of one tensor of the base by peft's layer; the layer's own base may be on meta."""

    layer: TunerModule
    names: tuple[str, ...]  # of the adapters, in order
    attribute: str  # of the base layer: its weight or its bias

    def merged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a float64 tensor of the base with the adapters merged, in float64; needs several times its size."""
        return self._merged(tensor, torch.float64)

    def merged_by_others(self, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the merges by peft of a tensor of the base in a dtype: with its adapters in that, and as they are.

        They are returned in float64. It lacks operations in 16 bits on some devices; nobody merges so there.
        """
        for adapters in dict.fromkeys((dtype, None)):
            try:
                yield self._merged(tensor.to(dtype), adapters).double()
            except RuntimeError:
                continue

    def _merged(self, tensor: torch.Tensor, adapters: torch.dtype | None) -> torch.Tensor:
        own = copy.deepcopy(self.layer)
        base = own.get_base_layer()
        for name, parameter in base._parameters.items():
            if parameter is not None:  # a bias does not depend on the weight's values, nor the weight on the bias's
                zeros = torch.zeros(parameter.shape, dtype=tensor.dtype, device=tensor.device)
                values = tensor if name == self.attribute else zeros
                base._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
        if adapters is not None:
            own.to(adapters)
        with torch.no_grad():
            own.eval().merge(safe_merge=False, adapter_names=in_order_of_merge(own, self.names))
        merged: torch.Tensor = getattr(base, self.attribute)
        return merged.data


def in_order_of_merge(layer: TunerModule, names: Sequence[str]) -> list[str]:
    """Return adapters in the order in which peft has to merge them, so that the weight computes as their layer does.

    OFT turns the input by the first one first, which is the last factor of the weight.
    """
    return list(reversed(names)) if hasattr(layer, "oft_R") else list(names)


def why_not_merged_right(layer: TunerModule, names: Collection[str]) -> str | None:
    """Return why peft's merge of a layer computes something else than the layer; None where it does not."""
    base: Any = layer.get_base_layer()
    for attribute, reason in _ONE_BY_ONE.items():
        if len(names) > 1 and hasattr(layer, attribute):
            return f"{reason}, so that the merged one computes something else. Merge one of them"
    if isinstance(layer, OFTConv2d) and any(size != 1 for size in base.kernel_size):
        return (
            f"peft's OFT of a convolution with kernel_size={tuple(base.kernel_size)} turns the input in another order "
            f"than its merge turns the weight, so that the merged one computes something else. Keep the adapter"
        )
    if pads_with_values(base) and not isinstance(layer, (IA3Layer, OFTConv2d)):  # which give their input to the base
        return (
            f"its convolution has padding_mode={base.padding_mode!r}, and peft's {type(layer).__name__} pads with "
            f"zeros, so no merged weight computes what the layer computes. Keep the adapter"
        )
    return why_other_product(base)


def is_plain(layer: TunerModule) -> bool:
    """Return whether all parameters of a layer's base are float tensors in memory, of no special kind."""
    parameters = list(layer.get_base_layer().parameters())
    plain = (type(parameter) is torch.nn.Parameter and not parameter.is_meta for parameter in parameters)
    return all(plain) and all(parameter.dtype in DTYPES for parameter in parameters)


def merge_in_float64(layer: TunerModule, names: tuple[str, ...], *, check_finite: bool) -> None:
    """Merge adapters into a layer in memory, each element rounded once, and mark them as merged.

    ValueError when an element is not finite.
    """
    base, merged = layer.get_base_layer(), {}
    for attribute, merge in tuner_merges(layer, names).items():
        merged[attribute] = merge.merged(base._parameters[attribute].double())  # type: ignore[union-attr]  # it is there
    for attribute, values in merged.items():
        weight: torch.Tensor = getattr(base, attribute).data
        round_into(values.to(weight.device), weight)
        if check_finite and not is_finite(weight):
            raise ValueError(f"its merged {attribute} holds NaN, infinity or a number beyond {weight.dtype}")
    layer.merged_adapters.extend(in_order_of_merge(layer, names))  # which peft's unmerge goes back


def tuner_merges(layer: TunerModule, names: tuple[str, ...]) -> dict[str, TunerMerge]:
    """Return the merges of a layer's base tensors, by attribute."""
    base = layer.get_base_layer()
    return {
        attribute: TunerMerge(layer, names, attribute)
        for attribute in ("weight", "bias")
        if base._parameters.get(attribute) is not None
    }


def fill_constants(layer: TunerModule) -> list[str]:
    """Compute the constants that peft left on meta and no file holds; return the names of the tensors still on meta."""
    for module in layer.modules():
        if isinstance(module, OFTRotationModule):
            rows, columns = torch.triu_indices(module.block_size, module.block_size, 1)
            module._buffers.update(rows=rows, cols=columns)
    inside = {id(tensor) for tensor in (*layer.get_base_layer().parameters(), *layer.get_base_layer().buffers())}
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta and id(tensor) not in inside]
