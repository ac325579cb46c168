"""MXFP4, the experts of gpt-oss: the storage and allocations of transformers' ``Mxfp4GptOssMLP`` on a GPU.

Blocks of 32 elements share a scale of one byte, and two elements a byte (OCP Microscaling Formats 1.0). Once loaded,
both lie on the GPU in the layout of kernels-community/gpt-oss-triton-kernels, which has the same size for sizes that
are multiples of 64, as gpt-oss has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError, MergeError

from .card_findings import KERNELS_FIX, at_least, bytes_of_parameters, dequantized, with_bytes
from .convertible import skipped_modules
from .format import TURING, Format, QuantizationRequest, TargetCard
from .middles import Middles
from .packed_linear import frozen
from .stored import QuantizedTensor, RowCodes, Stored, StoredCodes, Tables, entries, with_files

MX_BLOCK = 32  # elements that share a scale
# Between two neighbors of 0, 0.5, 1, 1.5, 2, 3, 4, 6. A middle goes to the neighbor whose code is even; a number that
# equals a boundary is given to the lower one, so each second boundary lies just below its middle.
# On the host, whatever torch's default device is where the package is first used.
_MIDDLES = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), dtype=torch.float64, device="cpu")
_MIDDLES[1::2] = torch.nextafter(_MIDDLES[1::2], torch.zeros_like(_MIDDLES[1::2]))
_PLACES = Middles(_MIDDLES)
_LARGEST = 6.0  # of the codes
_BIAS = 127
LARGEST_MXFP4 = _LARGEST * 2.0**_BIAS
_NEGATIVE = 8
_CODES = "_blocks"  # what the names of gpt-oss's codes end with


def build_mxfp4(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Put stand-ins for the experts of gpt-oss in MXFP4 in, or leave the model as it is dequantized."""
    if request.options.get("dequantize"):
        return []
    if not card.has(TURING):
        return [with_bytes(dequantized(request, card, "7.5"), bytes_of_parameters(model))]
    if card.trains:
        raise ArgumentError(
            "transformers does not train on MXFP4: its kernels have no backward pass. Plan and load it dequantized: "
            "quantization_config=Mxfp4Config(dequantize=True)."
        )
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = skipped_modules(model, request)
    found = [path for path, module in model.named_modules() if type(module).__name__ == "GptOssMLP"]
    if not found:
        raise ArgumentError(
            f"transformers has layers in MXFP4 for gpt-oss alone, and {type(model).__name__} is none. Leave "
            f"quantization_config out."
        )
    for path in found:
        if should_convert_module(f"{path}.experts", kept):
            model.set_submodule(path, Mxfp4Mlp(model.get_submodule(path)))
    message = (
        f"stays in MXFP4 only where triton 3.4 and the package kernels are installed{at_least(card, '7.5')}; "
        f"otherwise transformers dequantizes it to 16 bits while loading, to about four times the size."
    )
    return [Finding("kernels-needed", "info", "", message, KERNELS_FIX)]


class Mxfp4Experts(nn.Module):
    """The packed weights of all experts of a layer, with their scales; the biases are in float32."""

    def __init__(self, experts: int, inner: int, hidden: int) -> None:
        super().__init__()
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            self.register_parameter(name, frozen((experts, rows, columns // 2), torch.uint8))
            self.register_parameter(f"{name}_scales", frozen((experts, rows, columns // MX_BLOCK), torch.uint8))
            self.register_parameter(f"{name}_bias", frozen((experts, rows), torch.float32))


class Mxfp4Mlp(nn.Module):
    """The router, which is not quantized, and the experts."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.router, self.experts = plain.router, Mxfp4Experts(*plain.experts.down_proj.shape)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate as routing and the two products of ``matmul_ogs`` do; return output and router logits."""
        rows, width = hidden_states.shape[0], hidden_states.shape[-1]
        flat = hidden_states.reshape(-1, width)
        logits = nn.functional.linear(flat, self.router.weight, self.router.bias)
        tokens, chosen = flat.shape[0], self.router.top_k
        routes = tokens * chosen
        # topk_forward and sort_tokens: scores and numbers of the chosen experts, one bit for each expert, two orders
        routing = [
            logits.new_empty((tokens, chosen)),
            logits.new_empty((tokens, chosen), dtype=torch.int16),
            logits.new_empty((-(-logits.shape[1] // 32), -(-tokens // 32) * 32), dtype=torch.int32),
            logits.new_empty(2 * routes, dtype=torch.int32),
            logits.new_empty(routes),
        ]
        width_of_both = self.experts.get_parameter("gate_up_proj").shape[1]
        inner = flat.new_empty((routes, width_of_both // 2))  # SwiGLU is fused into the first product
        # the second one writes each route's row and then their sums into one tensor, of which the sums are returned
        indices = [logits.new_empty(routes, dtype=torch.int32), logits.new_empty(routes + tokens, dtype=torch.int32)]
        out = flat.new_empty((routes + tokens, width))[:tokens]
        del inner, indices, routing
        return out.reshape(rows, -1, width), logits


MXFP4 = Format(
    "mxfp4",
    build_mxfp4,
    dequantized_by="Mxfp4Config",
    computes_in=torch.bfloat16,
    loading_not_counted=True,
    read_on_disk=True,
    merged_on_disk=True,
)


def decode_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of MXFP4 codes in float64, exactly: a number of 4 bits (e2m1) times a power of two.

    One code a byte; ``exponents`` are the bytes of the scales (e8m0, biased by 127), of a shape that broadcasts.
    """
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor([*positive, *(-value for value in positive)], dtype=torch.float64, device=codes.device)
    return entries(table, codes).mul_(_powers(exponents.long() - _BIAS))


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


def nearest_mxfp4(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest numbers under exponents that are given, one for each element."""
    return _codes_under(values.unsqueeze(-1), exponents.long() - _BIAS)[0].squeeze(-1)


def steps_of_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the distance of the numbers around each code, in float64; ``exponents`` broadcast to the codes."""
    table = torch.tensor((0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0) * 2, dtype=torch.float64, device=codes.device)
    return entries(table, codes).mul_(_powers(exponents.long() - _BIAS))


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
    codes = _PLACES.before(scaled.abs()).to(torch.uint8) + _NEGATIVE * torch.signbit(scaled).to(torch.uint8)
    biased = torch.full_like(exponents, _BIAS).unsqueeze(-1)
    errors = (decode_mxfp4(codes, biased) - scaled).square_().sum(-1)
    scale = _powers(exponents)
    return codes, errors * scale * scale


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two in float64, exactly: an exponent there is eleven bits above the 52 of the mantissa."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def find_mxfp4(name: str, checkpoint: Checkpoint, settings: JsonObject) -> QuantizedTensor | None:
    """Return the weight whose MXFP4 codes a tensor holds, all experts of a layer; None for any other tensor."""
    info = checkpoint.tensors[name]
    exponents = checkpoint.tensors.get(f"{name.removesuffix(_CODES)}_scales") if name.endswith(_CODES) else None
    if info.dtype != "U8" or exponents is None or len(info.shape) != 4:
        return None
    experts, rows, blocks, size = info.shape
    if exponents.shape != (experts, rows, blocks) or size * 2 != MX_BLOCK:
        raise MergeError(
            f"{exponents.name} has the shape {list(exponents.shape)}, which does not fit the shape "
            f"{list(info.shape)} of {name}: a scale for each block of {MX_BLOCK} elements, two of them a byte."
        )
    shape = (experts, blocks * size * 2, rows)
    return QuantizedTensor("mxfp4", info, shape, with_files(checkpoint, {"scales": exponents}), {})


class _RowsOfExperts:
    """Rows of weights in MXFP4, counted through all experts; the disk has each expert transposed."""

    def __init__(self, weight: QuantizedTensor, tables: Tables, stored: Stored) -> None:
        self._weight, self._tables, self._stored = weight, tables, stored
        self._expert: tuple[int, torch.Tensor] | None = None  # the one whose codes are in memory

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        experts, rows, _ = self._weight.shape
        parts = []
        for expert in range(start // rows, min(-(-stop // rows), experts)):
            first, last = max(start - expert * rows, 0), min(stop - expert * rows, rows)
            exponents = spread_exponents(self._tables["scales"][expert])[:, first:last]
            parts.append(decode_mxfp4(self._codes_of(expert)[:, first:last], exponents).t())
        return torch.cat(parts)

    def _codes_of(self, expert: int) -> torch.Tensor:
        """Return the codes of one expert, a byte for each, as the disk has them: (output rows, input columns)."""
        if self._expert is None or self._expert[0] != expert:
            size = self._weight.info.nbytes // self._weight.shape[0]
            packed = self._stored(expert * size, (expert + 1) * size).view(self._weight.shape[2], -1)
            self._expert = expert, unpack_mxfp4(packed)
        return self._expert[1]


STORED_MXFP4 = StoredCodes(
    "mxfp4",
    find_mxfp4,
    _RowsOfExperts,
    suffix=_CODES,
    experts=RowCodes(
        LARGEST_MXFP4,
        unpack_mxfp4,
        spread_exponents,
        decode_mxfp4,
        steps_of_mxfp4,
        requantize_mxfp4,
        pack_mxfp4,
        nearest_mxfp4,
        8 / _LARGEST,  # the choice of a scale that the specification recommends
    ),
)
