"""The protocol of a quantization format: the package's questions to each, and the types of the answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.report import Finding

TURING = (7, 5)
AMPERE = (8, 0)  # the first compute capability with bfloat16
ADA = (8, 9)  # the first with products in fp8
HOPPER = (9, 0)


@dataclass(frozen=True)
class QuantizationRequest:
    """A method of quantization, and its options under the names that config.json has."""

    method: str  # transformers' ``quant_method``
    options: Mapping[str, Any]
    pre_quantized: bool  # whether the checkpoint holds quantized weights; if not, they are quantized while loaded


@dataclass(frozen=True)
class TargetCard:
    """The card on which a quantized model is going to run, and whether it trains there.

    Not the machine that plans: what an engine does with a format depends on the card on which the model is loaded.
    """

    capability: tuple[int, int] | None = None  # None where nobody said; it is then enough for the format
    on_host: bool = False  # whether it runs on the host, without an accelerator
    trains: bool = False

    def has(self, capability: tuple[int, int]) -> bool:
        """Return whether it is a card of at least this capability."""
        return not self.on_host and (self.capability is None or self.capability >= capability)

    def __str__(self) -> str:
        if self.on_host:
            return "the host"
        if self.capability is None:
            return "a card"
        return f"a card of capability {self.capability[0]}.{self.capability[1]}"


def _no_codes_by_name(tensors: Mapping[str, object]) -> frozenset[str]:
    return frozenset()


Build = Callable[[nn.Module, QuantizationRequest, TargetCard], list[Finding]]


def _hides_none(names: Iterable[str]) -> set[str]:
    return set()


def _corrects_none(options: Mapping[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    return {}


def _leaves_none_out(names: Iterable[str]) -> list[str]:
    return []


def _decodes_all_rightly(tensors: Mapping[str, TensorInfo], options: Mapping[str, Any]) -> list[str]:
    return []


def _holds_none(module: nn.Module) -> bool:
    return False


def _knows_no_tensor(tensor: torch.Tensor) -> int | None:
    return None


def _decodes_none(module: nn.Module) -> torch.Tensor | None:
    return None


def _stands_for_none(module: nn.Module) -> nn.Module | None:
    return None


def _no_kernels() -> Sequence[contextlib.AbstractContextManager[object]]:
    return ()


def _decoded_rightly() -> Sequence[contextlib.AbstractContextManager[object]]:
    return ()


def _no_lora_layers() -> Mapping[type[nn.Module], type[nn.Module]]:
    return {}


@dataclass(frozen=True)
class Format:
    """A quantization format of transformers: facts, and functions whose defaults say that there is nothing to do."""

    method: str  # transformers' ``quant_method``
    # Puts layers into a model on meta that store and allocate what the quantized ones do on a card.
    build: Build
    # How a checkpoint is loaded with plain weights: by transformers' config of this name with dequantize=True, or in
    # these words, without a capital. Both are empty where transformers has no way.
    dequantized_by: str = ""
    loads_plain: str = ""
    computes_in: torch.dtype | None = None  # in which its kernels compute, and what is not quantized is published
    linear_only: bool = False  # whether it quantizes linear layers alone
    shrinks: bool = False  # whether a model with no smaller layers was not quantized at all
    packs_on_device: bool = False  # whether weights arrive in 16 bits and are packed there, which forecasts count
    loading_not_counted: bool = False  # whether quantizing plain weights while loading takes memory that is not counted
    read_on_disk: bool = False  # whether a merge on disk reads its codes, to write a plain base
    merged_on_disk: bool = False  # whether it also merges into them, and keeps the format
    # The road where a merge on disk does not know a checkpoint's codes: merged when loaded, or made plain before.
    # Empty where only the base that it was made from is left.
    instead: Literal["", "loaded", "plain"] = ""
    changed_while_loading: tuple[str, ...] = ()  # options that a second config changes, beside those of all formats
    early_marks: tuple[str, ...] = ()  # options by which configs of early versions name it, without a quant_method
    # The modules of a model on meta that it packs by the names in a config, where a checkpoint may know better; and the
    # weights that are codes among the tensors on disk, by their names.
    packed_names: Callable[[nn.Module, QuantizationRequest], set[str]] | None = None
    codes_on_disk: Callable[[Mapping[str, object]], frozenset[str]] = _no_codes_by_name
    # The modules that have no weight before the first forward pass, by the names of the tensors on disk; a load with
    # dequantize=True gives them one.
    without_weight: Callable[[Iterable[str]], set[str]] = _hides_none
    # The options that the tensors on disk correct, by their names and dtypes there, where a config says otherwise.
    corrected: Callable[[Mapping[str, Any], Mapping[str, str]], dict[str, Any]] = _corrects_none
    # The scales on disk that transformers leaves out where it decodes single experts into one tensor.
    scales_left_out: Callable[[Iterable[str]], list[str]] = _leaves_none_out
    # The tensors on disk that transformers alone decodes wrongly, or fails at, where it decodes; by the options of
    # a config.
    decoded_wrongly: Callable[[Mapping[str, TensorInfo], Mapping[str, Any]], list[str]] = _decodes_all_rightly
    holds: Callable[[nn.Module], bool] = _holds_none  # whether a module's own weights are codes of it
    # Whether a layer computes with other values than its weight has, so that nothing can be added to that.
    computes_with_others: Callable[[nn.Module], bool] = _holds_none
    # Whether the first forward pass makes a plain weight of a layer's codes, so that nothing is added to them before.
    decoded_at_forward: Callable[[nn.Module], bool] = _holds_none
    # Whether accelerate offloads codes without their scales, so that nothing can tell what they stand for.
    lost_its_scales: Callable[[nn.Module], bool] = _holds_none
    # The bytes of one of its weights on a device, with statistics; None for any other tensor.
    bytes_of: Callable[[torch.Tensor], int | None] = _knows_no_tensor
    # The values of a module's weight, in float32 or wider where the codes give that; None for any other module.
    decode: Callable[[nn.Module], torch.Tensor | None] = _decodes_none
    # The layer that allocates what a real one does while a step is traced; None for any other module.
    stand_in: Callable[[nn.Module], nn.Module | None] = _stands_for_none
    # Replacements of kernels that cannot run in a trace, each a context.
    kernels: Callable[[], Sequence[contextlib.AbstractContextManager[object]]] = _no_kernels
    # Replacements of what transformers decodes wrongly while it loads, each a context.
    mended: Callable[[], Sequence[contextlib.AbstractContextManager[object]]] = _decoded_rightly
    # peft's LoRA layers for stand-ins by their classes, where peft makes none.
    lora_layers: Callable[[], Mapping[type[nn.Module], type[nn.Module]]] = _no_lora_layers


def holds_attribute(name: str) -> Callable[[nn.Module], bool]:
    """Return the recognition of modules that keep codes under this name, which users give to projections, too."""

    def holds(module: nn.Module) -> bool:
        codes = module._parameters.get(name, module._buffers.get(name))
        # codes may be viewed as floats, with facts in `meta`; a parameter of a user has floats alone
        return codes is not None and (not codes.is_floating_point() or hasattr(module, "meta"))

    return holds
