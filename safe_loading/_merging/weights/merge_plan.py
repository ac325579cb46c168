"""Which layers of a model are merged by which method, and the obstacles layer by layer; nothing is written here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from peft import PeftConfig
from peft.tuners.lora.layer import MultiheadAttention, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

from safe_loading._model.formats.registry import is_decoded_at_forward
from safe_loading._model.peft_layers import (
    LoraModule,
    TunerModule,
    adapters_of,
    is_lora_layer,
    is_tuner_layer,
    outermost_tuner_layers,
)
from safe_loading._model.quantized.recognize import computes_with_others, has_offloaded_codes, is_quantized

from .layer_merge import LayerMerge, MergeOptions
from .lora_layers import OVER_TOKENS, is_blocked, merge_targets, tokens_inside, without_bias
from .other_tuners import MERGE_ON_DISK, is_merged_on_disk, why_not_merged_right
from .shared_memory import SharedMemory
from .shared_weights import OwnWeight, group_by_memory
from .trainable_tokens import TokenRows, token_rows
from .unload import adapters_with_copy
from .variants import MERGE_BEFORE_QUANTIZING, SCALES_OFFLOADED, CannotMergeError, refuse_computed, refuse_impossible
from .writable_tensors import check_tensor, refuse_spread


@dataclasses.dataclass(frozen=True, eq=False)
class MergePlan:
    """The plan of a merge: its groups of layers, the weights that get their own memory, and the obstacles."""

    groups: list[list[LayerMerge]]  # those of one group write the same memory and are finished together
    own_weights: list[OwnWeight]  # those that get memory of their own before anything is written
    problems: list[str]

    @property
    def jobs(self) -> list[LayerMerge]:
        """The layers of all groups that are still to be merged."""
        return [job for group in self.groups for job in group]


def make_plan(model: torch.nn.Module, options: MergeOptions, configs: Iterable[PeftConfig]) -> MergePlan:
    """Plan the merge of every tuner layer of ``model``, whose adapters have these configs."""
    jobs: list[LayerMerge] = []
    problems: list[str] = []
    on_disk = all(map(is_merged_on_disk, configs))
    for path, layer in outermost_tuner_layers(model):
        try:
            jobs.append(_plan_layer(path, layer, options.names, options.dequantize))
        except CannotMergeError as error:
            road = f", or {MERGE_ON_DISK}" if error.or_on_disk and on_disk else ""
            problems.append(f"{path}: {error}{road}.")
    if not any(job.targets or job.method in ("peft", "dequantized") for job in jobs):
        # Nothing will change, so nothing needs to be known about shared memory.
        return MergePlan([[job] for job in jobs], [], problems)
    problems += _used_elsewhere(model, jobs)
    replaced = _replaced_originals(model, options.names) if options.unload else ()
    groups, own_weights, tied = group_by_memory(jobs, SharedMemory(model, replaced))
    return MergePlan(groups, own_weights, problems + tied)


def _used_elsewhere(model: torch.nn.Module, jobs: Iterable[LayerMerge]) -> list[str]:
    """Return why layers are not merged whose module the model has at another place too, where peft adapts nothing."""
    merged = {id(job.layer.get_base_layer()): job.path for job in jobs if job.names or job.targets}
    places = [
        (path, name, merged[id(child)])
        for path, module in model.named_modules()
        if not is_tuner_layer(module) and not isinstance(module, AuxiliaryTrainingWrapper)
        for name, child in module._modules.items()
        if id(child) in merged
    ]
    return [
        f"{adapted}: the same module is at {f'{path}.{name}'.lstrip('.')} too, where no adapter is, and both would "
        f"compute with the merged weight. Put a copy of it (copy.deepcopy) at one of them before peft adapts it; "
        f"one that never runs may be deleted."
        for path, name, adapted in places
    ]


def _plan_layer(path: str, layer: TunerModule, names: Sequence[str] | None, dequantize: bool) -> LayerMerge:
    before = tuple(layer.merged_adapters)
    if isinstance(layer, TrainableTokensLayer):
        chosen = _adapters_to_merge(layer, names, frozenset(layer.token_indices))
        rows = [token_rows(layer, chosen)] if chosen else []
        job = LayerMerge(path, layer, "tokens", chosen, [*rows], [(layer, chosen)], before)
        _check_tensors(job)
        return job
    _refuse_tokens(layer, names)
    _refuse_rounded(layer, names, dequantize)
    _refuse_codes_of_now(layer, names, dequantize)
    if is_tuner_layer(getattr(layer, "base_layer", None)) and not isinstance(layer, ParamWrapper):
        return _plan_levels(path, layer, names)
    if not is_lora_layer(layer):
        chosen = _adapters_to_merge(layer, names, adapters_of(layer))
        if chosen:
            _refuse_base(layer)
            wrong = why_not_merged_right(layer, chosen)
            if wrong is not None:
                raise CannotMergeError(wrong)
        return LayerMerge(path, layer, "peft", chosen, merged_before=before)
    if dequantize and is_quantized(layer.get_base_layer()):
        chosen = _adapters_to_merge(layer, names, adapters_of(layer))
        return LayerMerge(path, layer, "dequantized", chosen, merged_before=before)
    job = LayerMerge(path, layer, "blocks", (), merged_before=before)
    for nested in _nested_wrappers(layer):
        chosen = _adapters_to_merge(nested, names, adapters_of(nested))
        job.names = job.names or chosen
        if not chosen:
            continue
        if not is_blocked(nested, chosen):
            # One nested layer that is not known leaves all of them to peft.
            _check_peft_merge(nested, chosen)
            return LayerMerge(path, layer, "peft", chosen, merged_before=before)
        if nested.merged_adapters and any(nested.use_dora.get(name) for name in chosen):
            raise CannotMergeError(
                f"{list(nested.merged_adapters)} are merged already, and DoRA needs the weight without them. Call "
                f"model.unmerge_adapter() first"
            )
        job.targets += merge_targets(nested, chosen)
        job.marks.append((nested, chosen))
        if isinstance(nested, MultiheadAttention):
            out_proj = nested.get_base_layer().get_submodule("out_proj")
            job.marks += [(out_proj, chosen)] if is_lora_layer(out_proj) else []
    _check_tensors(job)
    return job


def _plan_levels(path: str, layer: TunerModule, names: Sequence[str] | None) -> LayerMerge:
    """Plan the merge of the layers of several methods around one module (``PeftMixedModel``), by peft from the inside.

    What each of them does is done to what the ones inside of it compute.
    """
    levels: list[TunerModule] = [layer]
    while is_tuner_layer(inner := getattr(levels[-1], "base_layer", None)):
        levels.append(inner)
    chosen = [(level, _adapters_to_merge(level, names, adapters_of(level))) for level in reversed(levels)]
    chosen = [(level, merged) for level, merged in chosen if merged]
    before = tuple(name for level in levels for name in level.merged_adapters)
    if not chosen:
        return LayerMerge(path, layer, "peft", (), merged_before=before)
    if is_quantized(layer.get_base_layer()):
        raise CannotMergeError(f"{len(levels)} methods adapt it, and its weight is quantized. Keep the adapters")
    for number, (level, merged) in enumerate(chosen):
        if not is_lora_layer(level):
            _refuse_base(level)
            if (wrong := why_not_merged_right(level, merged)) is not None:
                raise CannotMergeError(wrong)
            continue
        _check_peft_merge(level, merged)
        if (number or before) and any(level.use_dora.get(name) for name in merged):
            raise CannotMergeError(
                f"{list(merged)} is a DoRA around adapters of another method, and needs the norm of the weight without "
                f"them, which peft's merge takes with them. Keep the adapter"
            )
    all_names = tuple(name for _, merged in chosen for name in merged)
    return LayerMerge(path, layer, "peft", all_names, merged_before=before, levels=chosen)


def _refuse_tokens(layer: TunerModule, names: Sequence[str] | None) -> None:
    """Refuse a merge into a weight of which rows are trained as tokens inside of its LoRA."""
    tokens = tokens_inside(layer)
    if tokens is not None and _adapters_to_merge(layer, names, adapters_of(layer) | adapters_of(tokens)):
        raise CannotMergeError(OVER_TOKENS)


def _refuse_rounded(layer: TunerModule, names: Sequence[str] | None, dequantize: bool) -> None:
    """Refuse a merge into a weight that its layer rounds or scales in each forward pass, and the sum with it."""
    base = layer.get_base_layer()
    if (dequantize and is_lora_layer(layer)) or not computes_with_others(base):
        return
    if _adapters_to_merge(layer, names, adapters_of(layer)):
        advice = "Merge with dequantize=True, which puts a plain layer in its place"
        raise CannotMergeError(
            f"its {type(base).__name__} rounds or scales its weight in each forward pass, and so would it what the "
            f"adapter adds. {advice if is_lora_layer(layer) else 'Keep the adapter beside the base'}"
        )


def _refuse_codes_of_now(layer: TunerModule, names: Sequence[str] | None, dequantize: bool) -> None:
    """Refuse a merge into codes that the first forward pass replaces by a plain weight."""
    base = layer.get_base_layer()
    if (dequantize and is_lora_layer(layer)) or not is_decoded_at_forward(base):
        return
    if _adapters_to_merge(layer, names, adapters_of(layer)):
        advice = "Merge with dequantize=True" if is_lora_layer(layer) else "Run a forward pass before the merge"
        raise CannotMergeError(
            f"its {type(base).__name__} holds codes until the model's first forward pass decodes them. {advice}"
        )


def _adapters_to_merge(layer: TunerModule, names: Sequence[str] | None, existing: frozenset[str]) -> tuple[str, ...]:
    """Return the adapters to merge into a layer, in order, without those that are merged already."""
    asked = [name for name in (layer.active_adapters if names is None else names) if name in existing]
    return tuple(dict.fromkeys(name for name in asked if name not in layer.merged_adapters))


def _nested_wrappers(layer: LoraModule) -> list[LoraModule]:
    """Return a layer and those nested in it, of which each wraps another parameter of the same module."""
    layers = [layer]
    while isinstance(layers[-1], ParamWrapper) and is_lora_layer(inner := layers[-1].base_layer):
        layers.append(inner)
    return layers


def _check_peft_merge(layer: LoraModule, names: Sequence[str]) -> None:
    """Refuse layers that peft cannot merge, and quantized layers that it merges wrongly.

    It adds the bias of lora_B without its scaling, and merges a variant into a torchao layer as a plain LoRA.
    """
    refuse_impossible(layer, names)
    _refuse_base(layer)
    kind, base = type(layer).__name__, layer.get_base_layer()
    if type(layer).merge is BaseTunerLayer.merge:
        raise CannotMergeError(f"peft has no merge for a {kind}. {MERGE_BEFORE_QUANTIZING}")
    if has_offloaded_codes(base):
        raise CannotMergeError(SCALES_OFFLOADED)
    with_bias = [name for name in names if layer.lora_bias.get(name)]
    if with_bias and is_quantized(base) and getattr(base, "bias", None) is None:
        raise without_bias(with_bias[0], base)
    scaled_bias = [name for name in with_bias if layer.scaling[name] != 1]
    if scaled_bias and is_quantized(base):
        raise CannotMergeError(
            f"adapter {scaled_bias[0]!r} has lora_bias=True, and peft merges that into a quantized layer without its "
            f"scaling, {layer.scaling[scaled_bias[0]]:g}. Merge with dequantize=True"
        )
    varied = [name for name in names if layer.lora_variant.get(name) is not None]
    if varied and kind == "TorchaoLoraLinear":
        raise CannotMergeError(
            f"adapter {varied[0]!r} is a {type(layer.lora_variant[varied[0]]).__name__}, which peft merges into a "
            f"torchao layer as a plain LoRA. Merge with dequantize=True"
        )


def _refuse_base(layer: TunerModule) -> None:
    """Refuse weights that peft would merge in vain, and those on ranks.

    It makes new weights, which FSDP2 does not know.
    """
    for attribute in ("weight", "bias"):
        refuse_computed(layer.get_base_layer(), attribute)
    for name, parameter in layer.get_base_layer().named_parameters():
        refuse_spread(parameter, f"its {name}")


def _check_tensors(job: LayerMerge) -> None:
    """Refuse targets that cannot be written, and adapters without values."""
    for target in job.targets:
        refuse_computed(target.owner, target.attribute)
        check_tensor(target)
        for matrix in () if isinstance(target, TokenRows) else target.matrices:
            if any(term.left.is_meta or term.right.is_meta for term in matrix.update.terms):
                raise CannotMergeError(
                    "its adapter is on meta, so it holds no values: peft loads none onto an offloaded layer. Load the "
                    "adapter before the model is dispatched, or merge with merge_lora_checkpoint"
                )


def _replaced_originals(model: torch.nn.Module, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the paths of modules whose copy in an adapter (``modules_to_save``) stays in their place."""
    return tuple(
        f"{path}.original_module"
        for path, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and adapters_with_copy(module, names)
    )
