"""Linear layers in 4 and 8 bits on meta, which store and allocate what bitsandbytes' do on CUDA.

bitsandbytes packs a weight while it is copied to a GPU, so a model made from a config has no packed weights, and its
kernels cannot run on tensors without content. These layers stand in for its own: the same classes for ``peft`` and
``transformers`` to see, packed weights and statistics of the same shapes, and a forward and backward pass that allocate
the buffers which bitsandbytes 0.45 to 0.50 allocates: the weight in 16 bits for the time of a product
(``dequantize_4bit`` and ``F.linear``), and int32 sums for the product in 8 bits.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from safe_loading.errors import ArgumentError

from .packed_formats import stand_in_of_torchao
from .packed_linear import frozen
from .recognize import is_bitsandbytes_linear

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

FEW_TOKENS = 64  # up to here the 4-bit kernels multiply without unpacking the weight (bitsandbytes 0.50)
BLOCK = 64  # elements that share an absmax, bitsandbytes' default on CUDA
NESTED_BLOCK = 256  # elements of absmax that share a statistic, with double quantization


class StandIn(nn.Module):
    """What both kinds of stand-in have: a linear layer's sizes, and the dtype of the weight before it was packed."""

    in_features: int
    out_features: int
    original_dtype: torch.dtype
    transposed: bool = False  # whether the weight arrives as transformers' Conv1D stores it


class Params4bit(nn.Parameter):
    """The packed weight of a 4-bit stand-in, under the class name by which transformers and peft recognize one."""


@dataclass(frozen=True)
class FourBitOptions:
    """How a layer is stored in 4 bits, and what it computes in."""

    compute_dtype: torch.dtype
    storage: torch.dtype  # the dtype in which the packed weight is stored
    nested: bool  # whether the statistics are themselves quantized (double quantization)
    quant_type: str  # "nf4" or "fp4"
    block: int = BLOCK  # elements that share an absmax


def bitsandbytes_config(config: object) -> BitsAndBytesConfig | None:
    """Return a ``quantization_config``, as an object or as in config.json; None for another method's."""
    from transformers import BitsAndBytesConfig

    if isinstance(config, dict):
        # configs of early versions have no quant_method; transformers' AutoQuantizationConfig reads them the same way
        legacy = config.get("load_in_4bit") or config.get("load_in_8bit")
        if config.get("quant_method", "bitsandbytes" if legacy else None) != "bitsandbytes":
            return None
        config = BitsAndBytesConfig.from_dict(dict(config))  # type: ignore[no-untyped-call]  # transformers' own
    return config if isinstance(config, BitsAndBytesConfig) else None


def quantize_with_stand_ins(model: nn.Module, config: BitsAndBytesConfig) -> None:
    """Replace the layers of a PreTrainedModel on meta that bitsandbytes would quantize by their stand-ins."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    # which layers stay as they are: transformers' rule, as its quantizers for 4 and 8 bits apply it
    in_float32 = getattr(model, "_keep_in_fp32_modules", None)
    kept = HfQuantizer.get_modules_to_not_convert(model, config.llm_int8_skip_modules, in_float32)  # type: ignore[arg-type]  # a PreTrainedModel has them
    for name, module in list(model.named_modules()):
        if not should_convert_module(name, kept):
            continue
        if type(module) is nn.Linear:
            model.set_submodule(name, _stand_in(module, config))
        elif isinstance(module, Conv1D):  # GPT-2's linear layer, whose weight is transposed
            rows, columns = module.weight.shape
            linear = nn.Linear(rows, columns, bias=False, device="meta", dtype=module.weight.dtype)
            linear.bias = module.bias
            made = _stand_in(linear, config)
            made.transposed = True
            model.set_submodule(name, made)
    four = config.load_in_4bit
    marks = {"is_loaded_in_4bit": four, "is_loaded_in_8bit": not four, "is_quantized": True}
    vars(model).update({**marks, "quantization_method": config.quant_method})


def stand_ins_of(model: nn.Module) -> dict[str, StandIn]:
    """Return the stand-ins of a model by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, StandIn)}


def unpacked_copies(layer: StandIn) -> tuple[int, ...]:
    """Return the bytes that a stand-in's weight takes on the GPU while it is loaded, before it is packed.

    It arrives in 16 bits. An 8-bit weight goes from there to the host to be quantized, and takes its place twice; so
    does a transposed one, since bitsandbytes quantizes rows that lie one after the other.
    """
    size = layer.out_features * layer.in_features * layer.original_dtype.itemsize
    return (size, size) if hasattr(layer, "scales") or layer.transposed else (size,)


@contextlib.contextmanager
def with_stand_ins(model: nn.Module) -> Iterator[Mapping[str, StandIn]]:
    """Replace real layers of bitsandbytes and torchao by stand-ins, and put all of them back at the end.

    Yields those for bitsandbytes by their paths.
    """
    originals: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if is_bitsandbytes_linear(module) and not isinstance(module, StandIn)
    }
    made = {name: _stand_in_of_layer(module) for name, module in originals.items()}
    packed = {name: other for name, module in model.named_modules() if (other := stand_in_of_torchao(module))}
    originals |= {name: model.get_submodule(name) for name in packed}
    if "" in originals:
        kind = type(model).__name__
        raise ArgumentError(
            f"A single quantized layer ({kind}) was passed; put it into torch.nn.Sequential({kind}(...))."
        )
    try:
        for name, replacement in {**made, **packed}.items():
            model.set_submodule(name, replacement)
        yield made
    finally:
        for name, module in originals.items():
            model.set_submodule(name, module)


def _stand_in(linear: nn.Linear, config: BitsAndBytesConfig) -> StandIn:
    """Return the stand-in of a plain linear layer that bitsandbytes will quantize."""
    if not config.load_in_4bit:
        return eight_bit_class()(linear, config.llm_int8_threshold)
    options = FourBitOptions(
        config.bnb_4bit_compute_dtype,
        config.bnb_4bit_quant_storage,
        config.bnb_4bit_use_double_quant,
        config.bnb_4bit_quant_type,
    )
    return four_bit_class()(linear, options)


def _stand_in_of_layer(module: Any) -> StandIn:
    """Return the stand-in of a layer of bitsandbytes."""
    from transformers.pytorch_utils import Conv1D

    weight = module.weight
    state = getattr(weight, "quant_state", None)
    dtype = state.dtype if state is not None else weight.dtype if weight.is_floating_point() else torch.float16
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=dtype)
    linear.bias = module.bias
    if hasattr(module, "compute_dtype"):
        options = FourBitOptions(
            module.compute_dtype or dtype,
            weight.quant_storage,
            weight.compress_statistics,
            weight.quant_type,
            weight.blocksize,
        )
        made = four_bit_class()(linear, options)
    else:
        made = eight_bit_class()(linear, module.state.threshold)
    made.transposed = getattr(module, "source_cls", None) is Conv1D
    return made.train(module.training)


def _frozen_bias(linear: nn.Linear) -> nn.Parameter | None:
    return None if linear.bias is None else frozen(tuple(linear.bias.shape), linear.bias.dtype)


@cache
def four_bit_class() -> Callable[[nn.Linear, FourBitOptions], StandIn]:
    """Return the class that stands in for ``bitsandbytes.nn.Linear4bit``, derived from it where it is installed."""
    installed = importlib.util.find_spec("bitsandbytes") is not None
    engine: Any = importlib.import_module("bitsandbytes").nn.Linear4bit if installed else nn.Linear

    class Linear4bit(engine, StandIn):  # type: ignore[misc]  # optional, and untyped
        """What ``bitsandbytes.nn.Linear4bit`` is once its weight is packed."""

        def __init__(self, linear: nn.Linear, options: FourBitOptions) -> None:
            # Not bitsandbytes' own __init__, which makes a weight that is not packed, on the default device.
            nn.Module.__init__(self)
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.compute_dtype, self.quant_state = options.compute_dtype, None
            self.compute_type_is_set = True
            self.original_dtype = linear.weight.dtype
            count = linear.weight.numel()
            packed = -(-count // (2 * options.storage.itemsize))
            self.weight = frozen((packed, 1), options.storage, Params4bit)
            # what peft reads of bitsandbytes' parameter
            vars(self.weight).update(compress_statistics=options.nested, quant_type=options.quant_type)
            self.bias = _frozen_bias(linear)
            blocks = math.ceil(count / options.block)
            self._add_buffer("absmax", (blocks,), torch.uint8 if options.nested else torch.float32)
            self._add_buffer("code", (16,), torch.float32)
            if options.nested:
                self._add_buffer("nested_absmax", (math.ceil(blocks / NESTED_BLOCK),), torch.float32)
                self._add_buffer("nested_code", (256,), torch.float32)
                self._add_buffer("offset", (), torch.float32)

        def _add_buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Compute in the compute dtype, and return the input's."""
            input_dtype, bias = x.dtype, self.bias
            x = x.to(self.compute_dtype)
            if bias is not None and bias.dtype != x.dtype:
                bias.data = bias.data.to(x.dtype)  # as bitsandbytes does, for good
            product = _product_4bit(x, self.weight, self.absmax, bias, self.out_features, self.original_dtype)
            return product.to(input_dtype)

    return Linear4bit


@cache
def eight_bit_class() -> Callable[[nn.Linear, float], StandIn]:
    """Return the class that stands in for ``bitsandbytes.nn.Linear8bitLt``, derived from it where it is installed."""
    installed = importlib.util.find_spec("bitsandbytes") is not None
    engine: Any = importlib.import_module("bitsandbytes").nn.Linear8bitLt if installed else nn.Linear
    make_state: Any = importlib.import_module("bitsandbytes").MatmulLtState if installed else SimpleNamespace

    class Linear8bitLt(engine, StandIn):  # type: ignore[misc]  # optional, and untyped
        """What ``bitsandbytes.nn.Linear8bitLt`` is once its weight is quantized."""

        def __init__(self, linear: nn.Linear, threshold: float) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features, self.index = linear.in_features, linear.out_features, None
            self.original_dtype = linear.weight.dtype
            self.state = make_state()
            self.state.threshold, self.state.has_fp16_weights = threshold, False
            self.weight = frozen((self.out_features, self.in_features), torch.int8)
            self.bias = _frozen_bias(linear)
            scales = torch.empty(self.out_features, dtype=torch.float32, device="meta")
            self.register_buffer("scales", scales, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Quantize the input, multiply in int32, and return the input's dtype."""
            if self.bias is not None and self.bias.dtype != x.dtype:
                self.bias.data = self.bias.data.to(x.dtype)
            return _product_8bit(x, self.weight, self.scales, self.bias, self.state.threshold)

    return Linear8bitLt


@cache
def lora_layers() -> Mapping[type[nn.Module], type[nn.Module]]:
    """Return peft's LoRA layers for stand-ins by their classes, where bitsandbytes is missing and peft makes none.

    peft defines ``bnb.Linear4bit`` and ``bnb.Linear8bitLt`` only where bitsandbytes is installed. This one allocates
    what they do: in 4 bits the result is copied first, and each adapter's output is cast before it is added.
    """
    if importlib.util.find_spec("bitsandbytes") is not None:
        return {}
    from peft.tuners.lora.layer import Linear

    class LoraOfStandIn(Linear):
        """A LoRA layer around a stand-in for a layer of bitsandbytes."""

        def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            """Add the adapters' outputs as peft's layers for bitsandbytes do."""
            if self.lora_variant:
                return super().forward(x, *args, **kwargs)
            result: torch.Tensor = self.base_layer(x, *args, **kwargs)
            if isinstance(self.base_layer.weight, Params4bit):
                result = result.clone()
            for name in self.active_adapters if not self.disable_adapters else ():
                if name not in self.lora_A:
                    continue
                down, up, dtype = self.lora_A[name], self.lora_B[name], result.dtype
                inner = x if torch.is_autocast_enabled() else x.to(cast(nn.Linear, down).weight.dtype)
                output = up(down(self.lora_dropout[name](inner))) * self.scaling[name]
                result = result + (output if torch.is_autocast_enabled() else output.to(dtype))
            return result

    stand_ins: tuple[Any, ...] = (four_bit_class(), eight_bit_class())
    return dict.fromkeys(stand_ins, LoraOfStandIn)


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        bias: torch.Tensor | None,
        rows: int,
        original: torch.dtype,
    ) -> torch.Tensor:
        ctx.packed, ctx.absmax, ctx.rows, ctx.width, ctx.original = weight, absmax, rows, x.shape[-1], original
        if x.numel() // x.shape[-1] <= FEW_TOKENS:
            return x.new_empty((*x.shape[:-1], rows))
        return nn.functional.linear(x, _unpacked(ctx, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        # into the dtype that was packed, and from there into the gradient's
        return grads[0] @ _unpacked(ctx, ctx.original).to(grads[0].dtype), *(None,) * 5


def _unpacked(ctx: Any, dtype: torch.dtype) -> torch.Tensor:
    if ctx.absmax.dtype == torch.uint8:  # double quantization: the statistics are unpacked first, then an offset added
        plain = torch.empty_like(ctx.absmax, dtype=torch.float32)
        plain = plain + 0.0
    weight: torch.Tensor = ctx.packed.new_empty((ctx.rows, ctx.width), dtype=dtype)
    return weight


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
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        gradient = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        # As MatMul8bitLt.backward of bitsandbytes: a scale is the largest value of its row, whose code is 127.
        weight = ctx.quantized.to(ctx.dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1.0 / 127.0))
        return (gradient.to(ctx.dtype) @ weight).view(ctx.shape), None, None, None, None


_product_4bit: Callable[..., torch.Tensor] = _FourBitProduct.apply
_product_8bit: Callable[..., torch.Tensor] = _EightBitProduct.apply
