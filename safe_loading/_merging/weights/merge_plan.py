"""Which layers of a model are merged how, and everything that forbids it; nothing is written here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper

from safe_loading._model.quantized.recognize import has_offloaded_codes, is_quantized
from safe_loading._model.tensor_values import is_finite

from .finite import why_not_finite
from .fp8_merge import why_fp8_not_finite
from .lora_layers import MatrixPart, MergeTarget, adapters_of, is_blocked, targets
from .offloaded import Offloaded
from .trainable_tokens import Tokens, tokens
from .variants import MERGE_BEFORE_QUANTIZING, SCALES_OFFLOADED, CannotMerge, refuse_impossible
from .writable_tensors import Sharing, check_tensor, same_change, same_memory, tuner_layers

Road = Literal["blocks", "tokens", "peft", "dequantised"]


@dataclasses.dataclass(eq=False)
class LayerMerge:
    """One outermost tuner layer, and what merging it changes.

    Attributes:
        path: Its place in the model.
        layer: The tuner layer, which is a module too.
        road: Who merges it: row blocks, the replaced tokens, peft, or a plain layer that takes the place of a quantized
            one.
        names: The adapters that are merged; of a nested layer, those of the outermost.
        targets: The weights that change; empty for peft's road, and for one that a tied layer changes already.
        marks: The layers whose ``merged_adapters`` grow, with the names.
        merged_before: The adapters that the layer had merged already.
    """

    path: str
    layer: Any
    road: Road
    names: tuple[str, ...]
    targets: list[MergeTarget | Tokens]
    marks: list[tuple[Any, tuple[str, ...]]]
    merged_before: tuple[str, ...] = ()

    def name_of(self, target: MergeTarget | Tokens) -> str:
        """Return the name of a weight in the unloaded base model."""
        for path, module in self.layer.named_modules():
            if module is target.owner:
                inner = ".".join(p for p in path.split(".") if p not in ("base_layer", ""))
                outer = ".".join(p for p in self.path.split(".") if p not in ("base_layer", "token_adapter"))
                return ".".join(filter(None, (outer, inner, target.attribute)))
        return f"{self.path}.{target.attribute}"


@dataclasses.dataclass(frozen=True, eq=False)
class MergePlan:
    """What a merge will do.

    Attributes:
        groups: Jobs in order; those of one group write the same memory and are finished together.
        problems: Everything that forbids the merge.
    """

    groups: list[list[LayerMerge]]
    problems: list[str]


def make_plan(
    model: torch.nn.Module, names: Sequence[str] | None, *, unload: bool, dequantize: bool = False
) -> MergePlan:
    """Look at every tuner layer of ``model``; ``names`` None takes the active adapters of each."""
    jobs: list[LayerMerge] = []
    problems: list[str] = []
    for path, layer in tuner_layers(model):
        try:
            jobs.append(_job(path, layer, names, dequantize))
        except CannotMerge as error:
            problems.append(f"{path}: {error}.")
    if not any(job.targets or job.road in ("peft", "dequantised") for job in jobs):
        return MergePlan([[job] for job in jobs], problems)
    groups, shared = _grouped(jobs, Sharing(model, _thrown_away(model, names) if unload else ()))
    return MergePlan(groups, problems + shared)


def not_finite(job: LayerMerge, *, scratch_bytes: int) -> list[str]:
    """Return the reasons why weights of a job would not be finite."""
    problems = []
    if job.road == "peft":
        # peft's own check comes layer by layer, and for torchao before the adapter is added
        bad = [name for name in job.names if not all(t.is_meta or is_finite(t) for t in _tensors_of(job.layer, name))]
        problems += [f"{job.path}: its adapter {name!r} holds NaN or infinity." for name in bad]
    for target in job.targets:
        if isinstance(target, Tokens):
            reasons = [target.why_not_finite()]
        else:
            reasons = [_why_not_finite(piece, scratch_bytes) for piece in target.pieces]
        found = sorted({reason for reason in reasons if reason})
        problems += [f"{job.name_of(target)}: {reason}." for reason in found]
    return problems


def _tensors_of(layer: Any, name: str) -> Iterator[torch.Tensor]:
    """Yield the tensors of one adapter of a tuner layer, whatever its kind."""
    for attribute in layer.adapter_layer_names:
        part = getattr(layer, attribute, None)
        if isinstance(part, (torch.nn.ModuleDict, torch.nn.ParameterDict)) and name in part:
            held: Any = part[name]
            yield from [held] if isinstance(held, torch.Tensor) else held.parameters()


def _why_not_finite(piece: MatrixPart, scratch_bytes: int) -> str | None:
    if piece.fp8 is not None:
        return why_fp8_not_finite(piece.update, piece.fp8, scratch_bytes=scratch_bytes)
    return why_not_finite(piece.update, piece.matrix, scratch_bytes=scratch_bytes)


def torn_ties(model: Any, jobs: Sequence[LayerMerge], store: Offloaded) -> list[str]:
    """Return a problem for each weight that the model declares as tied, that lies on disk, and changes alone.

    On disk tied weights are two entries, which share no memory.
    """
    config = getattr(model, "config", None)
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    if not store.on_disk or not getattr(config, "tie_word_embeddings", False):
        return []
    targets_by_name = {job.name_of(target): target for job in jobs for target in job.targets}
    problems = []
    for pair in ties.items():
        for name, other in (pair, pair[::-1]):
            one, two = targets_by_name.get(name), targets_by_name.get(other)
            if one is None or (id(one.owner), one.attribute) not in store.on_disk:
                continue
            if two is None or not same_change(one, two):
                problems.append(_tied(name, other, changed=two is not None))
    return problems


def _wanted(layer: BaseTunerLayer, names: Sequence[str] | None, there: frozenset[str]) -> tuple[str, ...]:
    """Return the adapters to merge into a layer, in order."""
    asked = [name for name in (layer.active_adapters if names is None else names) if name in there]
    return tuple(dict.fromkeys(name for name in asked if name not in layer.merged_adapters))


def _job(path: str, layer: BaseTunerLayer, names: Sequence[str] | None, dequantize: bool) -> LayerMerge:
    before = tuple(layer.merged_adapters)
    if isinstance(layer, TrainableTokensLayer):
        chosen = _wanted(layer, names, frozenset(layer.token_indices))
        found: list[MergeTarget | Tokens] = [tokens(layer, chosen)] if chosen else []
        return _checked(LayerMerge(path, layer, "tokens", chosen, found, [(layer, chosen)], before))
    if not isinstance(layer, LoraLayer):
        return LayerMerge(path, layer, "peft", tuple(layer.active_adapters if names is None else names), [], [], before)
    if dequantize and is_quantized(layer.get_base_layer()):
        chosen = _wanted(layer, names, adapters_of(layer))
        return LayerMerge(path, layer, "dequantised", chosen, [], [], before)
    found, marks = [], []
    first: tuple[str, ...] = ()
    for part in _chain(layer):
        chosen = _wanted(part, names, adapters_of(part))
        first = first or chosen
        if not chosen:
            continue
        if not is_blocked(part, chosen):
            _check_peft_merge(part, chosen)
            return LayerMerge(path, layer, "peft", chosen, [], [], before)
        if part.merged_adapters and any(part.use_dora.get(name) for name in chosen):
            raise CannotMerge(
                f"{list(part.merged_adapters)} are merged already, and DoRA needs the weight without them. Call "
                f"model.unmerge_adapter() first"
            )
        found += targets(part, chosen)
        marks.append((part, chosen))
        if isinstance(part, MultiheadAttention):
            marks.append((part.get_base_layer().out_proj, chosen))
    return _checked(LayerMerge(path, layer, "blocks", first, found, marks, before))


def _check_peft_merge(layer: Any, names: Sequence[str]) -> None:
    """Refuse what peft cannot merge, and what its merge of quantized layers does wrong.

    It adds the bias of lora_B without its scaling, and merges a variant into a torchao layer as a plain LoRA.
    """
    refuse_impossible(layer, names)
    kind = type(layer).__name__
    if type(layer).merge is BaseTunerLayer.merge:
        raise CannotMerge(f"peft has no merge for a {kind}. {MERGE_BEFORE_QUANTIZING}")
    if has_offloaded_codes(layer.get_base_layer()):
        raise CannotMerge(SCALES_OFFLOADED)
    having = [name for name in names if layer.lora_bias.get(name) and layer.scaling[name] != 1]
    if having and is_quantized(layer.get_base_layer()):
        raise CannotMerge(
            f"adapter {having[0]!r} has lora_bias=True, and peft merges that into a quantized layer without its "
            f"scaling, {layer.scaling[having[0]]:g}. Merge with dequantize=True"
        )
    varied = [name for name in names if layer.lora_variant.get(name) is not None]
    if varied and kind == "TorchaoLoraLinear":
        raise CannotMerge(
            f"adapter {varied[0]!r} is a {type(layer.lora_variant[varied[0]]).__name__}, which peft merges into a "
            f"torchao layer as a plain LoRA. Merge with dequantize=True"
        )


def _chain(layer: Any) -> list[Any]:
    """Return a layer and those nested in it, of which each wraps another parameter of the same module."""
    chain = [layer]
    while isinstance(chain[-1], ParamWrapper) and isinstance(chain[-1].base_layer, LoraLayer):
        chain.append(chain[-1].base_layer)
    return chain


def _checked(job: LayerMerge) -> LayerMerge:
    for target in job.targets:
        check_tensor(target)
        for piece in () if isinstance(target, Tokens) else target.pieces:
            if any(term.left.is_meta or term.right.is_meta for term in piece.update.terms):
                raise CannotMerge(
                    "its adapter is on meta, so it holds no values: peft loads none onto an offloaded layer. Load the "
                    "adapter before the model is dispatched, or merge with merge_lora_checkpoint"
                )
    return job


def saved_by(module: ModulesToSaveWrapper, names: Sequence[str] | None) -> list[str]:
    """Return which of the adapters that are merged bring a content of a saved module; ``names`` None: the active."""
    return [name for name in (module.active_adapters if names is None else names) if name in module.modules_to_save]


def _thrown_away(model: torch.nn.Module, names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(
        f"{path}.original_module"
        for path, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and saved_by(module, names)
    )


def _grouped(jobs: list[LayerMerge], sharing: Sharing) -> tuple[list[list[LayerMerge]], list[str]]:
    """Join jobs that change the same memory in the same way; anything else that shares memory is a problem."""
    home = {(id(t.owner), t.attribute): (job, t) for job in jobs for t in job.targets}
    group_of = {id(job): [job] for job in jobs}
    problems = []
    for job in jobs:
        if job.road == "peft":
            problems += _foreign(job, sharing)
        for target in list(job.targets):
            for path, module, attribute in sharing.others(target):
                other = home.get((module, attribute))
                if other is None or not _same(target, other[1]):
                    problems.append(_tied(job.name_of(target), path, changed=other is not None))
                elif other[1] in other[0].targets and target in job.targets and other[1] is not target:
                    other[0].targets.remove(other[1])  # once is enough
                    _join(group_of, job, other[0])
    groups = list({id(group): group for group in (group_of[id(job)] for job in jobs)}.values())
    return groups, problems


def _join(group_of: dict[int, list[LayerMerge]], one: LayerMerge, other: LayerMerge) -> None:
    into, away = group_of[id(one)], group_of[id(other)]
    if into is not away:
        into.extend(away)
        for job in away:
            group_of[id(job)] = into


def _same(one: MergeTarget | Tokens, other: MergeTarget | Tokens) -> bool:
    return same_memory(one.tensor, other.tensor) and same_change(one, other)


def _foreign(job: LayerMerge, sharing: Sharing) -> list[str]:
    """Return a problem for each weight that peft would change and that somebody outside the layer reads."""
    inside = {id(module) for module in job.layer.modules()}
    problems = []
    for module in _base(job.layer).modules():
        for name, tensor in module._parameters.items():
            if tensor is None or type(tensor) is not torch.nn.Parameter or tensor.is_meta:
                continue
            for path, owner, _ in sharing.others(MergeTarget(module, name, tensor.data, ())):
                if owner not in inside:
                    problems.append(_tied(f"{job.path}.{name}", path, changed=False))
    return problems


def _base(layer: BaseTunerLayer) -> torch.nn.Module:
    base = layer.get_base_layer()
    return base if isinstance(base, torch.nn.Module) else torch.nn.Module()


def _tied(name: str, other: str, *, changed: bool) -> str:
    how = "which the adapters change in another way" if changed else "which the adapters do not change"
    return (
        f"{name} shares its memory with {other}, {how}: merging would change what both compute. Untie them first "
        f"(load the base with tie_word_embeddings=False, or give one a clone of the weight), or train with "
        f"LoraConfig(ensure_weight_tying=True)."
    )
