"""CUDA's choices of kernels where the CPU has others, so that a trace on the CPU allocates as CUDA does.

A few operations choose a kernel by the device of their input, and the choice changes what is kept for the backward
pass. Tracing happens on fake CPU tensors, because a torch without CUDA cannot hold fake CUDA ones. So inside
`cuda_paths` these functions of ``torch.nn.functional`` take CUDA's choice, and allocate for a moment what a CUDA kernel
allocates as scratch. The facts are those of ``aten/src/ATen/native`` (SoftMax.cpp and cuda/SoftMax.cu, Dropout.cpp,
Normalization.cpp), torch 2.4 to 2.13; those of attention are in ``cuda_attention.py``, those of reductions in
``cuda_scratch.py``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Protocol

import torch
from torch._prims_common import suggest_memory_format
from torch.nn import functional

from safe_loading._core.thread_patches import answer_no, answer_yes, patched, seen_here

from .cuda_attention import AMPERE, additive_mask, fused_attention, unfused_attention
from .cuda_scratch import ADDS_IN_PLACE, CARD, card_of

aten = torch.ops.aten
_Gradients = tuple[torch.Tensor | None, ...]


@contextlib.contextmanager
def cuda_paths(capability: tuple[int, int] | None) -> Iterator[None]:
    """Inside, softmax, dropout, norms, attention and optimizers allocate as on a GPU of this compute capability.

    None stands for an accelerator other than an NVIDIA GPU: Dropout.cpp treats it as CUDA, and nothing else is known.
    """
    if capability is None:
        names = ["dropout"]
        grouped: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    else:
        names = ["softmax", "dropout", "scaled_dot_product_attention", "batch_norm"]
        grouped = _grouped_products(capability >= AMPERE)
    functions = _CudaFunctions(capability or (0, 0))
    token = CARD.set(None if capability is None else card_of(capability))
    try:
        with contextlib.ExitStack() as stack:
            # Models and torch's own modules call these as attributes of torch.nn.functional. Not by a function mode:
            # functions that are composed of them (multi_head_attention_forward, Tensor.backward) switch modes off.
            for name in names:
                stack.enter_context(patched(functional, name, getattr(functions, name)))
            for module in _optimizers():
                stack.enter_context(patched(module, "_default_to_fused_or_foreach", _lists_by_default))
            stack.enter_context(grouped)
            yield
    finally:
        CARD.reset(token)


def _optimizers() -> list[ModuleType]:
    """Return the modules of torch's optimizers that ask whether to go through lists of parameters."""
    modules = (module for name, module in sys.modules.items() if name.startswith("torch.optim."))
    return [module for module in modules if hasattr(module, "_default_to_fused_or_foreach")]


def _lists_by_default(params: object, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
    """Return whether a step is fused, and whether it takes whole lists, for which it computes beside all parameters."""
    return use_fused and not differentiable, not use_fused and not differentiable


def _grouped_products(fused: bool) -> contextlib.AbstractContextManager[object]:
    """Answer for experts whether the card has a kernel for all their products; transformers asks the fake device."""
    moe = sys.modules.get("transformers.integrations.moe")
    if not hasattr(moe, "_can_use_grouped_mm"):  # as of transformers 5.23
        return contextlib.nullcontext()
    return patched(moe, "_can_use_grouped_mm", answer_yes if fused else answer_no)


class _CudaFunctions:
    """Functions with the signatures of ``torch.nn.functional``, whose own ones run where CUDA's choice is the CPU's."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._softmax: Callable[..., torch.Tensor] = seen_here(functional, "softmax")
        self._dropout: Callable[..., torch.Tensor] = seen_here(functional, "dropout")
        self._batch_norm: Callable[..., torch.Tensor] = seen_here(functional, "batch_norm")
        self._attention: Callable[..., torch.Tensor] = seen_here(functional, "scaled_dot_product_attention")

    def softmax(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's own name, which callers may use
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Convert float16 to float32 inside the kernel."""
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

    def batch_norm(
        self,
        input: torch.Tensor,  # noqa: A002 - as for softmax
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """Put an input in order first where cuDNN normalizes it, whose backward pass reads it, too."""
        x = input
        # `_select_batch_norm_backend` of Normalization.cpp
        takes = weight is not None and bias is not None and weight.dtype == torch.float32 and x.dim() >= 3
        if takes and x.dtype in (torch.float32, torch.float16) and x.shape[0] <= (880801 if training else 65535):
            x = x.contiguous(memory_format=suggest_memory_format(x))
        return self._batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)

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
        """Run the kernel that CUDA would choose, else the unfused math."""
        options = dropout_p, is_causal, scale
        chosen = fused_attention(self._capability, query, key, value, attn_mask, enable_gqa, options)
        if chosen is not None:
            return chosen
        if query.device.type == "meta" or query.dim() != 4:
            return self._attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        mask = additive_mask(attn_mask, query)
        if 0.0 < dropout_p < 1.0:
            return unfused_attention(query, key, value, mask, enable_gqa, options)
        # the CPU would take its own flash kernel here
        math = aten._scaled_dot_product_attention_math
        token = ADDS_IN_PLACE.set(True)  # the mask, except under a dispatch mode such as the trace's (attention.cpp)
        try:
            output: torch.Tensor = math(
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        finally:
            ADDS_IN_PLACE.reset(token)
        return output


class _SoftmaxContext(Protocol):
    """The state that the function below keeps from the forward pass for the backward pass."""

    saved_tensors: tuple[torch.Tensor, ...]
    dim: int
    dtype: torch.dtype

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SoftmaxContext, x: torch.Tensor, dim: int, fused: bool) -> torch.Tensor:
        result: torch.Tensor = aten._softmax(x, dim, fused)
        ctx.save_for_backward(result)
        ctx.dim, ctx.dtype = dim, x.dtype
        return result

    @staticmethod
    def backward(ctx: _SoftmaxContext, *grads: torch.Tensor) -> _Gradients:
        (result,) = ctx.saved_tensors
        gradient: torch.Tensor = aten._softmax_backward_data(grads[0], result, ctx.dim, ctx.dtype)
        return gradient, None, None


# torch does not type `apply`
_apply_softmax: Callable[..., torch.Tensor] = _Softmax.apply
