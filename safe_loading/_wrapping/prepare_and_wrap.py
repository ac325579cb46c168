"""``prepare_and_wrap``: a base, an adapter and user code, combined in the one order that saves memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import (
    MODEL_TYPE_TO_PEFT_MODEL_MAPPING,
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import nn
from transformers import PreTrainedModel

from safe_loading._core.interrupts import undone, undone_on_error
from safe_loading._core.log import quiet
from safe_loading._loading.peft_config import can_build_on_meta, changes_base
from safe_loading._loading.starts import may_change_base
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.stand_ins import MetaStandIns, NoInit
from safe_loading._model.torch_state import TorchState
from safe_loading.errors import ArgumentError, SafeLoadingError, WrapError

from .attach_head import attach_head
from .heads import as_head, head_problems
from .mixin_names import check_mixin, check_names
from .proof import prove, refuse_unreached
from .transparent import Transparent
from .wrap_order import check_order
from .wrap_transparent import wrap_transparent


def prepare_and_wrap(
    model: PreTrainedModel,
    peft_config: PeftConfig,
    mixin: type[Transparent],
    *,
    heads: Mapping[str, nn.Module | nn.Parameter] | None = None,
    adapter_name: str = "default",
    gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    **state: Any,
) -> PeftModel:
    """Prepare a base for training, add an adapter, attach heads, and wrap user code around it, in this order.

    A quantized base goes through ``prepare_model_for_kbit_training``. Any other base does not, since that function
    would cast all of it to float32; peft freezes it anyway. Mistakes in the config, the names and the heads, and code
    that would not run, are found before the base is touched.

    Args:
        model: A base of transformers, quantized or not.
        peft_config: The adapter, such as a ``LoraConfig``.
        mixin: A class derived from ``Transparent``, with the code in its ``__call__``.
        heads: Modules and bare parameters to attach, by name.
        adapter_name: The name of the adapter.
        gradient_checkpointing: Whether activations are recomputed in the backward pass.
        gradient_checkpointing_kwargs: Arguments for ``torch.utils.checkpoint``, such as ``{"use_reentrant": False}``.
        **state: Attributes that the model gets, for the mixin.

    Returns:
        The PeftModel, wrapped.

    Raises:
        WrapError: The base is in a plain wrapper, names clash, a head cannot be attached, or the code would not run.
            The base is unchanged.
        ArgumentError: The arguments contradict one another, or peft cannot use the config. The base is unchanged.
    """
    check_mixin(mixin)
    check_order(model, mixin.__name__)
    own = {name: as_head(head) for name, head in heads.items()} if isinstance(heads, Mapping) else {}
    _check_types(model, peft_config, own or heads, checkpointing=gradient_checkpointing)
    cls = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(str(peft_config.task_type), PeftModel)
    problems = check_names(model, mixin, state, also=(cls,))
    for name, head in own.items():
        problems += [f"head {name!r}: {problem}" for problem in head_problems(model, model, name, head)]
        if name in state:
            problems.append(f"{name!r} is the name of a head and of a state: rename one of them.")
    if problems:
        raise WrapError(f"{mixin.__name__} cannot go around {type(model).__name__}; nothing was changed:", problems)
    with undone_on_error(_undo_of(model, peft_config, list(own.values()))):
        _try_on_meta(model, peft_config, adapter_name, mixin)
        _prepare(model, gradient_checkpointing, gradient_checkpointing_kwargs)
        wrapped: Any = get_peft_model(model, peft_config, adapter_name=adapter_name)
        for name, head in own.items():
            attach_head(wrapped, name, head, adapter_name=adapter_name)
        result: PeftModel = wrap_transparent(wrapped, mixin, **state)
        return result


def _undo_of(model: PreTrainedModel, config: PeftConfig, heads: Sequence[nn.Module]) -> Callable[[], object]:
    """Return the function that puts the base, the heads, the config and torch back into their present state."""
    state = TorchState(generator=True)  # from which peft draws new adapters
    snapshot, fields = Snapshot(nn.ModuleList((model, *heads))), copy.deepcopy(vars(config))
    for head in heads:
        snapshot.keep_whole(head)
    if may_change_base(config):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                snapshot.keep(parameter)
    # prepare_model_for_kbit_training casts to float32, from which each value comes back as it was, without a copy.
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters()]

    def undo() -> None:
        state.restore()
        snapshot.restore()
        for parameter, dtype in dtypes:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        vars(config).update(fields)

    return undo


def _check_types(model: object, config: object, heads: object, *, checkpointing: bool) -> None:
    if not isinstance(model, PreTrainedModel):
        hint = " It has an adapter already: call wrap_transparent(model, ...)." if isinstance(model, PeftModel) else ""
        raise ArgumentError(f"{type(model).__name__} is not a PreTrainedModel.{hint}")
    if not isinstance(config, PeftConfig):
        raise ArgumentError(f"{type(config).__name__} is not a peft config, such as LoraConfig(...).")
    valid = heads is None or (isinstance(heads, Mapping) and all(isinstance(h, nn.Module) for h in heads.values()))
    if not valid:
        raise ArgumentError(f"heads={heads!r:.80}: pass modules by name: {{'value_head': torch.nn.Linear(64, 1)}}.")
    if checkpointing and not model.supports_gradient_checkpointing:
        raise ArgumentError(f"{type(model).__name__} has no gradient checkpointing: pass gradient_checkpointing=False.")


def _try_on_meta(model: PreTrainedModel, config: PeftConfig, adapter_name: str, mixin: type[Transparent]) -> None:
    """Have peft add the adapter to the model on the meta device, to find peft's refusals and where calls go."""
    on_meta = can_build_on_meta(config) and not changes_base(config)
    # Other adapters are initialized from the weights, which do not exist on meta. Calls take the same way through every
    # adapter of a task, so a LoRA takes their place.
    trial = copy.deepcopy(config) if on_meta else LoraConfig(target_modules="all-linear", task_type=config.task_type)
    try:
        with undone(Snapshot(model).restore), quiet(), MetaStandIns(model):
            with torch.device("meta"), NoInit():
                attached: Any = get_peft_model(model, trial, adapter_name=adapter_name)
            refuse_unreached(mixin, prove(attached, None, None))
    except SafeLoadingError:
        raise
    except (ValueError, TypeError, NotImplementedError, AttributeError, KeyError) as error:
        if on_meta:
            raise ArgumentError(
                f"peft cannot add this {type(config).__name__} to {type(model).__name__}; nothing was changed: {error}"
            ) from error


def _prepare(model: Any, checkpointing: bool, kwargs: dict[str, Any] | None) -> None:
    quantized = any(getattr(model, name, False) for name in ("is_loaded_in_8bit", "is_loaded_in_4bit", "is_quantized"))
    if quantized:
        prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]  # peft leaves it untyped
            model, use_gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs=kwargs
        )
    # prepare_model_for_kbit_training has switched it on for a quantized base.
    if checkpointing and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        if hasattr(model, "activation_checkpointing_enable"):  # the new name; with the old one transformers warns
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        # Reentrant checkpoints need an input that requires a gradient, and what comes before the adapter is frozen.
        model.enable_input_require_grads()
