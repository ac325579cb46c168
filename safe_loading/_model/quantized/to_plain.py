"""How a quantized checkpoint becomes one of plain weights, in words: each method has its own way in transformers."""

from __future__ import annotations

from collections.abc import Mapping

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._model.formats.registry import format_named, has_no_plain_load

# Without the last argument save_pretrained converts back to codes what it loaded from codes, or fails (5.23).
_SAVE = "save it with save_pretrained(..., save_original_format=False)"


def how_to_dequantize(method: object, tensors: Mapping[str, TensorInfo] | None = None, options: object = None) -> str:
    """Return the advice for a ``quant_method`` of transformers: without a capital, and without a period.

    A load in plain weights is none where transformers would decode some wrongly, as the ``tensors`` on disk and the
    ``options`` of the config tell.
    """
    known = None if has_no_plain_load(method, tensors, options) else format_named(method)
    if known is not None and known.dequantized_by:
        config = f"{known.dequantized_by}(dequantize=True)"
        return f"load it with from_pretrained(..., quantization_config={config}), and {_SAVE}"
    if known is not None and known.loads_plain:
        return f"{known.loads_plain}, and {_SAVE}"
    return "take the one that it was made of, whose weights are not quantized"
