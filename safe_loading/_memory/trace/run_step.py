"""What is run in a trace: a prompt and tokens after it, or forward, loss, backward and the optimizer."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from transformers.modeling_outputs import BaseModelOutput

from safe_loading._core.workload import OptimizerRule, Workload

from .inputs import StepInputs, engine_model
from .ledger import Ledger
from .trained_parameters import TrainedParameters

_CACHES = ("past_key_values", "cache_params", "state", "past_buckets_states")
_DEEPEST_CACHE = 6  # containers and objects inside one another


def run_generation(model: torch.nn.Module, workload: Workload, inputs: StepInputs, ledger: Ledger) -> object:
    """Run the prompt, then the steps of one token each, as ``generate()`` calls the model; return the cache."""
    ledger.phase = "prefill"
    prompt = inputs.batch(workload.batch_size, workload.context_length)
    length = prompt["attention_mask"].shape[-1] if "attention_mask" in prompt else 0
    batch: dict[str, object] = {**prompt}
    del prompt
    options: dict[str, object] = {"use_cache": True} if "use_cache" in inputs.names else {}
    if "logits_to_keep" in inputs.names:
        options["logits_to_keep"] = 1  # as generate() asks for
    # generate() starts a decoder with one token, whatever the length of the text that the encoder reads
    encoder_decoder = "decoder_input_ids" in batch
    _classify_inputs(batch, ledger)
    if encoder_decoder:
        batch["decoder_input_ids"] = inputs.tokens(inputs.rows(workload.batch_size), 1)
        _classify_inputs(batch, ledger)
    with torch.no_grad(), _autocast(workload):
        with _encoder_output(model if encoder_decoder else None) as encoder_outputs:
            output = model(**batch, **options)
        cache = _field(output, *_CACHES)
        encoded = encoder_outputs.pop() if encoder_outputs else _field(output, "encoder_last_hidden_state")
        output = None  # generate() deletes it too before the next token
        _classify_cache(cache, ledger)
        # the prompt's tensors are freed here, so nothing else may refer to them
        masked = "attention_mask" in batch
        batch = {"attention_mask": batch["attention_mask"]} if encoder_decoder and masked else {}
        ledger.phase = "decode"
        name = next((name for name in _CACHES if name in inputs.names), "")
        for step in range(workload.decode_steps if cache is not None and name else 0):
            batch = _next_token(inputs, workload, batch, length + step + 1 if masked else 0, encoded)
            _classify_inputs(batch, ledger)
            output = model(**batch, **{name: cache}, **options)
            cache = _field(output, name)
            output = None
            _classify_cache(cache, ledger)
    return cache


@contextlib.contextmanager
def _encoder_output(model: torch.nn.Module | None) -> Iterator[list[object]]:
    """Collect what the model's encoder returns, which generate() passes to the decoder as it is."""
    outputs: list[object] = []
    get_encoder = getattr(engine_model(model), "get_encoder", None) if model is not None else None
    encoder = get_encoder() if callable(get_encoder) else None
    if not isinstance(encoder, torch.nn.Module):
        yield outputs
        return
    handle = encoder.register_forward_hook(
        lambda _, __, output: outputs.append(output) if isinstance(output, dict) else None
    )
    try:
        yield outputs
    finally:
        handle.remove()


def _next_token(
    inputs: StepInputs, workload: Workload, batch: dict[str, object], length: int, encoded: object
) -> dict[str, object]:
    """Return the arguments of a decode step; `length` is the mask's, 0 for a model without a mask."""
    rows = inputs.rows(workload.batch_size)
    if encoded is not None:
        encoded = BaseModelOutput(encoded) if isinstance(encoded, torch.Tensor) else encoded
        return {**batch, "decoder_input_ids": inputs.tokens(rows, 1), "encoder_outputs": encoded}
    following: dict[str, object] = {"input_ids": inputs.tokens(rows, 1)}
    if length:
        following["attention_mask"] = inputs.tokens(rows, length)
    return following


def run_training(
    model: torch.nn.Module,
    workload: Workload,
    inputs: StepInputs,
    ledger: Ledger,
    trained: TrainedParameters,
) -> None:
    """Run one training step in its steady state, with the optimizer's state already allocated."""
    optimizer = _make_optimizer(workload, trained.stepped, ledger)
    ledger.make_resident()
    for parameter in trained.parameters:
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # of torch
            lambda p: ledger.classify(ledger.index_of(p.grad), "gradients") if p.grad is not None else None
        )
    micro_batches = min(workload.gradient_accumulation_steps, 2)  # every further one is like the first
    for number in range(micro_batches):
        last = number == micro_batches - 1
        trained.begin_micro_batch(last)
        ledger.phase = "forward"
        batch = inputs.batch(workload.batch_size, workload.sequence_length)
        if workload.labels and "labels" in inputs.names and "labels" not in batch:
            batch["labels"] = inputs.labels(workload.batch_size, workload.sequence_length)
        _classify_inputs(batch, ledger)
        options = {"use_cache": False} if "use_cache" in inputs.names else {}
        with torch.enable_grad(), _autocast(workload), _offloaded(workload):
            output = model(**batch, **options)
            del batch  # as the Trainer does before the backward pass
            loss = _loss_of(output)
            del output
        _classify_activations(ledger)
        # from here on what a checkpoint recomputes is temporary, since it was not alive after the forward pass
        ledger.phase = "backward"
        trained.begin_backward(last)
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        del loss
        trained.bring_gradients(ledger)
    ledger.phase = "optimizer"
    if optimizer is not None:
        _drop_unused_state(optimizer, ledger)
        optimizer.step()
        for tensor in _tensors_of(list(optimizer.state.values())):  # which outlives this function
            ledger.keep_alive(tensor)
    trained.drop_gradients()


def _loss_of(output: object) -> torch.Tensor:
    """Return the model's own loss, or the mean of its first differentiable output."""
    loss = _field(output, "loss")
    if loss is None:
        tensors = [t for t in _tensors_of(output) if t.requires_grad and t.is_floating_point()]
        return torch.stack([t.float().mean() for t in tensors[:1]]).sum()
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}, not a tensor")
    return loss


def _make_optimizer(
    workload: Workload, parameters: Sequence[torch.nn.Parameter], ledger: Ledger
) -> torch.optim.Optimizer | None:
    """Return the optimizer with its state, which is there from the second step on; None where only state is counted."""
    rule = workload.rule
    if not parameters or (rule is not None and rule.source is None):
        _allocate_state(rule, parameters, ledger)
        return None
    if rule is None:
        optimizer_class, options = workload.optimizer, {}
    else:
        module, _, name = (rule.source or "").partition(":")
        optimizer_class, options = getattr(importlib.import_module(module), name), dict(rule.options)
    optimizer: torch.optim.Optimizer = optimizer_class(parameters, **options)  # type: ignore[operator]  # a class
    # Whether a CUDA graph is being captured is asked of the current GPU, which makes a context on it (torch 2.13).
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(optimizer, name, lambda: None)
    # optimizers allocate their state in the first step; only the fake gradients' shapes matter
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for tensor in _tensors_of(state):
            ledger.classify(ledger.index_of(tensor), "optimizer")
    return optimizer


def _drop_unused_state(optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
    """Take back the state of parameters that the step gave no gradient, for which a real optimizer makes none."""
    for parameter, state in optimizer.state.items():
        if parameter.grad is None:
            for tensor in _tensors_of(state):
                ledger.take_back(tensor)


def _allocate_state(rule: OptimizerRule | None, parameters: Iterable[torch.nn.Parameter], ledger: Ledger) -> None:
    """Allocate what an optimizer that is not run would keep."""
    if rule is None:
        return
    for parameter in parameters:
        size = rule.state_bytes(parameter.shape, parameter.itemsize)
        if size:
            state = torch.empty(size, dtype=torch.uint8, device=parameter.device)
            ledger.classify(ledger.index_of(state), "optimizer")
            ledger.keep_alive(state)


def _autocast(workload: Workload) -> AbstractContextManager[object]:
    if workload.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, workload.autocast))


def _offloaded(workload: Workload) -> AbstractContextManager[object]:
    # pinned memory of the host would make no difference on the device
    return torch.autograd.graph.save_on_cpu() if workload.activation_offload else contextlib.nullcontext()


def _classify_inputs(batch: object, ledger: Ledger) -> None:
    for tensor in _tensors_of(batch):
        index = ledger.index_of(tensor)
        if index is not None and ledger.allocations[index].component == "temporary":
            ledger.classify(index, "inputs", module="")


def _classify_cache(cache: object, ledger: Ledger) -> None:
    for tensor in _tensors_of(cache):
        ledger.classify(ledger.index_of(tensor), "kv_cache")


def _classify_activations(ledger: Ledger) -> None:
    """What the forward pass made and is alive after it is there for the backward pass."""
    for index in list(ledger.live.values()):
        if ledger.allocations[index].component == "temporary":
            ledger.classify(index, "activations")


def _field(output: object, *names: str) -> object:
    """Return the first of a model output's fields that is there and not None."""
    for name in names:
        value: object = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if value is not None:
            return value
    return None


def _tensors_of(value: object, depth: int = _DEEPEST_CACHE) -> list[torch.Tensor]:
    """Return the tensors in containers and in the attributes of objects such as caches."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or value is None or isinstance(value, (str, int, float, type, torch.nn.Module)):
        return []
    items: list[object] = list(value.values()) if isinstance(value, dict) else []
    items += list(value) if isinstance(value, (list, tuple)) else []
    if hasattr(value, "__dict__"):
        items += list(vars(value).values())
    return [tensor for item in items for tensor in _tensors_of(item, depth - 1)]
