"""Fused attention as CUDA runs it: the choice of a kernel, and its allocations, on tensors without data.

The facts are those of torch 2.13 for CUDA 13 (``aten/src/ATen/native/transformers/cuda``: sdp_utils.cpp, attention.cu,
attention_backward.cu and the files of flash_attn and mem_eff_attention; ``native/cudnn/MHA.cpp``). benchmarks/
predict_on_cuda.py holds them against torch's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

aten = torch.ops.aten
AMPERE = (8, 0)  # the first compute capability with flash attention and cuDNN's
# Compute capabilities whose blocks may use no more than 100 KiB of shared memory
_LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
_HALF = (torch.float16, torch.bfloat16)
_CUDNN_PREFERRED = (9, 10)  # check_prefer_cudnn_attention: major compute capabilities where cuDNN comes first
_MOST_SPLITS = 200  # of keys over all heads, where gradients of keys are accumulated in scratch
_Gradients = tuple[torch.Tensor | None, ...]
_Options = tuple[float, bool, float | None]  # dropout, is_causal, scale


class _Context(Protocol):
    """The state that the functions below keep from the forward pass for the backward pass."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    capability: tuple[int, int]
    options: _Options
    sequence_sizes: tuple[object, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


def fused_attention(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    grouped: bool,
    options: _Options,
) -> torch.Tensor | None:
    """Return the output of the kernel that CUDA would choose (``select_sdp_backend``); None where it is the math.

    The tensors are (rows, heads, tokens, size).
    """
    if query.dim() != 4 or query.dtype not in (*_HALF, torch.float32) or not _have_heads(query, key, value, grouped):
        return None
    if _takes_cudnn(capability, query, value, mask, options[0]) and key.shape[2] != 1:
        return _apply_cudnn_attention(query, key, value, additive_mask(mask, query), *options)
    if key.shape[1] != value.shape[1]:  # of groups, which cuDNN alone takes
        return None
    if mask is None and _takes_flash(capability, query, key, value, options):
        return _padded_flash_attention(query, key, value, options)
    if _takes_efficient(capability, query, key, value, mask, grouped):
        return _apply_efficient_attention(
            query, key, value, _aligned_bias(query, key, additive_mask(mask, query)), capability, *options
        )
    return None


def unfused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    grouped: bool,
    options: _Options,
) -> torch.Tensor:
    """Return the output of the math with a dropout (``_scaled_dot_product_attention_math``), whose kernel is fused.

    torch's own function would take the CPU's dropout here, whose mask is as large as the scores. The order and the
    lifetimes are those of attention.cpp.
    """
    dropout, causal, scale = options
    exact = [tensor.float() if tensor.dtype in _HALF else tensor for tensor in (query, key, value)]
    factor = math.sqrt(abs(scale) if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scaled = exact[0] * factor
    if causal:
        tokens = (query.shape[-2], key.shape[-2])
        mask = additive_mask(torch.ones(tokens, dtype=torch.bool, device=query.device).tril(), scaled)
    keys, values = exact[1:]
    if grouped:
        keys, values = (_repeated(each, query.shape[-3]) for each in (keys, values))
    scores = torch.matmul(scaled, keys.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scores = aten._safe_softmax(scores, -1)
    scores = torch.native_dropout(scores, dropout, True)[0]
    return torch.matmul(scores, values).to(query.dtype)


def _repeated(heads: torch.Tensor, count: int) -> torch.Tensor:
    own = heads.shape[-3]
    return heads if own == count else heads.repeat_interleave(count // own, -3)


def _have_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> bool:
    """Whether keys and values have a query's rows and heads, or a head for each group: fused kernels broadcast none."""
    rows, heads = query.shape[:2]
    counts = [each.shape[1] for each in (key, value)]
    fit = all(count == heads or (grouped and count and heads % count == 0) for count in counts)
    return fit and key.shape[0] == value.shape[0] == rows


def _takes_cudnn(
    capability: tuple[int, int], query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> bool:
    if capability[0] not in _CUDNN_PREFERRED or query.dtype not in _HALF or (mask is not None and mask.requires_grad):
        return False
    if dropout * 16 % 1:  # check_cudnn_dropout: cuDNN knows multiples of 1/16 only
        return False
    return all(size % 8 == 0 and size <= 256 for size in (query.shape[-1], value.shape[-1]))


def _takes_flash(
    capability: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
) -> bool:
    head, (dropout, causal, _) = query.shape[-1], options
    if capability < AMPERE or query.dtype not in _HALF or head != value.shape[-1] or head > 256:
        return False
    if causal and query.shape[2] != key.shape[2]:
        return False
    trains = any(tensor.requires_grad for tensor in (query, key, value))
    return not (trains and capability in _LITTLE_SHARED_MEMORY and head > 192 and (head <= 224 or dropout > 0))


def _takes_efficient(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    grouped: bool,
) -> bool:
    if query.dtype == torch.bfloat16 and capability < AMPERE:
        return False
    # minimum_gemm_alignment
    alignment = 8 if query.dtype in _HALF else 4 if capability >= AMPERE else 1
    unequal = grouped and query.shape[1] != key.shape[1]  # the efficient kernel takes no grouped heads
    return not unequal and query.shape[-1] % alignment == 0 and value.shape[-1] % alignment == 0


def additive_mask(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as numbers that are added to the scores (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, query.new_empty(()), query.new_empty(()))


def _aligned_bias(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return the bias as the efficient kernel takes it, expanded by a view (``preprocess_mask``)."""
    if bias is None:
        return None
    if any(stride % 8 for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
        width = bias.shape[-1]
        bias = functional.pad(bias, [0, 8 - width % 8])[..., :width]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _padded_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
) -> torch.Tensor:
    head = query.shape[-1]
    if head % 8 == 0:
        return flash_attention(query, key, value, *options)
    padded = [functional.pad(tensor, [0, -head % 8]) for tensor in (query, key, value)]
    return flash_attention(*padded, *options)[..., :head]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        output, sums, *sequence_sizes, state, offset, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, sums, state, offset)
        ctx.sequence_sizes, ctx.options = tuple(sequence_sizes), (dropout, causal, scale)
        result: torch.Tensor = output
        return result

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> _Gradients:
        query, key, value, output, sums, state, offset = ctx.saved_tensors
        dropout, causal, scale = ctx.options
        # what lies with its heads before its tokens, as an output does whose query was put in order
        copies = [tensor.transpose(1, 2).contiguous() for tensor in (grads[0], output)]
        gradients = aten._scaled_dot_product_flash_attention_backward(
            grads[0], query, key, value, output, sums, *ctx.sequence_sizes, dropout, causal, state, offset, scale=scale
        )
        # scratch of mha_bwd (flash_attn/flash_api.cpp): softmax_d and dq_accum, in float32, with rounded sizes
        batch, heads, length, size = query.shape
        length, size = -(-length // 128) * 128, -(-size // 32) * 32
        scratch = [
            query.new_empty((batch, heads, length), dtype=torch.float32),
            query.new_empty((batch, length, heads, size), dtype=torch.float32),
        ]
        if heads != key.shape[1]:  # dk_expanded and dv_expanded: one for each query head, summed afterwards
            scratch += [key.new_empty((batch, key.shape[2], heads, key.shape[3])) for _ in range(2)]
        del scratch, copies
        return (*gradients, None, None, None)


class _CudnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        state = [query.new_empty((), dtype=torch.int64) for _ in range(2)]  # seed and offset
        output = torch.empty_like(query) if query.shape[-1] == value.shape[-1] else _new_output(query, value)
        sums = query.new_empty((*query.shape[:3], 1), dtype=torch.float32) if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(query, key, value, bias, output, sums, *state)
        return output

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> _Gradients:
        query, key, value = ctx.saved_tensors[:3]
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        # the workspace of cudnn_frontend: sums of the softmax and an accumulator of the query's gradient, in float32;
        # what a plan of cuDNN itself takes is known to cuDNN alone
        workspace = query.new_empty(math.prod(query.shape[:3]) * (query.shape[3] + 1), dtype=torch.float32)
        del workspace
        return (*gradients, None, None, None, None)


class _EfficientAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        capability: tuple[int, int],
        dropout: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        output = _new_output(query, value)
        # kAlignLSE: rows in multiples of 32
        rows = -(-query.shape[2] // 32) * 32 if any(ctx.needs_input_grad) else 0
        sums = query.new_empty((*query.shape[:2], rows), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, output, sums)
        ctx.capability = capability
        return output

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> _Gradients:
        query, key, value, bias, output, _ = ctx.saved_tensors
        grad = grads[0].transpose(1, 2).contiguous()
        gradients = [
            torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            for t in (query, key, value)
        ]
        bias_gradient = _gradient_of_bias(bias) if ctx.needs_input_grad[3] else None
        if query.dtype == torch.float32:  # kKernelComputesDelta: not in float32
            product = grad * output.transpose(1, 2)
            delta = product.sum(-1).transpose(-2, -1).contiguous()
            del product
        else:
            delta = query.new_empty(query.shape[:3], dtype=torch.float32)
        workspace = query.new_empty(_efficient_workspace(ctx.capability, query, key, value), dtype=torch.uint8)
        del delta, grad, workspace
        return (*gradients, bias_gradient, None, None, None, None)


def _gradient_of_bias(bias: torch.Tensor) -> torch.Tensor:
    """Return a gradient for each row and head, although they share the bias, in lines of a multiple of 16 numbers."""
    *leading, width = bias.shape
    return bias.new_empty((*leading, -(-width // 16) * 16))[..., :width]


class _Tile(NamedTuple):
    """The rows and columns of the scores that a block of threads computes."""

    queries: int
    keys: int
    accumulates: bool  # gradients of keys and values in scratch, since they do not fit into registers


def _tile_of(capability: tuple[int, int], dtype: torch.dtype, head: int) -> _Tile:
    """Return the kernel that ``dispatch_cutlassB`` chooses, by the size of a head.

    Which kernels fit into a card's shared memory was read off torch's own code for a T4, an A100, an L4 and an H100.
    """
    little = capability < AMPERE or capability in _LITTLE_SHARED_MEMORY
    if head <= 64:
        return _Tile(64, 64, accumulates=False)
    if dtype == torch.float32:
        return _Tile(64 if little else 128, 64, accumulates=False)
    if head > 128:
        return _Tile(128, 64, accumulates=True)
    if not little:
        return _Tile(128, 128, accumulates=False)
    if capability >= AMPERE and head > 96:
        return _Tile(64, 64, accumulates=True)
    return _Tile(128, 64, accumulates=False)


def _efficient_workspace(
    capability: tuple[int, int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> int:
    """Return the bytes of the backward pass's workspace (``workspace_size`` of kernel_backward.h)."""
    (batch, heads, queries, head), keys = query.shape, key.shape[2]
    tile = _tile_of(capability, query.dtype, max(head, value.shape[3]))
    # GradQTempStorage: a lock, a counter and the tile in float32
    size = -(-queries // tile.queries) * -(-head // tile.keys) * (16 + 4 * tile.queries * tile.keys)
    if tile.accumulates:
        crowded = batch * heads >= 256 and keys <= 2 * tile.keys
        splits = 1 if crowded else max(1, min(-(-keys // tile.keys), _MOST_SPLITS // (batch * heads)))
        for width in (head, value.shape[3]):
            size += 4 * splits * tile.keys * -(-width // tile.queries) * tile.queries
    return batch * heads * -(-size // 16) * 16


def _new_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return an output that lies in memory as (rows, tokens, heads, size)."""
    batch, heads, length, _ = query.shape
    return query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)


# torch does not type `apply`
flash_attention: Callable[..., torch.Tensor] = _FlashAttention.apply
_apply_cudnn_attention: Callable[..., torch.Tensor] = _CudnnAttention.apply
_apply_efficient_attention: Callable[..., torch.Tensor] = _EfficientAttention.apply
