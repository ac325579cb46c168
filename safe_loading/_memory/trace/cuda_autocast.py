"""CUDA's autocast, where the CPU's is another: norms, softmax, powers, exponentials and interpolation are in float32.

A trace runs on fake CPU tensors, for which ``torch.autocast("cpu")`` casts products to 16 bits as CUDA's does, and
leaves most other operations alone. CUDA's casts the inputs of many to float32, which takes twice the memory, and what
follows often stays so. Its lists are those of ``aten/src/ATen/autocast_mode.h`` (torch 2.4 to 2.13). The functions are
replaced where models call them; what torch's own C++ calls inside another operation is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from safe_loading._core.engines import norms_in_float32
from safe_loading._core.thread_patches import patched, seen_here
from safe_loading._core.workload import Workload

from .cuda_scratch import CARD

_HALF = (torch.float16, torch.bfloat16)
_Call = Callable[..., object]

_FUNCTIONAL = ("softplus", "cosine_similarity", "pdist")
_POWERS = ("pow", "exp", "expm1", "log", "log1p", "log2", "log10", "logsumexp", "rsqrt", "reciprocal", "cumsum")
_OTHERS = ("cumprod", "acos", "asin", "tan", "sinh", "cosh", "erfinv", "dist", "renorm")
# These have an argument for the dtype of their output, which CUDA's autocast sets where the caller does not.
_WITH_DTYPE = ("softmax", "log_softmax", "sum", "prod")
_OF_LINALG = ("norm", "vector_norm", "matrix_norm")
_UPSAMPLED = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
_UPSAMPLED_PRIVATELY = ("nearest_exact1d", "nearest_exact2d", "nearest_exact3d", "bilinear2d_aa", "bicubic2d_aa")


@contextlib.contextmanager
def cuda_autocast(workload: Workload) -> Iterator[None]:
    """Inside, the autocast of a workload is CUDA's, where the card is one of CUDA's: in recomputations, too."""
    if workload.autocast is None or CARD.get() is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, names, make in _places():
            for name in names:
                stack.enter_context(patched(owner, name, make(seen_here(owner, name))))
        yield


def _places() -> Iterator[tuple[Any, Sequence[str], Callable[[_Call], _Call]]]:
    """Yield the owners of functions that are replaced, their names, and the maker of each replacement."""
    yield functional, (*norms_in_float32(), *_FUNCTIONAL), _in_float32
    yield functional, ("softmax", "log_softmax"), _to_float32
    yield functional, ("scaled_dot_product_attention",), _in_16_bits
    yield functional, ("cross_entropy",), _cross_entropy
    yield torch, ("is_autocast_enabled",), _of_the_card
    yield torch, (*_POWERS, *_OTHERS, "cosine_similarity"), _in_float32
    yield torch, _WITH_DTYPE, _to_float32
    yield torch.linalg, _OF_LINALG, _to_float32
    upsampled = [f"upsample_{name}" for name in _UPSAMPLED]
    yield vars(torch._C)["_nn"], [*upsampled, *(f"_upsample_{name}" for name in _UPSAMPLED_PRIVATELY)], _in_float32
    yield torch.Tensor, (*_POWERS, *_OTHERS, "__pow__"), _in_float32
    yield torch.Tensor, _WITH_DTYPE, _to_float32


def _in_float32(original: _Call) -> _Call:
    """Return a function that casts its inputs from 16 bits to float32 under autocast."""
    return _casting(original, _HALF, lambda: torch.float32)


def _in_16_bits(original: _Call) -> _Call:
    """Return a function that casts its inputs from float32 to the dtype of autocast, which only a trace needs.

    What allocates in the place of CUDA's attention is no operation that autocast knows.
    """
    return _casting(original, (torch.float32, *_HALF), lambda: torch.get_autocast_dtype("cpu"))


def _casting(original: _Call, dtypes: Sequence[torch.dtype], target: Callable[[], torch.dtype]) -> _Call:
    def cast(value: object) -> object:
        return value.to(target()) if isinstance(value, torch.Tensor) and value.dtype in dtypes else value

    def call(*args: object, **options: object) -> object:
        if torch.is_autocast_enabled("cpu"):
            args, options = tuple(map(cast, args)), {name: cast(value) for name, value in options.items()}
        return original(*args, **options)

    return call


def _to_float32(original: _Call) -> _Call:
    """Return a function whose output is in float32 under autocast, unless its caller says another dtype."""

    def call(*args: object, **options: object) -> object:
        first = args[0] if args else options.get("input")
        halved = isinstance(first, torch.Tensor) and first.dtype in _HALF and torch.is_autocast_enabled("cpu")
        said = options.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
        return original(*args, **(options | {"dtype": torch.float32} if halved and not said else options))

    return call


def _cross_entropy(original: _Call) -> _Call:
    """Return a function that leaves logits in 16 bits and casts their logarithms, where the CPU casts the logits."""

    def call(
        input: torch.Tensor,  # noqa: A002 - torch's own name, which callers may use
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        *others: Any,
        **options: Any,
    ) -> object:
        plain = not options.get("label_smoothing") and not target.is_floating_point() and not others
        if not plain or weight is not None or input.dtype not in _HALF or not torch.is_autocast_enabled("cpu"):
            return original(input, target, weight, *others, **options)
        options.pop("label_smoothing", None)
        with torch.autocast("cpu", enabled=False):
            logarithms = torch.ops.aten.log_softmax(input, 0 if input.dim() == 1 else 1)
            return functional.nll_loss(logarithms.float(), target, **options)

    return call


def _of_the_card(original: _Call) -> _Call:
    """Return a function that answers for the card where no device is named, as layers of peft ask."""

    def call(*device: str) -> object:
        return original(*device) if device else original("cpu")

    return call
