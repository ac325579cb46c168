"""Liger's fused linear cross entropy in a traced step: its chunks and buffers, without kernels, which allocate nothing.

As ``liger_kernel/ops/fused_linear_cross_entropy.py`` has it, and ``lce_forward`` of its models: the gradients are made
in the forward pass, from the logits of one chunk of tokens after the other.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput

from safe_loading.errors import TraceError

_IGNORED = -100
NOTE = (
    "Liger's fused cross entropy is counted; its kernels for norms, rotary positions and SwiGLU, which keep less for "
    "the backward pass, are not."
)
_NOT_GATHERED = (
    "Liger's loss reads the weight of the head, and the units that accelerate makes around a PEFT model gather it in "
    "the head's own forward alone, which Liger does not call: the step itself fails, with a mix of torch.Tensor and "
    "DTensor. load_at_prepare gathers it with the norm before it: forecast its units, "
    'wrapped_by="safe_loading". Or train without Liger\'s head: fused_lm_head=False.'
)


def liger_forward(base: Any) -> Callable[..., CausalLMOutput]:
    """Return a forward of a causal language model that computes its loss as Liger does, and no logits."""

    def forward(self: Any, *args: Any, fused_lm_head: bool = True, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)
        hidden = self.base_model(*args, **kwargs)[0]
        head = self.get_output_embeddings()
        if isinstance(head.weight, DTensor):
            raise TraceError(f"{type(self).__name__}: {_NOT_GATHERED}")
        shifted = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:].contiguous()
        states = hidden.view(-1, hidden.shape[-1])
        loss: Any = _Loss.apply(states, head.weight, shifted.view(-1), head.bias)  # type: ignore[no-untyped-call]  # of torch
        return CausalLMOutput(loss=loss)

    return types.MethodType(forward, base)


def chunk_of(tokens: int, hidden: int, words: int) -> int:
    """Return how many tokens have their logits at a time: about as many bytes as the hidden states of all."""
    factor = -(-words // hidden)
    return 1 << max(0, (-(-tokens // factor) - 1).bit_length())


class _Loss(torch.autograd.Function):
    """The allocations of the loss and its gradients; the kernel writes the gradient of the logits over them."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Make the gradients chunk by chunk; they are kept for the backward pass."""
        states, weight, target, bias = args
        (tokens, hidden), words = states.shape, weight.shape[0]
        chunk = chunk_of(tokens, hidden, words)
        of_states = torch.zeros_like(states)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = None if bias is None else torch.zeros_like(bias)
        loss = torch.zeros(tokens, dtype=torch.float32, device=states.device)
        counted = (target != _IGNORED).sum()
        for start in range(0, tokens, chunk):
            own = states[start : start + chunk]
            logits = own @ weight.t()
            if bias is not None:
                logits = logits + bias
            of_states[start : start + chunk] = logits @ weight
            if of_weight is not None:
                of_weight += torch.mm(logits.t(), own).float()
            if of_bias is not None:
                of_bias += logits.sum(dim=0)
        del counted
        ctx.save_for_backward(of_states, of_weight, of_bias)
        return torch.sum(loss)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients, which the kernel multiplies in place."""
        of_states, of_weight, of_bias = ctx.saved_tensors
        return of_states, of_weight, None, of_bias
