"""What a quantization config asks for, read without the package of its method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safe_loading.errors import ArgumentError

from .to_plain import how_to_dequantize

# What from_pretrained lets a second config of the same method change of a checkpoint's own (LOADING_ATTRIBUTES of
# transformers/quantizers/auto.py, as far as it matters for memory).
_CHANGED_WHILE_LOADING = ("dequantize", "use_optimized_inference", "backend")
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
    """Where a quantized model is going to run, and for what.

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


def read_request(on_disk: object, asked: object = None) -> QuantizationRequest | None:
    """Return what a checkpoint's config and the caller's ask for together, as ``from_pretrained`` combines them.

    Both may be a config of transformers, or what config.json has. Raises `ArgumentError` when they contradict one
    another, which ``from_pretrained`` refuses too.
    """
    if on_disk is None:
        return None if asked is None else QuantizationRequest(*_method_and_options(asked), pre_quantized=False)
    method, options = _method_and_options(on_disk)
    if asked is not None:
        other, changes = _method_and_options(asked)
        if other != method:
            raise ArgumentError(
                f"The checkpoint is quantized ({method}), and quantization_config asks for {other}; from_pretrained "
                f"refuses that. Leave quantization_config out, or quantize a plain one: {how_to_dequantize(method)}."
            )
        names = (*_CHANGED_WHILE_LOADING, "modules_to_not_convert") if method == "fp8" else _CHANGED_WHILE_LOADING
        options |= {name: changes[name] for name in names if name in changes}
    return QuantizationRequest(method, options, pre_quantized=True)


def _method_and_options(config: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(config, Mapping):
        options = dict(config)
    elif hasattr(config, "to_dict"):
        options = dict(config.to_dict())
        if hasattr(config, "get_loading_attributes"):
            options |= config.get_loading_attributes()
    else:
        raise ArgumentError(
            f"quantization_config={config!r:.80}: pass a config of transformers, such as BitsAndBytesConfig, or the "
            f"dict that config.json has."
        )
    nested = options.get("quantization_config")  # compressed-tensors' own, as older versions saved it
    options = dict(nested) if isinstance(nested, Mapping) else options
    # configs of early versions of bitsandbytes have no quant_method; transformers reads them the same way
    early = options.get("load_in_4bit") or options.get("load_in_8bit")
    method = "bitsandbytes" if early else options.get("quant_method")
    method = getattr(method, "value", method)
    if not isinstance(method, str):
        raise ArgumentError(f"quantization_config={config!r:.80} has no quant_method, such as 'fp8' or 'gptq'.")
    return method, options
