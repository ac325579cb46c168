"""Can this tensor be merged into at all, and who else would see the change?"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from .lora_layers import MergeTarget
from .rounding import DTYPES
from .trainable_tokens import TokenRows
from .variants import CannotMergeError


def check_tensor(target: MergeTarget | TokenRows) -> None:
    """Refuse a weight that is not a plain float tensor in memory."""
    tensor, what = target.tensor, f"its {target.attribute}"
    refuse_spread(tensor, what)
    if tensor.device.type == "meta":
        offloaded = getattr(getattr(target.owner, "_hf_hook", None), "offload", False)
        raise CannotMergeError(
            f"{what} is offloaded by accelerate. Load the model without offloading (device_map={{'': 'cpu'}}), or "
            f"merge on disk"
            if offloaded
            else f"{what} is on meta, so it holds no values. Load the weights first"
        )
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise CannotMergeError(
            f"{what} is a {type(tensor).__name__}, not a plain tensor. Dequantize the model first, or merge into the "
            f"base before it is quantized, with merge_lora_checkpoint"
        )
    fp8 = isinstance(target, MergeTarget) and all(matrix.fp8 is not None for matrix in target.matrices)
    if tensor.dtype not in DTYPES and not fp8:
        raise CannotMergeError(
            f"{what} is {tensor.dtype}. Dequantize the model first: from_pretrained(..., "
            f"quantization_config=FineGrainedFP8Config(dequantize=True)) for fp8"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise CannotMergeError(f"{what} was made in torch.inference_mode(). Call this in torch.inference_mode() too")


def refuse_spread(tensor: torch.Tensor, what: str) -> None:
    """Refuse a weight that is spread over ranks, where a layer does not merge its own shard."""
    if isinstance(tensor, DTensor):
        raise CannotMergeError(
            f"{what} is a DTensor (FSDP2 or tensor parallel), which is merged in LoRA of Linear and Embedding layers "
            f"only. Merge before the model is sharded",
            or_on_disk=True,
        )


def same_change(one: MergeTarget | TokenRows, other: MergeTarget | TokenRows) -> bool:
    """Return whether the same is done to two targets, as ensure_weight_tying=True makes sure, wherever they lie."""
    if isinstance(one, TokenRows) or isinstance(other, TokenRows):
        return isinstance(one, TokenRows) and isinstance(other, TokenRows) and one.equals(other)
    if len(one.matrices) != len(other.matrices):
        return False
    return all(a.update.equals(b.update) for a, b in zip(one.matrices, other.matrices, strict=True))


def parents_of(model: torch.nn.Module) -> dict[int, list[tuple[torch.nn.Module, str]]]:
    """Return, for the id of each module, every parent with the name that it has there."""
    parents: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None:
                parents.setdefault(id(child), []).append((module, name))
    return parents
