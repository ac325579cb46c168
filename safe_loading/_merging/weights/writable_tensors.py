"""Can this tensor be merged into at all, and who else would see the change?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .lora_layers import MergeTarget
from .rounding import DTYPES
from .trainable_tokens import TokenRows
from .update import Update
from .variants import CannotMergeError


def check_tensor(target: MergeTarget | TokenRows) -> None:
    """Refuse a weight that is not a plain float tensor in memory."""
    tensor, what = target.tensor, f"its {target.attribute}"
    if isinstance(tensor, DTensor):
        raise CannotMergeError(
            f"{what} is a DTensor (FSDP2 or tensor parallel), which is merged in Linear and Embedding layers only. "
            f"Merge before the model is sharded, or save the adapter and merge it with merge_lora_checkpoint"
        )
    if tensor.device.type == "meta":
        offloaded = getattr(getattr(target.owner, "_hf_hook", None), "offload", False)
        raise CannotMergeError(
            f"{what} is offloaded by accelerate. Load the model without offloading (device_map={{'': 'cpu'}}), or "
            f"merge on disk"
            if offloaded
            else f"{what} is on meta, so it holds no values. Load the weights first"
        )
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise CannotMergeError(f"{what} is a {type(tensor).__name__}, not a plain tensor. Dequantize the model first")
    fp8 = isinstance(target, MergeTarget) and all(matrix.fp8 is not None for matrix in target.matrices)
    if tensor.dtype not in DTYPES and not fp8:
        raise CannotMergeError(
            f"{what} is {tensor.dtype}. Dequantize the model first: from_pretrained(..., "
            f"quantization_config=FineGrainedFP8Config(dequantize=True)) for fp8"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise CannotMergeError(f"{what} was made in torch.inference_mode(). Call this in torch.inference_mode() too")


class _MemoryRange(NamedTuple):
    """The addresses of one parameter or buffer, and where the model has it."""

    start: int
    end: int
    path: str
    owner: int
    attribute: str


class SharedMemory:
    """Which parameters and buffers of a model lie in the same memory.

    Ranges of addresses are compared, not storages: views of one storage that do not overlap are not tied.
    Modules whose path begins with one of ``replaced`` are left out: unloading throws them away.
    """

    def __init__(self, model: torch.nn.Module, replaced: tuple[str, ...] = ()) -> None:
        self._ranges: list[_MemoryRange] = []
        for path, module in model.named_modules():
            if replaced and path.startswith(replaced):
                continue
            # MultiheadAttention's weights may be plain attributes, between merge and unmerge of peft
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.is_meta:
                    continue
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if type(local) in (torch.nn.Parameter, torch.Tensor):
                    start, end = _addresses(local)
                    if end > start:
                        full_name = f"{path}.{name}".lstrip(".")
                        self._ranges.append(_MemoryRange(start, end, full_name, id(module), name))
        self._ranges.sort()

    def others(self, target: MergeTarget | TokenRows) -> list[tuple[str, int, str]]:
        """Return path, id of the module and attribute of every other tensor in the memory of ``target``."""
        start, end = _addresses(target.tensor)
        own = (id(target.owner), target.attribute)
        return [
            (other.path, other.owner, other.attribute)
            for other in self._ranges
            if other.start < end and start < other.end and (other.owner, other.attribute) != own
        ]


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory in the same shape, as tied weights are."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def same_change(one: MergeTarget | TokenRows, other: MergeTarget | TokenRows) -> bool:
    """Return whether the same is done to two targets, as ensure_weight_tying=True makes sure, wherever they lie."""
    if isinstance(one, TokenRows) or isinstance(other, TokenRows):
        return isinstance(one, TokenRows) and isinstance(other, TokenRows) and one.equals(other)
    if len(one.matrices) != len(other.matrices):
        return False
    return all(equal_updates(a.update, b.update) for a, b in zip(one.matrices, other.matrices, strict=True))


def equal_updates(one: Update, other: Update) -> bool:
    """Return whether two updates add the same to the last bit."""
    if one is other:
        return True
    if one.shape != other.shape or len(one.terms) != len(other.terms):
        return False
    if one.has_magnitude or other.has_magnitude:
        # An embedding takes norms of columns and the head tied to it norms of rows, so equal magnitudes mean nothing.
        return False
    return all(
        a.scaling == b.scaling
        and a.left.shape == b.left.shape
        and torch.equal(a.left, b.left)
        and torch.equal(a.right, b.right)
        for a, b in zip(one.terms, other.terms, strict=True)
    )


def parents_of(model: torch.nn.Module) -> dict[int, list[tuple[torch.nn.Module, str]]]:
    """Return, for the id of each module, every parent with the name that it has there."""
    parents: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None:
                parents.setdefault(id(child), []).append((module, name))
    return parents


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor and the one after its last, gaps of a view included."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
