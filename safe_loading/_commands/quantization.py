"""The argument ``--quantization``, shared by ``plan``, ``predict`` and ``audit``, and the notice of an engine."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# As transformers' configs have them: BitsAndBytesConfig, FineGrainedFP8Config and Mxfp4Config with their defaults; GPTQ
# and AWQ as nearly all checkpoints have them.
_CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """Declare the argument."""
    names = ", ".join(_CONFIGS)
    more = f'quantize the base: {names}, or JSON such as \'{{"quant_method": "gptq", "bits": 4}}\''
    parser.add_argument("--quantization", metavar="NAME|JSON", help=more)


def quantization(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the ``quantization_config`` that was asked for, as config.json has it; None without one."""
    from safe_loading.errors import ArgumentError

    text: str | None = arguments.quantization
    if text is None:
        return None
    if not text.lstrip().startswith("{"):
        if text not in _CONFIGS:
            known = ", ".join(_CONFIGS)
            example = '{"quant_method": "gptq", "bits": 4}'
            raise ArgumentError(f"--quantization {text}: pass one of {known}, or what a config.json has: {example}.")
        return dict(_CONFIGS[text])
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"--quantization {text:.80}: it is no JSON: {error}.") from error
    return dict(config)


def capability(text: str | None) -> tuple[int, int] | None:
    """Return a compute capability that was written as 9.0."""
    from safe_loading.errors import ArgumentError

    match = re.fullmatch(r"(\d+)\.(\d+)", text) if text is not None else None
    if text is not None and match is None:
        raise ArgumentError(f"--capability {text}: write major and minor, such as 8.0 for an A100 and 9.0 for an H100.")
    return None if match is None else (int(match[1]), int(match[2]))


@contextmanager
def without_kernel_notice() -> Iterator[None]:
    """Drop bitsandbytes' notice at import that a kernel of the hub is not there: no command runs 4 bits on a CPU."""
    engine = logging.getLogger("bitsandbytes.backends.cpu.ops")
    engine.addFilter(_is_no_notice)
    try:
        yield
    finally:
        engine.removeFilter(_is_no_notice)


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
