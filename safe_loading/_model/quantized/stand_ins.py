"""Stand-ins for the real quantized layers of a model while it is traced, and the engines' bookkeeping about them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from safe_loading._core.interrupts import undone
from safe_loading._core.thread_patches import patched, seen_here
from safe_loading._model.formats.packed_linear import StandIn
from safe_loading._model.formats.registry import FORMATS
from safe_loading.errors import ArgumentError


def stand_ins_of(model: nn.Module) -> dict[str, StandIn]:
    """Return the stand-ins of a model by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, StandIn)}


def unpacked_copies(layer: StandIn) -> tuple[int, ...]:
    """Return the bytes that a stand-in's weight takes on the GPU while it is loaded, before it is packed.

    It arrives in 16 bits. An 8-bit weight goes from there to the host to be quantized, and takes its place twice; so
    does a transposed one, since the engine quantizes rows that lie one after the other.
    """
    size = layer.out_features * layer.in_features * layer.original_dtype.itemsize
    return (size, size) if hasattr(layer, "scales") or layer.transposed else (size,)


@contextlib.contextmanager
def with_stand_ins(model: nn.Module) -> Iterator[Mapping[str, StandIn]]:
    """Replace real quantized layers whose kernels cannot be traced by stand-ins, and put all of them back at the end.

    Yields those that pack their weights while they are loaded, by their paths.
    """
    made = {path: other for path, module in model.named_modules() if (other := _stand_in_of(module)) is not None}
    originals = {path: model.get_submodule(path) for path in made}
    if "" in originals:
        kind = type(model).__name__
        raise ArgumentError(
            f"A single quantized layer ({kind}) was passed; put it into torch.nn.Sequential({kind}(...))."
        )

    def put_back() -> None:
        for path, module in originals.items():
            model.set_submodule(path, module)

    with undone(put_back), _unpacked_for_adapters():
        for path, replacement in made.items():
            model.set_submodule(path, replacement)
        yield {path: layer for path, layer in made.items() if isinstance(layer, StandIn)}


@contextlib.contextmanager
def _unpacked_for_adapters() -> Iterator[None]:
    """Inside, peft gets the unpacked weight of a stand-in where DoRA takes the norm of one: it knows its own alone."""
    from peft.tuners.lora import dora

    original: Callable[[nn.Module], torch.Tensor] = seen_here(dora, "dequantize_module_weight")

    def unpack(module: nn.Module) -> torch.Tensor:
        layer: Any = module
        if isinstance(module, StandIn) and hasattr(module, "unpacked"):
            values: torch.Tensor = layer.unpacked()
            return values
        return original(module)

    with patched(dora, "dequantize_module_weight", unpack):
        yield


@cache
def lora_layers() -> Mapping[type[nn.Module], type[nn.Module]]:
    """Return peft's LoRA layers for stand-ins by their classes, where an engine is missing and peft makes none."""
    return {stand_in: layer for each in FORMATS.values() for stand_in, layer in each.lora_layers().items()}


def _stand_in_of(module: nn.Module) -> nn.Module | None:
    return next((other for each in FORMATS.values() if (other := each.stand_in(module)) is not None), None)
