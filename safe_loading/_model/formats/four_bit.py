"""4 bits of bitsandbytes (NF4 and FP4): the packed weight, its statistics, and a layer that allocates as its own.

bitsandbytes packs a weight while it is copied to a GPU, so a model made from a config has no packed weights, and its
kernels cannot run on tensors without content. The layer stands in for its own: the same class for ``peft`` and
``transformers`` to see, packed weights and statistics of the same shapes, and a forward and backward pass that allocate
the weight in 16 bits for the time of a product, as 0.45 to 0.50 do (``dequantize_4bit`` and ``F.linear``).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, counted
from safe_loading._core.thread_patches import patched

from .four_bit_blocks import four_bit_blocks, numbers_of
from .packed_linear import StandIn, frozen, frozen_bias
from .packed_on_disk import FOUR_BITS, NESTED_BLOCK, STATES
from .stored import QuantizedTensor, Rows, Stored, StoredCodes, Tables, entries, packed_tensor

FOUR_BIT_LAYER = "Linear4bit"
# A frozen base in 4 bits as QLoRA has it: the config as config.json has it, and as an argument in Python.
QLORA = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
}
QLORA_WRITTEN = (
    'quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
    "bnb_4bit_compute_dtype=torch.bfloat16)"
)
_FOUR_BIT = "Params4bit"
# The config whose codes lie in a floating dtype, which FSDP flattens.
FLOAT_STORAGE = "BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16)"
# Up to here bitsandbytes 0.50 multiplies the packed weight on every card and in every dtype. For more tokens it decides
# by the card, the dtype and the sizes: in float32 for 7, on an H100 for 64 at most, on an RTX 4090 for 256. A forecast
# that is one weight too large for a short prompt does no harm, one that is too small does.
FEW_TOKENS = 4
BLOCK = 64  # elements that share an absmax, bitsandbytes' default on CUDA
_NF4_TABLE = 16 * 4  # bitsandbytes: each weight has the 16 float32 values that its codes stand for
_ABSMAX_TABLE = 256 * 4  # and with double quantization the 256 values of its 8-bit absmax codes
# Of a layer: whether its first forward in eval mode puts the codes into an order for CPUs with AVX-512.
_REORDERS = "support_avx512bf16_for_cpu"


class Params4bit(nn.Parameter):
    """The packed weight of a 4-bit stand-in, under the class name by which transformers and peft recognize one."""


@dataclass(frozen=True)
class FourBitOptions:
    """The storage of a layer in 4 bits, and the dtype in which it computes."""

    compute_dtype: torch.dtype
    storage: torch.dtype  # the dtype in which the packed weight is stored
    nested: bool  # whether the statistics are themselves quantized (double quantization)
    quant_type: str  # "nf4" or "fp4"
    block: int = BLOCK  # elements that share an absmax


def is_four_bit(tensor: object) -> bool:
    """Return whether a tensor is a 4-bit weight of bitsandbytes."""
    return type(tensor).__name__ == _FOUR_BIT


@cache
def four_bit_class() -> Callable[[nn.Linear, FourBitOptions], StandIn]:
    """Return the class that stands in for ``bitsandbytes.nn.Linear4bit``, derived from it where it is installed."""
    installed = importlib.util.find_spec("bitsandbytes") is not None
    engine: Any = importlib.import_module("bitsandbytes").nn.Linear4bit if installed else nn.Linear

    class Linear4bit(engine, StandIn):  # type: ignore[misc]  # optional, and untyped
        """The layer ``bitsandbytes.nn.Linear4bit`` once its weight is packed."""

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
            self.bias = frozen_bias(linear)
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

        def unpacked(self) -> torch.Tensor:
            """Return the weight in 16 bits."""
            return _unpacked_weight(self)

    return Linear4bit


def _unpacked_weight(layer: Any) -> torch.Tensor:
    """Return a stand-in's weight in 16 bits, as ``dequantize_4bit`` allocates it."""
    nested = layer.absmax.dtype == torch.uint8
    statistics = layer.absmax.new_empty(layer.absmax.shape, dtype=torch.float32) if nested else layer.absmax
    values: torch.Tensor = layer.weight.new_empty((layer.out_features, layer.in_features), dtype=layer.original_dtype)
    del statistics  # alive until the values are there
    return values


def bytes_of_four_bit(tensor: torch.Tensor) -> int:
    """Return the bytes of a weight of bitsandbytes in 4 bits: two in a byte, and its statistics."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        tensors: list[torch.Tensor] = [tensor, state.absmax, state.code]
        if state.nested:
            tensors += [state.offset, state.state2.absmax, state.state2.code]
        return sum(int(stored.nbytes) for stored in tensors)
    count = tensor.numel()
    blocks = math.ceil(count / (getattr(tensor, "blocksize", None) or BLOCK))
    size = math.ceil(count / 2) + _NF4_TABLE
    if not getattr(tensor, "compress_statistics", True):
        return size + 4 * blocks
    # double quantization: a byte for each block, a float32 for 256 of them, one offset and the table
    return size + blocks + 4 * math.ceil(blocks / NESTED_BLOCK) + 4 + _ABSMAX_TABLE


def decode_four_bit_layer(module: nn.Module) -> torch.Tensor:
    """Return the values of a 4-bit weight as a matrix, in float32."""
    weight: Any = module.weight
    return _decode(weight.data, weight.quant_state)


def _decode(codes: torch.Tensor, state: Any) -> torch.Tensor:
    if _is_packed(state):
        codes, state = _unpacked_for_cpu(codes, state)
    packed = codes.view(torch.uint8).view(-1)
    scales = state.absmax
    if state.nested:
        outer = state.state2
        scales = decode_nested_scales(scales, outer.code, outer.absmax, outer.blocksize, state.offset)
    table = numbers_of(state.code, state.quant_type)
    return decode_four_bits(packed, table, scales, state.blocksize, 0, state.shape.numel()).view(state.shape)


def decode_four_bits(
    packed: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, blocksize: int, start: int, stop: int
) -> torch.Tensor:
    """Return the values of 4-bit codes of bitsandbytes in float32: the product of code and scale.

    bitsandbytes' own ``dequantize_4bit`` is wrong on the CPU for some rows that are no whole number of blocks (0.50.2:
    32, 96 and 160 columns in blocks of 64), and rounds to the dtype of the checkpoint. Each byte of ``packed`` has two
    codes, the first in the high half, beginning with that of element ``start``; the blocks of ``blocksize`` elements
    are counted through the whole weight.
    """
    # A byte is looked up with both of its values at once: half the indices, and they are the largest temporary. An odd
    # element is the second code of its byte, so the first one is cut off.
    codes = torch.arange(256, device=packed.device)
    pairs = table.float()[torch.stack([codes >> 4, codes & 15], 1)]
    values = pairs.index_select(0, packed.int()).view(-1)[start % 2 :][: stop - start]
    scales = scales.float().view(-1)
    # Whole blocks are multiplied as rows of a matrix, and what is left of one at either end by its own scale.
    first = min(-(-start // blocksize) * blocksize, stop)
    last = max(first, stop // blocksize * blocksize)
    for low, high in ((start, first), (last, stop)):
        values[low - start : high - start].mul_(scales[low // blocksize : low // blocksize + 1])
    whole = values[first - start : last - start].view(-1, blocksize)
    whole.mul_(scales[first // blocksize : last // blocksize, None])
    return values


@contextlib.contextmanager
def decoded_rightly_on_the_cpu() -> Iterator[None]:
    """Inside, ``dequantize_4bit`` of bitsandbytes is right on the CPU too, rounded as it rounds; see above."""
    engine = sys.modules.get("bitsandbytes.functional")
    if engine is None:
        yield
        return
    own = engine.dequantize_4bit

    def dequantize_4bit(codes: torch.Tensor, quant_state: Any = None, *args: Any, **options: Any) -> torch.Tensor:
        if quant_state is None or args or options or codes.device.type != "cpu":
            return cast("torch.Tensor", own(codes, quant_state, *args, **options))
        values = _decode(codes, quant_state).to(quant_state.dtype)
        return values.t() if codes.shape[0] == 1 else values

    with patched(engine, "dequantize_4bit", dequantize_4bit):
        yield


def decode_nested_scales(
    codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, blocksize: int, offset: torch.Tensor | float
) -> torch.Tensor:
    """Return scales that are themselves stored as codes of 8 bits (bitsandbytes' double quantization)."""
    outer = scales.float().view(-1).repeat_interleave(blocksize)[: codes.numel()]
    return entries(table.float(), codes.view(-1)) * outer + offset


def undo_cpu_packing(module: torch.nn.Module) -> None:
    """Undo the order into which bitsandbytes puts 4-bit weights at the first forward on a CPU with AVX-512.

    Neither its own ``dequantize_4bit`` nor peft's merge know of that order: what they make of such codes is noise. The
    weight gets a new ``quant_state``; the one that it had stays as it was, for whoever puts it back.
    """
    weight: Any = getattr(module, "weight", None)
    if getattr(weight, "quant_state", None) is not None and _is_packed(weight.quant_state):
        weight.data, weight.quant_state = _unpacked_for_cpu(weight.data, weight.quant_state)


def keep_order_of_codes(module: torch.nn.Module) -> None:
    """Keep bitsandbytes from reordering the codes of a layer on a CPU: FSDP gathers them in the old order ever after.

    The statistics, which FSDP does not split, would say the new one.
    """
    if getattr(module, _REORDERS, False):
        setattr(module, _REORDERS, False)


def reordering_findings(model: nn.Module) -> list[Finding]:
    """Return the finding of codes that the first forward on this CPU puts into an order that their engine misreads."""
    paths = [
        path
        for path, module in model.named_modules()
        if getattr(module, _REORDERS, False)
        and is_four_bit(module._parameters.get("weight"))
        and module.get_parameter("weight").device.type == "cpu"
    ]
    if not paths:
        return []
    message = (
        f"the first forward on this CPU (AVX-512) puts the codes of {counted(len(paths), 'layer')} into an order that "
        f"bitsandbytes reads wrongly itself, and rounds their scales to bfloat16: what save_pretrained, "
        f"merge_and_unload, unmerge_adapter and a DoRA read afterwards is something else."
    )
    fix = "merge with merge_lora_inplace, which reads that order, and save right after it, before a forward."
    return [Finding("codes-reordered", "warning", paths[0], message, fix)]


def _is_packed(state: Any) -> bool:
    """Return whether codes or scales are in the order for CPUs; bitsandbytes makes scales a matrix nowhere else."""
    return getattr(state, "packing_format_for_cpu", False) or (not state.nested and state.absmax.dim() == 2)


def _unpacked_for_cpu(codes: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Return codes and their state in the usual order; the scales stay as the packing rounded them, in bfloat16.

    bitsandbytes' own inverse (0.50.2) forgets to transpose plain scales, and rounds nested ones a second time. It runs
    when a state dict is taken, so that scales may be in the order for CPUs where the codes no longer are.
    """
    state = copy.copy(state)
    scales = state.absmax.T.reshape(-1).float()
    if getattr(state, "packing_format_for_cpu", False):
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

        state.original_nested = False
        codes, state = _convert_weight_packed_for_cpu_inverse(codes, state)
    state.absmax = scales
    return codes, state


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
        of_bias = grads[0].sum(0) if ctx.needs_input_grad[3] else None  # of the rows that are left autograd makes one
        of_input = None
        if ctx.needs_input_grad[0]:  # into the dtype that was packed, and from there into the gradient's
            of_input = grads[0] @ _unpacked(ctx, ctx.original).to(grads[0].dtype)
        return of_input, None, None, of_bias, None, None


def _unpacked(ctx: Any, dtype: torch.dtype) -> torch.Tensor:
    if ctx.absmax.dtype == torch.uint8:  # double quantization: the statistics are unpacked first, then an offset added
        plain = torch.empty_like(ctx.absmax, dtype=torch.float32)
        plain = plain + 0.0
    weight: torch.Tensor = ctx.packed.new_empty((ctx.rows, ctx.width), dtype=dtype)
    return weight


_product_4bit: Callable[..., torch.Tensor] = _FourBitProduct.apply


def find_four_bits(name: str, checkpoint: Checkpoint, settings: JsonObject) -> QuantizedTensor | None:
    """Return the weight whose 4-bit codes a tensor holds; None for any other tensor."""
    return packed_tensor(FOUR_BITS, name, checkpoint)


def _with_plain_scales(weight: QuantizedTensor, tables: Tables) -> Tables:
    if "nested_absmax" not in tables:
        return tables
    absmax = decode_nested_scales(  # the scales are codes themselves
        tables["absmax"],
        tables["nested_quant_map"],
        tables["nested_absmax"],
        int(weight.facts["nested_blocksize"]),
        float(weight.facts["nested_offset"]),
    )
    return {**tables, "absmax": absmax}


def _four_bit_rows(weight: QuantizedTensor, tables: Tables, stored: Stored) -> Rows:
    columns, table = weight.shape[-1], numbers_of(tables["quant_map"], weight.facts["quant_type"])

    def rows(start: int, stop: int) -> torch.Tensor:
        first, last = start * columns, stop * columns
        # A byte holds two codes; where the number of columns is odd, a row may begin within a byte.
        packed, size = stored(first // 2, -(-last // 2)), int(weight.facts["blocksize"])
        values = decode_four_bits(packed, table, tables["absmax"], size, first, last)
        return values.double().view(-1, columns)

    return rows


STORED_FOUR_BITS = StoredCodes(
    FOUR_BITS,
    find_four_bits,
    _four_bit_rows,
    tables=_with_plain_scales,
    described_by=tuple(STATES),
    in_blocks=four_bit_blocks,
)
