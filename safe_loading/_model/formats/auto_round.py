"""AutoRound, which stores its codes in the layout of GPTQ or of AWQ.

Its rules by module are read as ``get_layer_config`` of auto-round 0.9 does (``inference/convert_model.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .awq import awq_layer
from .card_findings import experts_not_quantized, kernel_finding
from .convertible import LayerRule, block_prefixes, rules_by_module, skipped_modules, whole_option
from .format import AMPERE, Format, QuantizationRequest, TargetCard
from .gptq import gptq_layer, linears_in_blocks

_MOST_BITS = 8  # of codes: layers with more stay as they are
_LEFT_OUT = {"bits": 16}
_BLOCKS = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")


def pack_auto_round(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers as the format does in whose layout the codes are."""
    layout = str(request.options.get("packing_format", "auto_round:auto_gptq"))
    usual = LayerRule(whole_option(request, "bits", 4), whole_option(request, "group_size", 128))
    in_awq = "awq" in layout
    _refuse_other_codes("", request.options)
    for path, changes in _changes_by_layer(model, request).items():
        rule = usual.changed(path, changes)
        if rule.bits <= _MOST_BITS or rule.bits > _LEFT_OUT["bits"]:
            _refuse_other_codes(path, changes)
            layer: Any = model.get_submodule(path)
            model.set_submodule(path, (awq_layer if in_awq else gptq_layer)(layer, rule, card))
    slower = "its GEMM kernel" if in_awq else "its torch kernel"
    kernel = kernel_finding("gptqmodel's Marlin kernel" if card.has(AMPERE) else slower)
    return [kernel, *experts_not_quantized(model, "auto-round", taken_apart=True)]  # from auto-round 0.10 on


def _changes_by_layer(model: nn.Module, request: QuantizationRequest) -> Mapping[str, Mapping[str, Any]]:
    """Return the changes for each layer that may be quantized: those inside the blocks, and those that rules name."""
    linears = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    blocks = block_prefixes(model, request, *_BLOCKS)
    found = (
        (path for path in linears if path.startswith(blocks)) if blocks else (p for p, _ in linears_in_blocks(model))
    )
    inside = list(found)
    changes = dict(rules_by_module(request, "extra_config"))
    if wanted := _texts(request.options.get("modules_in_block_to_quantize")):
        changes |= {path: _LEFT_OUT for path in inside if not any(re.search(name, path) for name in wanted)}
    _expand(_of_gptq(rules_by_module(request, "dynamic")), changes, inside, linears)
    kept = [re.compile(name) for name in skipped_modules(model, request, default_too=True)]
    changes |= {path: _LEFT_OUT for path in inside if any(name.search(path) for name in kept)}
    _expand(dict(changes), changes, inside, linears)
    quantized = {*changes, *inside}
    return {path: changes.get(path, {}) for path in linears if path in quantized}


def _expand(
    rules: Mapping[str, Mapping[str, Any]], changes: dict[str, Mapping[str, Any]], inside: list[str], linears: list[str]
) -> None:
    """Add the changes of rules that are patterns to each layer that they match and no rule before has named."""
    for key, rule in rules.items():
        if not rule:
            continue
        if key in linears:
            continue
        pattern = re.compile(key)
        for path in [p for p in inside if pattern.search(p)] or [p for p in linears if pattern.search(p)]:
            changes.setdefault(path, rule)


def _of_gptq(rules: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return rules of GPTQ's ``dynamic`` as auto-round reads them, which skips those without a sign."""
    return {key[2:]: _LEFT_OUT if key[0] == "-" else rule for key, rule in rules.items() if key[:2] in ("-:", "+:")}


def _texts(names: object) -> list[str]:
    if isinstance(names, (list, tuple)):
        return [text for name in names for text in _texts(name)]
    return [] if names is None else [str(names)]


def _refuse_other_codes(path: str, options: Mapping[str, Any]) -> None:
    """Refuse codes that are no whole numbers, whose layouts are others."""
    kind = str(options.get("data_type") or "int")
    if not kind.startswith("int"):
        of = f" of {path}" if path else ""
        raise ArgumentError(
            f"quantization_config is auto-round with data_type {kind!r:.40}{of}, and only 'int' can be planned. Plan "
            f"the model that it was made of, whose config has no quantization_config: its plan is an upper bound."
        )


AUTO_ROUND = Format("auto-round", pack_auto_round, computes_in=torch.float16, shrinks=True)
