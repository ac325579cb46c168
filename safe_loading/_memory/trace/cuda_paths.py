"""What CUDA would run where the CPU runs something else, so that a trace on the CPU allocates what CUDA allocates.

A few operations choose between kernels by the device of their input, and the choice changes what is kept for the
backward pass. Tracing happens on fake CPU tensors (a torch without CUDA cannot hold fake CUDA ones), so inside
`cuda_paths` these functions of ``torch.nn.functional`` take CUDA's choice. Buffers that a CUDA kernel takes for itself
while it runs are taken here too. The facts are those of ``aten/src/ATen/native`` (SoftMax.cu, Dropout.cpp,
transformers/cuda/attention.cu and attention_backward.cu), torch 2.4 to 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

_ATEN: Any = torch.ops.aten
AMPERE = (8, 0)  # the first compute capability with flash attention


@contextlib.contextmanager
def cuda_paths(capability: tuple[int, int] | None) -> Iterator[None]:
    """Inside, softmax, dropout and attention allocate what they allocate on a GPU of this compute capability.

    None is an accelerator that is no GPU of NVIDIA's. Of these torch knows one thing: their dropout is CUDA's.
    """
    paths = _Paths(capability or (0, 0))
    before = {name: getattr(functional, name) for name in ("softmax", "dropout", "scaled_dot_product_attention")}
    paths.softmax_elsewhere, paths.dropout_elsewhere = before["softmax"], before["dropout"]
    paths.attention_elsewhere = before["scaled_dot_product_attention"]
    try:
        for name in before if capability is not None else ("dropout",):
            setattr(functional, name, getattr(paths, name))
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


class _Paths:
    softmax_elsewhere: Any
    dropout_elsewhere: Any
    attention_elsewhere: Any

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def softmax(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's own name, which callers may use
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Half to float in one kernel, and one buffer of the gradient's size in the backward pass."""
        x = input
        if dim is None or not (x.is_floating_point() or dtype is not None):
            elsewhere: torch.Tensor = self.softmax_elsewhere(x, dim, _stacklevel, dtype)
            return elsewhere
        fused = x.dtype == torch.float16 and dtype == torch.float32
        result: torch.Tensor = _SOFTMAX(x if fused or dtype is None else x.to(dtype), dim, fused)
        return result

    def dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        """One kernel, whose mask has one byte an element."""
        if not training or inplace or not 0.0 < p < 1.0 or x.numel() == 0:
            elsewhere: torch.Tensor = self.dropout_elsewhere(x, p, training, inplace)
            return elsewhere
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
        """Flash attention where there is no mask, else the memory-efficient kernel, else the plain one."""
        kernel = self._kernel(query, key, value, attn_mask, enable_gqa)
        if kernel is None:
            if query.device.type == "meta" or query.dim() != 4:
                result: torch.Tensor = self.attention_elsewhere(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
                return result
            plain = _ATEN._scaled_dot_product_attention_math
            result = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        else:
            result = kernel.apply(query, key, value, _bias(query, key, attn_mask), dropout_p, is_causal, scale)
        return result

    def _kernel(self, query: Any, key: Any, value: Any, mask: Any, grouped: bool) -> Any:
        if query.dim() != 4 or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return None
        head, plain = query.shape[-1], query.dtype == torch.float32
        same = head == value.shape[-1] and head % 8 == 0
        if same and not plain and mask is None and self._capability >= AMPERE and head <= 256:
            return _Flash
        unequal = grouped and query.shape[1] != key.shape[1]  # the efficient kernel takes no grouped heads
        wants_mask_gradient = mask is not None and mask.requires_grad
        return None if unequal or wants_mask_gradient or head % 4 else _Efficient


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """What the efficient kernel is given for a mask: added to the scores, and as large as they are, without a copy."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, fused: bool) -> torch.Tensor:
        result: torch.Tensor = _ATEN._softmax(x, dim, fused)
        ctx.save_for_backward(result)
        ctx.dim, ctx.dtype = dim, x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (result,) = ctx.saved_tensors
        gradient = _ATEN._softmax_backward_data(grads[0], result, ctx.dim, ctx.dtype)
        buffer = torch.empty_like(grads[0])  # grad * output, which the kernel sums
        del buffer
        return gradient, None, None


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, bias: Any, dropout: float, causal: bool, scale: float | None
    ) -> torch.Tensor:
        result = _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)
        ctx.save_for_backward(query, key, value, result[0], result[1], result[6], result[7])
        ctx.sizes, ctx.options = result[2:6], (dropout, causal, scale)
        output: torch.Tensor = result[0]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, output, sums, state, offset = ctx.saved_tensors
        dropout, causal, scale = ctx.options
        gradients = _ATEN._scaled_dot_product_flash_attention_backward(
            grads[0], query, key, value, output, sums, *ctx.sizes, dropout, causal, state, offset, scale=scale
        )
        batch, heads, length, size = query.shape
        length, size = -(-length // 128) * 128, -(-size // 32) * 32
        buffers = [
            query.new_empty((batch, heads, length), dtype=torch.float32),
            query.new_empty((batch, length, heads, size), dtype=torch.float32),
        ]
        if heads != key.shape[1]:  # gradients of the keys and values for each query head, summed afterwards
            buffers += [key.new_empty((batch, key.shape[2], heads, key.shape[3])) for _ in range(2)]
        del buffers
        return (*gradients, None, None, None, None)


class _Efficient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, bias: Any, dropout: float, causal: bool, scale: float | None
    ) -> torch.Tensor:
        keeps = any(ctx.needs_input_grad)
        output: torch.Tensor
        output, sums, seed, offset = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout, causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, bias, output, sums, seed, offset)
        ctx.options = dropout, causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, bias, output, sums, seed, offset = ctx.saved_tensors
        dropout, causal, scale = ctx.options
        gradients = _ATEN._scaled_dot_product_efficient_attention_backward(
            grads[0],
            query,
            key,
            value,
            bias,
            output,
            sums,
            seed,
            offset,
            dropout,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        buffer = query.new_empty(query.shape[:3], dtype=torch.float32)  # delta, the row sums of grad * output
        del buffer
        return (*gradients[:3], None, None, None, None)


_SOFTMAX: Any = _Softmax.apply
