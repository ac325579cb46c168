"""FSDP2: which rows a rank owns, ``fully_shard`` over meta, and the local shards put in place."""

from __future__ import annotations

import functools
import importlib
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from safe_loading._model.formats.four_bit import is_four_bit
from safe_loading._model.layout.window import Window
from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import ArgumentError, DeviceError

from .fsdp_units import ShardingUnit
from .local_shard import ElementRange
from .parameters import parameters_of

# Methods of wrappers (value heads, reward models) that compute without calling the wrapper's own forward.
FORWARD_METHODS = ("generate", "score", "value", "get_value", "get_values", "compute_value", "compute_values")
# Attributes of parameters that hold for the very tensor: numbers of FSDP2, and marks of a load.
_OF_ENGINES = ("_fsdp", "_is_hf_initialized", "_from_folder_of_safe_loading", "_sharing_of_safe_loading")


def mixed_precision_policy(policy: object) -> MixedPrecisionPolicy:
    """Return a policy of FSDP2; a dtype stands for computing in it and reducing gradients in float32."""
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, torch.dtype):
        return MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=torch.float32)
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    instead = ""
    if isinstance(policy, MixedPrecision):
        dtypes = f"param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype}"
        instead = f": pass MixedPrecisionPolicy({dtypes}), which leaves buffers in their dtype, or version=1"
    raise ArgumentError(f"mp_policy={policy!r}: FSDP2 takes a MixedPrecisionPolicy, a torch.dtype or None{instead}.")


def offload_policy(policy: object, device: torch.device) -> OffloadPolicy:
    """Return a policy of FSDP2; host memory is pinned only where there is an accelerator to copy to."""
    if isinstance(policy, CPUOffloadPolicy) and device.type == "cpu":
        return CPUOffloadPolicy(pin_memory=False)
    if isinstance(policy, OffloadPolicy):
        return policy
    if not isinstance(policy, bool | None):
        raise ArgumentError(f"offload_policy={policy!r}: pass a bool or an OffloadPolicy of torch.distributed.fsdp.")
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if policy else OffloadPolicy()


def offloads(policy: object) -> bool:
    """Whether the shards stay on the host, by a policy of either version."""
    return isinstance(policy, CPUOffloadPolicy) or bool(getattr(policy, "offload_params", False))


def check(parameters: Sequence[ModelTensor]) -> list[str]:
    """Return the problems that ``fully_shard`` would report only after it has changed the model."""
    problems = []
    for parameter in parameters:
        name, tensor = parameter.name, parameter.tensor
        if len(tensor) and not tensor.numel():  # torch splits a tensor without rows
            problems.append(
                f"{name} {list(tensor.shape)} has rows without elements: pass it in ignored_params= of "
                f"wrap_fsdp_meta_safe"
            )
        elif not tensor.is_contiguous():
            problems.append(f"{name} is not contiguous (strides {list(tensor.stride())}): call .contiguous()")
        elif isinstance(tensor, DTensor):
            problems.append(
                f"{name} is a DTensor already: wrap the plain model, for tensor parallelism with a mesh of the "
                f"dimensions 'fsdp' and 'tp'"
            )
    return problems


def own_rows(shape: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row that a rank owns and the one after its last: FSDP2 splits rows as ``chunk`` does."""
    rows = -(-shape[0] // ranks)
    return min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])


def owned_ranges(
    parameters: Sequence[ModelTensor], rank: int, ranks: int, windows: Mapping[str, Window]
) -> list[ElementRange]:
    """Return the ranges that one rank of the shard group owns; ``windows`` are the parts of those that are split."""
    ranges = []
    for parameter in parameters:
        name, tensor = parameter.names[0], parameter.tensor
        window = windows.get(name)
        shape = tensor.shape if window is None else window.shape(tensor.shape)
        start, stop = own_rows(shape, rank, ranks)
        row = math.prod(shape[1:])
        ranges.append(ElementRange(name, start * row, stop * row, tensor.dtype, window))
    return ranges


def allocate(
    parameters: Sequence[ModelTensor], owned: Sequence[ElementRange], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return an empty local shard for the range of each parameter, in the shape that FSDP2 gives it."""
    shards = {}
    for parameter, own in zip(parameters, owned, strict=True):
        shape = parameter.tensor.shape if own.window is None else own.window.shape(parameter.tensor.shape)
        rows = (own.stop - own.start) // math.prod(shape[1:])
        shards[own.name] = torch.empty((rows, *shape[1:]), dtype=own.dtype, device=device)
    return shards


def wrap(
    model: nn.Module,
    units: Sequence[ShardingUnit],
    mesh: DeviceMesh,
    mixed_precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: Collection[nn.Parameter],
    reshard_after_forward: bool | int | None,
) -> None:
    """Apply ``fully_shard`` to each unit, the root last: a unit leaves out the parameters of the units inside it.

    ``reshard_after_forward`` is torch's, for the units that are not kept; None is torch's default, to free them.
    """
    modules = dict(model.named_modules())
    apart = _parameters_apart(model, units)
    left = set(ignored).union(*apart.values())

    def shard(targets: Sequence[nn.Module], reshard: bool | int | None) -> None:
        fully_shard(
            targets[0] if len(targets) == 1 else list(targets),
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=mixed_precision,
            offload_policy=offload,
            ignored_params=left or None,
        )
        for target in targets:
            sharded: Any = type(target)
            target.__class__ = class_of_unit(sharded.__mro__[2])  # FSDP<name>, FSDPModule, <name>

    for unit in units:
        if unit.parameters_only:
            continue
        is_root = unit.modules == ("",)
        if is_root and (base := base_of_adapters(model)) is not None and not _shares_with_outside(base, model):
            # A unit of its own, so that it still gathers its parameters when peft gives it back without the adapters.
            # Kept as a root is, which torch decides for the root alone.
            shard([base], False)
        # None for the root, for which torch decides: it stays gathered until the backward pass
        shard(
            [modules[name] for name in unit.modules],
            None if is_root else False if unit.keeps else reshard_after_forward,
        )
    for unit, own in apart.items():  # once the units around them have taken what else their modules have
        left = set(model.parameters()) - own
        shard([modules[name] for name in unit.modules], reshard_after_forward)


def _parameters_apart(model: nn.Module, units: Sequence[ShardingUnit]) -> dict[ShardingUnit, set[nn.Parameter]]:
    """Return the parameters of each unit that leaves the others of its modules to the unit around it."""
    apart = [unit for unit in units if unit.parameters_only]
    named = {each.name: cast("nn.Parameter", each.tensor) for each in parameters_of(model)} if apart else {}
    return {unit: {named[name] for name in unit.parameters} for unit in apart}


def _shares_with_outside(base: nn.Module, model: nn.Module) -> bool:
    """Return whether parameters of the base are those of modules around it too: one unit takes both places of them.

    So are vectors that peft keeps once for all layers (VB-LoRA, Uni-LoRA, TinyLoRA).
    """
    prefix = next(f"{name}." for name, module in model.named_modules() if module is base)
    named = [(name, id(each)) for name, each in model.named_parameters(remove_duplicate=False)]
    inside = {each for name, each in named if name.startswith(prefix)}
    return any(each in inside for name, each in named if not name.startswith(prefix))


def let_generate_wait(model: nn.Module) -> None:
    """Let ``generate`` of transformers take steps until all ranks are done, because each step is a collective."""
    for module in model.modules():
        if callable(getattr(type(module), "generate", None)):
            module.__dict__["_is_fsdp_managed_module"] = True  # what transformers looks at


@functools.cache
def class_of_unit(plain: type[Any]) -> type[nn.Module]:
    """Return the class that ``fully_shard`` makes of another, under the name of that other.

    Engines look classes up by name: accelerate finds the layers to wrap and to checkpoint so, transformers the loss.
    """
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"__deepcopy__": _refuse_copy, **names}
    return types.new_class(plain.__name__, (FSDPModule, plain), exec_body=lambda namespace: namespace.update(own))


def _refuse_copy(module: nn.Module, memo: object) -> NoReturn:
    """Refuse to be copied, as FSDP2's classes do."""
    raise ArgumentError(
        f"This {type(module).__name__} is sharded by FSDP2, which copies no module. If modules_to_save names it, "
        f"attach the adapter first, then wrap. To keep its values, save the model."
    )


def base_of_adapters(model: nn.Module) -> nn.Module | None:
    """Return the model inside a PeftModel; None where the PeftModel computes with its embedding (prompt learning)."""
    peft_model: Any = model  # peft may be absent, so its classes are not imported to narrow the type
    if not is_peft_model(model) or any(config.is_prompt_learning for config in peft_model.peft_config.values()):
        return None
    base: nn.Module = peft_model.get_base_model()
    return base


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is peft's wrapper of another."""
    return _is_a(model, "PeftModel")


def _is_a(model: nn.Module, name: str) -> bool:
    """Whether a class of that name is among a model's; without importing a package that may be absent."""
    return any(kind.__name__ == name for kind in type(model).__mro__)


def register_methods(model: nn.Module) -> list[str]:
    """Let the root gather its parameters before methods that bypass its forward; return their names."""
    if _is_a(model, "PreTrainedModel"):
        return []  # its methods compute through self(...)
    # the other methods of a PeftModel compute through self(...) too; its generate is that of the model inside
    names = ("generate",) if is_peft_model(model) else FORWARD_METHODS
    found = [(name, getattr(type(model), name, None)) for name in names]
    methods = [name for name, method in found if callable(method) and not isinstance(method, type)]
    for name in methods:
        if is_peft_model(model) and name not in vars(model):
            model.__dict__[name] = _of_class(model, name)
        register_fsdp_forward_method(model, name)
    return methods


def _of_class(model: nn.Module, name: str) -> Callable[..., object]:
    """Return a method that its class is asked for at each call: wrap_transparent changes the class."""

    @functools.wraps(getattr(model, name))
    def of_class(*args: object, **options: object) -> object:
        return getattr(type(model), name)(model, *args, **options)

    return of_class


def copy_attributes(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the attributes that code gave a parameter (``_no_weight_decay``) to the one that takes its place."""
    if not is_four_bit(tensor):  # what it has belongs to its codes
        vars(target).update({name: note for name, note in vars(tensor).items() if not name.startswith(_OF_ENGINES)})


def install(parameters: Sequence[ModelTensor], shards: Mapping[str, torch.Tensor]) -> None:
    """Put local shards in place of the parameters that ``fully_shard`` left on meta; ties stay."""
    for parameter in parameters:
        module, attribute = parameter.places[0]
        sharded: object = module._parameters[attribute]  # torch's stubs know no parameter that is a DTensor
        shard = shards[parameter.name]
        if not isinstance(sharded, DTensor) or sharded._local_tensor.shape != shard.shape:
            raise DeviceError(
                f"{parameter.name}: torch {torch.__version__} gives this rank "
                f"{getattr(sharded, 'placements', 'all of it')}, this package read {list(shard.shape)}. "
                f"Please report it."
            )
        # not from_local, which would move a shard that is offloaded to the host to the device of the mesh
        make: Callable[..., torch.Tensor] = DTensor  # torch annotates the arguments of a subclass of Tensor only
        tensor = make(shard, sharded._spec, requires_grad=False)
        installed = nn.Parameter(tensor, requires_grad=parameter.tensor.requires_grad)
        copy_attributes(parameter.tensor, installed)
        parameter.put(installed)


def states_of_fsdp2() -> Any:
    """Return the registry in which ``fully_shard`` has its state of each module, which it refuses a second time."""
    return getattr(importlib.import_module("torch.distributed._composable_state"), "_module_state_mapping", {})
