"""``predict_memory``: the peak of a real step, per component and module, before a weight is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from safe_loading._core.arguments import compute_capability, model_source, whole_number
from safe_loading._core.spread import Spread
from safe_loading._core.workload import Workload
from safe_loading._model.quantized.request import TargetCard
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading.errors import ArgumentError

from .forecast.build_model import build, loading_of_layers
from .forecast.peak_parts import components_at_peak, modules_at_peak, peak_in_words
from .forecast.report import MemoryForecast
from .trace.allocator import replay
from .trace.cuda_paths import cuda_paths
from .trace.records import StepTrace
from .trace.scan_kernels import scan_stand_ins
from .trace.timeline import context_of, run_events, workspaces_of
from .trace.trace_step import ranks_alike, trace_step
from .trace.zero3_step import is_stage_3

SHARDED_ALREADY = (
    "The model is sharded already. Pass it as it is before it is sharded, or its config, with "
    "spread=Spread.fsdp2(ranks)."
)


def predict_memory(
    model_or_config: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    capability: tuple[int, int] | None = None,
    context_bytes: int | None = None,
    expandable_segments: bool = False,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    auto_class: type | None = None,
    prepare_for_kbit: bool = True,
    keep_outputs: bool | Literal["across_steps"] = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    quantization_config: object = None,
    spread: Spread | None = None,
    scan_kernels: bool = True,
    loaded_by: Literal["to", "device_map"] = "to",
    empties_cache: bool = False,
) -> MemoryForecast:
    """Return what a step takes of one GPU, without the GPU, the weights or the memory.

    The model's own code runs once on tensors that have shapes and no data, and every allocation is recorded. The
    records of a few steps are then replayed by the rules of CUDA's caching allocator.

    Args:
        model_or_config: A folder or hub id of a model or an adapter, a config, or a model: real, on meta, or a
            ``PeftModel``. It is not changed. A config with a ``quantization_config`` gives quantized layers, whether or
            not the package of the method is installed.
        workload: What is run, for example ``Workload.train(batch_size=4, sequence_length=1024)``.
        inputs: Inputs by argument name, for models that take more than tokens: images, audio, a batch of your
            collator. Their shapes and dtypes count; integers that are not on meta keep their values, such as the
            places of images in a text. Inputs that are not passed are made from the workload.
        capability: Compute capability of the GPU, on which the attention kernels and the size of cuBLAS's scratch
            depend, and whether fp8 and MXFP4 stay as they are or are dequantized: (7, 5) a T4, (8, 0) an A100, (8, 9)
            an L4 or RTX 4090, (9, 0) an H100. None takes an A100, and an H100 for fp8, which an A100 does not run.
        context_bytes: The size of the CUDA context. None takes what was measured for this capability, or an allowance.
        expandable_segments: Whether ``PYTORCH_ALLOC_CONF=expandable_segments:True`` will be set.
        dtype: The dtype of the weights of a config or folder. None takes the one that it names.
        attn_implementation: As for ``from_pretrained``, for a config or folder.
        auto_class: The class to build for a config or folder that does not name one.
        prepare_for_kbit: Whether training in 4 or 8 bits starts with peft's ``prepare_model_for_kbit_training``, which
            casts what is not quantized to float32. Only for a model made here.
        keep_outputs: Whether the loop holds the model's output, logits included, while it runs backward, as
            ``out = model(...); out.loss.backward()`` does in a function of one step. The Trainer does not.
            ``"across_steps"`` for a loop whose variable holds it until the next forward pass has returned.
        trust_remote_code: Whether the repository's own code may run.
        revision: Branch, tag or commit of a hub id.
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
            that what peft leaves on the host stays there (BOFT's permutations). Weights that bitsandbytes quantizes
            are always loaded the second way.
        empties_cache: Whether the loop calls ``torch.cuda.empty_cache()`` between steps, as the Trainer does with
            ``torch_empty_cache_steps=1``: each step then starts without what the one before left in the allocator.

    Raises:
        ArgumentError: No model can be built from the source, or the workload does not suit it.
        TraceError: The model's own code cannot run without data; the text says where.
    """
    model_source(model_or_config, "model_or_config", torch.nn.Module, PreTrainedConfig)
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r:.80}: pass a Workload, for example Workload.train(4, 1024).")
    if capability is not None:
        compute_capability(capability)
    _check_inputs_and_loading(inputs, loaded_by)
    if context_bytes is not None:
        whole_number(context_bytes, "context_bytes", least=0, what="a number of bytes")
    options: dict[str, object] = {"auto_class": auto_class, "dtype": dtype, "attn_implementation": attn_implementation}
    options |= {"trust_remote_code": trust_remote_code, "revision": revision}
    options |= {"quantization_config": quantization_config}
    card = TargetCard(capability, trains=workload.kind == "train")
    made = build(model_or_config, workload, options, prepare_for_kbit, card)
    capability = capability or made.capability
    scans = scan_stand_ins(made.model) if scan_kernels else contextlib.nullcontext(())
    kept = _kept_outputs(made.model, keep_outputs)
    with with_stand_ins(made.model) as stand_ins, cuda_paths(capability), scans as of_scans, kept:
        loading = loading_of_layers(made.model, stand_ins) if stand_ins else made.loading
        loading = dataclasses.replace(loading, warmed=loading.warmed or loaded_by == "device_map")
        traces = _traces(made.model, made.workload, inputs, spread, attached_there=loaded_by == "device_map")
    trace = max(traces.values(), key=lambda of_rank: of_rank.devices[0].peak_bytes if 0 in of_rank.devices else 0)
    # accelerators come first; the host follows where the model's own code makes tensors on it
    device = next(iter(trace.devices))
    workspaces = workspaces_of(capability, training=workload.kind == "train")
    workspaces = () if workload.kind == "weights_only" else workspaces
    events = run_events(
        trace, device, loading, workspaces, left_across_steps=keep_outputs == "across_steps", emptied=empties_cache
    )
    run = replay(events, expandable_segments=expandable_segments)
    context, source = context_of(capability) if context_bytes is None else (context_bytes, "as passed")
    return MemoryForecast(
        model=made.name,
        workload=_workload_text(workload),
        allocated_peak_bytes=run.allocated_peak_bytes,
        reserved_peak_bytes=run.reserved_peak_bytes,
        context_bytes=context,
        components=components_at_peak(trace, device, sum(workspaces), run.allocated_peak_bytes),
        modules=modules_at_peak(trace, device),
        peak_at=peak_in_words(trace, device),
        notes=(f"Context: {source}.", *_spread_notes(spread), *_scan_notes(of_scans), *made.notes, *trace.assumptions),
        events=events,
        expandable_segments=expandable_segments,
        ranks={rank: of_rank.devices[device].peak_bytes for rank, of_rank in traces.items()} if spread else {},
    )


def _check_inputs_and_loading(inputs: Mapping[str, torch.Tensor] | None, loaded_by: str) -> None:
    given = {} if inputs is None else inputs
    if not isinstance(given, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in given.values()):
        raise ArgumentError(
            "inputs: pass tensors by argument name, such as {'pixel_values': torch.empty(4, 3, 336, 336)}."
        )
    if loaded_by not in ("to", "device_map"):
        raise ArgumentError(f'loaded_by={loaded_by!r:.80}: pass "to" or "device_map".')


def _traces(
    model: torch.nn.Module,
    workload: Workload,
    inputs: Mapping[str, torch.Tensor] | None,
    spread: Spread | None,
    *,
    attached_there: bool,
) -> dict[int, StepTrace]:
    """Return the step of each rank under its number; ranks that hold the same share one."""
    if is_sharded(model):
        raise ArgumentError(SHARDED_ALREADY)
    if spread is None:
        return {0: trace_step(model, workload, inputs=inputs, attached_there=attached_there)}
    if not isinstance(spread, Spread):
        raise ArgumentError(f"spread={spread!r:.80}: pass a Spread, for example Spread.fsdp2(ranks=8).")
    if workload.kind == "weights_only":
        raise ArgumentError("spread= needs a step, because units are gathered in it: Workload.train(...) or generate.")
    if spread.kind == "ddp" and workload.kind != "train":
        raise ArgumentError("Spread.ddp is for training: a rank that generates holds its model as one GPU alone does.")
    if spread.kind in ("fsdp1", "zero") and workload.kind != "train":
        raise ArgumentError(f"Spread.{spread.kind} is for training. Spread.fsdp2 can be forecast for generation too.")
    if is_stage_3(spread):
        _check_stage_3(workload)
    traces: dict[int, StepTrace] = {}
    for group in ranks_alike(model, workload, spread):
        traces |= dict.fromkeys(group, trace_step(model, workload, inputs=inputs, spread=spread, rank=group[0]))
    return dict(sorted(traces.items()))


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


def _spread_notes(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ()
    text = f"One of {spread.cards} ranks: {spread}. NCCL's own buffers are not counted."
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


def _workload_text(workload: Workload) -> str:
    """Return the call that makes a workload, with an adapter's kind and rank in place of all its fields."""
    adapter = workload.adapter
    if adapter is None or isinstance(adapter, (str, os.PathLike)):
        return repr(workload)
    fields = vars(adapter)  # PeftConfig declares no rank, since some kinds of adapters have none
    rank = f"r={fields['r']}" if "r" in fields else ""
    return f"{repr(workload.replace(adapter=None))[:-1]}, adapter={type(adapter).__name__}({rank}))"


@contextlib.contextmanager
def _kept_outputs(model: torch.nn.Module, keep: bool | str) -> Iterator[None]:
    """Keep what the model returns alive until its next call, as a loop's variable does."""
    if keep not in (True, False, "across_steps"):
        raise ArgumentError(f"keep_outputs={keep!r:.80}: True, False or 'across_steps'.")
    kept: dict[str, object] = {}
    hook = model.register_forward_hook(lambda _, __, output: kept.update(output=output)) if keep else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
