"""Carrying out a plan: weights are overwritten, layers are marked as merged or replaced by their base."""

from __future__ import annotations

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.other import AuxiliaryTrainingWrapper

from safe_loading._core import progress
from safe_loading._core.interrupts import HeldSignals
from safe_loading._model.peft_layers import TunerModule, is_lora_layer
from safe_loading.errors import MergeError

from .fp8_merge import merge_fp8
from .layer_merge import LayerMerge, MergeOptions
from .lora_layers import MatrixUpdate, data_of
from .merge_plan import MergePlan
from .offloaded import OffloadedWeights
from .rounding_loss import RoundingLoss
from .trainable_tokens import TokenRows
from .unload import hand_hooks_on
from .update import MergeThreads, PartlyMergedError, merge_matrix, merge_threads
from .writable_tensors import parents_of

_Parents = dict[int, list[tuple[torch.nn.Module, str]]]


class HalfMergedError(Exception):
    """A layer was merged in part: which weight could not be finished, and how many of its rows are merged."""


def carry_out(
    tuner: BaseTuner,
    plan: MergePlan,
    offloaded: OffloadedWeights,
    options: MergeOptions,
    held: HeldSignals,
    *,
    show_progress: bool,
) -> dict[str, RoundingLoss]:
    """Write, mark and unload the layers of a plan, group by group; each group's memory is freed with it.

    Returns what was lost of each weight that was rounded to codes, by its name.

    Ctrl-C is among the signals that are ``held``, and is raised once the current layer is finished; it says what is
    merged, as MergeError does when the memory ran out.
    """
    parents = parents_of(tuner.model) if options.unload else {}
    losses: dict[str, RoundingLoss] = {}
    groups, total = plan.groups, len(plan.groups)
    bar = progress.Bar("merging", total, unit=" layers", shown=show_progress)
    with bar, merge_threads() as threads:
        for _ in range(total):
            begun = None
            try:
                held.deliver()
                for job in groups[0]:
                    begun = job.path
                    losses |= _merge_layer(job, offloaded, options, threads)
            except (MemoryError, RuntimeError, HalfMergedError) as error:
                raise _stopped(error, plan, total) from error
            except KeyboardInterrupt as interrupt:
                raise _interrupted(plan, total, begun) from interrupt
            # Only now: of tied layers one has the targets for all, so none is done before the whole group is written.
            for job in groups.pop(0):
                if options.unload and job.method != "dequantized":
                    _unload_layer(job, tuner, parents)
            bar.advance()
    return losses


def _merge_layer(
    job: LayerMerge, offloaded: OffloadedWeights, options: MergeOptions, threads: MergeThreads | None
) -> dict[str, RoundingLoss]:
    """Overwrite the weights of a layer, in the offload store too, and mark it as merged; return the rounding losses.

    HalfMergedError: the memory ran out after something of the layer was written; MemoryError, RuntimeError: before.
    """
    if job.method in ("peft", "dequantized"):
        return {}  # merged already
    written, losses = 0, dict[str, RoundingLoss]()
    for target in job.targets:
        if isinstance(target, TokenRows):
            target.write()
            continue
        for matrix in target.matrices:
            try:  # torch reports an allocation that failed as a RuntimeError
                if matrix.fp8 is None:
                    norms = _merge_matrix(matrix, options.scratch_bytes, threads, begun=written > 0)
                else:
                    loss = merge_fp8(matrix.update, matrix.fp8, scratch_bytes=options.scratch_bytes)
                    norms, losses[job.name_of(target)] = {}, loss
            except (MemoryError, RuntimeError, PartlyMergedError) as error:
                if written or isinstance(error, PartlyMergedError):
                    raise HalfMergedError(f"{job.name_of(target)}: {error}") from error
                raise
            written += 1
            if not options.unload and target.attribute != "bias":
                for index, norm in norms.items():
                    _keep_norm(job.layer, matrix.update.terms[index].name, norm)
    # Before the marks: a full disk leaves the layer as it was, and a second call merges it.
    offloaded.write_back((target.owner, name) for target in job.targets for name in target.written)
    for layer, names in job.marks:
        layer.merged_adapters.extend(names)
    job.targets.clear()  # views of the adapter's tensors, which unloading frees
    return losses


def _merge_matrix(
    matrix: MatrixUpdate, scratch_bytes: int, threads: MergeThreads | None, *, begun: bool
) -> dict[int, torch.Tensor]:
    try:
        return merge_matrix(matrix.update, matrix.matrix, scratch_bytes=scratch_bytes, threads=threads)
    except (MemoryError, RuntimeError):  # before the first row of this matrix was written
        if not begun:
            raise
        # Other weights of the layer are merged already, so this one has to be: in the smallest blocks.
        return merge_matrix(matrix.update, matrix.matrix, scratch_bytes=1)


def _keep_norm(layer: TunerModule, name: str, norm: torch.Tensor) -> None:
    """Leave a norm where peft's unmerge looks for it, in the shape that it expects."""
    if is_lora_layer(layer):  # no other layer has a DoRA
        magnitude = data_of(layer.lora_magnitude_vector[name])
        layer._cache_store(f"{name}-weight_norm", norm.to(magnitude.dtype).view_as(magnitude))


def _unload_layer(job: LayerMerge, tuner: BaseTuner, parents: _Parents) -> None:
    """Replace the tuner layer by its base layer in each of its parents."""
    layer = job.layer
    take_off = getattr(layer, "unload_and_optionally_merge_module", None)
    if take_off is not None:  # MultiheadAttention has to make its weights parameters again
        base = take_off(merge=False, safe_merge=False, adapter_names=None)
    else:
        base = layer.get_base_layer()
    hand_hooks_on(layer, base)
    for parent, name in parents.get(id(layer), []):
        if not isinstance(parent, AuxiliaryTrainingWrapper):  # unloaded with its wrapper
            tuner._replace_module(parent, name, base, layer)


def _stopped(error: Exception, plan: MergePlan, total: int) -> MergeError:
    """Return the error to raise when writing the weights failed, most likely for lack of memory."""
    state = f"{total - len(plan.groups)} of {total} layers are merged"
    if isinstance(error, HalfMergedError):
        return MergeError(
            f"The merge stopped within a layer, which could not be finished; {state}, and this one in part:",
            [f"{error}. Its weight is neither the base's nor the merged one: load the base anew."],
        )
    return MergeError(
        f"The merge stopped between two layers; {state}, the others are unchanged:",
        [f"{plan.jobs[0].path}: {error or type(error).__name__}. Free memory, and call it again: it merges the rest."],
    )


def _interrupted(plan: MergePlan, total: int, layer: str | None) -> KeyboardInterrupt:
    """Return the error of Ctrl-C: how much is merged, and how to go on. ``layer`` was begun, where there is one."""
    state = f"merge_lora_inplace: {total - len(plan.groups)} of {total} layers are merged"
    if layer is not None:  # raised in the middle, by another thread or a debugger
        return KeyboardInterrupt(f"{state}, and {layer} may be in part: load the base anew.")
    rest = ", ".join(job.path for job in plan.jobs[:3])
    return KeyboardInterrupt(
        f"{state}, the others are unchanged ({rest}, ...). Call it again with the same arguments to merge the rest."
    )
