"""Which layers of a model are merged by which method, and what forbids it layer by layer; nothing is written here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from peft.tuners.lora.layer import MultiheadAttention, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper

from safe_loading._model.peft_layers import LoraModule, TunerModule, is_lora_layer, outermost_tuner_layers
from safe_loading._model.quantized.recognize import has_offloaded_codes, is_quantized

from .lora_layers import MergeTarget, adapters_of, is_blocked, merge_targets
from .trainable_tokens import TokenRows, token_rows
from .unload import adapters_with_copy
from .variants import MERGE_BEFORE_QUANTIZING, SCALES_OFFLOADED, CannotMergeError, refuse_impossible
from .writable_tensors import SharedMemory, check_tensor, same_change, same_memory

Method = Literal["blocks", "tokens", "peft", "dequantised"]


@dataclasses.dataclass(frozen=True)
class MergeOptions:
    """The arguments of ``merge_lora_inplace``, checked; ``names`` None means the active adapters of each layer."""

    names: tuple[str, ...] | None
    check_finite: bool
    scratch_bytes: int
    unload: bool
    dequantize: bool


@dataclasses.dataclass(eq=False)
class LayerMerge:
    """One outermost tuner layer, and what merging it changes."""

    path: str
    layer: TunerModule
    method: Method  # row blocks, rows of tokens, peft's own merge, or a plain layer in place of a quantized one
    names: tuple[str, ...]  # the adapters that are merged; of nested layers, those of the outermost
    # The weights that change; empty for the last two methods, and where a tied layer changes the weight already.
    targets: list[MergeTarget | TokenRows] = dataclasses.field(default_factory=list)
    # The layers whose ``merged_adapters`` grow, with the names.
    marks: list[tuple[TunerModule, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    merged_before: tuple[str, ...] = ()  # the adapters that were merged already

    def name_of(self, target: MergeTarget | TokenRows) -> str:
        """Return the name of a weight in the unloaded base model."""
        # peft's wrappers add these parts to the paths, and unloading takes them away again.
        for path, module in self.layer.named_modules():
            if module is target.owner:
                inner = ".".join(p for p in path.split(".") if p not in ("base_layer", ""))
                outer = ".".join(p for p in self.path.split(".") if p not in ("base_layer", "token_adapter"))
                return ".".join(filter(None, (outer, inner, target.attribute)))
        return f"{self.path}.{target.attribute}"


@dataclasses.dataclass(frozen=True, eq=False)
class MergePlan:
    """What a merge will do, and everything that forbids it."""

    groups: list[list[LayerMerge]]  # those of one group write the same memory and are finished together
    problems: list[str]

    @property
    def jobs(self) -> list[LayerMerge]:
        """The layers of all groups that are still to be merged."""
        return [job for group in self.groups for job in group]


def make_plan(model: torch.nn.Module, options: MergeOptions) -> MergePlan:
    """Plan the merge of every tuner layer of ``model``."""
    jobs: list[LayerMerge] = []
    problems: list[str] = []
    for path, layer in outermost_tuner_layers(model):
        try:
            jobs.append(_plan_layer(path, layer, options.names, options.dequantize))
        except CannotMergeError as error:
            problems.append(f"{path}: {error}.")
    if not any(job.targets or job.method in ("peft", "dequantised") for job in jobs):
        # Nothing will change, so nothing needs to be known about shared memory.
        return MergePlan([[job] for job in jobs], problems)
    replaced = _replaced_originals(model, options.names) if options.unload else ()
    groups, tied = _group_by_memory(jobs, SharedMemory(model, replaced))
    return MergePlan(groups, problems + tied)


def tie_problem(name: str, other: str, *, changed: bool) -> str:
    """Return why a weight that shares its memory with ``other`` cannot change alone, or in another way than that."""
    how = "which the adapters change in another way" if changed else "which the adapters do not change"
    return (
        f"{name} shares its memory with {other}, {how}: merging would change what both compute. Untie them first "
        f"(load the base with tie_word_embeddings=False, or give one a clone of the weight), or train with "
        f"LoraConfig(ensure_weight_tying=True)."
    )


def _plan_layer(path: str, layer: TunerModule, names: Sequence[str] | None, dequantize: bool) -> LayerMerge:
    before = tuple(layer.merged_adapters)
    if isinstance(layer, TrainableTokensLayer):
        chosen = _adapters_to_merge(layer, names, frozenset(layer.token_indices))
        rows = [token_rows(layer, chosen)] if chosen else []
        job = LayerMerge(path, layer, "tokens", chosen, [*rows], [(layer, chosen)], before)
        _check_tensors(job)
        return job
    if not is_lora_layer(layer):
        chosen = tuple(layer.active_adapters if names is None else names)
        return LayerMerge(path, layer, "peft", chosen, merged_before=before)
    if dequantize and is_quantized(layer.get_base_layer()):
        chosen = _adapters_to_merge(layer, names, adapters_of(layer))
        return LayerMerge(path, layer, "dequantised", chosen, merged_before=before)
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
    """Refuse what peft cannot merge, and what its merge of quantized layers gets wrong.

    It adds the bias of lora_B without its scaling, and merges a variant into a torchao layer as a plain LoRA.
    """
    refuse_impossible(layer, names)
    kind, base = type(layer).__name__, layer.get_base_layer()
    if type(layer).merge is BaseTunerLayer.merge:
        raise CannotMergeError(f"peft has no merge for a {kind}. {MERGE_BEFORE_QUANTIZING}")
    if has_offloaded_codes(base):
        raise CannotMergeError(SCALES_OFFLOADED)
    scaled_bias = [name for name in names if layer.lora_bias.get(name) and layer.scaling[name] != 1]
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


def _check_tensors(job: LayerMerge) -> None:
    """Refuse targets that cannot be written, and adapters without values."""
    for target in job.targets:
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


def _group_by_memory(jobs: list[LayerMerge], shared: SharedMemory) -> tuple[list[list[LayerMerge]], list[str]]:
    """Join jobs that change the same memory in the same way; anything else that shares memory is a problem."""
    target_at = {(id(t.owner), t.attribute): (job, t) for job in jobs for t in job.targets}
    group_of = {id(job): [job] for job in jobs}
    problems = []
    for job in jobs:
        # What peft changes is not known as targets, so here any sharing with a module outside the layer is a problem.
        if job.method == "peft":
            problems += _shared_outside(job, shared)
        for target in list(job.targets):
            for path, module, attribute in shared.others(target):
                other = target_at.get((module, attribute))
                if other is None or not (same_memory(target.tensor, other[1].tensor) and same_change(target, other[1])):
                    problems.append(tie_problem(job.name_of(target), path, changed=other is not None))
                elif other[1] in other[0].targets and target in job.targets and other[1] is not target:
                    other[0].targets.remove(other[1])  # once is enough
                    _join(group_of, job, other[0])
    groups = list({id(group): group for group in (group_of[id(job)] for job in jobs)}.values())
    return groups, problems


def _join(group_of: dict[int, list[LayerMerge]], one: LayerMerge, other: LayerMerge) -> None:
    into, emptied = group_of[id(one)], group_of[id(other)]
    if into is not emptied:
        into.extend(emptied)
        for job in emptied:
            group_of[id(job)] = into


def _shared_outside(job: LayerMerge, shared: SharedMemory) -> list[str]:
    """Return a problem for each weight that peft would change and that a module outside the layer reads too."""
    inside = {id(module) for module in job.layer.modules()}
    problems = []
    for module in job.layer.get_base_layer().modules():
        for name, tensor in module._parameters.items():
            if tensor is None or type(tensor) is not torch.nn.Parameter or tensor.is_meta:
                continue
            for path, owner, _ in shared.others(MergeTarget(module, name, tensor.data, ())):
                if owner not in inside:
                    problems.append(tie_problem(f"{job.path}.{name}", path, changed=False))
    return problems
