"""Every format by transformers' name of its method; a new one is its file, and its row here and in docs/planning.md."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import torch

from safe_loading._checkpoint.header import TensorInfo

from .auto_round import AUTO_ROUND
from .awq import AWQ
from .bitnet import BITNET, STORED_BITNET
from .bitsandbytes import BITSANDBYTES
from .compressed_tensors import COMPRESSED_TENSORS
from .eight_bit import STORED_EIGHT_BITS
from .fbgemm import FBGEMM
from .format import Format
from .four_bit import STORED_FOUR_BITS
from .fp8 import FP8_BLOCKS, MXFP8, STORED_FP8
from .gptq import GPTQ
from .hqq import HQQ
from .kept_codes import AQLM, EETQ, GEMMA, HIGGS, SPQR, VPTQ
from .mxfp4 import MXFP4, STORED_MXFP4
from .stored import StoredCodes
from .torchao import TORCHAO

_IN_ORDER = (
    *(BITSANDBYTES, FP8_BLOCKS, MXFP8, FBGEMM, MXFP4, COMPRESSED_TENSORS, GPTQ, AUTO_ROUND, AWQ, TORCHAO, HQQ),
    *(BITNET, AQLM, VPTQ, SPQR, HIGGS, EETQ, GEMMA),
)
FORMATS: Mapping[str, Format] = {each.method: each for each in _IN_ORDER}
STORED: Mapping[str, StoredCodes] = {
    each.kind: each for each in (STORED_FP8, STORED_EIGHT_BITS, STORED_MXFP4, STORED_FOUR_BITS, STORED_BITNET)
}
# The words by which publishers name a quantized checkpoint: "Llama-3.1-70B-Instruct-FP8", "Qwen3-8B-AWQ-w4a16".
QUANTIZED_NAME = re.compile(
    r"(?<![a-z0-9])(?:(?:nv|mx)?fp[48]|w\d{1,2}a\d{1,2}|int[48]|[48]-?bit|awq|gptq|hqq|bnb)(?![a-z0-9])", re.IGNORECASE
)
KNOWN_ON_DISK = (
    "bitsandbytes in 4 and 8 bits, fp8 with weight_scale_inv or scales of rows, MXFP4, and packed weights of BitNet"
)


def format_named(method: object) -> Format | None:
    """Return the format of a ``quant_method`` as a config has it; None where it is none that is known."""
    return FORMATS.get(method) if isinstance(method, str) else None


def is_decoded_at_forward(module: torch.nn.Module) -> bool:
    """Return whether a layer holds codes that become a plain weight at the model's first forward pass."""
    return any(each.decoded_at_forward(module) for each in FORMATS.values())


@contextlib.contextmanager
def kernel_stand_ins() -> Iterator[None]:
    """Inside, the kernels of the quantized layers of transformers allocate, and compute nothing."""
    with contextlib.ExitStack() as stack:
        for each in FORMATS.values():
            for replaced in each.kernels():
                stack.enter_context(replaced)
        yield


def has_no_plain_load(method: object, tensors: Mapping[str, TensorInfo] | None, settings: object) -> bool:
    """Return whether transformers alone would decode some of a folder's ``tensors`` wrongly, or fail at them."""
    known = format_named(method)
    options = {**(settings if isinstance(settings, dict) else {}), "dequantize": True}
    return known is not None and bool(tensors) and bool(known.decoded_wrongly(tensors or {}, options))


@contextlib.contextmanager
def decoded_rightly(settings: object) -> Iterator[None]:
    """Mend the decoding of transformers inside, while it loads a checkpoint with this ``quantization_config``."""
    known = format_named(settings.get("quant_method")) if isinstance(settings, dict) else None
    with contextlib.ExitStack() as stack:
        for mended in () if known is None else known.mended():
            stack.enter_context(mended)
        yield


def method_of_dtype(dtype: str) -> str:
    """Return the method that saves codes of this dtype of safetensors, for advice about a tensor that says no more."""
    return FP8_BLOCKS.method if dtype.startswith("F8") else BITSANDBYTES.method
