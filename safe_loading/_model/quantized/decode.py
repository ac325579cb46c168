"""The values that the codes of a quantized weight stand for, exactly or in float32 or wider."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .recognize import FP8, fp8_scales_name, is_eight_bit, is_four_bit, is_torchao

MX_BLOCK = 32  # elements that share a scale in MXFP4


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """A matrix of fp8 numbers, with one scale for each block of it."""

    codes: torch.Tensor  # (rows, columns)
    scales: torch.Tensor | None  # (blocks of rows, blocks of columns), or one number for all; None without scales
    block: tuple[int, int]  # rows and columns of a block
    scales_name: str = ""  # in their module

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the values of some rows in float64, exactly; ``stop`` may lie beyond the last row."""
        return decode_fp8(self.codes[start : min(stop, len(self.codes))], self.scales, self.block, start)


def fp8_matrix_of(module: torch.nn.Module, attribute: str) -> Fp8Matrix | None:
    """Return an fp8 weight of a module with its scales, or None when it is no fp8 matrix.

    The scales are those of transformers: ``weight_scale_inv`` of an FP8Linear, one for each block of ``block_size``;
    ``weight_scale`` of an FP8Embedding, a single one. For any other kind it raises NotImplementedError.
    """
    weight = getattr(module, attribute)
    if weight.dtype not in FP8 or weight.dim() != 2:
        return None
    name = fp8_scales_name(module, attribute)
    scales = getattr(module, name, None)
    others = {*module._parameters, *module._buffers} - {name, attribute, "activation_scale", "bias"}
    unknown = sorted(other for other in others if "scale" in other)
    if unknown or hasattr(module, "n_groups"):
        what = f"scales of an unknown kind ({', '.join(unknown)})" if unknown else "groups of rows with separate inputs"
        raise NotImplementedError(f"its fp8 {type(module).__name__} has {what}")
    rows, columns = getattr(module, "block_size", None) or tuple(weight.shape)
    if scales is None:
        return Fp8Matrix(weight.data, None, (int(rows), int(columns)))
    return Fp8Matrix(weight.data, scales.data, (int(rows), int(columns)), name)


def decode_fp8(
    codes: torch.Tensor, scales: torch.Tensor | None, block: tuple[int, int], start: int = 0
) -> torch.Tensor:
    """Return the values of some rows of an fp8 matrix in float64, which holds the 28 bits of code times scale.

    The scales are those of the whole matrix, of which ``start`` is the first of these rows.
    """
    values = codes.to(torch.float32).double()
    return values if scales is None else values.mul_(spread_scales(scale_grid(scales), block, start, values.shape))


def scale_grid(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as a matrix with one element for each block; a single scale may have any shape."""
    return scales.view(1, 1) if scales.numel() == 1 else scales


def spread_scales(grid: torch.Tensor, block: tuple[int, int], start: int, shape: torch.Size) -> torch.Tensor:
    """Return the scale of each element of rows that begin with row ``start``, in float64."""
    rows = torch.arange(start, start + shape[0], device=grid.device) // block[0]
    columns = torch.arange(shape[1], device=grid.device) // block[1]
    return grid.float().double()[rows][:, columns]


def decode_four_bits(
    packed: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, blocksize: int, start: int, stop: int
) -> torch.Tensor:
    """Return the values of 4-bit codes of bitsandbytes in float32: the product of code and scale.

    bitsandbytes' own ``dequantize_4bit`` is wrong on the CPU where a row is shorter than a block (0.50.2), and rounds
    to the dtype of the checkpoint. Each byte of ``packed`` has two codes, the first in the high half, beginning with
    that of element ``start``; the blocks of ``blocksize`` elements are counted through the whole weight.
    """
    # An odd element is the second code of its byte, so the first code is cut off.
    codes = torch.stack([packed >> 4, packed & 15], 1).view(-1)[start % 2 :][: stop - start]
    blocks = torch.arange(start, stop, device=packed.device) // blocksize
    return table.float()[codes.long()] * scales.float().view(-1)[blocks]


def decode_nested_scales(
    codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, blocksize: int, offset: torch.Tensor | float
) -> torch.Tensor:
    """Return scales that are themselves stored as codes of 8 bits (bitsandbytes' double quantization)."""
    outer = scales.float().view(-1).repeat_interleave(blocksize)[: codes.numel()]
    return table.float()[codes.view(-1).long()] * outer + offset


def decode_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of MXFP4 codes in float64, exactly: a number of 4 bits (e2m1) times a power of two.

    One code a byte; ``exponents`` are the bytes of the scales (e8m0, biased by 127), of a shape that broadcasts.
    """
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor([*positive, *(-value for value in positive)], dtype=torch.float64, device=codes.device)
    return torch.ldexp(table[codes.long()], exponents.long() - 127)


def undo_cpu_packing(module: torch.nn.Module) -> None:
    """Undo the order into which bitsandbytes puts 4-bit weights at the first forward on a CPU with AVX-512.

    Neither its own ``dequantize_4bit`` nor peft's merge know of that order: what they make of such codes is noise.
    """
    weight: Any = getattr(module, "weight", None)
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

        weight.data, weight.quant_state = _convert_weight_packed_for_cpu_inverse(weight.data, weight.quant_state)


def decoded_weight(module: torch.nn.Module) -> torch.Tensor:
    """Return the values of a quantized layer's weight as a matrix, in float32 or wider where the codes give that.

    For a kind of code that is not known here it raises NotImplementedError.
    """
    unknown = f"{type(module).__name__} is quantized in a way that is not known here"
    if getattr(module, "weight", None) is None:
        raise NotImplementedError(unknown)
    weight: Any = module.weight  # each engine has its own class of parameter
    fp8 = fp8_matrix_of(module, "weight")
    if fp8 is not None:
        return fp8.rows(0, len(fp8.codes))
    if is_four_bit(weight):
        undo_cpu_packing(module)
        state, packed = weight.quant_state, weight.data.view(torch.uint8).view(-1)
        scales = state.absmax
        if state.nested:
            outer = state.state2
            scales = decode_nested_scales(scales, outer.code, outer.absmax, outer.blocksize, state.offset)
        return decode_four_bits(packed, state.code, scales, state.blocksize, 0, state.shape.numel()).view(state.shape)
    if is_eight_bit(weight):
        from bitsandbytes.functional import int8_vectorwise_dequant

        state = getattr(module, "state", None)  # where bitsandbytes moves the scales at the first forward
        scales = weight.SCB if state is None or state.SCB is None else state.SCB
        return int8_vectorwise_dequant(weight.data, scales.to(weight.device))  # type: ignore[no-any-return]  # a tensor
    if is_torchao(weight):
        return weight.dequantize()  # type: ignore[no-any-return]  # a tensor
    raise NotImplementedError(unknown)
