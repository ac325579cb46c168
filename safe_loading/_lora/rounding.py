"""From float64 to the dtype of a weight with exactly one rounding, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_Array = np.ndarray[Any, Any]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# A float32 may be a middle when these bits of it, which the target does not have, say so. A middle between two
# bfloat16 has the highest of them alone. One between two float16 has none of the lowest 12, the subnormal ones too;
# others have none either, but those do no harm: a step of one float32 leads them over no middle.
_LOW = {torch.bfloat16: 0xFFFF, torch.float16: 0xFFF}
_MIDDLE = {torch.bfloat16: 0x8000, torch.float16: 0}
# Elements that are looked at together: about one chunk of a hundred holds a middle by chance.
_CHUNKS = {torch.bfloat16: 512, torch.float16: 64}
_NONE: _Array = np.empty(0, np.int64)
_BFLOAT16_MIDDLE = -(1 << 15)  # 0x8000 as an int16


class Rounder:
    """Writes float64 blocks into a weight of one dtype, each element rounded once to the nearest, ties to even.

    torch converts float64 to bfloat16 and float16 by way of float32, which rounds twice. That is wrong only where
    the float32 lies in the middle between two numbers of the target and the float64 does not. So the float32 are
    searched for such middles; they are few, and each is moved by one step to the side on which its float64 lies.

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
        self._frames: dict[int, _Frame] = {}

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
            block = self._frame(values).flat.view(values.shape).copy_(block)
        return values.copy_(block)

    def store(self, values: torch.Tensor, block: torch.Tensor) -> None:
        """Write contiguous float64 ``values`` into ``block``, which may have any strides."""
        if self._single.numel() == 0:
            block.copy_(values)
            return
        frame = self._frame(values)
        single = frame.flat.view(values.shape).copy_(values)
        if frame.on_cpu:
            frame.mend(values)
        else:
            _mend_on_device(self._dtype, single, values)
        block.copy_(single)

    def _frame(self, values: torch.Tensor) -> _Frame:
        count = values.numel()
        if count not in self._frames:
            self._frames[count] = _Frame(self._dtype, self._single[:count], self._low)
        return self._frames[count]


class _Frame:
    """The float32 of blocks of one size, and views of them.

    To make a view costs as much as a pass over thousands of elements, and so does each operator of torch on a handful
    of them; numpy's cost a tenth.
    """

    def __init__(self, dtype: torch.dtype, flat: torch.Tensor, low: torch.Tensor) -> None:
        self.flat, self.on_cpu = flat, flat.device.type == "cpu"
        if not self.on_cpu:
            return
        chunk = _CHUNKS[dtype]
        whole = flat.numel() // chunk * chunk
        chunks = flat.view(torch.int32)[:whole].view(-1, chunk)
        self._dtype, self._chunk, self._whole = dtype, chunk, whole
        self._chunks = chunks.view(torch.int16) if dtype == torch.bfloat16 else chunks
        self._low = low[:whole].view(-1, chunk)
        self._least = torch.empty(len(chunks), dtype=self._chunks.dtype)
        self._least_array = self._least.numpy()
        self._single: _Array = flat.numpy()
        self._bits: _Array = self._single.view(np.int32)
        self._rows = self._bits[:whole].reshape(-1, chunk)

    def mend(self, values: torch.Tensor) -> None:
        """Move the float32 that lie in a middle, and whose float64 do not, by one step towards those."""
        at = self._middles()
        if not len(at):
            return
        exact, size = np.abs(values.view(-1).numpy()[at]), np.abs(self._single[at])
        # The bits of a float32 grow with its size, whatever the sign.
        self._bits[at] += (exact > size).astype(np.int32) - (exact < size)

    def _middles(self) -> _Array:
        """Return where a float32 may lie in the middle between two numbers of the target, as flat positions."""
        dtype, chunk, whole = self._dtype, self._chunk, self._whole
        found = _NONE if whole == len(self._bits) else self._within(self._bits[whole:])[0] + whole
        if not whole:
            return found
        if dtype == torch.bfloat16:
            # One reduction without a temporary. The high halves are looked at too: -0.0 is found without need.
            torch.amin(self._chunks, 1, out=self._least)
            chunks = np.flatnonzero(self._least_array == _BFLOAT16_MIDDLE)
        else:
            torch.bitwise_and(self._chunks, _LOW[dtype], out=self._low)
            torch.amin(self._low, 1, out=self._least)
            chunks = np.flatnonzero(self._least_array == 0)
        if not len(chunks):
            return found
        row, column = self._within(self._rows[chunks])
        return np.concatenate([chunks[row] * chunk + column, found])

    def _within(self, bits: _Array) -> tuple[_Array, ...]:
        return np.nonzero((bits & _LOW[self._dtype]) == _MIDDLE[self._dtype])


def _mend_on_device(dtype: torch.dtype, single: torch.Tensor, values: torch.Tensor) -> None:
    """Do the same as :meth:`_Frame.mend` where numpy does not reach."""
    bits = single.view(torch.int32)
    at = ((bits & _LOW[dtype]) == _MIDDLE[dtype]).nonzero(as_tuple=True)
    exact, size = values[at].abs_(), single[at].abs_()
    bits[at] += (exact > size).int() - (exact < size).int()


def round_into(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write float64 ``values`` into ``out``, of the same shape and any strides, each rounded once."""
    Rounder(out.dtype, out.numel(), out.device).store(values.contiguous(), out)
