"""How a quantized checkpoint becomes one of plain weights, in words: each method has its own way in transformers."""

from __future__ import annotations

# Without the last argument save_pretrained converts back to codes what it loaded from codes, or fails (5.23).
_SAVE = "save it with save_pretrained(..., save_original_format=False)"
_CONFIGS = {
    "compressed-tensors": "CompressedTensorsConfig",
    **dict.fromkeys(("fp8", "mxfp8"), "FineGrainedFP8Config"),
    "mxfp4": "Mxfp4Config",
}


def how_to_dequantize(method: object) -> str:
    """Return the advice for a ``quant_method`` of transformers: without a capital, and without a period."""
    if method == "bitsandbytes":
        return f"load it with from_pretrained, call dequantize(), and {_SAVE}"
    if method in _CONFIGS:
        wanted = f"quantization_config={_CONFIGS[str(method)]}(dequantize=True)"
        return f"load it with from_pretrained(..., {wanted}), and {_SAVE}"
    return "take the one that it was made of, whose weights are not quantized"
