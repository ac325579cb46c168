"""Attention by kernels of packages and of the hub, while a step is traced: their allocations, without the kernels.

Flash attention 2 keeps the output and one float32 sum for each row, and its backward pass has scratch in float32;
torch's own flash attention is the same code, and stands in for it here. Versions 3 and 4, flex attention and kernels of
the hub keep the same, and what else they allocate is not known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import masking_utils, modeling_utils

from safe_loading._core.thread_patches import patched_item
from safe_loading._model.attention_names import FLEX, attention_of, is_traced_by_stand_in

from .cuda_attention import flash_attention


@contextlib.contextmanager
def attention_stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, a model's attention allocates as its kernels do, whether or not they are installed."""
    names = [name for name in attention_of(model) if is_traced_by_stand_in(name)]
    functions: Any = modeling_utils.ALL_ATTENTION_FUNCTIONS
    masks: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    of_flash = masks["flash_attention_2"]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(patched_item(functions._local_mapping, name, _attend))
            stack.enter_context(patched_item(masks._local_mapping, name, _no_mask if name == FLEX else of_flash))
        yield


def _no_mask(*_: object, **__: object) -> None:
    """A block mask of flex attention has an entry for 128 x 128 scores: next to nothing."""
    return


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Allocate as ``flash_attention_forward`` of transformers does; the tensors are (rows, heads, tokens, size)."""
    if query.dtype == torch.float32:  # the kernels take 16 bits alone
        dtype = _half_dtype(module)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    size, own = query.shape[-1], value.shape[-1]
    if own != size:
        value = nn.functional.pad(value, [0, size - own])
    if attention_mask is not None:  # rows with padding are unpadded before the kernel and padded after it
        query, key, value = query.clone(), key.clone(), value.clone()
    out = flash_attention(query, key, value, dropout, bool(is_causal), scaling).transpose(1, 2)
    if attention_mask is not None:
        out = out.clone()
    return out[..., :own], None


def _half_dtype(module: Any) -> torch.dtype:
    weights = (layer.weight.dtype for layer in module.modules() if isinstance(layer, nn.Linear))
    dtypes = [dtype for dtype in weights if dtype in (torch.float16, torch.bfloat16)]
    return dtypes[0] if dtypes else torch.bfloat16
