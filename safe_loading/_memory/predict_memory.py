"""``predict_memory``: the peak of a real step, per component and module, before a weight is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from safe_loading._checkpoint.hub import HubOptions
from safe_loading._core.arguments import compute_capability, model_source, whole_number
from safe_loading._core.collector import full_collections_put_off
from safe_loading._core.spread import Spread
from safe_loading._core.workload import Workload, require_workload
from safe_loading._model.attention_names import may_be_flash
from safe_loading._model.formats.format import TargetCard
from safe_loading._model.positions import long_rows
from safe_loading._model.quantized.kbit_preparation import KbitPreparation, check_preparation
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading._model.quantized_meta_model import QuantizationConfig
from safe_loading._model.torch_state import undone_when_raised
from safe_loading.errors import ArgumentError

from .forecast.build_model import Built, build, loading_of_layers
from .forecast.idle_parts import idle_parts
from .forecast.peak_parts import components_at_peak, modules_at_peak, peak_in_words
from .forecast.report import MemoryForecast
from .forecast.suggestions import Origin, suggestions_for
from .trace.allocator import replay
from .trace.cuda_paths import cuda_paths
from .trace.evaluation import NOTE as EVALUATION_NOTE
from .trace.fused_lm_head import LABELS_NOTE
from .trace.inputs import engine_base
from .trace.liger_lm_head import about_head
from .trace.over_ranks import RankOfJob, ranks_alike, refuse_reference_over_ranks
from .trace.pass_between import with_pass
from .trace.read_adapter import as_passed
from .trace.records import StepTrace
from .trace.scan_kernels import scan_stand_ins
from .trace.step_tensors import Inputs, outputs_kept, require_tensors
from .trace.timeline import context_of, run_events, workspaces_of
from .trace.trace_step import trace_step
from .trace.two_ends import peaks_of_phases, trace_two_ends
from .trace.zero3_step import is_stage_3

SHARDED_ALREADY = (
    "The model is sharded already. Pass it as it is before it is sharded, or its config, with "
    "spread=Spread.fsdp2(ranks)."
)

_PHASES = {"prefill": "prompt", "decode": "end"}  # of a generation, and what a report calls them
_OF_THE_BUILD = ("auto_class", "dtype", "attn_implementation", "trust_remote_code", "quantization_config")


@undone_when_raised
@full_collections_put_off()
def predict_memory(
    model: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload,
    *,
    inputs: Inputs | None = None,
    capability: tuple[int, int] | None = None,
    context_bytes: int | None = None,
    expandable_segments: bool = False,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    auto_class: type | str | None = None,
    prepare_for_kbit: KbitPreparation | None = None,
    keep_outputs: bool | Literal["across_steps"] = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    quantization_config: QuantizationConfig = None,
    spread: Spread | None = None,
    scan_kernels: bool = True,
    loaded_by: Literal["to", "device_map"] = "to",
    empties_cache: bool = False,
) -> MemoryForecast:
    """Forecast the memory that a step takes on one GPU, without the GPU, the weights or the memory.

    The model's own code runs once on tensors that have shapes and no data, and every allocation is recorded. The
    records of a few steps are then replayed by the rules of CUDA's caching allocator.

    Args:
        model: A folder or hub id of a model or an adapter, a config, or a model: real, on meta, or a
            ``PeftModel``. It is not changed. A config with a ``quantization_config`` gives quantized layers, whether or
            not the package of the method is installed.
        workload: What is run, for example ``Workload.train(batch_size=4, sequence_length=1024)``.
        inputs: Inputs by argument name, for models that take more than tokens: images, audio, a batch of your
            collator, of tensors or of dicts and lists of tensors. Their shapes and dtypes count; integers that are not
            on meta keep their values, such as the places of images in a text. Inputs that are not passed are made from
            the workload.
        capability: Compute capability of the GPU, on which the attention kernels and the size of cuBLAS's scratch
            depend, and whether quantized weights stay so or are dequantized: (7, 5) a T4, (8, 0) an A100, (8, 9)
            an L4 or RTX 4090, (9, 0) an H100. None takes an A100, and an H100 for fp8, which an A100 does not run.
        context_bytes: The size of the CUDA context. None takes what was measured for this capability, or an allowance.
        expandable_segments: Whether ``PYTORCH_ALLOC_CONF=expandable_segments:True`` will be set.
        dtype: The dtype of the weights of a config or folder. None takes the one that it names.
        attn_implementation: As for ``from_pretrained``, for a config or folder.
        auto_class: The class to build from a config or folder, or its name in transformers; None takes what it names.
        prepare_for_kbit: Who prepares a base in 4 or 8 bits for training: "trl", whose trainers leave the base as it
            was loaded and cast the adapter to bfloat16; "peft", whose ``prepare_model_for_kbit_training`` casts what is
            not packed to float32 and leaves the adapter in float32; "axolotl" or "unsloth", by what their source says;
            or "none". None takes trl's, which most people use. A base that is passed as a module is as it is, and
            only the adapter of the workload is cast.
        keep_outputs: Whether the loop holds the model's output, logits included, while it runs backward, as
            ``out = model(...); out.loss.backward()`` does in a function of one step. The Trainer does not.
            ``"across_steps"`` for a loop whose variable holds it until the next forward pass has returned.
        trust_remote_code: Whether the repository's own code may run.
        revision: Branch, tag or commit of a hub id.
        subfolder: Folder inside the folder or hub id.
        token: Token for the hub, as for ``huggingface_hub``.
        quantization_config: As for ``from_pretrained``, for a config or folder that is not quantized yet, or the dict
            that a config.json has.
        spread: How the job is spread over ranks: ``Spread.fsdp2(ranks=8)`` or ``Spread.ddp(ranks=8)``. The forecast is
            then that of one rank, the one that takes the most, and `MemoryForecast.ranks` has every rank's peak; the
            workload is that of each rank.
        scan_kernels: Whether Mamba's layers run the kernels of mamba_ssm and causal_conv1d. False is for a GPU machine
            without these packages, where transformers computes one token after the other: that takes far more memory,
            and minutes to trace for a long row.
        loaded_by: How the weights come to the GPU: ``"to"`` for ``model.to("cuda")`` and for weights made or loaded
            there one by one; ``"device_map"`` for ``from_pretrained(..., device_map=...)``, which takes all weights in
            one block first, so that other tails of blocks stay allocated, and after which the adapter is attached, so
            that what peft leaves on the host stays there (BOFT's permutations). Weights in 4 or 8 bits
            are always loaded the second way.
        empties_cache: Whether the loop calls ``torch.cuda.empty_cache()`` between steps, as the Trainer does with
            ``torch_empty_cache_steps=1``: each step then starts without what the one before left in the allocator.

    Raises:
        ArgumentError: No model can be built from the source, or the workload does not suit it.
        TraceError: The model's own code cannot run without data; the text says where.
    """
    passed = dict(locals())
    model_source(model, "model", torch.nn.Module, PreTrainedConfig)
    require_workload(workload, "Workload.train(4, 1024)").require_sizes()
    if capability is not None:
        compute_capability(capability)
    _check_inputs_and_loading(inputs, loaded_by, context_bytes)
    preparation = check_preparation(prepare_for_kbit)
    options = {name: passed[name] for name in _OF_THE_BUILD}
    card = TargetCard(capability, trains=workload.kind == "train")
    made = build(model, workload, options, preparation, card, HubOptions(revision, subfolder, token))
    capability = capability or made.capability
    scans = scan_stand_ins(made.model) if scan_kernels else contextlib.nullcontext(())
    kept = _kept_outputs(made.model, keep_outputs)
    with with_stand_ins(made.model) as stand_ins, cuda_paths(capability), scans as of_scans, kept:
        loading = loading_of_layers(made.model, stand_ins) if stand_ins else made.loading
        loading = dataclasses.replace(loading, warmed=loading.warmed or loaded_by == "device_map")
        traces = _traces(made.model, made.workload, inputs, spread, preparation, loaded_by == "device_map")
    trace = max(traces.values(), key=lambda of_rank: of_rank.devices[0].peak_bytes if 0 in of_rank.devices else 0)
    # accelerators come first; the host follows where the model's own code makes tensors on it
    device = next(iter(trace.devices))
    workspaces = workspaces_of(capability, training=workload.kind == "train") if workload.kind != "weights_only" else ()
    events = run_events(
        trace, device, loading, workspaces, left_across_steps=keep_outputs == "across_steps", emptied=empties_cache
    )
    run = replay(events, expandable_segments=expandable_segments)
    context, source = context_of(capability) if context_bytes is None else (context_bytes, "as passed")
    return MemoryForecast(
        model=made.name,
        workload=as_passed(workload),
        allocated_peak_bytes=run.allocated_peak_bytes,
        reserved_peak_bytes=run.reserved_peak_bytes,
        context_bytes=context,
        components=components_at_peak(trace, device, sum(workspaces), run.allocated_peak_bytes),
        modules=modules_at_peak(trace, device),
        peak_at=peak_in_words(trace, device),
        phases=peaks_of_phases(trace, device, _PHASES, sum(workspaces)) if workload.kind == "generate" else {},
        notes=(f"Context: {source}.", *_notes(made, trace, spread, of_scans, inputs)),
        events=events,
        expandable_segments=expandable_segments,
        ranks={rank: of_rank.devices[device].peak_bytes for rank, of_rank in traces.items()} if spread else {},
        findings=tuple(long_rows(made.model, workload, made.name)),
        suggest=functools.partial(suggestions_for, _origin(passed, made, quantized=bool(stand_ins) or made.quantized)),
    )


def _origin(passed: dict[str, Any], made: Built, *, quantized: bool) -> Origin:
    """Return the call of `predict_memory` with these arguments; a model is not kept alive by its forecast."""
    source = passed.pop("model")
    del passed["workload"]
    model = weakref.ref(source) if isinstance(source, torch.nn.Module) else None
    folder_or_config = None if model else source

    def held() -> Any:
        return model() if model else folder_or_config

    def predict(workload: Workload, changes: Mapping[str, object]) -> MemoryForecast:
        return predict_memory(held(), workload, **{**passed, **changes})

    spread: Spread | None = passed["spread"]
    flash = may_be_flash(made.model, made.workload.autocast or (spread and spread.param_dtype))
    return Origin(predict, lambda: held() is not None, passed, model is not None, quantized, flash)


def _check_inputs_and_loading(inputs: Inputs | None, loaded_by: str, context_bytes: int | None) -> None:
    if context_bytes is not None:
        whole_number(context_bytes, "context_bytes", least=0, what="a number of bytes")
    require_tensors(inputs)
    if loaded_by not in ("to", "device_map"):
        raise ArgumentError(f'loaded_by={loaded_by!r:.80}: pass "to" or "device_map".')


def _traces(
    model: torch.nn.Module,
    workload: Workload,
    inputs: Inputs | None,
    spread: Spread | None,
    preparation: KbitPreparation,
    attached_there: bool,
) -> dict[int, StepTrace]:
    """Return the step of each rank under its number; ranks that hold the same share one."""
    if is_sharded(model):
        raise ArgumentError(SHARDED_ALREADY)
    encodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def trace(work: Workload, rank: int = 0) -> StepTrace:
        return trace_step(
            model,
            work,
            inputs=inputs,
            job=None if spread is None else RankOfJob(spread, rank),
            attached_there=attached_there and spread is None,
            prepare_for_kbit=preparation,
        )

    def whole(rank: int = 0) -> StepTrace:
        if not workload.new_tokens:
            return trace(workload, rank)
        return trace_two_ends(workload, functools.partial(trace, rank=rank), encoder_decoder=encodes)

    if spread is None:
        if workload.generated_rows:
            generation = trace_two_ends(workload.rollout, trace, encoder_decoder=encodes)
            return {0: with_pass(trace(workload), generation, after=False)}
        return {0: whole()}
    _refuse_spread(model, workload, spread)
    if is_stage_3(spread):
        _check_stage_3(workload)
    traces: dict[int, StepTrace] = {}
    for group in ranks_alike(model, workload, spread, preparation):
        traces |= dict.fromkeys(group, whole(group[0]))
    return dict(sorted(traces.items()))


_UNITS = {
    "safe_loading": " The units are those of wrap_fsdp_meta_safe and load_at_prepare. Where accelerate wraps, as for a "
    'Trainer, pass wrapped_by="accelerate".',
    "accelerate": " The units are those that the installed accelerate makes by default.",
}
_NOT_AHEAD = (
    " None is gathered ahead in the backward pass. Where accelerate's file or fsdp_config has a backward_prefetch, "
    "pass it to Spread.fsdp1."
)


def _refuse_spread(model: torch.nn.Module, workload: Workload, spread: Spread) -> None:
    """Refuse a job over several ranks that was not held against one, with the jobs that can be forecast."""
    if not isinstance(spread, Spread):
        raise ArgumentError(f"spread={spread!r:.80}: pass a Spread, for example Spread.fsdp2(ranks=8).")
    if not spread.ranks:
        raise ArgumentError(f"{spread} leaves the ranks open: pass a number, or let fewest_ranks find it.")
    if workload.generated_rows:
        raise ArgumentError(
            f"Samples that the model itself generates over ranks were not held against trl's trainer. Forecast one "
            f"card, or the step with samples of vLLM: {workload.replace(steps_per_generation=0)}."
        )
    if workload.completion_length and spread.kind == "zero":
        raise ArgumentError("A step of GRPO was not held against DeepSpeed. Spread.fsdp2(ranks) can be forecast.")
    if workload.eval_batch_size and spread.kind == "zero":
        raise ArgumentError(
            f"An evaluation was not held against DeepSpeed. Forecast one card, or the job without it: "
            f"{workload.replace(eval_batch_size=0)}."
        )
    refuse_reference_over_ranks(model, workload, spread)
    if workload.kind == "weights_only":
        raise ArgumentError("spread= needs a step, because units are gathered in it: Workload.train(...) or generate.")
    if spread.kind == "ddp" and workload.kind != "train":
        raise ArgumentError("Spread.ddp is for training: a rank that generates holds its model as one GPU alone does.")
    if spread.kind in ("fsdp1", "zero") and workload.kind != "train":
        raise ArgumentError(f"Spread.{spread.kind} is for training. Spread.fsdp2 can be forecast for generation too.")


def _check_stage_3(workload: Workload) -> None:
    options = {"autocast": workload.autocast, "activation_offload": workload.activation_offload}
    problems = [f"{name}={value!r}" for name, value in options.items() if value]
    if problems:
        raise ArgumentError(
            "Such a step of ZeRO-3 was not held against DeepSpeed. Spread.fsdp2(ranks) can be forecast with it:",
            problems,
        )


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 or FSDP1 has sharded a model, so that a rank alone cannot run a step of it."""
    parameters = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return parameters or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _notes(
    made: Built,
    trace: StepTrace,
    spread: Spread | None,
    scans: tuple[str, ...],
    inputs: Inputs | None,
) -> tuple[str, ...]:
    unlabelled = made.workload.fused_lm_head is True and "labels" not in (inputs or {})
    said = {EVALUATION_NOTE: bool(made.workload.eval_batch_size)}
    said[about_head(engine_base(made.model))] = made.workload.fused_lm_head == "liger"
    said[LABELS_NOTE] = unlabelled and not made.workload.completion_length
    assumed = (*made.notes, *trace.assumptions, *idle_parts(made.model, trace, own_inputs=inputs is not None))
    return (*_spread_notes(spread), *_scan_notes(scans), *(note for note, holds in said.items() if holds), *assumed)


def _spread_notes(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ()
    text = f"One of {spread.cards} ranks: {spread}. NCCL's own buffers are not counted."
    if spread.kind in ("fsdp1", "fsdp2"):
        text += _UNITS[spread.wrapped_by]
        if spread.kind == "fsdp1" and spread.wrapped_by == "accelerate" and spread.backward_prefetch is None:
            text += _NOT_AHEAD
    if spread.kind == "zero":
        text += " Nor is setting up: DeepSpeed then holds twice what is trained, on the host if the card has no room."
    if spread.kind == "ddp" and not spread.find_unused_parameters:
        text += (
            " In the second step DDP replaces its buckets, and NCCL may keep the old ones for up to 0.1 s beside them."
        )
    return (text,)


def _scan_notes(kinds: tuple[str, ...]) -> tuple[str, ...]:
    if not kinds:
        return ()
    return (
        f"The scans of {', '.join(kinds)} are those of mamba_ssm and causal_conv1d. Without these packages a step "
        f"takes far more: scan_kernels=False.",
    )


def _kept_outputs(model: torch.nn.Module, keep: bool | str) -> contextlib.AbstractContextManager[None]:
    if keep not in (True, False, "across_steps"):
        raise ArgumentError(f"keep_outputs={keep!r:.80}: True, False or 'across_steps'.")
    return outputs_kept(model) if keep else contextlib.nullcontext()
