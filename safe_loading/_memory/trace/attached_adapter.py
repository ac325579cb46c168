"""The adapter of a workload, attached to a model for a trace."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, LoraRuntimeConfig, PeftConfig, PeftModel, get_peft_model

from safe_loading._core.workload import Workload
from safe_loading._loading.allocation_limit import allocation_limit
from safe_loading._loading.peft_config import (
    as_trained,
    injecting,
    is_lora,
    mamba_outputs_adapted,
    refuse_costly_patterns,
)
from safe_loading._loading.starts import skip_deferred_start
from safe_loading._model.quantized.kbit_preparation import KbitPreparation, prepare_adapter
from safe_loading._model.quantized.stand_ins import lora_layers
from safe_loading._model.stand_ins import MetaStandIns, NoInit
from safe_loading._ranks.own_generators import own_generators
from safe_loading.errors import AdapterError

from .read_adapter import read_adapter
from .trace_error import refuse_untraced_methods

# what peft computes with before it looks whether it is there, with an example of each
_NEEDED = {"task_type": "'CAUSAL_LM'", "num_virtual_tokens": "20", "adapter_len": "10", "adapter_layers": "2"}
# which begin with what was computed of data or of quantized weights, and from there on are as every LoRA
_FROM_DATA = ("corda", "loftq")


@contextlib.contextmanager
def with_adapter(
    model: torch.nn.Module,
    workload: Workload,
    left_on_host: set[str] | None = None,
    *,
    prepare_for_kbit: KbitPreparation = "none",
) -> Iterator[torch.nn.Module]:
    """Yield the model with the workload's adapter attached: a peft config, the folder of an adapter, or None.

    While peft builds, the model's tensors are stand-ins on ``meta``, so nothing is allocated or initialized. They are
    its own again when this yields, but their ``requires_grad`` is as peft set it; the caller's snapshot restores that.
    `left_on_host` receives the names of the buffers that peft leaves on the host when the model is on a device already.
    A saved config is that of an adapter to run, of which a workload that trains makes one to train.
    `prepare_for_kbit` says who prepares it, where the base is in 4 or 8 bits.
    """
    adapter = workload.adapter
    if adapter is None:
        attached = getattr(model, "active_peft_config", None)
        if attached is not None:
            refuse_untraced_methods(attached)
        yield model
        return
    config, fitted = _config_on(model, adapter)
    refuse_untraced_methods(config)
    _refuse_incomplete(config)
    if config is not adapter:
        refuse_costly_patterns(config, model, adapter)
        config.inference_mode = workload.kind != "train"  # a saved config has True, with which nothing would be trained
    wrapped = attach_without_values(model, config, adapter, fitted, left_on_host)
    prepare_adapter(wrapped, prepare_for_kbit)
    yield wrapped


def attach_without_values(
    model: torch.nn.Module,
    config: PeftConfig,
    adapter: object,
    fitted: contextlib.AbstractContextManager[None],
    left_on_host: set[str] | None = None,
) -> PeftModel:
    """Return the model with an adapter of this config, its tensors stand-ins on ``meta`` while peft builds.

    ``adapter`` names it in errors, and ``fitted`` is the context in which its config fits the model.
    """
    config = _as_attached(config)
    # Only LoRA's modules are the same when they are made on meta. Other methods compute with what they make, such as
    # BOFT its permutations, and peft moves and casts it (AdaLoRA's ranks become trainable): made on the host, a layer
    # at a time, and moved to the stand-ins' device.
    on_meta = is_lora(config)
    uninitialized = NoInit() if on_meta else contextlib.nullcontext()
    limit = contextlib.nullcontext() if on_meta else allocation_limit(model, {}, adapter)
    device = torch.device("meta" if on_meta else "cpu")
    with (
        own_generators(),
        MetaStandIns(model),
        uninitialized,
        device,
        injecting(adapter, model),
        fitted,
        as_trained(config),
        mamba_outputs_adapted(config),
        limit,
    ):
        # which would give each layer that is replicated weights of its own
        fast = on_meta and not getattr(config, "layer_replication", None)
        wrapped: PeftModel = get_peft_model(model, config, low_cpu_mem_usage=fast)
        if left_on_host is not None:
            left_on_host.update(name for name, buffer in wrapped.named_buffers() if buffer.device.type == "cpu")
    for name in wrapped.peft_config:
        skip_deferred_start(wrapped, name)  # KaSA's SVDs: they run when the adapter is made, not in a step
    return wrapped


def _config_on(
    model: torch.nn.Module, adapter: PeftConfig | str | os.PathLike[str]
) -> tuple[PeftConfig, contextlib.AbstractContextManager[None]]:
    """Return an adapter's config for a model, and the context in which peft builds it."""
    if isinstance(adapter, (str, os.PathLike)):
        return read_adapter(adapter).config_on(model)
    return adapter, contextlib.nullcontext()


def _refuse_incomplete(config: PeftConfig) -> None:
    """Raise `AdapterError` for a config that lacks fields which peft needs, and which its own errors do not name."""
    fields = vars(config)
    prompts = [name for name in ("task_type", "num_virtual_tokens") if config.is_prompt_learning]
    missing = [name for name in (*prompts, "adapter_len", "adapter_layers") if name in fields and fields[name] is None]
    if missing:
        kind = type(config).__name__
        example = ", ".join(f"{name}={_NEEDED[name]}" for name in missing)
        raise AdapterError(f"{kind} has no {' and no '.join(missing)}. Pass {kind}({example}), with values of yours.")


def _as_attached(config: PeftConfig) -> PeftConfig:
    """Return a LoRA's config so that it can be attached here: without a GPU, data or values, and to stand-ins."""
    if not isinstance(config, LoraConfig):
        return config
    config = copy.copy(config)
    if config.init_lora_weights in _FROM_DATA:
        config.init_lora_weights = True
    velora: Any = getattr(config, "velora_config", None)
    if velora is not None and velora.init_type == "random":  # which looks at its values; the first batch makes as many
        config.velora_config = copy.copy(velora)
        vars(config.velora_config)["init_type"] = "batch_average_once"
    if config.runtime_config.ephemeral_gpu_offload:  # which moves weights to the GPU while DoRA begins, and back
        config.runtime_config = LoraRuntimeConfig(ephemeral_gpu_offload=False)
    if lora_layers():
        config._custom_modules = {**(config._custom_modules or {}), **lora_layers()}
    return config
