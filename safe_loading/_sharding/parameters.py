"""The parameters and buffers of a model under their canonical names, and which of them are not sharded."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from safe_loading._core.names import canonical, first_names
from safe_loading._model.tensors import ModelTensor, addresses, inventory
from safe_loading.errors import ArgumentError

Ignored = nn.Module | nn.Parameter | str


def parameters_of(model: nn.Module) -> tuple[ModelTensor, ...]:
    """Return the parameters of a model, each once, under their canonical names."""
    return tuple(_canonical(tensor) for tensor in inventory(model) if not tensor.is_buffer)


def buffers_of(model: nn.Module) -> tuple[ModelTensor, ...]:
    """Return the buffers of a model, each once, under their canonical names."""
    return tuple(_canonical(tensor) for tensor in inventory(model) if tensor.is_buffer)


def gradient_problems(parameters: Iterable[ModelTensor]) -> list[str]:
    """Return a problem for each parameter that has a gradient, and for each trained one with hooks on it.

    FSDP trains other tensors in place of the parameters: the gradients would be lost, and the hooks never called.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a look at a parameter without weights would read them
        hooked = [
            each.name
            for each in parameters
            if each.tensor.requires_grad
            and (each.tensor._backward_hooks or getattr(each.tensor, "_post_accumulate_grad_hooks", None))
        ]
        with_gradient = [each.name for each in parameters if each.tensor.grad is not None]
    problems = [
        f"{name} has a hook on its gradient, which would never be called: remove the hook, and change .grad between "
        f"backward() and the optimizer's step"
        for name in hooked
    ]
    if with_gradient:
        problems.append(
            f"{first_names(with_gradient)} {'has a gradient' if len(with_gradient) == 1 else 'have gradients'}, which "
            f"would be lost: call the optimizer's step(), and model.zero_grad()"
        )
    return problems


def memory_problems(parameters: Iterable[ModelTensor]) -> list[str]:
    """Return a problem for each trained parameter in the memory of another one, which FSDP would train apart from it.

    ``weight.data`` of one module that is made the parameter of another ties the two, and no name shows it.
    """
    real = [each for each in parameters if type(each.tensor) in (nn.Parameter, torch.Tensor) and not each.is_meta]
    ranges = sorted(((*addresses(each.tensor), number) for number, each in enumerate(real)))
    problems, end, owner = [], 0, 0
    for start, stop, number in ranges:
        one, other = real[owner], real[number]
        if start < end and (one.tensor.requires_grad or other.tensor.requires_grad):
            problems.append(
                f"{one.name} shares its memory with {other.name}, a parameter of its own, and FSDP would train the two "
                f"apart: make them one parameter, as {other.name} = {one.name} does and .data does not, or clone() one"
            )
        if stop > end:
            end, owner = stop, number
    return problems


def _canonical(tensor: ModelTensor) -> ModelTensor:
    names = tuple([canonical(name) for name in tensor.names])
    return tensor if names == tensor.names else tensor._replace(names=names)


def ignored_parameters(model: nn.Module, ignored: Iterable[Ignored]) -> set[nn.Parameter]:
    """Return the parameters that ``ignored_params=`` names: themselves, by their modules, or by names or patterns."""
    if isinstance(ignored, (nn.Module, nn.Parameter, str)):
        ignored = [ignored]
    if not isinstance(ignored, Iterable):
        raise ArgumentError(f"ignored_params={ignored!r:.80}: pass modules, parameters, or names or patterns of them.")
    entries = tuple(ignored)
    by_tensor = {parameter.tensor: parameter for parameter in parameters_of(model)} if entries else {}
    matched: set[nn.Parameter] = set()
    problems = []
    for entry in entries:
        own = [entry] if isinstance(entry, nn.Parameter) else []
        own = [*entry.parameters()] if isinstance(entry, nn.Module) else own
        matches = {parameter for parameter in own if parameter in by_tensor}
        if isinstance(entry, str):
            matches = {
                tensor
                for tensor, parameter in by_tensor.items()
                if isinstance(tensor, nn.Parameter) and any(_matches(entry, name) for name in parameter.names)
            }
        if not matches and not (isinstance(entry, nn.Module) and not own):  # a norm without weights has none to keep
            what = entry if isinstance(entry, str) else f"a {type(entry).__name__}"
            problems.append(f"{what}: matches no parameter of the model")
        matched |= matches
    if problems:
        raise ArgumentError("ignored_params= names what the model does not have:", problems)
    return matched


def scalars_of(parameters: Iterable[ModelTensor]) -> set[nn.Parameter]:
    """Return the parameters without a dimension to split, such as CLIP's temperature, which FSDP refuses to take."""
    return {each.tensor for each in parameters if isinstance(each.tensor, nn.Parameter) and not each.tensor.ndim}


def average_gradients(parameters: Iterable[ModelTensor], groups: Sequence[dist.ProcessGroup]) -> None:
    """Average the gradients of parameters that every rank keeps whole, as FSDP averages those of shards.

    FSDP leaves that to whoever keeps a parameter from it, and each rank would train values of its own, which nothing
    tells. An average is its own average, so a script may do the same.
    """

    def average(gradient: torch.Tensor) -> torch.Tensor:
        averaged = torch.clone(gradient, memory_format=torch.contiguous_format)
        for group in groups:
            dist.all_reduce(averaged, group=group)
            averaged /= dist.get_world_size(group)
        return averaged

    for each in parameters:
        module, name = each.places[0]
        parameter = module._parameters[name]  # the wrap has put a new one there
        if parameter is not None and (parameter.is_floating_point() or parameter.is_complex()):
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch gives a frozen one no hook, and a script may train it later
            parameter.register_hook(average)  # type: ignore[no-untyped-call]  # of torch
            parameter.requires_grad_(trained)


def described(parameters: Sequence[ModelTensor], buffers: Sequence[ModelTensor]) -> list[str]:
    """Return a line for each tensor, which the ranks compare."""
    return [tensor.line() for tensor in (*parameters, *buffers)]


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
