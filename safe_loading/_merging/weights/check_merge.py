"""Can all of a plan be carried out? Every reason against it is found, on every rank, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.other import ModulesToSaveWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from safe_loading._core.log import quiet
from safe_loading._core.names import method_name
from safe_loading._core.report import problems_of_all_layers
from safe_loading._model.peft_layers import TunerModule
from safe_loading._model.tensor_values import is_finite
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import MergeError

from .dequantize import Replacement, dequantized_layers
from .finite import why_not_finite
from .fp8_merge import why_fp8_not_finite
from .layer_merge import LayerMerge, MergeOptions
from .lora_layers import MatrixUpdate
from .merge_plan import MergePlan
from .offloaded import OffloadedWeights
from .other_tuners import of_the_input
from .shared_weights import OwnWeight, tie_problem
from .trainable_tokens import TokenRows
from .unload import adapters_with_copy
from .writable_tensors import same_change

_NOT_OFFLOADED = (
    "It is offloaded, so it cannot be given memory of its own here. Load the model without offloading "
    "(device_map={'': 'cpu'}), or merge with merge_lora_checkpoint."
)
# Of VB-LoRA: infinite for the vectors that are not chosen, where the adapter was saved without their logits.
_MASKED = {"vblora_logits_A", "vblora_logits_B"}
_TIMEOUT = 1800.0  # seconds; the ranks check weights of the same size, so they arrive together


def check_merge(
    tuner: BaseTuner, plan: MergePlan, offloaded: OffloadedWeights, options: MergeOptions
) -> list[Replacement]:
    """Refuse a plan for every reason on every rank; return the plain layers that will replace quantized ones."""
    model: torch.nn.Module = tuner.model
    problems = [*([] if options.dequantize else _refused_by_peft(tuner)), *_wrapped_by_fsdp1(model), *plan.problems]
    problems += _mixed_by_the_input(tuner)
    if options.unload:
        problems += _conflicting_copies(model, options.names)
    if options.check_finite:
        for job in plan.jobs:
            problems += _not_finite(job, scratch_bytes=options.scratch_bytes)
    problems += _offloaded_ties(plan.own_weights, offloaded)
    problems += _broken_disk_ties(model, plan.jobs, offloaded)
    if problems or plan.own_weights:  # what only some of the repeated layers share could not be saved
        problems += _replication_advice(tuner)
    problems += offloaded.full_disks((t.owner, name) for job in plan.jobs for t in job.targets for name in t.written)
    replacements: list[Replacement] = []
    if options.dequantize:
        replacements, more = dequantized_layers(model, plan.jobs, options)
        problems += more
    problems = _of_all_ranks(model, problems)
    if problems:
        told = problems_of_all_layers(problems)
        raise MergeError(f"The adapters of this {type(model).__name__} cannot be merged:", told)
    return replacements


def reshard(model: torch.nn.Module) -> None:
    """Let FSDP2 put its shards back, since a forward pass may leave whole weights, which are copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _of_all_ranks(model: torch.nn.Module, problems: list[str]) -> list[str]:
    """Return the problems of all ranks over which ``model`` is spread; those of this one when it is not spread."""
    # Every rank takes part, without problems too: otherwise those that have some would wait for it.
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    ranks = {rank for mesh in meshes for rank in mesh.mesh.view(-1).tolist()}
    if not ranks:
        return problems
    everywhere = Ranks.resolve(sorted(ranks)).exchange("check the merge", problems, timeout=_TIMEOUT)
    return list(dict.fromkeys(problem for rank in everywhere for problem in rank))


def _refused_by_peft(tuner: BaseTuner) -> list[str]:
    """Return peft's own objections to merging this model as a whole."""
    check: Callable[[], object] = tuner._check_merge_allowed
    with quiet():  # it warns of tied weights, which the plan looks at layer by layer
        try:
            check()
        except (ValueError, NotImplementedError) as error:
            return [f"peft refuses: {error}."]
    return []


def _mixed_by_the_input(tuner: BaseTuner) -> list[str]:
    """Return the problem of X-LoRA: its layers are LoRA's, and a module beside them weighs their adapters anew."""
    kinds = {name: method_name(config.peft_type) for name, config in tuner.peft_config.items()}
    if "XLORA" not in kinds.values():
        return []
    loras = [name for name, kind in kinds.items() if kind != "XLORA"]
    return [
        f"{of_the_input('XLORA')}. To merge one of the LoRAs {loras} that it weighs, load that one alone, without the "
        f"X-LoRA."
    ]


def _wrapped_by_fsdp1(model: torch.nn.Module) -> list[str]:
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            return [
                f"{path or 'the model'} is wrapped by FSDP1, which keeps the weights flattened and split. Save the "
                f"adapter, and merge it into the unsharded base."
            ]
    return []


def _conflicting_copies(model: torch.nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return a problem for each module of which several of the merged adapters have a copy, with other values."""
    problems = []
    for path, module in model.named_modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        chosen = adapters_with_copy(module, names)
        copies: list[dict[str, torch.Tensor]] = [module.modules_to_save[name].state_dict() for name in chosen]
        if any(not torch.equal(value, other[key]) for other in copies[1:] for key, value in copies[0].items()):
            problems.append(
                f"{path}: the adapters {chosen} each have a copy of it (modules_to_save), and the copies differ. Name "
                f"one of them in adapter_names."
            )
    return problems


def _not_finite(job: LayerMerge, *, scratch_bytes: int) -> list[str]:
    """Return the reasons why weights of a layer would not be finite."""
    problems = []
    if job.method == "peft":
        # peft's own check comes layer by layer, and for some engines before the adapter is added
        levels = job.levels or [(job.layer, job.names)]
        pairs = [(layer, name) for layer, names in levels for name in names]
        bad = [name for layer, name in pairs if not all(map(is_finite, _adapter_tensors(layer, name)))]
        problems += [f"{job.path}: its adapter {name!r} holds NaN or infinity." for name in bad]
    for target in job.targets:
        if isinstance(target, TokenRows):
            reasons = [target.why_not_finite()]
        else:
            reasons = [_why_matrix_not_finite(matrix, scratch_bytes) for matrix in target.matrices]
        problems += [f"{job.name_of(target)}: {reason}." for reason in sorted({r for r in reasons if r})]
    return problems


def _adapter_tensors(layer: TunerModule, name: str) -> Iterator[torch.Tensor]:
    """Yield the tensors of one adapter of a tuner layer of any kind, without those on meta."""
    for attribute in set(layer.adapter_layer_names) - _MASKED:
        by_adapter = getattr(layer, attribute, None)
        if isinstance(by_adapter, (torch.nn.ModuleDict, torch.nn.ParameterDict)) and name in by_adapter:
            adapter = by_adapter[name]
            tensors = [adapter] if isinstance(adapter, torch.Tensor) else adapter.parameters()
            yield from (tensor for tensor in tensors if not tensor.is_meta)


def _why_matrix_not_finite(matrix: MatrixUpdate, scratch_bytes: int) -> str | None:
    if matrix.fp8 is not None:
        return why_fp8_not_finite(matrix.update, matrix.fp8, scratch_bytes=scratch_bytes)
    return why_not_finite(matrix.update, matrix.matrix, scratch_bytes=scratch_bytes)


def _offloaded_ties(own_weights: Sequence[OwnWeight], offloaded: OffloadedWeights) -> list[str]:
    """Return a problem for each weight that has to leave the memory of others and that accelerate's hooks hold."""
    return [
        tie_problem(one.name, ", ".join(one.others), _NOT_OFFLOADED)
        for one in own_weights
        if any(offloaded.holds(module, name) for module, name in one.places)
    ]


def _broken_disk_ties(model: torch.nn.Module, jobs: Sequence[LayerMerge], offloaded: OffloadedWeights) -> list[str]:
    """Return a problem for each weight that the model declares as tied, that lies on disk, and would change alone.

    On disk tied weights are two entries without common memory, so the plan did not see that they are tied.
    """
    config = getattr(model, "config", None)
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    if not offloaded.on_disk or not getattr(config, "tie_word_embeddings", False):
        return []
    targets_by_name = {job.name_of(target): target for job in jobs for target in job.targets}
    problems = []
    for pair in ties.items():
        for name, other in (pair, pair[::-1]):
            one, two = targets_by_name.get(name), targets_by_name.get(other)
            if one is None or (id(one.owner), one.attribute) not in offloaded.on_disk:
                continue
            if two is None or not same_change(one, two):
                problems.append(tie_problem(name, other, _NOT_OFFLOADED))
    return problems


def _replication_advice(tuner: BaseTuner) -> list[str]:
    """Return the advice on layers that an adapter repeats, if those still share their weights."""
    if not any(getattr(config, "layer_replication", None) for config in tuner.peft_config.values()):
        return []
    counts: dict[tuple[int, str], int] = {}
    for name, parameter in tuner.model.named_parameters(remove_duplicate=False):
        without_numbers = "".join(letter for letter in name if not letter.isdigit())  # equal in every layer
        kind = (id(parameter), without_numbers)
        counts[kind] = counts.get(kind, 0) + 1
    if max(counts.values(), default=1) == 1:
        return []
    return [
        "layer_replication made layers that share their weights. Give each its own before the merge, which takes the "
        "memory of a larger model: layers = model.get_base_model().model.layers; for i, layer in enumerate(layers): "
        "layers[i] = copy.deepcopy(layer)"
    ]
