"""Weights that NVIDIA's modelopt quantized, as config.json or a file beside it says. Imports no torch.

No transformers up to 5.23 reads them: without a ``quantization_config`` it makes plain layers, and with one whose
method is ``modelopt`` it warns and does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

from .faults import fault
from .left_over import bytes_in_codes, files_take
from .model_folder import CONFIG, ModelFolder

QUANT_CONFIG = "hf_quant_config.json"  # the name under which modelopt exports it
MODELOPT = "modelopt"


def modelopt_codes(folder: ModelFolder) -> Finding | None:
    """Return the finding of weights that modelopt quantized; None if it did not, or the headers show plain weights."""
    named = next(_named(folder), None)
    if named is None:
        return None
    size = bytes_in_codes(folder)
    if size is None:
        return None
    path, algorithm = named
    message = (
        f"says that modelopt quantized the weights ({algorithm}){files_take(size)}. No transformers up to 5.23 reads "
        f"such codes: it makes layers in 16 bits, whose weights no file holds"
    )
    fix = (
        "take the checkpoint in 16 bits that it was made of, whose plan is an upper bound; vLLM and TensorRT-LLM read "
        "these codes"
    )
    return fault("modelopt-codes", path, message, fix, size)


def _named(folder: ModelFolder) -> Iterator[tuple[Path, str]]:
    found = folder.files.try_read(folder.path / CONFIG)
    config = {} if isinstance(found, Finding) else found
    for part in (config, config.get("text_config")):
        quantized = part.get("quantization_config") if isinstance(part, dict) else None
        if isinstance(quantized, dict) and _is_of_modelopt(quantized):
            yield folder.path / CONFIG, _algorithm(quantized) or MODELOPT
    beside = folder.path / QUANT_CONFIG
    document = folder.files.try_read(beside) if beside.is_file() else {}
    if isinstance(document, Finding):
        yield beside, "in codes that nobody can tell: the file is damaged"
        return
    quantized = document.get("quantization")
    if isinstance(quantized, dict) and (algorithm := _algorithm(quantized)):
        yield beside, algorithm


def _is_of_modelopt(quantized: JsonObject) -> bool:
    """Return whether an entry is of modelopt, which names other methods, too, where only experts are in its codes."""
    producer = quantized.get("producer")
    made = isinstance(producer, dict) and producer.get("name") == MODELOPT and _algorithm(quantized)
    return quantized.get("quant_method") == MODELOPT or bool(made)


def _algorithm(quantized: JsonObject) -> str:
    """Return the name of the codes; "" where only the cache is quantized."""
    algorithm = quantized.get("quant_algo")
    return algorithm if isinstance(algorithm, str) else ""
