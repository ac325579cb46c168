"""Steps that are really run, as a workload describes them, for plans that were made on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tiny_models import VOCAB, tiny_config
from transformers.modeling_outputs import BaseModelOutput

from safe_loading import Workload
from safe_loading._memory.trace.inputs import forward_arguments

ROWS, COLUMNS = 2, 8
STEP = Workload.generate(ROWS, COLUMNS)
CACHES = ("cache", "past_key_values", "cache_params", "state", "past_buckets_states")


def save_tiny(name: str, folder: Any) -> Any:
    """Write a tiny model of a class of transformers in float32, with weights of its own, and return the class."""
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    kind._from_config(tiny_config(name), dtype=torch.float32).save_pretrained(folder)
    return kind


@torch.no_grad()
def generation(model: Any, device: Any = "cpu") -> list[torch.Tensor]:
    """Read a prompt and take one step of one token; return the logits of both, on the host."""
    names = forward_arguments(model)
    ids = torch.randint(12, VOCAB, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": ids.to(device)}
    if "attention_mask" in names:
        batch["attention_mask"] = torch.ones_like(ids).to(device)
    extra: dict[str, Any] = {"use_cache": True} if "use_cache" in names else {}
    if "logits_to_keep" in names:
        extra["logits_to_keep"] = 1
    decoder = getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in names
    if decoder:
        batch["decoder_input_ids"] = torch.full((ROWS, 1), 13, device=device)
    torch.manual_seed(0)
    output = model(**batch, **extra)
    logits = [output.logits.cpu().clone()]
    cache, encoded = _field(output, *CACHES), getattr(output, "encoder_last_hidden_state", None)
    del output, batch
    if cache is None:
        return logits
    last = torch.full((ROWS, 1), 14, device=device)
    batch = {"input_ids": last}
    if decoder:
        encoder_outputs = BaseModelOutput(encoded)
        batch = {"decoder_input_ids": last, "encoder_outputs": encoder_outputs}
    if "attention_mask" in names:
        batch["attention_mask"] = torch.ones((ROWS, COLUMNS + (not decoder)), dtype=torch.long, device=device)
    torch.manual_seed(0)
    with experts_as_generate_decodes(model):
        output = model(**batch, **{next(name for name in CACHES if name in names): cache}, **extra)
    return [*logits, output.logits.cpu().clone()]


@contextlib.contextmanager
def experts_as_generate_decodes(model: Any) -> Iterator[None]:
    """Inside, experts of a mixture compute as in the decode steps of ``generate()`` on an accelerator."""
    before = model.get_experts_implementation()
    model.set_experts_implementation({key: "batched_mm" if v == "grouped_mm" else v for key, v in before.items()})
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _field(output: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(output, name, None)) is not None), None)


def step_of(model: Any, workload: Workload, device: Any) -> Any:
    """Return a function that runs a workload once, as training loops and ``generate()`` do."""
    rows, columns = workload.batch_size, workload.sequence_length

    def tokens(width: int, value: int = 5) -> torch.Tensor:
        return torch.full((rows, width), value, device=device)

    if workload.kind == "generate":
        model.eval()
        how = {"max_new_tokens": workload.decode_steps + 1, "do_sample": False}  # no draw
        if model.generation_config.eos_token_id is not None:
            how["eos_token_id"] = 1 << 20  # an end that no row comes to
        return lambda: model.generate(input_ids=tokens(columns), attention_mask=tokens(columns, 1), **how)
    model.train()
    if workload.gradient_checkpointing:
        # the states of the random generators lie on the host, whatever the device
        options = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if workload.adapter is not None:
            model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)

    def train() -> None:
        batch = {"input_ids": tokens(columns), "attention_mask": tokens(columns, 1), "labels": tokens(columns)}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train
