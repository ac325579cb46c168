"""The tensors of an adapter file against the slots of a model: what fits, and a finding for all that does not."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping

import torch
from peft import PeftConfig, PeftModel

from safe_loading._core.names import PEFT_PREFIX, nearest, without_peft_prefix
from safe_loading._core.report import Finding

from .key_names import layer_indices
from .slots import AdapterSlot, RoutedTensors, named_tensors


@dataclasses.dataclass(frozen=True)
class Match:
    """What is to be written where.

    Attributes:
        values: The tensor for each slot key.
        base_writes: Tensors that the file holds for the base's own weights, by state-dict key.
        findings: Everything that does not fit, and what is worth knowing.
    """

    values: dict[str, torch.Tensor]
    base_writes: dict[str, torch.Tensor]
    findings: list[Finding]

    @property
    def uncovered(self) -> bool:
        """Whether a slot is left without a tensor by something that does not fit."""
        return any(finding.code in _LEAVES_A_SLOT for finding in self.findings)


# The first two are asked for by the wrappers (Routed.missing); AdaLoRA counts its ranks anew and peft never saves it.
_TOLD_ELSEWHERE = (".modules_to_save.", "trainable_tokens", ".ranknum.")
_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")
_LEAVES_A_SLOT = frozenset({"adapter-key-missing", "modules-to-save-missing", "shape-mismatch", "vocabulary-resized"})


def match(
    model: PeftModel,
    config: PeftConfig,
    where: str,
    slots: Mapping[str, AdapterSlot],
    routed: RoutedTensors,
    embeddings: Iterable[torch.Tensor],
) -> Match:
    """Pair tensors with slots.

    Args:
        model: The model with the adapter's slots.
        config: The adapter's config.
        where: The adapter's file, for the findings.
        slots: What waits for a tensor.
        routed: What the file has, by state-dict key.
        embeddings: The base's input and output embedding weights, as they stood before injection.
    """
    result = Match({}, {}, [])
    rows = {tensor.shape[0] for tensor in embeddings}
    for key, value in routed.tensors.items():
        slot = slots.get(key)
        if slot is None:
            continue
        if slot.tensor.shape == value.shape:
            result.values[key] = value
        else:
            result.findings.append(_shape_mismatch(where, config, key, slot.tensor, value, rows))
    stray = {key: value for key, value in routed.tensors.items() if key not in slots}
    if stray:
        _match_base_weights(model, config, where, stray, list(embeddings), result)
    result.findings.extend(_missing(where, slots, routed))
    result.findings[:] = grouped(result.findings)
    result.findings.extend(_layer_counts(where, model, routed, result.findings))
    return result


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Make one finding of those that differ only in the number of their layer: a misfit repeats itself in each."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        pattern = (finding.code, finding.where, finding.message, finding.fix)
        alike.setdefault(tuple(_LAYER.sub("N", text) for text in pattern), []).append(finding)
    return [_one_for_all(group) for group in alike.values()]


def _one_for_all(group: list[Finding]) -> Finding:
    first = group[0]
    if len(group) == 1:
        return first
    layers = sorted({int(number) for finding in group for number in _LAYER.findall(finding.where)})
    return dataclasses.replace(
        first,
        message=f"{first.message} The same in {len(group) - 1} more, of layers {layers}.",
        bytes=sum(finding.bytes for finding in group),
    )


def _shape_mismatch(
    where: str, config: PeftConfig, key: str, tensor: torch.Tensor, value: torch.Tensor, rows: set[int]
) -> Finding:
    have, want = list(value.shape), list(tensor.shape)
    if have[1:] == want[1:] and want[0] in rows and ".lora_" not in key:
        return Finding(
            "vocabulary-resized",
            "error",
            f"{where}: {key}",
            f"the file has {have[0]} rows ({have}), the base's vocabulary has {want[0]} ({want}).",
            f"load the base yourself, call base.resize_token_embeddings({have[0]}) and pass it as base_model.",
            value.nbytes,
        )
    rank = f" The config says r={getattr(config, 'r', None)}." if ".lora_" in key else ""
    return Finding(
        "shape-mismatch",
        "error",
        f"{where}: {key}",
        f"the file has {have}, the model wants {want}.{rank}",
        "pass the base that the adapter was trained on (for a head: base_kwargs={'num_labels': ...}), or mend r and "
        "rank_pattern in adapter_config.json.",
        value.nbytes,
    )


def _match_base_weights(
    model: PeftModel,
    config: PeftConfig,
    where: str,
    stray: Mapping[str, torch.Tensor],
    embeddings: list[torch.Tensor],
    result: Match,
) -> None:
    own = named_tensors(model)
    embedding_ids = {id(tensor) for tensor in embeddings}
    # peft saves the input and the output embedding together (save_embedding_layers); one alone was a module to save
    whole_set = embedding_ids <= {id(own[key]) for key in stray if key in own}
    # and with it the bias that such a module has (the decoder of a BERT)
    ends = {key.rpartition(".")[0] for key in stray if id(own.get(key)) in embedding_ids}
    modules = {path for path, _ in model.named_modules()}
    for key, value in stray.items():
        tensor = own.get(key)
        if tensor is None:
            result.findings.append(_unexpected(where, key, modules, model))
            continue
        bias = getattr(config, "bias", "none") != "none" and key.endswith(".bias")
        embedding = key.rpartition(".")[0] in ends and (".base_layer." in key or whole_set)
        if not (bias or embedding):
            result.findings.append(_undeclared(where, key, value))
        elif tensor.shape != value.shape:
            rows = {each.shape[0] for each in embeddings}
            result.findings.append(_shape_mismatch(where, config, key, tensor, value, rows))
        elif torch.promote_types(tensor.dtype, value.dtype) != tensor.dtype:
            result.findings.append(_base_dtype(where, key, tensor, value))
        else:
            result.base_writes[key] = value


def _base_dtype(where: str, key: str, tensor: torch.Tensor, value: torch.Tensor) -> Finding:
    return Finding(
        "base-weight-dtype",
        "error",
        f"{where}: {key}",
        f"the file replaces this weight of the base in {value.dtype}, the base is {tensor.dtype}; writing it would "
        f"round it.",
        f"load the base with dtype={value.dtype}.",
        value.nbytes,
    )


def _undeclared(where: str, key: str, value: torch.Tensor) -> Finding:
    module = without_peft_prefix(key.rpartition(".")[0])
    return Finding(
        "modules-to-save-undeclared",
        "error",
        f"{where}: {key}",
        f"the file holds a weight of the base ({list(value.shape)}), but modules_to_save in its config does not name "
        f"{module!r}; peft would overwrite the base's own.",
        f"add {module.rpartition('.')[2]!r} to modules_to_save in adapter_config.json, or remove the tensor.",
        value.nbytes,
    )


def _unexpected(where: str, key: str, modules: set[str], model: PeftModel) -> Finding:
    path = key.split(".lora_")[0] if ".lora_" in key else key.rpartition(".")[0]
    if path in modules and path != PEFT_PREFIX.rstrip("."):
        return Finding(
            "target-not-covered",
            "error",
            f"{where}: {key}",
            f"the base has {without_peft_prefix(path)!r}, but the config's target_modules do not select "
            f"it; the tensor has no place.",
            "add the module to target_modules in adapter_config.json.",
        )
    inside = without_peft_prefix(path)
    return Finding(
        "adapter-key-unexpected",
        "error",
        f"{where}: {key}",
        f"{type(model.get_base_model()).__name__} has no module {inside!r} (nearest: "
        f"{_nearest(path, modules, model)}).",
        _fix(inside, model),
    )


def _fix(path: str, model: PeftModel) -> str:
    for config in model.peft_config.values():
        for name in getattr(config, "modules_to_save", None) or ():
            if f"{path}.".startswith(f"{name}."):
                return (
                    f"the adapter was saved with this head: load the base, call attach_head(base, {name!r}, ...) with "
                    f"a module like it, and pass that base."
                )
    return "pass the base that the adapter was trained on."


def _nearest(path: str, modules: set[str], model: PeftModel) -> str:
    """Return modules that stand where a path leaves the model, those first whose names are most like it."""
    parent = nearest(path, modules) or ""
    name = path.removeprefix(parent).lstrip(".").partition(".")[0]
    children = [child for child, _ in model.get_submodule(parent).named_children()]
    near = difflib.get_close_matches(name, children, n=3, cutoff=0.0)
    return ", ".join(without_peft_prefix(f"{parent}.{child}").lstrip(".") for child in near) or "none"


def _missing(where: str, slots: Mapping[str, AdapterSlot], routed: RoutedTensors) -> list[Finding]:
    findings = [
        Finding(
            "modules-to-save-missing",
            "error",
            f"{where}: {key}",
            "modules_to_save (or trainable tokens) in the config ask for it, the file does not hold it.",
            "save the adapter again with save_pretrained, or take the module out of the config.",
        )
        for key in routed.missing
    ]
    # tied slots share one storage: one tensor of the file fills all of them
    filled = {slots[key].tensor.untyped_storage()._cdata for key in routed.tensors if key in slots}
    for key, slot in slots.items():
        wanted = slot.is_parameter and key not in routed.tensors
        elsewhere = any(part in key for part in _TOLD_ELSEWHERE)
        if wanted and not elsewhere and slot.tensor.untyped_storage()._cdata not in filled:
            findings.append(
                Finding(
                    "adapter-key-missing",
                    "error",
                    f"{where}: {key}",
                    f"the model has a {list(slot.tensor.shape)} for it, the file has no tensor; peft would leave it "
                    f"at its random or zero start.",
                    "pass the base that the adapter was trained on, or save the adapter again (gathered, from rank 0).",
                    slot.tensor.nbytes,
                )
            )
    return findings


def _layer_counts(where: str, model: PeftModel, routed: RoutedTensors, findings: list[Finding]) -> list[Finding]:
    """Say it in one line when the base has another number of layers than the adapter."""
    if not any(finding.code in ("adapter-key-missing", "adapter-key-unexpected") for finding in findings):
        return []
    layers = getattr(getattr(model.get_base_model(), "config", None), "num_hidden_layers", None)
    named = layer_indices(key for key in routed.tensors if ".lora_" in key)
    if not isinstance(layers, int) or not named or max(named) + 1 == layers:
        return []
    return [
        Finding(
            "layer-count",
            "error",
            where,
            f"the adapter names layers up to {max(named)}, the base has {layers} layers.",
            "pass the base that the adapter was trained on.",
        )
    ]
