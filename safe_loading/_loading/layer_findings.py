"""Findings on the layers of a model, compared with its config and with one another: from headers alone, without torch.

What is outside the layers only the class of the model knows. Layers know one another: of several that have the same
tensors, one that lacks some, or has one of another shape, was saved or copied wrong.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from safe_loading._checkpoint.faults import fault, listed, note
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, Severity, counted

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_BODIES = frozenset(
    {"model.layers.", "layers.", "transformer.h.", "h.", "gpt_neox.layers.", "model.decoder.layers."}
    | {"model.language_model.layers.", "language_model.model.layers."}
)
INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"})
_SAVE_AGAIN = "copy or download the whole folder again, or save the model again"

Layers = Mapping[int, Mapping[str, TensorInfo]]
"""The tensors of each layer of one list, by the rest of their names."""


def layer_findings(path: Path, config: JsonObject, tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    """Return where the layers differ from what the config at ``path`` counts, and from one another."""
    lists = _lists_of_layers(tensors)
    findings = _layer_count(path, config, lists)
    if _is_quantized(config):
        return findings  # codes are integers, and what is left out of the quantization differs from layer to layer
    findings += _integer_weights(path.parent, tensors)
    if not _differ_by_design(config):
        for prefix, layers in lists.items():
            findings += _odd_layers(path.parent, prefix, layers)
    return findings


def _lists_of_layers(tensors: Mapping[str, TensorInfo]) -> dict[str, Layers]:
    lists: dict[str, dict[int, dict[str, TensorInfo]]] = defaultdict(lambda: defaultdict(dict))
    for name, info in tensors.items():
        if match := _LAYER.search(name):
            lists[name[: match.start(1)]][int(match[1])][name[match.end() :]] = info
    return dict(lists)


def _layer_count(path: Path, config: JsonObject, lists: Mapping[str, Layers]) -> list[Finding]:
    """Compare the number of layers in the config with the layer numbers in the tensors' names."""
    # A model of text and images has the number in the config of its language model.
    configs = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    count = next((part["num_hidden_layers"] for part in configs if type(part.get("num_hidden_layers")) is int), None)
    # An image encoder has a list of its own, which num_hidden_layers does not count, so one list that fits is enough.
    highest = {max(layers) for layers in lists.values()}
    # Layers that predict further tokens follow on the others, and are no part of the model that is loaded.
    further = (part.get("num_nextn_predict_layers") for part in configs)
    more = max((number for number in further if type(number) is int), default=0)
    if count is None or not highest or any(count - 1 <= last <= count - 1 + max(0, more) for last in highest):
        return []
    message = f"num_hidden_layers is {count}, and the files have the layers 0 to {max(highest)}"
    fix = "correct config.json, or save the model again; layers that the config does not count are not loaded"
    # Of a list with another name nobody knows whether it is the one that the config counts.
    severity: Severity = "error" if len(_BODIES & lists.keys()) == 1 else "warning"
    return [note(severity, "layers-differ", path, message, fix)]


def _integer_weights(folder: Path, tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    wrong = [name for name, info in tensors.items() if name.endswith(".weight") and info.dtype in INTEGERS]
    if not wrong:
        return []
    kinds = ", ".join(sorted({tensors[name].dtype for name in wrong}))
    held = counted(len(wrong), "weight")
    message = f"holds {held} as integers ({kinds}), and config.json names no quantization: {listed(wrong)}"
    size = sum(tensors[name].nbytes for name in wrong)
    return [fault("integer-weight", folder, message, "save the model again in a floating-point dtype", size)]


def _odd_layers(folder: Path, prefix: str, layers: Layers) -> Iterator[Finding]:
    """Yield what one layer between others lacks, or has in another shape, where all others are alike.

    The first and the last are not judged: architectures make them different.
    """
    shapes: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for layer in layers.values():
        for name, info in layer.items():
            shapes[name][tuple(info.shape)] += 1
    held = {name: sum(counted.values()) for name, counted in shapes.items()}
    others = len(layers) - 1
    lacked = [name for name, count in held.items() if count == others]
    odd = [name for name, counted in shapes.items() if held[name] == len(layers) and min(counted.values()) == 1]
    for number in sorted(layers)[1:-1]:
        own = layers[number]
        absent = [name for name in lacked if name not in own]
        # A layer of another kind has tensors that the others do not have.
        if absent and all(held[name] == len(layers) for name in own):
            names = listed(f"{prefix}{number}.{name}" for name in sorted(absent))
            message = f"lacks {counted(len(absent), 'tensor')} of layer {number}, which all other layers have: {names}"
            yield fault("layer-tensor-missing", folder, message, _SAVE_AGAIN)
        for name in odd:
            (usual, count), *_ = shapes[name].most_common()
            if count == others and tuple(own[name].shape) != usual:
                message = f"the tensor is {list(own[name].shape)}, and in all other layers it is {list(usual)}"
                yield fault("layer-shape", f"{folder}: {prefix}{number}.{name}", message, _SAVE_AGAIN, own[name].nbytes)


def _is_quantized(config: JsonObject) -> bool:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any(part.get("quantization_config") or part.get("compression_config") for part in parts)


def _differ_by_design(config: JsonObject) -> bool:
    """Return whether the config says something about each layer by itself, so that each may have its own sizes."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        count = part.get("num_hidden_layers")
        for value in part.values():
            if isinstance(value, list) and len(value) == count and len({repr(entry) for entry in value}) > 1:
                return True
    return False
