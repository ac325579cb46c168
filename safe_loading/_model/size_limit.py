"""A limit on the memory that a config makes a model take: in proportion to the checkpoint's bytes, counted on meta."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from safe_loading._core.report import format_bytes
from safe_loading.errors import CheckpointError

from .tensors import ModelTensor, inventory

_BYTES_ALLOWED = 1 << 30  # tables of positions and masks, which few models compute from their config
_TIMES_ON_DISK = 8  # twice what fp8 becomes as float32
_TIMES_CODES = 32  # codes of one bit, as float32


def refuse_out_of_proportion(model: nn.Module, where: object, on_disk: int) -> None:
    """Refuse a model on meta that would take far more memory than the ``on_disk`` bytes of its checkpoint.

    Whether its tensors have the shapes of the files is checked elsewhere; buffers, and parameters that the class
    computes, are in no file. ``where`` names the config.
    """
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    times = _TIMES_CODES if quantized else _TIMES_ON_DISK
    _refuse(inventory(model), where, _BYTES_ALLOWED + times * on_disk, on_disk)


def refuse_large_buffers(model: nn.Module) -> None:
    """Refuse buffers on meta, which no file holds, out of proportion to the parameters of a transformers model."""
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        return  # of a class of the caller's own, whose sizes no config says
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    lost = (each for each in inventory(model) if each.is_buffer and each.is_meta and not each.persistent)
    _refuse(
        lost, f"the config of this {type(model).__name__}", _BYTES_ALLOWED + _TIMES_ON_DISK * parameters, parameters
    )


def _refuse(tensors: Iterable[ModelTensor], where: object, most: int, known: int) -> None:
    largest = sorted(tensors, key=lambda each: -each.nbytes)
    total = sum(each.nbytes for each in largest)
    if total <= most:
        return
    raise CheckpointError(
        f"{where} makes a model of {format_bytes(total)}, out of proportion to the {format_bytes(known)} of its "
        f"weights (at most {format_bytes(most)}). Correct its sizes, or save the model again. The largest tensors:",
        [f"{each.line()}, {format_bytes(each.nbytes)}" for each in largest[:3]],
    )
