"""Buffers that no checkpoint holds: computed again as ``from_pretrained`` does, to the bit and with their dtype."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from safe_loading._core.names import canonical
from safe_loading._model.size_limit import refuse_large_buffers
from safe_loading._model.stand_ins import MetaStandIns, NoInit
from safe_loading._model.tensors import TensorPlace, tensor_places
from safe_loading._ranks.own_generators import own_copy_of_generators
from safe_loading.errors import CheckpointError

# The methods by which plain modules reset themselves, the most specific first; torchtitan's and torchvision's included.
_RESET_METHODS = (
    "reset_buffers",
    "init_buffers",
    "_init_buffers",
    "reset_parameters",
    "_reset_parameters",
    "init_weights",
)


def compute_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the value of every buffer that is on meta and in no state dict, on the CPU, by canonical name.

    The model's own modules compute them, while every parameter is replaced by a stand-in on meta: no parameter can
    change, and no memory is needed for them. transformers models initialize themselves as a whole, as in
    ``from_pretrained``; other modules through the method by which their class resets them. Each buffer is poisoned
    first, with a value that no code computes, which proves that every element was written. The states of the random
    generators are restored. The parameters may be on meta or not; FSDP must not have wrapped the model yet.
    """
    lost = {
        canonical(place.name): place
        for place in tensor_places(model, repeats=False)
        if place.is_buffer and place.tensor.is_meta and not place.persistent
    }
    if not lost:
        return {}
    refuse_large_buffers(model)
    dtypes = _uncast_dtypes(model, lost)
    first, unwritten = _compute_poisoned(model, lost, dtypes, poison=0)
    # every value of a one-byte dtype may be a computed one: what changes with the poison was not written
    small = {name: place for name, place in lost.items() if _is_one_byte(dtypes[name])}
    if small:
        again, _ = _compute_poisoned(model, lost, dtypes, poison=1)
        unwritten |= {name for name in small if not torch.equal(first[name], again[name])}
    if unwritten:
        raise CheckpointError(
            "These buffers are on meta, no checkpoint holds them, and nothing computes them again:",
            [_remedy(name, place) for name, place in lost.items() if name in unwritten],
        )
    return first


def _is_one_byte(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def _uncast_dtypes(model: nn.Module, lost: Mapping[str, TensorPlace]) -> dict[str, torch.dtype]:
    """Return the dtype that each buffer has in a model as its class makes it, before anyone cast the whole of it.

    ``model.to(torch.bfloat16)`` casts rotary frequencies too, where ``from_pretrained`` keeps them in float32. On meta
    such a cast loses nothing but their dtype.
    """
    dtypes = {name: place.tensor.dtype for name, place in lost.items()}
    if all(dtype == torch.float32 or not dtype.is_floating_point for dtype in dtypes.values()):
        return dtypes  # nobody cast them to a narrower dtype
    for path, module in transformers_models(model):
        prefix, skeleton = f"{canonical(path)}." if path else "", skeleton_like(module)
        for place in tensor_places(skeleton, repeats=False) if skeleton is not None else ():
            name = f"{prefix}{canonical(place.name)}"
            if place.is_buffer and name in dtypes:
                dtypes[name] = place.tensor.dtype
    return dtypes


def skeleton_like(model: PreTrainedModel) -> nn.Module | None:
    """Return a model on meta as ``from_pretrained`` makes it in the same dtype; None where the class cannot."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    dtype = max(counts, key=counts.__getitem__, default=torch.float32)
    if dtype.itemsize < 2:  # fp8 weights, in which no model computes
        dtype = torch.bfloat16
    make: Callable[..., nn.Module] = type(model)._from_config
    try:
        with own_copy_of_generators(), torch.device("meta"):
            return make(copy.deepcopy(model.config), dtype=dtype)
    except Exception:  # a user's class, whose __init__ takes more than a config: its dtypes are kept as they are
        return None


def transformers_models(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the outermost transformers models in a module tree with their paths."""
    outer_paths: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(
            not outer or path.startswith(f"{outer}.") for outer in outer_paths
        ):
            outer_paths.append(path)
            yield path, module


def _compute_poisoned(
    model: nn.Module, lost: Mapping[str, TensorPlace], dtypes: Mapping[str, torch.dtype], *, poison: int
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Let the model fill its poisoned buffers; return their values, and the names of those that were not written."""
    with MetaStandIns(model), _marked_as_loaded(model), own_copy_of_generators(), torch.no_grad():
        for name, place in lost.items():
            place.module._buffers[place.attribute] = _poisoned(place.tensor.shape, dtypes[name], poison)
        for _, inner in transformers_models(model):
            initialize: Callable[[], object] = inner.initialize_weights  # transformers annotates nothing here
            initialize()
        # a dict and not a set: modules are reset in the order of the tree
        for module in dict.fromkeys(place.module for place in lost.values() if _holds_poison(place, poison)):
            _reset(module)
        beside = [(name, place) for name, place in lost.items() if _holds_poison(place, poison)]
        for name, place in beside:
            place.module._buffers[place.attribute] = _poisoned(place.tensor.shape, dtypes[name], poison)
        for module in dict.fromkeys(place.module for _, place in beside):
            _reset_beside_weights(module)
        _take_from_twins(model, {name: place for name, place in lost.items() if _holds_poison(place, poison)})
        values = {name: _value(place) for name, place in lost.items()}
        unwritten = {
            name for name, place in lost.items() if _holds_poison(place, poison) or values[name].dtype != dtypes[name]
        }
    return values, unwritten


def twins_of_diffusers(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the paths of the models of diffusers in a tree, each with two that its class makes anew on the host.

    They have the buffers and attributes that a constructor computes, and parameters without values, which take no
    memory. In what was drawn at random the two differ.
    """
    for path, module in model.named_modules():
        make: Callable[..., nn.Module] | None = getattr(type(module), "from_config", None)
        config: object = vars(module).get("_internal_dict")  # where diffusers keeps it (0.42)
        if make is not None and isinstance(config, Mapping):
            with contextlib.suppress(Exception):  # a user's class, whose constructor may ask for anything
                with own_copy_of_generators(), NoInit(), torch.device("cpu"):
                    twins = make(config), make(config)
                yield path, *twins


def _take_from_twins(model: nn.Module, lost: Mapping[str, TensorPlace]) -> None:
    """Fill buffers that a class of diffusers computes in its constructor alone."""
    for path, one, other in twins_of_diffusers(model) if lost else ():
        prefix = f"{canonical(path)}." if path else ""
        values, again = dict(one.named_buffers()), dict(other.named_buffers())
        for name, place in lost.items():
            value = values.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            into = place.module._buffers[place.attribute]
            if value is None or into is None or not is_like(value, into):
                continue
            if torch.equal(value, again[name.removeprefix(prefix)]):
                into.copy_(value)


def is_like(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a value has the shape and the dtype of a tensor."""
    return value.shape == tensor.shape and value.dtype == tensor.dtype


def _reset(module: nn.Module) -> None:
    for method in _RESET_METHODS:
        reset = getattr(module, method, None)
        if callable(reset):
            with contextlib.suppress(Exception):  # it takes arguments, or cannot work on meta: the poison stays
                reset()
                return


def _reset_beside_weights(module: nn.Module) -> None:
    """Reset a module that makes its buffers on the device of its own parameters, as timm's Swin Transformer does.

    The parameters are on the host meanwhile, each in the memory of one number. They have no values, so that nothing may
    be computed from them.
    """
    replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    memory: set[int] = set()
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                replaced.append((inner._parameters, name, parameter))
    for parameters, name, parameter in replaced:
        number = torch.zeros((), dtype=parameter.dtype, device="cpu")
        memory.add(number.untyped_storage().data_ptr())
        parameters[name] = nn.Parameter(number.expand(parameter.shape), requires_grad=False)
    try:
        with _Unread(memory):
            _reset(module)
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


class _Unread(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Context manager: inside it, every operation on some memory raises."""

    def __init__(self, memory: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._memory = memory

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Collection[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        for value in tree_leaves((args, kwargs)):
            is_real = isinstance(value, torch.Tensor) and not value.is_meta
            if is_real and value.untyped_storage().data_ptr() in self._memory:
                raise ValueError(f"{func} is given a weight that has no values yet")
        return func(*args, **(kwargs or {}))


def _poisoned(shape: torch.Size, dtype: torch.dtype, poison: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan"), dtype=dtype, device="cpu")
    if _is_one_byte(dtype):
        return torch.full(shape, poison, dtype=dtype, device="cpu")
    return torch.full(shape, torch.iinfo(dtype).min + 12345, dtype=dtype, device="cpu")


def _holds_poison(place: TensorPlace, poison: int) -> bool:
    value = place.module._buffers[place.attribute]
    if value is None or not value.numel():
        return False
    if value.is_meta:
        return True
    if _is_one_byte(value.dtype):
        return False
    mark = _poisoned(torch.Size(()), value.dtype, poison)
    return bool((value.isnan() if mark.isnan() else value == mark).any())


def _value(place: TensorPlace) -> torch.Tensor:
    value = place.module._buffers[place.attribute]
    return torch.empty(0) if value is None else value.detach()


@contextlib.contextmanager
def _marked_as_loaded(model: nn.Module) -> Iterator[None]:
    """Mark every parameter as loaded and no module as done: so does ``from_pretrained`` before it initializes.

    ``PreTrainedModel._initialize_weights`` and ``transformers.initialization`` skip what has the flag.
    """
    flag = "_is_hf_initialized"
    before = [(module, module.__dict__.pop(flag)) for module in model.modules() if flag in module.__dict__]
    for parameter in model.parameters():
        setattr(parameter, flag, True)  # of a stand-in, which is thrown away
    try:
        yield
    finally:
        for module in model.modules():
            module.__dict__.pop(flag, None)
        for module, value in before:
            module.__dict__[flag] = value


def _remedy(name: str, place: TensorPlace) -> str:
    kind = type(place.module).__name__
    if ".trainable_tokens_original." in f".{name}":
        return (
            f"{name}: peft copies these rows from the weights of the base. Load the two with load_peft_on_rank on "
            f"every rank, and wrap what it returns, without source= and adapters="
        )
    return (
        f"{name}: {place.tensor.dtype} {list(place.tensor.shape)} of {kind}. Give {kind} a method reset_buffers() that "
        f"fills it, or assign its values to the module's attribute {place.attribute} before the call: on every rank, "
        f"on the CPU"
    )
