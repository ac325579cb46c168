"""Removes the marks of a quantized load and of an adapter's load, so that ``save_pretrained`` writes it as it is."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from safe_loading._core.engines import targets_of
from safe_loading._core.names import PEFT_PREFIX
from safe_loading._model.formats.four_bit import undo_cpu_packing
from safe_loading._model.quantized.recognize import is_quantized

_RECORD = "_weight_conversions"  # what ``from_pretrained`` converted, and ``save_pretrained`` converts back


def forget_codes(model: torch.nn.Module) -> None:
    """Have ``save_pretrained`` write weights as they are, and under the names that the class has on disk.

    Without this it fails, or makes codes of plain ones for a config that says of none, and they are lost when it is
    loaded (``revert_weight_conversion`` of transformers 5.23). Codes that stay are written by their layers, unless
    their quantizer has a way back.
    """
    for module in model.modules():
        undo_cpu_packing(module)  # which the engine's own inverse leaves half done
    recorded = [
        module for module in model.modules() if isinstance(module, PreTrainedModel) and vars(module).get(_RECORD)
    ]
    quantized = any(is_quantized(module) for module in model.modules())
    for module in recorded:
        conversions: list[Any] = vars(module)[_RECORD]
        if not any(map(_makes_codes, conversions)):
            continue
        plain: list[Any] = get_model_conversion_mapping(module)
        kept: list[Any] = []
        for conversion in conversions:
            targets = targets_of(conversion)
            of_codes = _makes_codes(conversion) and not (quantized and _has_a_way_back(conversion))
            kept += [other for other in plain if targets_of(other) == targets] if of_codes else [conversion]
        vars(module)[_RECORD] = kept


def forget_names_of_adapter(base: torch.nn.Module) -> None:
    """Have ``save_pretrained`` write the names that the class has on disk.

    ``load_adapter`` of transformers puts what it converted of the adapter's names in the place of what was converted of
    the model's (5.23), so that each weight would be saved as ``base_model.model...``, and found by no load.
    """
    record: list[Any] = vars(base).get(_RECORD) or []
    names = [str(name) for conversion in record for name in getattr(conversion, "source_patterns", ())]
    if any(PEFT_PREFIX in name for name in names):
        del vars(base)[_RECORD]


def _has_a_way_back(conversion: Any) -> bool:
    """Return whether transformers can revert a conversion when it saves."""
    try:
        conversion.reverse_transform()
    except (NotImplementedError, ValueError):
        return False
    return True


def _makes_codes(conversion: Any) -> bool:
    """Return whether one of its operations is a quantizer's."""
    return any(hasattr(operation, "hf_quantizer") for operation in getattr(conversion, "operations", ()))
