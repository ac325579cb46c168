"""From float64 to the dtype of a weight with exactly one rounding, in place."""

from __future__ import annotations

import torch

_DROPPED = (1 << 29) - 1  # the bits of a float64's fraction that a float32 does not have

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bytes_per_element(dtype: torch.dtype) -> int:
    """Return what a block of a weight of this dtype needs per element while it is merged, in bytes."""
    return 8 if dtype in (torch.float64, torch.float32) else 16


def round_into(values: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
    """Write ``values`` into ``out``, each rounded once to the nearest, ties to even.

    torch converts float64 to bfloat16 and float16 by way of float32, which rounds twice. So the bits that float32
    does not have are folded into its last one first ("rounding to odd"): the way to float32 is then exact, and the
    last bit still says on which side of a tie the value lies. Exact for every normal number of the target, and for
    float16's subnormal ones too.

    Args:
        values: float64; overwritten when ``out`` is a 16-bit dtype.
        out: Any strides, the same shape.
        scratch: int64 of the same shape; made here when it is None and needed.
    """
    if out.dtype not in (torch.float64, torch.float32):
        bits = values.view(torch.int64)
        sticky = torch.bitwise_and(bits, _DROPPED, out=scratch)
        sticky.add_(_DROPPED)  # carries into the last kept bit when any dropped one is set
        bits.bitwise_or_(sticky)
        bits.bitwise_and_(~_DROPPED)
    out.copy_(values)
