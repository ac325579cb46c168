"""What CUDA would run where the CPU runs something else, so that a trace on the CPU allocates what CUDA allocates.

A few operations choose a kernel by the device of their input, and the choice changes what is kept for the backward
pass. Tracing happens on fake CPU tensors, because a torch without CUDA cannot hold fake CUDA ones. So inside
`cuda_paths` these functions of ``torch.nn.functional`` take CUDA's choice, and allocate for a moment what a CUDA kernel
allocates as scratch. The facts are those of ``aten/src/ATen/native`` (SoftMax.cpp and cuda/SoftMax.cu, Dropout.cpp,
transformers/cuda/sdp_utils.cpp, attention.cu and attention_backward.cu), torch 2.4 to 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.nn import functional

aten = torch.ops.aten
AMPERE = (8, 0)  # the first compute capability with flash attention
_Gradients = tuple[torch.Tensor | None, ...]


@contextlib.contextmanager
def cuda_paths(capability: tuple[int, int] | None) -> Iterator[None]:
    """Inside, softmax, dropout and attention allocate what they allocate on a GPU of this compute capability.

    None stands for an accelerator other than an NVIDIA GPU: Dropout.cpp treats it as CUDA, and nothing else is known.
    """
    # models and torch's own modules call these as attributes of torch.nn.functional
    replacements = _CudaFunctions(capability or (0, 0))
    originals = {name: getattr(functional, name) for name in ("softmax", "dropout", "scaled_dot_product_attention")}
    try:
        for name in originals if capability is not None else ("dropout",):
            setattr(functional, name, getattr(replacements, name))
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)


class _CudaFunctions:
    """Functions with the signatures of ``torch.nn.functional``, whose own ones run where CUDA's choice is the CPU's."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._softmax: Callable[..., torch.Tensor] = functional.softmax
        self._dropout: Callable[..., torch.Tensor] = functional.dropout
        self._attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention

    def softmax(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's own name, which callers may use
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Convert float16 to float32 inside the kernel, and allocate one scratch buffer in the backward pass."""
        x = input
        if dim is None or not (x.is_floating_point() or dtype is not None):
            return self._softmax(x, dim, _stacklevel, dtype)
        # `half_to_float` of softmax() in SoftMax.cpp; from any other dtype CUDA makes a converted copy first too
        fused = x.dtype == torch.float16 and dtype == torch.float32
        return _apply_softmax(x if fused or dtype is None else x.to(dtype), dim, fused)

    def dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        """Run the fused kernel, whose mask takes one byte an element."""
        # is_fused_kernel_acceptable of Dropout.cpp; the CPU multiplies by a mask in the input's dtype
        if not training or inplace or not 0.0 < p < 1.0 or x.numel() == 0:
            return self._dropout(x, p, training, inplace)
        return torch.native_dropout(x, p, True)[0]

    def scaled_dot_product_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Run flash attention where it applies, else the memory-efficient kernel, else the unfused math."""
        apply_kernel = self._fused_attention(query, key, value, attn_mask, enable_gqa)
        if apply_kernel is not None:
            return apply_kernel(query, key, value, _attention_bias(query, key, attn_mask), dropout_p, is_causal, scale)
        if query.device.type == "meta" or query.dim() != 4:
            return self._attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        # the CPU would take its own flash kernel here
        math = aten._scaled_dot_product_attention_math
        output: torch.Tensor = math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return output

    def _fused_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, grouped: bool
    ) -> Callable[..., torch.Tensor] | None:
        """Return the kernel that CUDA would choose (``can_use_flash_attention`` and ``can_use_mem_efficient``)."""
        if query.dim() != 4 or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return None
        head, is_float32 = query.shape[-1], query.dtype == torch.float32
        aligned = head == value.shape[-1] and head % 8 == 0
        if aligned and not is_float32 and mask is None and self._capability >= AMPERE and head <= 256:
            return flash_attention
        unequal = grouped and query.shape[1] != key.shape[1]  # the efficient kernel takes no grouped heads
        wants_mask_gradient = mask is not None and mask.requires_grad
        return None if unequal or wants_mask_gradient or head % 4 else _apply_efficient_attention


def _attention_bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask as the efficient kernel takes it: added to the scores, and expanded to their shape by a view."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _Context(Protocol):
    """What the functions below keep from the forward pass for the backward pass."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    dim: int
    dtype: torch.dtype
    options: tuple[float, bool, float | None]  # dropout, is_causal, scale
    sequence_sizes: tuple[object, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, dim: int, fused: bool) -> torch.Tensor:
        result: torch.Tensor = aten._softmax(x, dim, fused)
        ctx.save_for_backward(result)
        ctx.dim, ctx.dtype = dim, x.dtype
        return result

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> _Gradients:
        (result,) = ctx.saved_tensors
        gradient: torch.Tensor = aten._softmax_backward_data(grads[0], result, ctx.dim, ctx.dtype)
        scratch = torch.empty_like(grads[0])  # grad * output, which the kernel sums
        del scratch
        return gradient, None, None


class _FlashAttention(torch.autograd.Function):
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
        del scratch
        return (*gradients, None, None, None, None)


class _EfficientAttention(torch.autograd.Function):
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
        keeps_sums = any(ctx.needs_input_grad)
        output: torch.Tensor
        output, sums, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps_sums, dropout, causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, bias, output, sums, seed, offset)
        ctx.options = dropout, causal, scale
        return output

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> _Gradients:
        query, key, value, bias, output, sums, seed, offset = ctx.saved_tensors
        dropout, causal, scale = ctx.options
        inputs = (grads[0], query, key, value, bias, output, sums, seed, offset)
        wanted = [True, True, True, False]  # no gradient of the bias
        gradients = aten._scaled_dot_product_efficient_attention_backward(*inputs, dropout, wanted, causal, scale=scale)
        scratch = query.new_empty(query.shape[:3], dtype=torch.float32)  # delta, the row sums of grad * output
        del scratch
        return (*gradients[:3], None, None, None, None)


# torch does not type `apply`
_apply_softmax: Callable[..., torch.Tensor] = _Softmax.apply
flash_attention: Callable[..., torch.Tensor] = _FlashAttention.apply
_apply_efficient_attention: Callable[..., torch.Tensor] = _EfficientAttention.apply
