"""The truth for traces: what the CPU allocator really allocates while a step runs, to the byte.

For a new case, run the step for real with `generation` or `training`, trace the same step, and compare the figures with
`above_start` of the trace.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from allocator import peak_above_start
from plan_truth import experts_as_generate_decodes

from safe_loading._memory.trace.records import StepTrace

NEVER = 1 << 20  # an id that no tiny model writes


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
        loss.backward()

    return {"train": peak_above_start(step)}


def above_start(trace: StepTrace, *phases: str) -> int:
    """The most bytes that were alive in some phases of a trace, above those at the start of the first of them."""
    live = start = most = 0
    begun = False
    for index, freed in trace.events:
        block = trace.allocations[index]
        counts = not freed and block.phase in phases
        if counts and not begun:
            begun, start = True, live
        live += -block.bytes if freed else block.bytes
        if counts:
            most = max(most, live - start)
    return most
