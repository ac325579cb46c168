"""Linear layers in 4 and 8 bits on meta, which store and allocate what bitsandbytes' do on CUDA.

bitsandbytes makes its layers while the weights are copied to a GPU, so a model made from a config has none. These
stand in their place: the same classes for ``peft`` and ``transformers`` to see, packed weights and statistics of the
same shapes, and a forward and backward pass that take the buffers which bitsandbytes 0.45 to 0.50 take: the weight in
16 bits for the time of a product (``dequantize_4bit`` and ``F.linear``), and int32 sums for the product in 8 bits.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache
from typing import Any

import torch
from torch import nn

from safe_loading.errors import ArgumentError

FEW_TOKENS = 64  # up to here the 4-bit kernels multiply without unpacking the weight (bitsandbytes 0.50)
NESTED_BLOCK = 256  # elements of absmax that share a statistic, with double quantization


def quantize(model: nn.Module, config: Any) -> None:
    """Replace the linear layers of a model on meta by their stand-ins, as `config` says.

    Args:
        model: A ``PreTrainedModel`` on meta; changed.
        config: A ``BitsAndBytesConfig``, or the dict of one.

    Raises:
        ArgumentError: The config is of another method, or bitsandbytes is not installed.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizers_utils import should_convert_module

    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    read: Any = BitsAndBytesConfig.from_dict
    said: Any = read(dict(config)) if isinstance(config, dict) and method == "bitsandbytes" else config
    if not isinstance(said, BitsAndBytesConfig):
        raise ArgumentError(f"quantization_config is {method!r}; only bitsandbytes' 4 and 8 bits can be forecast.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ArgumentError(
            "The config is quantized with bitsandbytes, which is not installed: "
            "pip install 'safe-loading[bitsandbytes]'"
        )
    base: Any = importlib.import_module("transformers.quantizers.base").HfQuantizer
    fixed = getattr(model, "_keep_in_fp32_modules", None)
    kept = base.get_modules_to_not_convert(model, said.llm_int8_skip_modules, fixed)
    four = said.load_in_4bit
    make = four_bit_class() if four else eight_bit_class()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and should_convert_module(name, kept):
            model.set_submodule(name, make(module, said))
    marks = {"is_loaded_in_4bit": four, "is_loaded_in_8bit": not four, "is_quantized": True}
    model.__dict__.update({**marks, "quantization_method": said.quant_method})


def is_stand_in(module: nn.Module) -> bool:
    """Whether a module was made by `quantize`."""
    return getattr(module, "stands_for_16_bits", None) is not None


def arrival(layer: Any) -> tuple[int, ...]:
    """Return the bytes of what a stand-in's weight was before: 16 bits, twice where it went over the host to 8 bits."""
    size: int = layer.out_features * layer.in_features * layer.stands_for_16_bits.itemsize
    return (size, size) if hasattr(layer, "scales") else (size,)


class Params4bit(nn.Parameter):
    """A packed weight, under the name by which engines know one."""


def _frozen(shape: tuple[int, ...], dtype: torch.dtype, kind: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    return kind(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


@cache
def four_bit_class() -> Any:
    """Return the class that stands for ``bitsandbytes.nn.Linear4bit``."""
    stored: Any = importlib.import_module("bitsandbytes").nn.Linear4bit

    class Linear4bit(stored):  # type: ignore[misc]  # optional, and untyped
        """What ``bitsandbytes.nn.Linear4bit`` is once its weight is packed."""

        def __init__(self, linear: nn.Linear, config: Any) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.compute_dtype, self.quant_state = config.bnb_4bit_compute_dtype, None
            self.compute_type_is_set = True
            self.stands_for_16_bits = linear.weight.dtype
            count, block = linear.weight.numel(), 64
            storage = config.bnb_4bit_quant_storage
            packed = -(-count // (2 * storage.itemsize))
            self.weight = _frozen((packed, 1), storage, Params4bit)
            # what peft reads of bitsandbytes' parameter
            vars(self.weight).update(
                compress_statistics=config.bnb_4bit_use_double_quant, quant_type=config.bnb_4bit_quant_type
            )
            self.bias = linear.bias if linear.bias is None else _frozen(tuple(linear.bias.shape), linear.bias.dtype)
            blocks = math.ceil(count / block)
            nested = config.bnb_4bit_use_double_quant
            self._keep("absmax", (blocks,), torch.uint8 if nested else torch.float32)
            self._keep("code", (16,), torch.float32)
            if nested:
                self._keep("nested_absmax", (math.ceil(blocks / NESTED_BLOCK),), torch.float32)
                self._keep("nested_code", (256,), torch.float32)
                self._keep("offset", (), torch.float32)

        def _keep(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Compute in the compute dtype, and return the input's."""
            given, bias = x.dtype, self.bias
            x = x.to(self.compute_dtype)
            if bias is not None and bias.dtype != x.dtype:
                bias.data = bias.data.to(x.dtype)  # as bitsandbytes does, for good
            result: torch.Tensor = _PRODUCT4(x, self.weight, self.absmax, bias, self.out_features)
            return result.to(given)

    return Linear4bit


class _Product4(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, absmax: torch.Tensor, bias: Any, rows: int
    ) -> torch.Tensor:
        ctx.packed, ctx.absmax, ctx.rows, ctx.width = weight, absmax, rows, x.shape[-1]
        if x.numel() // x.shape[-1] <= FEW_TOKENS:
            return x.new_empty((*x.shape[:-1], rows))
        return nn.functional.linear(x, _unpacked(ctx, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradient = grads[0] @ _unpacked(ctx, grads[0].dtype) if ctx.needs_input_grad[0] else None
        return gradient, None, None, None, None


def _unpacked(ctx: Any, dtype: torch.dtype) -> torch.Tensor:
    if ctx.absmax.dtype == torch.uint8:  # double quantization: the statistics are unpacked first, then an offset added
        plain = torch.empty_like(ctx.absmax, dtype=torch.float32)
        plain = plain + 0.0
    weight: torch.Tensor = ctx.packed.new_empty((ctx.rows, ctx.width), dtype=dtype)
    return weight


@cache
def eight_bit_class() -> Any:
    """Return the class that stands for ``bitsandbytes.nn.Linear8bitLt``."""
    engine: Any = importlib.import_module("bitsandbytes")

    class Linear8bitLt(engine.nn.Linear8bitLt):  # type: ignore[misc]  # optional, and untyped
        """What ``bitsandbytes.nn.Linear8bitLt`` is once its weight is quantized."""

        def __init__(self, linear: nn.Linear, config: Any) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features, self.index = linear.in_features, linear.out_features, None
            self.stands_for_16_bits = linear.weight.dtype
            self.state = engine.MatmulLtState()
            self.state.threshold, self.state.has_fp16_weights = config.llm_int8_threshold, False
            self.weight = _frozen((self.out_features, self.in_features), torch.int8)
            self.bias = linear.bias if linear.bias is None else _frozen(tuple(linear.bias.shape), linear.bias.dtype)
            scales = torch.empty(self.out_features, dtype=torch.float32, device="meta")
            self.register_buffer("scales", scales, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Quantize the input, multiply in int32, and return the input's dtype."""
            if self.bias is not None and self.bias.dtype != x.dtype:
                self.bias.data = self.bias.data.to(x.dtype)
            result: torch.Tensor = _PRODUCT8(x, self.weight, self.scales, self.bias, self.state.threshold)
            return result

    return Linear8bitLt


class _Product8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: Any, threshold: float
    ) -> torch.Tensor:
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
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        gradient = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        weight = ctx.quantized.to(ctx.dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1.0 / 127.0))
        return (gradient.to(ctx.dtype) @ weight).view(ctx.shape), None, None, None, None


_PRODUCT4: Any = _Product4.apply
_PRODUCT8: Any = _Product8.apply
