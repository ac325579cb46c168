"""From float64 to the dtype of a weight with exactly one rounding, in place.

torch converts float64 to 16 bits and to fp8 by way of float32, and so rounds twice. The second rounding goes wrong
where the first one lands in the middle between two numbers of the target: ties go to even, though the float64 lay on
one side. *Rounding to odd* makes the first rounding harmless: bits that are cut off leave a 1 in the last bit that is
kept, so a number that is no middle never becomes one. That takes several passes over all elements, so a block in 16
bits is converted by torch first, and only the few elements whose float32 may be a middle are made anew in this way.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

_Bits = TypeVar("_Bits", torch.Tensor, npt.NDArray[np.int64])

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# These bits of a float32, which the target does not have, tell whether it may be a middle. The middle between two
# bfloat16 has the highest of them alone. That between two float16 has none of the lowest 12, and neither has that
# between two subnormal ones; other numbers without them do no harm: they are rounded once more, to the same number.
_LOW = {torch.bfloat16: 0xFFFF, torch.float16: 0xFFF}
_MIDDLE = {torch.bfloat16: 0x8000, torch.float16: 0}
# Elements that are searched together: about one chunk of a hundred holds a middle by chance.
_CHUNKS = {torch.bfloat16: 512, torch.float16: 64}
_BFLOAT16_MIDDLE = -(1 << 15)  # 0x8000 as an int16
# The lowest bits of a float64: all but those of the target and two more, of which the last is the odd one.
_DROPPED = {torch.bfloat16: (1 << 43) - 1, torch.float16: (1 << 40) - 1}
_BEYOND_FLOAT32 = 29  # bits of a float64's fraction that a float32 does not have


class Rounder:
    """Writes float64 blocks of up to ``size`` elements into a weight, each rounded once to nearest, ties to even."""

    def __init__(self, dtype: torch.dtype, size: int, device: torch.device) -> None:
        self._dtype = dtype
        self._narrow = dtype not in (torch.float64, torch.float32)
        self._single = torch.empty(size if self._narrow else 0, dtype=torch.float32, device=device)
        searched = dtype == torch.float16 and device.type == "cpu"
        self._low = torch.empty(size if searched else 0, dtype=torch.int32, device=device)
        self._frames: dict[torch.Size, _Frame] = {}

    @staticmethod
    def bytes_per_element(dtype: torch.dtype, device: torch.device) -> int:
        """Return the scratch of a block per element, its float64 values included, in bytes."""
        if device.type != "cpu":  # the search makes an int32 and a bool
            return {torch.bfloat16: 17, torch.float16: 17}.get(dtype, 8)
        return {torch.bfloat16: 12, torch.float16: 16}.get(dtype, 8)

    def load(self, block: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Copy a block of the weight to float64, exactly, and return it."""
        if self._dtype == torch.float16:  # torch converts float16 to float64 one by one, but to float32 in vectors
            block = self._frame(values.shape).single.copy_(block)
        return values.copy_(block)

    def store(self, values: torch.Tensor, block: torch.Tensor) -> None:
        """Write contiguous float64 ``values`` into ``block``, which may have any strides."""
        if not self._narrow:
            block.copy_(values)  # one rounding at most: to float32
            return
        frame = self._frame(values.shape)
        frame.single.copy_(values)
        frame.mend(values)
        block.copy_(frame.single)

    def _frame(self, shape: torch.Size) -> _Frame:
        frame = self._frames.get(shape)
        if frame is None:
            frame = self._frames[shape] = _Frame(self._dtype, self._single[: shape.numel()].view(shape), self._low)
        return frame


class _Frame:
    """The float32 of blocks of one shape, and the views of them through which middles are found and mended.

    A frame is made once per shape and kept: to make a view costs as much as a pass over thousands of elements. For the
    same reason the few elements with middles are mended by numpy, whose operators cost a tenth of torch's on a handful
    of elements.
    """

    def __init__(self, dtype: torch.dtype, single: torch.Tensor, low: torch.Tensor) -> None:
        self.single, self._dtype = single, dtype
        flat = single.view(-1)
        if single.device.type != "cpu":
            return
        chunk = _CHUNKS[dtype]
        self._whole = whole = flat.numel() // chunk * chunk
        chunks = flat.view(torch.int32)[:whole].view(-1, chunk)
        self._chunks = chunks.view(torch.int16) if dtype == torch.bfloat16 else chunks
        self._low = low[:whole].view(-1, chunk)
        self._least = torch.empty(len(chunks), dtype=self._chunks.dtype)
        self._least_array: npt.NDArray[np.signedinteger] = self._least.numpy()
        self._rows: npt.NDArray[np.float32] = flat[:whole].view(-1, chunk).numpy()
        self._rest: npt.NDArray[np.float32] = flat[whole:].numpy()
        self._exact: torch.Tensor | None = None

    def mend(self, values: torch.Tensor) -> None:
        """Recompute from float64 each float32 halfway between two values of the target dtype; no double rounding."""
        if self.single.device.type != "cpu":
            self._mend_on_device(values)
            return
        if values is not self._exact:
            flat = values.view(-1).numpy().view(np.int64)
            self._exact_rows, self._exact_rest = flat[: self._whole].reshape(self._rows.shape), flat[self._whole :]
            self._exact = values
        if len(self._rest):  # less than a chunk: mended without a search
            _make_anew(self._rest, slice(None), self._exact_rest, self._dtype)
        if not self._whole:
            return
        if self._dtype == torch.bfloat16:
            # The low half of a middle is the least int16 of all, so one reduction without a temporary finds it. The
            # high halves are searched too, as a view without them is not contiguous: that finds -0.0 needlessly.
            torch.amin(self._chunks, 1, out=self._least)
            at = (self._least_array == _BFLOAT16_MIDDLE).nonzero()[0]
        else:
            torch.bitwise_and(self._chunks, _LOW[self._dtype], out=self._low)
            torch.amin(self._low, 1, out=self._least)
            at = (self._least_array == 0).nonzero()[0]
        if len(at):
            _make_anew(self._rows, at, self._exact_rows.take(at, 0), self._dtype)

    def _mend_on_device(self, values: torch.Tensor) -> None:
        """Do the same where numpy does not reach."""
        middle = (self.single.view(torch.int32) & _LOW[self._dtype]) == _MIDDLE[self._dtype]
        at = middle.nonzero(as_tuple=True)
        odd = _round_to_odd(values[at].view(torch.int64), _DROPPED[self._dtype])
        self.single[at] = odd.view(torch.float64).float()


def round_into(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write float64 ``values`` into ``out``, of the same shape and any strides, each rounded once."""
    Rounder(out.dtype, out.numel(), out.device).store(values.contiguous(), out)


def round_to_fp8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float64 values in fp8, each rounded once to the nearest, ties to even."""
    # Rounded to odd, a float64 is a float32 already, so the last step is the only one that rounds to nearest.
    bits = _round_to_odd(values.contiguous().view(torch.int64), (1 << _BEYOND_FLOAT32) - 1)
    return bits.view(torch.float64).float().to(dtype)


def _make_anew(
    single: npt.NDArray[np.float32], at: npt.NDArray[np.intp] | slice, bits: npt.NDArray[np.int64], dtype: torch.dtype
) -> None:
    with np.errstate(over="ignore"):  # infinity is what a number beyond the dtype's largest becomes
        single[at] = _round_to_odd(bits, _DROPPED[dtype]).view(np.float64)


def _round_to_odd(bits: _Bits, dropped: int) -> _Bits:
    """Return the bits of float64 numbers without the ``dropped`` lowest; the last one kept is 1 if any of those was.

    When the result is rounded to nearest in a dtype with at least two bits fewer, it becomes what the whole number
    would become: it is a middle, or on one side of a middle, where the whole number is. Works alike for int64 arrays
    of numpy and of torch.
    """
    # Adding the mask carries into the last kept bit if any dropped bit is set, and OR keeps the bits that were there.
    return (bits | ((bits & dropped) + dropped)) & ~dropped
