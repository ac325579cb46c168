"""The forward passes in a trace of generation: a prompt and steps of one token, as ``generate()`` calls the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from safe_loading._core.workload import Workload

from .generated_sequences import GeneratedSequences
from .inputs import StepInputs, engine_model
from .ledger import Ledger
from .step_tensors import autocast, classify_cache, classify_inputs, field

# transformers 5.24 has one name, "cache"; before, most models had the second
_CACHES = ("cache", "past_key_values", "cache_params", "state", "past_buckets_states")


def run_generation(model: torch.nn.Module, workload: Workload, inputs: StepInputs, ledger: Ledger) -> object:
    """Run the prompt, then the steps of one token each, as ``generate()`` calls the model; return the cache."""
    ledger.phase = "prefill"
    name = next((name for name in _CACHES if name in inputs.names), "")
    # the encoder of T5 refuses a cache, though its config speaks of one
    options: dict[str, object] = {"use_cache": True} if "use_cache" in inputs.names and name else {}
    if "logits_to_keep" in inputs.names:
        options["logits_to_keep"] = 1  # as generate() asks for
    with torch.no_grad(), autocast(workload):
        prompt = inputs.batch(workload.batch_size, workload.context_length)  # the caller's, who holds it until the end
        classify_inputs(prompt, ledger)
        if inputs.classifies or (not inputs.generates and "decoder_input_ids" not in prompt):
            return _forward_passes(model, prompt, workload, inputs, ledger, options, name)
        encoder_decoder = "decoder_input_ids" in prompt
        sequences = GeneratedSequences(prompt, inputs, ledger, sampled=workload.do_sample)
        prompt.pop("decoder_input_ids", None)  # which generate() makes itself
        with _encoder_output(model if encoder_decoder else None) as encoder_outputs:
            output = model(**sequences.prompt(), **options)
        encoded = encoder_outputs.pop() if encoder_outputs else field(output, "encoder_last_hidden_state")
        encoded = BaseModelOutput(encoded) if isinstance(encoded, torch.Tensor) else encoded
        again: dict[str, object] = {} if encoded is None else {"encoder_outputs": encoded}
        cache = field(output, *_CACHES)
        classify_cache(cache, ledger)
        sequences.append(output)
        output = None  # generate() deletes it too before the next token
        ledger.phase = "decode"
        decoder = inputs.of_next_token(model)
        with inputs.decoding():
            for _ in range(workload.decode_steps if cache is not None and name else 0):
                ledger.begun.append(len(ledger.events))
                arguments = sequences.last_token()  # those of the step before are alive until these are there
                output = decoder(**arguments, **again, **{name: cache}, **options)
                cache = field(output, name)
                classify_cache(cache, ledger)
                sequences.append(output)
                output = None
    return cache


def _forward_passes(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    workload: Workload,
    inputs: StepInputs,
    ledger: Ledger,
    options: dict[str, object],
    name: str,
) -> object:
    """Run a model that ``generate()`` does not know, such as one without a head; return its cache if it has one."""
    output = model(**batch, **options)
    cache = field(output, *_CACHES)
    output = None
    classify_cache(cache, ledger)
    ledger.phase = "decode"
    goes_on = cache is not None and name and not inputs.classifies
    for step in range(workload.decode_steps if goes_on else 0):
        ledger.begun.append(len(ledger.events))
        rows = inputs.rows(workload.batch_size)
        following = {"input_ids": inputs.tokens(rows, 1)}
        if "attention_mask" in batch:
            following["attention_mask"] = inputs.tokens(rows, batch["attention_mask"].shape[-1] + step + 1)
        classify_inputs(following, ledger)
        output = model(**following, **{name: cache}, **options)
        cache = field(output, name)
        output = None
        classify_cache(cache, ledger)
    return cache


@contextlib.contextmanager
def _encoder_output(model: torch.nn.Module | None) -> Iterator[list[object]]:
    """Collect the outputs of the model's encoder, which generate() passes to the decoder as they are.

    generate() asks the decoder alone for a cache, which some encoders refuse.
    """
    outputs: list[object] = []
    get_encoder = getattr(engine_model(model), "get_encoder", None) if model is not None else None
    encoder = get_encoder() if callable(get_encoder) else None
    if not isinstance(encoder, torch.nn.Module):
        yield outputs
        return
    asked = encoder.register_forward_pre_hook(_without_cache, with_kwargs=True)
    with (
        asked,
        encoder.register_forward_hook(lambda _, __, out: outputs.append(out) if isinstance(out, dict) else None),
    ):
        yield outputs


def _without_cache(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name != "use_cache" or not value}
