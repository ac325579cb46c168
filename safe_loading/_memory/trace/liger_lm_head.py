"""Liger's fused linear cross entropy in a traced step: its chunks and buffers, without kernels, which allocate nothing.

As ``liger_kernel/ops/fused_linear_cross_entropy.py`` has it, and ``lce_forward`` of its models: the gradients are made
in the forward pass, from the logits of one chunk of tokens after the other.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput

from safe_loading.errors import TraceError

_IGNORED = -100
_NOTE = (
    "Liger's fused cross entropy is counted; its kernels for norms, rotary positions and SwiGLU, which keep less for "
    "the backward pass, are not."
)
_NO_HEAD = (
    "Liger's version 0.8 gives no fused cross entropy to a {}, whose own loss is counted. Its kernels for other parts, "
    "which take less, are not."
)
# the types whose causal language models Liger 0.8.2 gives its fused cross entropy by default, of its
# MODEL_TYPE_TO_APPLY_LIGER_FN (src/liger_kernel/transformers/monkey_patch.py); granite keeps its logits
TYPES = (
    "deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3_text gemma4_text glm4 gpt_oss hunyuan_v1_dense hunyuan_v1_moe "
    "llama llama4_text ministral mistral mixtral mllama_text_model nemotron olmo2 olmo3 phi3 qwen2 qwen3 "
    "qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next smollm3"
)
_NOT_GATHERED = (
    "Liger's loss reads the weight of the head, and the units that accelerate makes around a PEFT model gather it in "
    "the head's own forward alone, which Liger does not call: the step itself fails, with a mix of torch.Tensor and "
    "DTensor. load_at_prepare gathers it with the norm before it: forecast its units, "
    'wrapped_by="safe_loading". Or train without Liger\'s head: fused_lm_head=False.'
)


def is_patched(base: Any) -> bool:
    """Whether Liger gives a model a forward that makes no logits."""
    model_type = getattr(getattr(base, "config", None), "model_type", "")
    return type(base).__name__.endswith("ForCausalLM") and model_type in TYPES.split()


def about_head(base: Any) -> str:
    """Return the sentence of a forecast about the head that Liger gives a model."""
    return _NOTE if is_patched(base) else _NO_HEAD.format(type(base).__name__)


def liger_forward(base: Any) -> Callable[..., Any]:
    """Return a forward that computes the loss as Liger does, and no logits; the model's own where Liger leaves it."""
    own = base.forward

    @functools.wraps(own)
    def unpatched(*args: Any, fused_lm_head: bool = True, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    if not is_patched(base):
        return unpatched

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
