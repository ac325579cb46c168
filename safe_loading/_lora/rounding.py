"""From float64 to the dtype of a weight with exactly one rounding, in place."""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_DROPPED = (1 << 29) - 1  # the bits of a float64's fraction that a float32 does not have
# Elements that are looked at, and mended, together: about one chunk of a hundred holds a middle by chance.
_CHUNKS = {torch.bfloat16: 512, torch.float16: 64}
_LEAST_CHUNK = 8
_MENDED = 2048  # elements that are mended at once, which takes 28 bytes for each
_BFLOAT16_TIE = -(1 << 15)  # 0x8000, the low half of a float32 in the middle between two bfloat16


class Rounder:
    """Writes float64 blocks into a weight of one dtype, each element rounded once to the nearest, ties to even.

    torch converts float64 to bfloat16 and float16 by way of float32, which rounds twice. That is wrong only where
    the float32 lies in the middle between two numbers of the target and the float64 does not. So the float32 are
    searched for such middles; they are few, and only the chunks that hold one are rounded with care: the bits that
    float32 does not have are folded into its last one ("rounding to odd"), so that it says on which side of the
    middle the value lies. Exact for every normal number of the target, and for float16's subnormal ones too.

    Args:
        dtype: The dtype of the weight.
        size: The most elements of one block.
        device: Where the blocks are.
    """

    def __init__(self, dtype: torch.dtype, size: int, device: torch.device) -> None:
        self._dtype = dtype
        narrow = dtype not in (torch.float64, torch.float32)
        self._single = torch.empty(size if narrow else 0, dtype=torch.float32, device=device)
        self._low = torch.empty(size if dtype == torch.float16 else 0, dtype=torch.int32, device=device)

    @staticmethod
    def bytes_per_element(dtype: torch.dtype) -> int:
        """Return the scratch of a block per element, its float64 values included, in bytes."""
        return {torch.bfloat16: 12, torch.float16: 16}.get(dtype, 8)

    @property
    def nbytes(self) -> int:
        """The size of the scratch held here."""
        return self._single.nbytes + self._low.nbytes

    def load(self, block: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Copy a block of the weight to float64, exactly, and return it."""
        if self._dtype == torch.float16:  # torch converts float16 to float64 one by one, but to float32 in vectors
            block = self._single[: block.numel()].view(block.shape).copy_(block)
        return values.copy_(block)

    def store(self, values: torch.Tensor, block: torch.Tensor) -> None:
        """Write contiguous float64 ``values`` into ``block``, which may have any strides."""
        if self._single.numel() == 0:
            block.copy_(values)
            return
        single = self._single[: values.numel()].view(values.shape).copy_(values)
        chunk = math.gcd(values.numel(), _CHUNKS[self._dtype])
        if chunk < _LEAST_CHUNK:
            single.copy_(_to_odd(values.clone()))
        else:
            found, most = self._middles(single, chunk), _MENDED // chunk
            for start in range(0, len(found), most):
                part = found[start : start + most]
                exact = _to_odd(values.view(-1, chunk).index_select(0, part))
                single.view(-1, chunk).index_copy_(0, part, exact.float())
        block.copy_(single)

    def _middles(self, single: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the numbers of the chunks in which a float32 may lie in the middle between two of the target."""
        if self._dtype == torch.bfloat16:
            # One reduction without a temporary. The high halves are looked at too: -0.0 is found without need.
            return (single.view(torch.int16).view(-1, 2 * chunk).amin(1) == _BFLOAT16_TIE).nonzero().view(-1)
        # The middle has bit 12 set and zeros under it; in float16's subnormal range a higher one, and more zeros.
        low = self._low[: single.numel()].view(single.shape)
        torch.bitwise_and(single.view(torch.int32), (1 << 12) - 1, out=low)
        return (low.view(-1, chunk).amin(1) == 0).nonzero().view(-1)


def _to_odd(values: torch.Tensor) -> torch.Tensor:
    """Cut float64 off to the bits of a float32, in place; the last one is set when anything was cut off."""
    bits = values.view(torch.int64)
    sticky = bits & _DROPPED
    sticky.add_(_DROPPED)  # carries into the last kept bit when any dropped one is set
    bits.bitwise_or_(sticky)
    bits.bitwise_and_(~_DROPPED)
    return values


def round_into(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write float64 ``values`` into ``out``, of the same shape and any strides, each rounded once."""
    Rounder(out.dtype, out.numel(), out.device).store(values.contiguous(), out)
