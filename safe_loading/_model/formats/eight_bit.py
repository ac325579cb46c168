"""8 bits of bitsandbytes (LLM.int8): int8 under the largest value of each row, and a layer that allocates like its own.

Its product is in int32 sums, as bitsandbytes 0.45 to 0.50 make them; the input is quantized first.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.protocols import JsonObject

from .block_codes import BlockCodes, CodeTable, as_they_are, rounded_to
from .packed_linear import StandIn, frozen, frozen_bias
from .packed_on_disk import EIGHT_BITS, WEIGHT_FORMAT
from .stored import QuantizedTensor, Rows, Stored, StoredCodes, Tables, packed_tensor

EIGHT_BIT_LAYER = "Linear8bitLt"
_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it in int8_vectorwise_dequant
_EIGHT_BIT = "Int8Params"


def is_eight_bit(tensor: object) -> bool:
    """Return whether a tensor is an 8-bit weight of bitsandbytes."""
    return type(tensor).__name__ == _EIGHT_BIT


@cache
def eight_bit_class() -> Callable[[nn.Linear, float], StandIn]:
    """Return the class that stands in for ``bitsandbytes.nn.Linear8bitLt``, derived from it where it is installed."""
    installed = importlib.util.find_spec("bitsandbytes") is not None
    engine: Any = importlib.import_module("bitsandbytes").nn.Linear8bitLt if installed else nn.Linear
    make_state: Any = importlib.import_module("bitsandbytes").MatmulLtState if installed else SimpleNamespace

    class Linear8bitLt(engine, StandIn):  # type: ignore[misc]  # optional, and untyped
        """The layer ``bitsandbytes.nn.Linear8bitLt`` once its weight is quantized."""

        def __init__(self, linear: nn.Linear, threshold: float) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features, self.index = linear.in_features, linear.out_features, None
            self.original_dtype = linear.weight.dtype
            self.state = make_state()
            self.state.threshold, self.state.has_fp16_weights = threshold, False
            self.weight = frozen((self.out_features, self.in_features), torch.int8)
            self.bias = frozen_bias(linear)
            scales = torch.empty(self.out_features, dtype=torch.float32, device="meta")
            self.register_buffer("scales", scales, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Quantize the input, multiply in int32, and return the input's dtype."""
            if self.bias is not None and self.bias.dtype != x.dtype:
                self.bias.data = self.bias.data.to(x.dtype)
            return _product_8bit(x, self.weight, self.scales, self.bias, self.state.threshold)

        def unpacked(self) -> torch.Tensor:
            """Return the weight in float32, as ``int8_vectorwise_dequant`` computes it."""
            layer: Any = self
            values: torch.Tensor = layer.weight.detach() * layer.scales.view(-1, 1) * (1 / 127)
            return values

    return Linear8bitLt


def bytes_of_eight_bit(tensor: torch.Tensor) -> int:
    """Return the bytes of a weight in 8 bits, with the statistics of its rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    return tensor.numel() + 4 * rows  # int8, and SCB: the float32 largest value of each row


def decode_eight_bit_layer(module: nn.Module) -> torch.Tensor:
    """Return the values of an 8-bit weight as a matrix, in float32."""
    from bitsandbytes.functional import int8_vectorwise_dequant

    weight: Any = module.weight
    if weight.is_floating_point():
        raise NotImplementedError(f"{type(module).__name__} has no codes yet: its weight is in {weight.dtype}")
    state: Any = getattr(module, "state", None)  # where bitsandbytes moves the scales at the first forward
    scales = weight.SCB if state is None or state.SCB is None else state.SCB
    return int8_vectorwise_dequant(weight.data, scales.to(weight.device))  # type: ignore[no-any-return]  # a tensor


class _EightBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        threshold: float,
    ) -> torch.Tensor:
        # Each del stands where bitsandbytes frees the tensor: the peak is made of those that live at the same time.
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.to(torch.float16)  # quantization starts from 16 bits
        statistics = rows.new_empty(rows.shape[0], dtype=torch.float32)
        quantized = torch.empty_like(rows, dtype=torch.int8)
        if threshold > 0.0:
            outliers = rows.abs() >= threshold
            del outliers
        del rows
        sums = flat.new_empty((flat.shape[0], weight.shape[0]), dtype=torch.int32)
        result = torch.empty_like(sums, dtype=torch.float16)
        del sums, quantized, statistics
        result = result.to(x.dtype)
        if bias is not None and x.dtype != torch.float16:
            result = result.add_(bias)
        if any(ctx.needs_input_grad[:2]):
            ctx.kept = flat  # bitsandbytes keeps its input, of which it needs the dtype alone
        ctx.quantized, ctx.scales, ctx.shape, ctx.dtype = weight, scales, x.shape, x.dtype
        return result.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_bias = grads[0].sum(0) if ctx.needs_input_grad[3] else None  # of the rows that are left autograd makes one
        gradient = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        if not ctx.needs_input_grad[0]:
            return None, None, None, of_bias, None
        # As MatMul8bitLt.backward of bitsandbytes: a scale is the largest value of its row, whose code is 127.
        weight = ctx.quantized.to(ctx.dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1.0 / 127.0))
        return (gradient.to(ctx.dtype) @ weight).view(ctx.shape), None, None, of_bias, None


_product_8bit: Callable[..., torch.Tensor] = _EightBitProduct.apply


def find_eight_bits(name: str, checkpoint: Checkpoint, settings: JsonObject) -> QuantizedTensor | None:
    """Return the weight whose 8-bit codes a tensor holds; None for any other tensor."""
    return packed_tensor(EIGHT_BITS, name, checkpoint)


def _eight_bit_rows(weight: QuantizedTensor, tables: Tables, stored: Stored) -> Rows:
    columns = weight.shape[-1]

    def rows(start: int, stop: int) -> torch.Tensor:
        codes = stored(start * columns, stop * columns).view(torch.int8).view(-1, columns)
        # in float32, the order of bitsandbytes
        return (codes.float() * tables["SCB"].float().view(-1, 1)[start:stop] * _INT8).double()

    return rows


def _in_blocks(weight: QuantizedTensor, tables: Tables) -> BlockCodes:
    scales, numbers = tables["SCB"], torch.arange(256, dtype=torch.uint8).view(torch.int8).double() / 127
    read = rounded_to(scales.dtype, scales)
    return BlockCodes(CodeTable(numbers), weight.shape[-1], 1, lambda data: data, read, as_they_are)


STORED_EIGHT_BITS = StoredCodes(
    EIGHT_BITS, find_eight_bits, _eight_bit_rows, described_by=(f".{WEIGHT_FORMAT}",), in_blocks=_in_blocks
)
