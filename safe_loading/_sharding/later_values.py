"""A parameter whose values are still in a folder: it has no memory until something needs more than its shape.

What reads or writes it makes it real first, so that a script sees the values that it would have had, and nothing that
it writes is lost. Shapes, devices and casts of the dtype of the file need no values.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from safe_loading._checkpoint.index import require_unchanged
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.formats.four_bit import is_four_bit
from safe_loading._model.layout.checkpoint_source import CheckpointSource, disk_tensors
from safe_loading._model.layout.reading import ShardTarget, read_targets
from safe_loading.errors import ArgumentError

_FROM = "_from_folder_of_safe_loading"
# Of parameters that were read: not with them, where pickle would find it.
_READ: MutableMapping[torch.Tensor, FolderTensor] = WeakIdKeyDictionary()
_SHARING = "_sharing_of_safe_loading"  # the tensors that share a memory (.data, .detach()), this one among them
_ALIASES = ("data", "detach")
_CASTS = ("to", "cpu", "cuda", "float", "half", "bfloat16", "double")
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")  # attributes that are tensors
# What is known without a value, and what makes new memory like it.
_FACTS = {
    *("dim", "ndimension", "size", "numel", "nelement", "stride", "is_contiguous", "element_size"),
    *("storage_offset", "get_device", "is_floating_point", "is_complex", "is_signed", "requires_grad_"),
    *("retain_grad", "register_hook", "register_post_accumulate_grad_hook", "data_ptr"),
    *("untyped_storage", "__hash__", "__len__", "is_same_size", "is_pinned", "is_shared", "is_conj"),
    *("is_neg", "is_inference", "empty_like", "zeros_like", "ones_like", "rand_like", "randn_like"),
    *("full_like", "new_empty", "new_zeros", "new_ones", "new_full", "result_type"),
    *("_has_compatible_shallow_copy_type", "has_names", "is_tensor"),
}
_MEMORY = ("data_ptr", "untyped_storage")  # of an alias, which is read through them


@dataclasses.dataclass(frozen=True, eq=False)
class FolderTensor:
    """The values that a tensor of a model was loaded with, even if it was renamed since."""

    source: CheckpointSource | None  # None where the folder does not fit the model, which the wrap tells
    name: str  # under which the model had it when it was loaded
    through: torch.dtype | None = None  # in which it was loaded, where it is to be trained in a wider one

    def __deepcopy__(self, memo: object) -> FolderTensor:
        """Return the same: a copy of a parameter has the same values."""
        return self

    def holds(self, dtype: torch.dtype) -> bool:
        """Return whether the file has this dtype, so that a cast from it rounds once."""
        stored = self.source.stored_as(self.name) if self.source is not None else None
        if self.source is None or stored is None:
            return False
        return all(DTYPES.get(info.dtype) == dtype for info in disk_tensors(self.source, stored))

    def rounded_to(self, dtype: torch.dtype) -> FolderTensor:
        """Return the same values, rounded to a dtype before they get that of their tensor."""
        return self if self.holds(dtype) else dataclasses.replace(self, through=dtype)

    def read(self, like: torch.Tensor) -> torch.Tensor:
        """Return the values, in the shape and dtype of a tensor."""
        if self.source is None or is_four_bit(like):
            raise ArgumentError(
                f"The values of {self.name} are needed before accelerator.prepare, and only there they are "
                f"{'packed in 4 bits' if is_four_bit(like) else 'read'}. Attach an adapter whose values come from the "
                f"base (PiSSA, OLoRA, DoRA) to a model that was loaded outside of load_at_prepare(), and save or "
                f"change such a model there."
            )
        flat = torch.empty(like.numel(), dtype=like.dtype, device="cpu")
        read_targets(self.source, [ShardTarget(self.name, 0, like.numel(), flat, self.through)])
        require_unchanged(self.source.checkpoint)
        return flat.view(like.shape)


class WeightlessParameter(nn.Parameter):
    """A parameter whose values are to be read later; it becomes a plain one when something needs them."""

    def __deepcopy__(self, memo: dict[int, object]) -> WeightlessParameter:
        """Return a parameter without memory too: a plain copy would have memory for the whole."""
        if id(self) not in memo:
            made = memo[id(self)] = weightless(self)
            vars(made).update(copy.deepcopy(vars(made), memo))
        return cast(WeightlessParameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the parameter's reduction for pickle, with the values."""
        make_real(self)
        return cast(Any, nn.Parameter).__reduce_ex__(self, protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch annotates nothing
        """Return size and dtype; the values are not read."""
        return f"Parameter(not read yet, size={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the torch function, with values where it needs them."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            return _answer(func, args, kwargs)


# Under the class name by which transformers and peft tell 4-bit weights; it has the attributes that they ask for.
_FourBitParameter = type("Params4bit", (WeightlessParameter,), {"__doc__": "A 4-bit weight to be packed later."})


def weightless(like: torch.Tensor, dtype: torch.dtype | None = None) -> WeightlessParameter:
    """Return a parameter of the same shape without memory, in the same dtype where no other is given."""
    with torch._C.DisableTorchFunctionSubclass():
        kind = _FourBitParameter if is_four_bit(like) else WeightlessParameter
        made: torch.Tensor = torch.Tensor._make_subclass(kind, _nothing(like, dtype or like.dtype), like.requires_grad)
    copy_notes(like, made)
    return cast(WeightlessParameter, made)


def copy_notes(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the notes with a tensor to another one, which has a memory of its own."""
    vars(target).update({name: value for name, value in vars(tensor).items() if name != _SHARING})


def note_origin(tensor: torch.Tensor, origin: FolderTensor) -> None:
    """Note with a tensor where its values are."""
    vars(tensor)[_FROM] = origin


def origin_of(tensor: torch.Tensor) -> FolderTensor | None:
    """Return where the values of a tensor are, or were when it was loaded; None for one of the script's own."""
    found: FolderTensor | None = vars(tensor).get(_FROM) or _READ.get(tensor)
    return found


def make_real(parameter: WeightlessParameter) -> None:
    """Read the values of a parameter and its aliases, which are plain tensors from here on.

    So a weightless one has the values of the folder: nothing was written to it, nor to another one of its memory.
    """
    with torch._C.DisableTorchFunctionSubclass():
        origin = origin_of(parameter)
        if origin is None:
            return  # from_pretrained is not done with it
        values = origin.read(parameter)
        for each in [parameter, *_others(parameter)]:
            each.data = values
            _READ[each] = vars(each).pop(_FROM)
            vars(each).pop(_SHARING, None)
            _make_plain(each)


def _others(parameter: torch.Tensor) -> list[WeightlessParameter]:
    """Return the other tensors of a parameter's memory that are still there."""
    found = (reference() for reference in vars(parameter).get(_SHARING, ()))
    return [each for each in found if each is not None and each is not parameter]


def _share(parameter: WeightlessParameter, memory: WeightlessParameter) -> None:
    """Let a parameter have the memory of another one; its own is left to its aliases."""
    _leave(parameter)
    members = vars(memory).setdefault(_SHARING, [TensorWeakRef(memory)])
    members[:] = [reference for reference in members if reference() is not None]
    members.append(TensorWeakRef(parameter))
    vars(parameter)[_SHARING] = members


def _leave(parameter: WeightlessParameter) -> None:
    members = vars(parameter).pop(_SHARING, [])
    members[:] = [reference for reference in members if reference() is not parameter]


def _make_plain(parameter: torch.Tensor) -> None:
    setattr(parameter, "__class__", nn.Parameter)  # noqa: B010  # mypy takes it for an assignment to a variable


def _nothing(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    one = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device="cpu")
    return one.expand(like.shape)


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    first = args[0] if args and isinstance(args[0], WeightlessParameter) else None
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute == "data" and name == "__set__":
            return _set_data(*args)
        if attribute not in ("data", *_VIEWS):
            return func(*args, **kwargs)
        name = attribute
    if name in _FACTS and not (name in _MEMORY and first is not None and _is_alias(first)):
        return func(*args, **kwargs)
    if first is not None and not is_four_bit(first) and origin_of(first) is not None:
        if name in _ALIASES:
            return _alias(first)
        if name in _CASTS and (dtype := _dtype_after(name, args, kwargs, first)) is not None:
            return first if dtype == first.dtype else _cast_copy(first, dtype)
    for each in _weightless_in((args, kwargs)):
        make_real(each)
    return func(*args, **kwargs)


def _is_alias(parameter: WeightlessParameter) -> bool:
    members: list[TensorWeakRef] = vars(parameter).get(_SHARING, [])
    return bool(members) and members[0]() is not parameter


def _alias(parameter: WeightlessParameter) -> WeightlessParameter:
    made = weightless(parameter)
    made.requires_grad_(False)
    _share(made, parameter)
    return made


def _cast_copy(parameter: WeightlessParameter, dtype: torch.dtype) -> WeightlessParameter:
    made = weightless(parameter, dtype)
    made.requires_grad_(False)
    return made


def _dtype_after(name: str, args: Any, kwargs: Mapping[str, Any], first: WeightlessParameter) -> torch.dtype | None:
    """Return the dtype that a cast asks for, where it needs no values."""
    names = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
    dtype: torch.dtype | None = names.get(name, first.dtype)
    if name == "to":
        if kwargs.get("copy"):
            return None
        options = {key: kwargs[key] for key in kwargs if key != "copy"}
        # torch.nn.Module.to reads its arguments with it, whatever stubs say
        device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **options)  # pyright: ignore[reportAttributeAccessIssue]
        if device is not None and device.type == "meta":
            return None
        dtype = dtype or first.dtype
    origin = origin_of(first)
    # a narrower dtype between the file's and the new one would round a second time
    return dtype if dtype == first.dtype or (origin is not None and origin.holds(first.dtype)) else None


def _set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(value, WeightlessParameter):
        origin = origin_of(value)
        if isinstance(parameter, WeightlessParameter) and origin is not None:
            if all(each is not value for each in [parameter, *_others(parameter)]):
                parameter.data = _nothing(value, value.dtype)
                note_origin(parameter, origin)
                _share(parameter, value)
            return
        make_real(value)
    if isinstance(parameter, WeightlessParameter) and _others(parameter):
        make_real(parameter)  # what shares its memory keeps the values
    parameter.data = value.data
    if isinstance(parameter, WeightlessParameter):
        vars(parameter).pop(_FROM, None)
        _leave(parameter)
        _make_plain(parameter)


def _weightless_in(value: object) -> Iterator[WeightlessParameter]:
    if isinstance(value, WeightlessParameter):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _weightless_in(each)
    elif isinstance(value, Mapping):
        yield from _weightless_in([*value.values()])
