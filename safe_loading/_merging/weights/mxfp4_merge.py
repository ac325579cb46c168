"""Merged weights as MXFP4: blocks of 32 numbers of four bits (e2m1) under a power of two (e8m0)."""

from __future__ import annotations

import torch

from safe_loading._model.quantized.decode import MX_BLOCK, decode_mxfp4

# Between two neighbors of 0, 0.5, 1, 1.5, 2, 3, 4, 6. A middle goes to the neighbor whose code is even; ``bucketize``
# gives a number that equals a boundary to the lower one, so each second boundary lies just below its middle.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_LARGEST = 6.0  # of the codes
_BIAS = 127
LARGEST_MXFP4 = _LARGEST * 2.0**_BIAS
_NEGATIVE = 8


def requantize_mxfp4(values: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 rows as MXFP4: codes, one a byte, and the exponents of the scales, biased by 127.

    Of three exponents each block gets the one with the least sum of squared errors: the one that it has
    (``exponents``), the least under which its largest number fits, and the one below, under which the largest number
    becomes 6 times the scale. One of the latter two is the choice of the OCP Microscaling specification 1.0
    (section 6.3). With the one that it has, a block that did not change keeps its codes; each element becomes the
    nearest of the sixteen numbers, ties to the even code.
    """
    blocks = values.reshape(len(values), -1, MX_BLOCK)
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))  # largest = mantissa * 2 ** exponent, mantissa < 1
    fitting = exponent.long() - 3 + (mantissa > _LARGEST / 8)
    best = exponents.long() - _BIAS
    codes, error = _codes_under(blocks, best)
    for candidate in (fitting.clamp(-_BIAS, _BIAS), (fitting - 1).clamp(-_BIAS, _BIAS)):
        other, squares = _codes_under(blocks, candidate)
        better = squares < error
        best = torch.where(better, candidate, best)
        codes = torch.where(better.unsqueeze(-1), other, codes)
        error = torch.where(better, squares, error)
    return codes.view(values.shape), (best + _BIAS).to(torch.uint8)


def steps_of_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the distance of the numbers around each code, in float64; ``exponents`` broadcast to the codes."""
    table = torch.tensor((0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0) * 2, dtype=torch.float64, device=codes.device)
    return table[codes.long()] * _powers(exponents.long() - _BIAS)


def pack_mxfp4(codes: torch.Tensor) -> torch.Tensor:
    """Return codes two a byte, the first in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_mxfp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of rows of bytes, one a byte."""
    return torch.stack([packed & 15, packed >> 4], -1).view(len(packed), -1)


def spread_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Return the exponent of each element of rows."""
    return exponents.repeat_interleave(MX_BLOCK, -1)


def _codes_under(blocks: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest code of each element, and the sum of the squared errors of each block."""
    scaled = blocks * _powers(-exponents).unsqueeze(-1)  # exact, as long as no number is far below its block's largest
    lower = torch.tensor(_MIDDLES, dtype=torch.float64, device=blocks.device)
    lower[1::2] = torch.nextafter(lower[1::2], torch.zeros_like(lower[1::2]))
    codes = torch.bucketize(scaled.abs(), lower).to(torch.uint8) + _NEGATIVE * torch.signbit(scaled).to(torch.uint8)
    biased = torch.full_like(exponents, _BIAS).unsqueeze(-1)
    errors = (decode_mxfp4(codes, biased) - scaled).square_().sum(-1)
    scale = _powers(exponents)
    return codes, errors * scale * scale


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two in float64, exactly: an exponent there is eleven bits above the 52 of the mantissa."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)
