"""The truth for traces: what the CPU allocator really hands out while a step runs, to the byte."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_above_start(run: Callable[[], Any], log: list[int] | None = None) -> int:
    """Return the most bytes that were alive on the CPU while `run` ran, above those at its beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    events, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            # a number of Python becomes a tensor of the host for a moment, whatever the device
            if fields.device.type == "cpu" and abs(fields.alloc_size) > 8:
                events.append((event.start_time_ns, len(events), fields.alloc_size))
    del kept
    if log is not None:
        log.extend(size for _, _, size in sorted(events))
    live = most = 0
    for _, _, size in sorted(events):
        live += size
        most = max(most, live)
    return most


def tokens(model: Any, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """What a tokenizer gives: token ids and a mask of ones."""
    ids = torch.full((rows, columns), 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids.clone()
    return batch


@torch.no_grad()
def generation(model: Any, rows: int, columns: int) -> dict[str, int]:
    """Measure the prompt, and then the step of one token."""
    model.eval()
    kept: dict[str, Any] = {}

    def prompt() -> Any:
        batch = tokens(model, rows, columns)
        extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        kept["cache"] = model(**batch, use_cache=True, **extra).past_key_values
        return kept["cache"]

    def token() -> Any:
        batch = {"input_ids": torch.full((rows, 1), 5), "attention_mask": torch.full((rows, columns + 1), 1)}
        extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        model(**batch, past_key_values=kept["cache"], use_cache=True, **extra)

    return {"prefill": peak_above_start(prompt), "decode": peak_above_start(token)}


def training(model: Any, rows: int, columns: int, *, checkpointing: bool) -> dict[str, int]:
    """Measure forward and backward, with the gradients that they leave."""
    model.train()
    if checkpointing:
        # the states of the random generators lie on the host, whatever the device
        options = {"use_reentrant": False, "preserve_rng_state": False}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)

    def step() -> None:
        batch = tokens(model, rows, columns)
        loss = model(**batch, labels=torch.full((rows, columns), 5), use_cache=False).loss
        del batch
        loss.backward()

    return {"train": peak_above_start(step)}
