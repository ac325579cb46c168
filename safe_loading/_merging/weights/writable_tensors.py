"""Can this tensor be merged into at all, and who else would see the change?"""

from __future__ import annotations

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor

from .lora_layers import MergeTarget
from .rounding import DTYPES
from .trainable_tokens import Tokens
from .update import Update
from .variants import CannotMerge


def check_tensor(target: MergeTarget | Tokens) -> None:
    """Refuse a weight that is not a plain float tensor in memory.

    Raises:
        CannotMerge: The reason and the fix.
    """
    tensor, what = target.tensor, f"its {target.attribute}"
    if isinstance(tensor, DTensor):
        raise CannotMerge(
            f"{what} is a DTensor (FSDP2 or tensor parallel), which is merged in Linear and Embedding layers only. "
            f"Merge before the model is sharded, or save the adapter and merge it with merge_lora_checkpoint"
        )
    if tensor.device.type == "meta":
        offloaded = getattr(getattr(target.owner, "_hf_hook", None), "offload", False)
        raise CannotMerge(
            f"{what} is offloaded by accelerate. Load the model without offloading (device_map={{'': 'cpu'}}), or "
            f"merge on disk"
            if offloaded
            else f"{what} is on meta, so it holds no values. Load the weights first"
        )
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise CannotMerge(f"{what} is a {type(tensor).__name__}, not a plain tensor. Dequantize the model first")
    fp8 = not isinstance(target, Tokens) and all(piece.fp8 is not None for piece in target.pieces)
    if tensor.dtype not in DTYPES and not fp8:
        raise CannotMerge(
            f"{what} is {tensor.dtype}. Dequantize the model first: from_pretrained(..., "
            f"quantization_config=FineGrainedFP8Config(dequantize=True)) for fp8"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise CannotMerge(f"{what} was made in torch.inference_mode(). Call this in torch.inference_mode() too")


class Sharing:
    """Which parameters of a model lie in the same memory.

    Args:
        model: The model, adapters included.
        gone: Prefixes of the modules that unloading throws away, whose tensors nobody will read again.
    """

    def __init__(self, model: torch.nn.Module, gone: tuple[str, ...] = ()) -> None:
        self._spans: list[tuple[int, int, str, int, str]] = []
        for path, module in model.named_modules():
            if gone and path.startswith(gone):
                continue
            # MultiheadAttention's weights may be plain attributes, between merge and unmerge of peft
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.is_meta:
                    continue
                plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if type(plain) in (torch.nn.Parameter, torch.Tensor):
                    start, end = _span(plain)
                    if end > start:
                        self._spans.append((start, end, f"{path}.{name}".lstrip("."), id(module), name))
        self._spans.sort()

    def others(self, target: MergeTarget | Tokens) -> list[tuple[str, int, str]]:
        """Return path, id of the module and attribute of every other parameter in the memory of ``target``."""
        start, end = _span(target.tensor)
        own = (id(target.owner), target.attribute)
        return [
            (path, module, name)
            for other_start, other_end, path, module, name in self._spans
            if other_start < end and start < other_end and (module, name) != own
        ]


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory in the same shape, as tied weights are."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def same_change(one: MergeTarget | Tokens, other: MergeTarget | Tokens) -> bool:
    """Return whether the same is done to two targets, as ensure_weight_tying=True has it, wherever they lie."""
    if isinstance(one, Tokens) or isinstance(other, Tokens):
        return isinstance(one, Tokens) and isinstance(other, Tokens) and one.same_rows(other)
    if len(one.pieces) != len(other.pieces):
        return False
    return all(equal_updates(a.update, b.update) for a, b in zip(one.pieces, other.pieces, strict=True))


def equal_updates(one: Update, other: Update) -> bool:
    """Return whether two updates add the same to the last bit."""
    if one is other:
        return True
    if one.shape != other.shape or len(one.terms) != len(other.terms):
        return False
    if one.has_magnitude or other.has_magnitude:
        return False  # the norms of a row and of a column are different things
    return all(
        a.scaling == b.scaling
        and a.left.shape == b.left.shape
        and torch.equal(a.left, b.left)
        and torch.equal(a.right, b.right)
        for a, b in zip(one.terms, other.terms, strict=True)
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def parents_of(model: torch.nn.Module) -> dict[int, list[tuple[torch.nn.Module, str]]]:
    """Return, for the id of each module, every place where it stands."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None:
                places.setdefault(id(child), []).append((module, name))
    return places


def tuner_layers(model: torch.nn.Module) -> list[tuple[str, BaseTunerLayer]]:
    """Return the outermost tuner layers; those inside another one are merged with it."""
    found: list[tuple[str, BaseTunerLayer]] = []
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not any(path.startswith(f"{outer}.") for outer, _ in found[-1:]):
            found.append((path, module))
    return found
