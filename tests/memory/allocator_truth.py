"""The truth for traces: what the CPU allocator really allocates while a step runs, to the byte.

For a new case, run the step for real with `generation` or `training`, trace the same step, and compare the figures with
`above_start` of the trace. For anything else that runs on the CPU take `peak_above_start` or `bytes_kept_by`.

Two things are left out, which are allocated on the CPU alone. A Python number becomes a tensor on the host, whatever
the device. And some CPU kernels allocate scratch of their own, some KiB, and free it before they return.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from plan_truth import experts_as_generate_decodes
from torch.profiler import ProfilerActivity, profile

from safe_loading._memory.trace.records import StepTrace

NEVER = 1 << 20  # an id that no tiny model writes
NUMBER = 8  # bytes of a Python number
KERNELS_WITH_SCRATCH = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::mkldnn_convolution",
    "aten::convolution_backward",
)


@dataclass(frozen=True)
class _Event:
    """One allocation, or one free with a negative size; and when the operations that it is part of end."""

    time: int
    size: int
    address: int
    operation: int = 0  # when the outermost operation ends; 0 outside of any
    kernel: int = 0  # when the kernel with scratch ends; 0 outside of any


def peak_above_start(run: Callable[[], Any], log: list[int] | None = None) -> int:
    """Return the most bytes that were alive on the CPU while `run` ran, above those at its start.

    `log` receives the size of each allocation, and the negative size of each free.
    """
    with _profiled() as profiler:
        kept = run()
    sizes = _without_scratch(_events(profiler))
    del kept
    if log is not None:
        log.extend(sizes)
    return max(itertools.accumulate(sizes), default=0)


def bytes_kept_by(run: Callable[[], Any]) -> int:
    """Return the bytes on the CPU that the result of `run` keeps alive, such as the graph of a loss."""
    with _profiled() as profiler:
        kept = run()
    size = sum(_without_scratch(_events(profiler)))
    del kept
    return size


def _profiled() -> Any:
    gc.collect()  # or cycles that earlier tests left would be freed in the middle, and be missing from the peak
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _events(profiler: Any) -> list[_Event]:
    found, stack = [], [(event, 0, 0) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while stack:
        event, operation, kernel = stack.pop()
        kinds: Any = torch._C
        if event.tag == kinds._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                found.append(_Event(event.start_time_ns, fields.alloc_size, fields.ptr, operation, kernel))
        if not operation and event.name.startswith("aten::"):
            operation = event.end_time_ns
        if not kernel and event.name in KERNELS_WITH_SCRATCH:
            kernel = event.end_time_ns
        stack.extend((child, operation, kernel) for child in event.children)
    return sorted(found, key=lambda event: event.time)


def _without_scratch(events: list[_Event]) -> list[int]:
    born: dict[int, int] = {}
    out = set()
    for at, event in enumerate(events):
        if event.size > 0:
            born[event.address] = at
            if event.size <= NUMBER and not event.operation:
                out.add(at)
        elif event.address in born:
            start = born.pop(event.address)
            first = events[start]
            number = first.size <= NUMBER and event.time < first.operation
            if start in out or number or event.time < first.kernel:
                out |= {start, at}
    return [event.size for at, event in enumerate(events) if at not in out]


def tokens(model: Any, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """What a tokenizer returns: token ids and a mask of ones."""
    ids = torch.full((rows, columns), 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids.clone()
    return batch


def make_batch(model: Any, rows: int, columns: int, inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Copies of the case's own inputs, or else tokens, or images for a model that takes no tokens."""
    takes = inspect.signature(model.forward).parameters
    if inputs is not None:
        return {name: tensor.clone() for name, tensor in inputs.items()}
    if "input_ids" not in takes:
        size = model.config.image_size
        return {"pixel_values": torch.zeros(rows, model.config.num_channels, size, size)}
    return {name: tensor for name, tensor in tokens(model, rows, columns).items() if name in takes}


def generation(model: Any, rows: int, columns: int, inputs: dict[str, Any] | None = None, *, steps: int = 1) -> int:
    """Measure the model's own ``generate()`` with `steps` tokens after the first; a forward pass for other models."""
    model.eval()

    def run() -> Any:
        batch = make_batch(model, rows, columns, inputs)
        if not model.can_generate():
            with torch.no_grad():
                return model(**batch).logits
        batch.pop("decoder_input_ids", None)  # generate() starts a decoder by itself
        # an end that no row comes to, since a minimum of tokens would bring a processor of scores
        if hasattr(model, "_optimize_model_for_decode"):  # as on an accelerator, where experts decode in another way
            model._optimize_model_for_decode = functools.partial(experts_as_generate_decodes, model)
        return model.generate(**batch, max_new_tokens=steps + 1, do_sample=False, eos_token_id=NEVER)

    return peak_above_start(run)


def training(
    model: Any, rows: int, columns: int, inputs: dict[str, Any] | None = None, *, checkpointing: bool
) -> dict[str, int]:
    """Measure forward and backward, with the gradients that they leave; bytes under ``"train"``."""
    model.train()
    if checkpointing:
        # the states of the random generators lie on the host, whatever the device
        options = {"use_reentrant": False, "preserve_rng_state": False}
        name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # transformers 5.17
        getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": options})
    extra = {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}
    whole = type(model).__name__.endswith(("ForImageClassification", "ForSequenceClassification"))

    def step() -> None:
        batch = make_batch(model, rows, columns, inputs)
        batch["labels"] = torch.full((rows,), 1) if whole else torch.full((rows, columns), 5)
        loss = model(**batch, **extra).loss
        del batch
        loss.backward()

    return {"train": peak_above_start(step)}


def above_start(trace: StepTrace, *phases: str) -> int:
    """The most bytes that were alive in some phases of a trace, above those at the start of the first of them."""
    live = start = most = 0
    begun = False
    for event in trace.events:
        block = trace.allocations[event.allocation]
        counts = not event.freed and block.phase in phases
        if counts and not begun:
            begun, start = True, live
        live += event.sign * block.bytes
        if counts:
            most = max(most, live - start)
    return most
