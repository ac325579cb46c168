"""The method and options of a quantization config, read without the package of its method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safe_loading._model.formats.format import QuantizationRequest
from safe_loading._model.formats.registry import FORMATS
from safe_loading.errors import ArgumentError

from .to_plain import how_to_dequantize

# What from_pretrained lets a second config of the same method change of a checkpoint's own (LOADING_ATTRIBUTES of
# transformers/quantizers/auto.py, as far as it matters for memory).
_CHANGED_WHILE_LOADING = ("dequantize", "use_optimized_inference", "backend")


def read_request(on_disk: object, asked: object = None) -> QuantizationRequest | None:
    """Return the request of a checkpoint's config and the caller's together, as ``from_pretrained`` combines them.

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
        known = FORMATS.get(method)
        names = (*_CHANGED_WHILE_LOADING, *(known.changed_while_loading if known is not None else ()))
        options |= {name: changes[name] for name in names if name in changes}
    return QuantizationRequest(method, options, pre_quantized=True)


def packs_on_device(config: object) -> bool:
    """Return whether a config of transformers, or one as config.json has it, names a method that packs on a device."""
    try:
        method, _ = _method_and_options(config)
    except ArgumentError:  # there is none
        return False
    return method in FORMATS and FORMATS[method].packs_on_device


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
    nested = options.get("quantization_config")  # a config inside the method's own, as older versions saved it
    options = dict(nested) if isinstance(nested, Mapping) else options
    # configs of early versions have no quant_method; transformers reads them the same way
    early = (each.method for each in FORMATS.values() if any(options.get(mark) for mark in each.early_marks))
    method = next(early, None) or options.get("quant_method")
    method = getattr(method, "value", method)
    if not isinstance(method, str):
        raise ArgumentError(
            f"quantization_config={config!r:.80} has no quant_method, such as 'fp8' or 'gptq', and transformers reads "
            f"none without. Write the method of the engine that quantized the weights into it."
        )
    return method, options
