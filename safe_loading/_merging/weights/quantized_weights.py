"""Weights that are stored as codes: what they stand for, and fp8 weights that are merged under their scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .update import ROWS, PartlyMerged, RowMerger, Update

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BITS = 29  # of a float64's fraction that a float32 does not have


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """A matrix of fp8 numbers, with one scale for each block of it.

    Attributes:
        codes: The fp8 numbers, (rows, columns).
        scales: What the numbers of each block are multiplied with, (blocks of rows, blocks of columns) or one number
            for the whole matrix; None for a weight without scales.
        block: Rows and columns of a block.
        scales_name: The name of the scales in their module.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    block: tuple[int, int]
    scales_name: str = ""

    @property
    def step(self) -> int:
        """The rows that are merged together: whole blocks, and whole groups of :class:`RowMerger`."""
        return max(ROWS, -(-self.block[0] // ROWS) * ROWS) if self.scales is not None else 16 * ROWS

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return what some rows stand for in float64, exactly; ``stop`` may lie beyond the last."""
        stop = min(stop, len(self.codes))
        values = self.codes[start:stop].to(torch.float32).double()
        return values if self.scales is None else values.mul_(_spread(self._grid(), self.block, start, values.shape))

    def store(self, values: torch.Tensor, start: int) -> None:
        """Write float64 values, whole blocks from row ``start`` on, each rounded once.

        A block keeps its scale when its values fit under it. Otherwise it gets the least scale under which they fit,
        largest value / largest fp8 number, rounded up; a power of two where scales are powers of two.
        """
        rows = self.codes[start : start + len(values)]
        if self.scales is None:
            rows.copy_(to_fp8(values, rows.dtype))
            return
        high, grid = self.block[0], self._grid()
        blocks = grid[start // high : (start + len(values) - 1) // high + 1]
        needed = self._largest(values, start) / torch.finfo(self.codes.dtype).max
        held = blocks.float().double()
        scales = _up(torch.where(needed <= held, held, needed), grid.dtype)
        spread = _spread(scales, self.block, 0, values.shape)
        codes = to_fp8(torch.where(spread == 0, 0.0, values / spread), rows.dtype)
        blocks.copy_(scales)  # nothing is written before everything is there
        rows.copy_(codes)

    def _grid(self) -> torch.Tensor:
        scales = self.scales
        if scales is None:
            raise ValueError("there are no scales")
        return scales.view(1, 1) if scales.numel() == 1 else scales

    def _largest(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Return the largest absolute value of each block of rows that begin with a block."""
        (high, wide), (rows, columns) = self.block, values.shape
        room = torch.zeros(
            -(-rows // high) * high, -(-columns // wide) * wide, dtype=values.dtype, device=values.device
        )
        room[:rows, :columns] = values.abs()
        return room.view(-1, high, room.shape[1] // wide, wide).amax((1, 3))


def scaled_of(module: Any, attribute: str) -> Scaled | None:
    """Return an fp8 weight of a module with its scales, or None when it is no fp8 matrix.

    The scales are those of transformers: of an FP8Linear ``weight_scale_inv``, one for each block of ``block_size``; of
    an FP8Embedding ``weight_scale``, a single one.

    Raises:
        NotImplementedError: It is scaled, or used, in a way that is not known here.
    """
    weight = getattr(module, attribute)
    if weight.dtype not in FP8 or weight.dim() != 2:
        return None
    name = f"{attribute}_scale" if type(module).__name__ == "FP8Embedding" else f"{attribute}_scale_inv"
    scales = getattr(module, name, None)
    others = {*module._parameters, *module._buffers} - {name, attribute, "activation_scale", "bias"}
    unknown = sorted(other for other in others if "scale" in other)
    if unknown or hasattr(module, "n_groups"):
        what = (
            f"scales of another kind ({', '.join(unknown)})" if unknown else "groups of rows, each with its own input"
        )
        raise NotImplementedError(
            f"its fp8 {type(module).__name__} has {what}. Merge into the base before it is quantized, with "
            f"merge_lora_checkpoint"
        )
    block = getattr(module, "block_size", None) or tuple(weight.shape)
    if scales is None:
        return Scaled(weight.data, None, (int(block[0]), int(block[1])))
    return Scaled(weight.data, scales.data, (int(block[0]), int(block[1])), name)


def merge_scaled(update: Update, scaled: Scaled, *, scratch_bytes: int) -> None:
    """Overwrite an fp8 weight with its merged values.

    Raises:
        MemoryError, RuntimeError: The memory ran out before anything was written.
        PartlyMerged: It ran out later, and for the same rows once more.
    """
    merger, step = _merger(update, scaled, scratch_bytes), scaled.step

    def merge(start: int) -> None:  # the rows are written by the last operation on them
        values = scaled.rows(start, start + step)
        merger.merge(values, start)
        scaled.store(values, start)

    for start in range(0, len(scaled.codes), step):
        try:
            merge(start)
        except (MemoryError, RuntimeError, PartlyMerged) as error:
            try:
                merge(start)
            except (MemoryError, RuntimeError, PartlyMerged):
                if not start:
                    raise MemoryError(str(error)) from error
                raise PartlyMerged(start, error) from error


def _spread(grid: torch.Tensor, block: tuple[int, int], start: int, shape: torch.Size) -> torch.Tensor:
    """Return the scale of each element of some rows, in float64."""
    rows = torch.arange(start, start + shape[0], device=grid.device) // block[0]
    columns = torch.arange(shape[1], device=grid.device) // block[1]
    return grid.float().double()[rows][:, columns]


def why_scaled_not_finite(update: Update, scaled: Scaled, *, scratch_bytes: int) -> str | None:
    """Return why a merged fp8 weight would not be finite, or None when it will be; nothing is written."""
    merger, step, largest = _merger(update, scaled, scratch_bytes), scaled.step, 0.0
    for start in range(0, len(scaled.codes), step):
        values = scaled.rows(start, start + step)
        if not bool(values.isfinite().all()):
            return "the base weight itself holds NaN or infinity"
        merger.merge(values, start)
        if not bool(values.isfinite().all()):
            return "the adapter holds NaN or infinity, or DoRA divides by a norm of zero"
        largest = max(largest, float(values.abs().max()))
    limit = torch.finfo(scaled.codes.dtype).max if scaled.scales is None else torch.finfo(torch.float32).max
    if largest > limit:
        return f"a merged element, {largest:g}, is beyond the largest number of {scaled.codes.dtype}, {limit:g}"
    return None


def to_fp8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float64 values in fp8, each rounded once to the nearest, ties to even."""
    bits = values.contiguous().clone().view(torch.int64)
    dropped = (1 << _BITS) - 1
    # What float32 does not have is folded into its last bit, so that the second rounding knows of it.
    bits = (bits | ((bits & dropped) + dropped)) & ~dropped
    return bits.view(torch.float64).float().to(dtype)


def four_bits(
    packed: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, blocksize: int, start: int, stop: int
) -> torch.Tensor:
    """Return what 4-bit codes of bitsandbytes stand for in float32: the product of code and scale.

    Its own ``dequantize_4bit`` is wrong on the CPU where a row is shorter than a block (0.50.2), and rounds to the
    dtype of the checkpoint.

    Args:
        packed: Bytes with two codes each, the first in the high half, from that of element ``start`` on.
        table: The number of each code.
        scales: The scale of each block.
        blocksize: Elements of a block, counted through the whole weight.
        start: The first element.
        stop: The element after the last.
    """
    codes = torch.stack([packed >> 4, packed & 15], 1).view(-1)[start % 2 :][: stop - start]
    blocks = torch.arange(start, stop, device=packed.device) // blocksize
    return table.float()[codes.long()] * scales.float().view(-1)[blocks]


def unnested(
    codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, blocksize: int, offset: torch.Tensor | float
) -> torch.Tensor:
    """Return the scales that are themselves codes of 8 bits (bitsandbytes' double quantization)."""
    outer = scales.float().view(-1).repeat_interleave(blocksize)[: codes.numel()]
    return table.float()[codes.view(-1).long()] * outer + offset


# The quantized layers of bitsandbytes, and what their weights are as long as they are with them.
_CODES = {"Linear4bit": "Params4bit", "Linear8bitLt": "Int8Params"}
OFFLOADED = (
    "its quantized weight is offloaded, without its scales. Load the model without offloading, or merge into the base "
    "before it is quantized, with merge_lora_checkpoint"
)


def is_quantized(module: Any) -> bool:
    """Return whether a module's weights are codes: quantized by bitsandbytes, torchao, HQQ, GPTQ, AWQ, or fp8."""
    if any(hasattr(module, name) for name in ("qweight", "W_q")):
        return True
    tensors = module._parameters if isinstance(module, torch.nn.Module) else {}
    if any(name.endswith("_scale_inv") for name in tensors):  # the experts of transformers too
        return True
    weight = tensors.get("weight")
    if weight is None:
        return False
    named = type(weight).__name__ in _CODES.values() or type(weight).__module__.startswith("torchao.")
    return named or weight.dtype in FP8 or type(module).__name__ in _CODES


def is_offloaded(module: Any) -> bool:
    """Return whether bitsandbytes' codes are with accelerate, whose stores keep them without what they stand for."""
    kind = _CODES.get(type(module).__name__)
    return kind is not None and type(module.weight).__name__ != kind


def unpack(module: Any) -> None:
    """Undo the order into which bitsandbytes puts 4-bit weights at the first forward on a CPU with AVX-512.

    Neither its own ``dequantize_4bit`` nor peft's merge know of it: what they make of such codes is noise.
    """
    weight: Any = getattr(module, "weight", None)
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

        weight.data, weight.quant_state = _convert_weight_packed_for_cpu_inverse(weight.data, weight.quant_state)


def values_of(module: Any) -> torch.Tensor:
    """Return what the codes of a layer stand for, as a matrix in float32 or wider where the codes give that.

    Raises:
        NotImplementedError: The kind of code is not known here.
    """
    weight = getattr(module, "weight", None)
    scaled = None if weight is None else scaled_of(module, "weight")
    if scaled is not None:
        return scaled.rows(0, len(scaled.codes))
    kind = type(weight).__name__
    if kind == "Params4bit":
        unpack(module)
        state, packed = module.weight.quant_state, module.weight.data.view(torch.uint8).view(-1)
        scales = state.absmax
        if state.nested:
            scales = unnested(scales, state.state2.code, state.state2.absmax, state.state2.blocksize, state.offset)
        return four_bits(packed, state.code, scales, state.blocksize, 0, state.shape.numel()).view(state.shape)
    if kind == "Int8Params":
        from bitsandbytes.functional import int8_vectorwise_dequant

        scales = module.weight.SCB if module.state.SCB is None else module.state.SCB
        return int8_vectorwise_dequant(module.weight.data, scales.to(module.weight.device))  # type: ignore[no-any-return]  # a tensor
    if type(weight).__module__.startswith("torchao."):
        return module.weight.dequantize()  # type: ignore[no-any-return]  # a tensor
    raise NotImplementedError(f"{type(module).__name__} is quantized in a way that is not known here")


def _merger(update: Update, scaled: Scaled, scratch_bytes: int) -> RowMerger:
    merger = RowMerger(update, torch.float64, scaled.codes.device, scratch_bytes=scratch_bytes)
    if update.needs_norms:
        for start in range(0, len(scaled.codes), scaled.step):
            merger.add_norms(scaled.rows(start, start + scaled.step), start)
    return merger


def _up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales in the dtype in which they are stored, none smaller than it was."""
    if dtype == torch.float8_e8m0fnu:
        return torch.exp2(torch.ceil(torch.log2(scales.clamp_min(2.0**-127)))).to(dtype)
    there = scales.to(dtype)
    return torch.where(there.double() < scales, torch.nextafter(there, torch.full_like(there, torch.inf)), there)
