"""The experts of gpt-oss in MXFP4: what transformers' ``Mxfp4GptOssMLP`` stores and allocates on a GPU.

Blocks of 32 elements share a scale of one byte, and two elements a byte (OCP Microscaling Formats 1.0). Once loaded,
both lie on the GPU in the layout of kernels-community/gpt-oss-triton-kernels, which has the same size for sizes that
are multiples of 64, as gpt-oss has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .packed_linear import frozen

_BLOCK = 32  # elements that share a scale


class Mxfp4Experts(nn.Module):
    """The packed weights of all experts of a layer, with their scales; the biases are in float32."""

    def __init__(self, experts: int, inner: int, hidden: int) -> None:
        super().__init__()
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            self.register_parameter(name, frozen((experts, rows, columns // 2), torch.uint8))
            self.register_parameter(f"{name}_scales", frozen((experts, rows, columns // _BLOCK), torch.uint8))
            self.register_parameter(f"{name}_bias", frozen((experts, rows), torch.float32))


class Mxfp4Mlp(nn.Module):
    """The router, which is not quantized, and the experts."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.router, self.experts = plain.router, Mxfp4Experts(*plain.experts.down_proj.shape)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate what routing and the two products of ``matmul_ogs`` allocate; return output and router logits."""
        rows, width = hidden_states.shape[0], hidden_states.shape[-1]
        flat = hidden_states.reshape(-1, width)
        logits = nn.functional.linear(flat, self.router.weight, self.router.bias)
        tokens, chosen = flat.shape[0], self.router.top_k
        routes = tokens * chosen
        # topk_forward and sort_tokens: scores and numbers of the chosen experts, one bit for each expert, two orders
        routing = [
            logits.new_empty((tokens, chosen)),
            logits.new_empty((tokens, chosen), dtype=torch.int16),
            logits.new_empty((-(-logits.shape[1] // 32), -(-tokens // 32) * 32), dtype=torch.int32),
            logits.new_empty(2 * routes, dtype=torch.int32),
            logits.new_empty(routes),
        ]
        width_of_both = self.experts.get_parameter("gate_up_proj").shape[1]
        inner = flat.new_empty((routes, width_of_both // 2))  # SwiGLU is fused into the first product
        # the second one writes each route's row and then their sums into one tensor, of which the sums are returned
        indices = [logits.new_empty(routes, dtype=torch.int32), logits.new_empty(routes + tokens, dtype=torch.int32)]
        out = flat.new_empty((routes + tokens, width))[:tokens]
        del inner, indices, routing
        return out.reshape(rows, -1, width), logits
