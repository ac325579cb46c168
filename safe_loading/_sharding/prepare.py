"""``Accelerator.prepare`` for models that have no weights yet: sharded and loaded before accelerate sees them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch import nn
from torch.utils.data import DataLoader

from safe_loading._core.interrupts import undone_on_error
from safe_loading._model.torch_state import TorchState
from safe_loading.errors import ArgumentError

from . import fsdp1
from .accelerate_settings import wrap_options
from .checkpoint_folder import OpenedFolder
from .later_values import WeightlessParameter
from .parameters import gradient_problems, parameters_of
from .setup import ranks_of
from .undo import model_as_before
from .weightless import LaterWeights, later_weights_of, move_to_meta
from .wrap_fsdp_meta_safe import wrap_fsdp_meta_safe

_REPLACED = "_true_prepare_of_safe_loading"


def shard_at_prepare(**options: Any) -> None:
    """Let ``Accelerator.prepare`` load models without weights; it treats all others as before."""
    true_prepare: Callable[..., Any] = getattr(Accelerator.prepare, _REPLACED, Accelerator.prepare)

    @functools.wraps(true_prepare)
    def prepare(self: Accelerator, *args: Any, **keywords: Any) -> Any:
        models = [arg for arg in args if isinstance(arg, nn.Module) and later_weights_of(arg) is not None]
        if not models:
            return true_prepare(self, *args, **keywords)
        if len(models) > 1:
            raise ArgumentError("accelerate prepares one sharded model a call; call prepare once for each.")
        (model,) = models
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        with (
            # before all else, as even a look at a parameter without weights turns torch's functions off and on again
            undone_on_error(TorchState().restore),
            _as_before(self, model, optimizers, args),
            _prepared(self, model, optimizers, options) as wrapped,
            # a rank that fails here gets its model back, and the others could not go on without it
            ranks_of(None).together("prepare what accelerate is given", timeout=options["timeout"]),
        ):
            return true_prepare(self, *[wrapped if arg is model else arg for arg in args], **keywords)

    vars(prepare)[_REPLACED] = true_prepare
    setattr(Accelerator, "prepare", prepare)  # noqa: B010  # mypy refuses to assign to a method


def shard_references(**options: Any) -> None:
    """Let trl's trainers shard references that have no weights yet, which they give to no ``prepare``.

    Each of its modules has the function under a name of its own, and most are imported when they are first used.
    """
    for name, module in [*sys.modules.items()]:
        step: Callable[..., Any] | None = vars(module).get("prepare_fsdp") if name.startswith("trl.") else None
        if step is not None:
            replaced = _loading_references(getattr(step, _REPLACED, step), options)
            setattr(module, "prepare_fsdp", replaced)  # noqa: B010  # no type declares it


def _loading_references(step: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def prepare_fsdp(model: nn.Module, accelerator: Any) -> Any:
        later = later_weights_of(model)
        if later is None:
            return step(model, accelerator)
        with undone_on_error(TorchState().restore), _as_before(accelerator, model, (), ()):
            accelerator.state.fsdp_plugin.set_auto_wrap_policy(model)
            return _shard(accelerator, model, *later, upcast=False, checkpoints=False, options=options).eval()

    vars(prepare_fsdp)[_REPLACED] = step
    return prepare_fsdp


@contextlib.contextmanager
def _as_before(
    accelerator: Any, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], args: Sequence[Any]
) -> Iterator[None]:
    """Put all that ``prepare`` changes back into its state of now when the block fails, so that it can run again."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    loaders = [part for arg in args if isinstance(arg, DataLoader) for part in _with_samplers(arg)]
    changed = [accelerator, getattr(accelerator.state, "fsdp_plugin", None), *optimizers, *groups, *loaders]
    # What is cast to float32 is cast back, for which nothing need be kept; wider values would have been rounded.
    real = [parameter for parameter in model.parameters() if not isinstance(parameter, WeightlessParameter)]
    wide = {parameter: parameter.data for parameter in real if parameter.dtype == torch.float64}
    dtypes = [(parameter, parameter.dtype) for parameter in real]

    def cast_back() -> None:
        for parameter, dtype in dtypes:
            if parameter.dtype != dtype:
                parameter.data = wide.get(parameter, parameter.data).to(dtype)

    with undone_on_error(cast_back), model_as_before(model, changed, generator=True):
        yield


def _with_samplers(loader: object) -> Iterator[object]:
    """Yield a loader, and the samplers in it: accelerate gives them generators, and replaces some."""
    yield loader
    for name in ("sampler", "batch_sampler"):
        if (inner := vars(loader).get(name)) is not None and hasattr(inner, "__dict__"):
            yield from _with_samplers(inner)


@contextlib.contextmanager
def _prepared(
    accelerator: Any, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: dict[str, Any]
) -> Iterator[nn.Module]:
    """Shard and load a model, and give the optimizers that have its parameters the new ones."""
    later = later_weights_of(model)
    if later is None or accelerator.distributed_type != DistributedType.FSDP:
        raise ArgumentError(
            f"The weights of this {type(model).__name__} are not read yet, because from_pretrained was called in "
            f"load_at_prepare(), and accelerate runs {accelerator.distributed_type}, not FSDP: launch with `accelerate "
            f"launch --use_fsdp`, pass fsdp=True to TrainingArguments, or load without load_at_prepare()."
        )
    if problems := gradient_problems(parameters_of(model)):
        raise ArgumentError(f"FSDP cannot train this {type(model).__name__} as it is:", problems)
    held = _held_parameters(model, optimizers)
    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    checkpoints = plugin.activation_checkpointing and plugin.fsdp_version == 2
    upcast = accelerator.mixed_precision != "no" and accelerator.is_fsdp2
    wrapped = _shard(accelerator, model, *later, upcast=upcast, checkpoints=checkpoints, options=options)
    _give_parameters(wrapped, held)
    plugin.activation_checkpointing = plugin.activation_checkpointing and not checkpoints
    try:
        yield wrapped
    finally:
        plugin.activation_checkpointing = plugin.activation_checkpointing or checkpoints
    # Again: accelerate tells parameters by their addresses, and a rank that owns nothing of a tensor has none for it.
    _give_parameters(wrapped, held)


def _shard(
    accelerator: Any,
    model: nn.Module,
    inner: nn.Module,
    later: LaterWeights,
    *,
    upcast: bool,
    checkpoints: bool,
    options: dict[str, Any],
) -> nn.Module:
    move_to_meta(model, inner, trained_dtype=torch.float32 if upcast else None)
    if checkpoints:
        if accelerator.state.fsdp_plugin.auto_wrap_policy is None:
            raise ArgumentError(
                "activation_checkpointing of accelerate needs to know the layers: use its auto_wrap_policy "
                "TRANSFORMER_BASED_WRAP, which is the default of Trainer."
            )
        model = fsdp2_apply_ac(accelerator, model)
    # a new head was initialized by from_pretrained; a head of the folder that the model does not have is left there
    source = OpenedFolder(later.folder, later.source) if later.source is not None else later.folder
    # what a script made real, it may have changed
    own: dict[str, Any] = {"prefer": "model", "init_new": _nothing}
    wrapped = wrap_fsdp_meta_safe(model, source, **own, **wrap_options(accelerator, model), **options)
    plugin = accelerator.state.fsdp_plugin
    fsdp1.set_prefetching(
        wrapped,
        backward=plugin.backward_prefetch,
        forward=plugin.forward_prefetch,
        limit_all_gathers=plugin.limit_all_gathers,
    )
    return wrapped


def _nothing(module: nn.Module) -> None:
    """Initialize nothing: new parameters have their values already."""


Held = list[tuple[dict[str, Any], list["str | nn.Parameter"]]]


def _held_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Held:
    """Take the model's parameters out of optimizers; return each group with their names and its other parameters."""
    names = {id(parameter.tensor): parameter.name for parameter in parameters_of(model)}
    held: Held = []
    for optimizer in optimizers:
        if any(id(parameter) in names for parameter in optimizer.state):
            raise ArgumentError(f"The {type(optimizer).__name__} has taken steps with weights that were not read yet.")
        for group in optimizer.param_groups:
            members = [_name_or_parameter(each, names) for each in group["params"]]
            held.append((group, members))
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in names]
    return held


def _name_or_parameter(parameter: nn.Parameter, names: Mapping[int, str]) -> str | nn.Parameter:
    name = names.get(id(parameter))
    return parameter if name is None else name


def _give_parameters(model: nn.Module, held: Held) -> None:
    """Put the parameters that a model has now where an optimizer had those of the same names."""
    tensors = {parameter.name: parameter.tensor for parameter in parameters_of(model)}
    for group, members in held:
        group["params"] = [tensors[member] if isinstance(member, str) else member for member in members]
