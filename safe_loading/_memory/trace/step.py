"""The steps themselves: a prompt and a token, or forward, loss, backward and the optimizer."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from safe_loading._core.workload import OptimizerRule, Workload

from .inputs import Inputs, known
from .ledger import Ledger

_CACHES = ("past_key_values", "cache_params", "state", "past_buckets_states")


def generate(model: torch.nn.Module, workload: Workload, inputs: Inputs, ledger: Ledger) -> Any:
    """Read the prompt, then take the steps of one token, as ``generate()`` calls the model; return the cache."""
    ledger.phase = "prefill"
    batch = inputs.prompt(workload.batch_size, workload.context_length)
    _note_inputs(batch, ledger)
    extra: dict[str, Any] = {"use_cache": True} if "use_cache" in inputs.names else {}
    if "logits_to_keep" in inputs.names:
        extra["logits_to_keep"] = 1  # as generate() asks for
    encoder_decoder = "decoder_input_ids" in batch
    if encoder_decoder:
        batch["decoder_input_ids"] = inputs.tokens(inputs.rows(workload.batch_size), 1)
        _note_inputs(batch, ledger)
    with torch.no_grad(), _autocast(workload):
        with _encoded(model if encoder_decoder else None) as own:
            output = model(**batch, **extra)
        cache = _field(output, *_CACHES)
        encoded = own.pop() if own else _field(output, "encoder_last_hidden_state")
        output = None
        _note_cache(cache, ledger)
        masked = "attention_mask" in batch
        length = batch["attention_mask"].shape[-1] if masked and not encoder_decoder else 1
        batch = {"attention_mask": batch["attention_mask"]} if encoder_decoder and masked else {}
        ledger.phase = "decode"
        name = next((name for name in _CACHES if name in inputs.names), "")
        for step in range(workload.decode_steps if cache is not None and name else 0):
            batch = _next(inputs, workload, batch, length + step + 1 if masked else 0, encoded)
            _note_inputs(batch, ledger)
            output = model(**batch, **{name: cache}, **extra)
            cache = _field(output, name)
            output = None
            _note_cache(cache, ledger)
    return cache


@contextlib.contextmanager
def _encoded(model: torch.nn.Module | None) -> Iterator[list[Any]]:
    """Keep what the model's encoder gives, which generate() passes to the decoder as it is."""
    kept: list[Any] = []
    encoder = known(model).get_encoder() if model is not None and hasattr(known(model), "get_encoder") else None  # type: ignore[operator]  # a model's method
    if not isinstance(encoder, torch.nn.Module):
        yield kept
        return
    handle = encoder.register_forward_hook(
        lambda _, __, output: kept.append(output) if isinstance(output, dict) else None
    )
    try:
        yield kept
    finally:
        handle.remove()


def _next(inputs: Inputs, workload: Workload, batch: dict[str, Any], length: int, encoded: Any) -> dict[str, Any]:
    rows = inputs.rows(workload.batch_size)
    if encoded is not None:
        from transformers.modeling_outputs import BaseModelOutput

        encoded = BaseModelOutput(encoded) if isinstance(encoded, torch.Tensor) else encoded
        return {**batch, "decoder_input_ids": inputs.tokens(rows, 1), "encoder_outputs": encoded}
    after = {"input_ids": inputs.tokens(rows, 1)}
    if length:
        after["attention_mask"] = inputs.tokens(rows, length)
    return after


def train(model: torch.nn.Module, workload: Workload, inputs: Inputs, ledger: Ledger, params: list[Any]) -> None:
    """Take one training step as it is once the optimizer's state is there."""
    optimizer = _optimizer(workload, params, ledger)
    ledger.settle()
    for parameter in params:
        parameter.register_post_accumulate_grad_hook(
            lambda p: ledger.mark(ledger.number(p.grad), "gradients") if p.grad is not None else None
        )
    for _ in range(min(workload.gradient_accumulation_steps, 2)):  # the third is like the second
        ledger.phase = "forward"
        batch = inputs.prompt(workload.batch_size, workload.sequence_length)
        if workload.labels and "labels" in inputs.names and "labels" not in batch:
            batch["labels"] = inputs.labels(workload.batch_size, workload.sequence_length)
        _note_inputs(batch, ledger)
        extra = {"use_cache": False} if "use_cache" in inputs.names else {}
        with torch.enable_grad(), _autocast(workload):
            output = model(**batch, **extra)
            del batch  # as the Trainer does before the backward pass
            loss = _loss(output)
            del output
        _note_activations(ledger)
        ledger.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        del loss
    ledger.phase = "optimizer"
    if optimizer is not None:
        optimizer.step()
    for parameter in params:
        parameter.grad = None


def _loss(output: Any) -> torch.Tensor:
    loss = _field(output, "loss")
    if loss is None:
        tensors = [t for t in _tensors(output) if t.requires_grad and t.is_floating_point()]
        loss = torch.stack([t.float().mean() for t in tensors[:1]]).sum()
    return loss  # type: ignore[no-any-return]  # a tensor of the model's


def _optimizer(workload: Workload, params: list[Any], ledger: Ledger) -> Any:
    """Make the optimizer and its state, which is there from the second step on."""
    rule = workload.rule
    if not params or (rule is not None and rule.source is None):
        _note_state(rule, params, ledger)
        return None
    if rule is None:
        kind, options = workload.optimizer, {}
    else:
        module, _, name = (rule.source or "").partition(":")
        kind, options = getattr(importlib.import_module(module), name), dict(rule.options)
    optimizer: Any = kind(params, **options)  # type: ignore[operator]  # a class
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for tensor in _tensors(state):
            ledger.mark(ledger.number(tensor), "optimizer")
    return optimizer


def _note_state(rule: OptimizerRule | None, params: Iterable[Any], ledger: Ledger) -> None:
    if rule is None:
        return
    for parameter in params:
        size = rule.state_bytes(parameter.shape, parameter.itemsize)
        if size:
            state = torch.empty(size, dtype=torch.uint8, device=parameter.device)
            ledger.mark(ledger.number(state), "optimizer")
            ledger.hold(state)


def _autocast(workload: Workload) -> Any:
    if workload.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, workload.autocast))


def _note_inputs(batch: dict[str, Any], ledger: Ledger) -> None:
    for tensor in _tensors(batch):
        number = ledger.number(tensor)
        if number is not None and ledger.allocations[number].component == "temporary":
            ledger.mark(number, "inputs", module="")


def _note_cache(cache: Any, ledger: Ledger) -> None:
    for tensor in _tensors(cache):
        ledger.mark(ledger.number(tensor), "kv_cache")


def _note_activations(ledger: Ledger) -> None:
    for index in list(ledger.alive.values()):
        if ledger.allocations[index].component == "temporary":
            ledger.mark(index, "activations")


def _field(output: Any, *names: str) -> Any:
    for name in names:
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if value is not None:
            return value
    return None


def _tensors(value: Any, depth: int = 6) -> list[torch.Tensor]:
    """Return the tensors in containers and in the attributes of objects, caches above all."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or value is None or isinstance(value, (str, int, float, type, torch.nn.Module)):
        return []
    items = list(value.values()) if isinstance(value, dict) else []
    items += list(value) if isinstance(value, (list, tuple)) else []
    if hasattr(value, "__dict__"):
        items += list(vars(value).values())
    return [tensor for item in items for tensor in _tensors(item, depth - 1)]
