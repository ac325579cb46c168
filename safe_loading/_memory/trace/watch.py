"""The dispatch mode of a trace: sees every operation, its storages, its devices, and what it wants to know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .known_values import UNKNOWN, UnknownValue, Values
from .ledger import Ledger, key_of
from .memo import Memo
from .records import Crossing, Problem

aten = torch.ops.aten
_MOVES = frozenset({aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default})
# a CPU tensor of indices may index a tensor on a device; torch moves it
_INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)
# what autograd writes into a gradient of zeros in place, and beside it for subclasses such as fake tensors
# (``areAnyTensorSubclassLike`` of torch/csrc/autograd/FunctionsManual.cpp)
_INTO_ZEROS: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
_BY_MASK = frozenset({aten.index.Tensor, aten.masked_select.default})
_ZEROS = frozenset({"aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default"})
# of a gradient that only autograd's buffer holds, the calls that led here included
_ALONE, _ALONE_STORAGE = 4, 2

# the shapes that torch knows for it are those of CUDA's kernel; the CPU's takes every dtype
_BF16_ONLY = frozenset({aten._grouped_mm.default})


def _in_bf16(func: Any, args: Any, kwargs: Any) -> Any:
    dtype = args[0].dtype
    cast = partial(torch.Tensor.to, dtype=torch.bfloat16)
    swap = lambda t: cast(t) if t.is_floating_point() else t  # noqa: E731 - used twice, here
    return func(*tree_map_only(torch.Tensor, swap, args), **tree_map_only(torch.Tensor, swap, kwargs)).to(dtype)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Records in the ledger what each operation makes.

    Args:
        ledger: Where storages are recorded.
        values: The small true values.
        memo: What operations gave before.
        several: Whether the step runs on several devices, so that they must be compared.
    """

    def __init__(self, ledger: Ledger, values: Values, memo: Memo, *, several: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.ledger = ledger
        self.values = values
        self.memo = memo
        self.several = several
        self.boundary = False
        self.problems: dict[Problem, None] = {}
        self.moved: dict[tuple[Any, ...], list[int]] = {}
        self._made_from: dict[int, int | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self.values.number(args[0], self._where)
        if self.several:
            args, kwargs = self._same_device(func, args, kwargs)
        if func in _INTO_ZEROS and self._fills_gradient(args[0]):
            func = _INTO_ZEROS[func]
        out = self._run(func, args, kwargs)
        if func is aten.add.Tensor and self._sums_gradients(args):
            self.ledger.hand_on(args[0], out)
            return out
        made = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                self.values.take_over(tensor)
                number = self.ledger.add(tensor, str(func))
                if self.several and number not in self._made_from:
                    self._made_from[number] = self._first(args)
        self.values.follow(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = self.memo.key(func, args, kwargs)
        out = None if key is None else self.memo.recall(key, args)
        if out is not None:
            return out
        try:
            out = func(*args, **kwargs) if func not in _BF16_ONLY else _in_bf16(func, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._from_values(func, args, kwargs)
        if key is not None:
            self.memo.remember(key, args, kwargs, out)
        return out

    def _fills_gradient(self, into: torch.Tensor) -> bool:
        """Whether autograd itself fills a gradient of zeros."""
        if self.ledger.phase != "backward" or self.ledger.stack:
            return False
        number = self.ledger.number(into)
        return number is not None and self.ledger.allocations[number].op in _ZEROS

    def _sums_gradients(self, args: Any) -> bool:
        """Whether autograd adds one gradient to another between two nodes, which it does in place for real tensors.

        The rule is ``can_accumulate_inplace`` of ``torch/csrc/autograd/input_buffer.cpp``, which leaves subclasses out.
        """
        if self.ledger.phase != "backward" or self.ledger.stack or not isinstance(args[1], torch.Tensor):
            return False
        first, second = args
        storage = first.untyped_storage()
        return (
            first.is_contiguous()
            and first.shape == second.shape
            and first.dtype == second.dtype
            and storage.nbytes() == first.nbytes
            and first._use_count() <= _ALONE
            and torch._C._storage_Use_Count(storage._cdata) <= _ALONE_STORAGE
        )

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor with the values of a fake one, or ones with a note that says so."""
        return self.values.ask(tensor, self._where)

    @property
    def _where(self) -> str:
        return self.ledger.stack[-1] if self.ledger.stack else ""

    def _from_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = self.values.answer(func, args, kwargs)
        first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
        if value is None and func in _BY_MASK:
            return self._by_mask(func, *args)
        kinds = [str(returned.type) for returned in func._schema.returns]
        if value is None and kinds[0] in UNKNOWN:  # `torch.equal`, say
            return self.values.guess(kinds[0], self._where)
        if value is None or first is None:
            raise UnknownValue(f"the shape that {func} gives depends on values")

        def fake(real: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=first.device)
            self.values.set(made, real)
            return made

        return tree_map_only(torch.Tensor, fake, value)

    def _by_mask(self, func: Any, x: torch.Tensor, by: Any) -> torch.Tensor:
        """Choose among unknown numbers by known masks: by the indices of what these let through, as torch does."""
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(x.shape, by.shape)  # type: ignore[no-untyped-call]  # of torch
            x, by = x.expand(shape), [self.__torch_dispatch__(aten.expand.default, (), (by, list(shape)))]
        places: list[torch.Tensor | None] = []
        for index in by:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
            else:
                found = self.__torch_dispatch__(aten.nonzero.default, (), (index,))  # refused where it is not known
                places.extend(found.unbind(1))
        result: torch.Tensor = aten.index.Tensor(x, places)
        self.ledger.add(result, str(func))  # while the indices are there
        return result

    def _same_device(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if func in _MOVES:
            self._note_move(func, args, kwargs)
            return args, kwargs
        tensors = list(_tensors((*args, *kwargs.values())))
        weighty = [t for t in tensors if t.dim() or t.device.index is not None]
        if func in _INDEXING:
            weighty = [t for t in weighty if t is args[0] or t.device.index is not None]
        devices = list(dict.fromkeys(t.device for t in weighty))
        if len(devices) < 2:
            return args, kwargs
        self._note_problem(func, weighty, devices)
        # go on as if it had been moved, so that every such place is found in one trace
        target = max(devices, key=lambda d: sum(t.nbytes for t in weighty if t.device == d))
        moved = {id(t): t.to(target) for t in weighty if t.device != target}
        swap = lambda t: moved.get(id(t), t)  # noqa: E731 - used twice, here
        return tree_map_only(torch.Tensor, swap, args), tree_map_only(torch.Tensor, swap, kwargs)

    def _note_problem(self, func: Any, tensors: list[torch.Tensor], devices: list[torch.device]) -> None:
        words = tuple(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {key_of(t.device)}" for t in tensors)
        where = self._where
        keys = tuple(key_of(device) for device in devices)
        makers = tuple(self._maker(self.ledger.number(tensor), where) for tensor in tensors)
        self.problems.setdefault(Problem(str(func), where, keys, words, self.ledger.phase, makers))

    def _first(self, args: Any) -> int | None:
        return next((number for leaf in _tensors(args) if (number := self.ledger.number(leaf)) is not None), None)

    def _maker(self, number: int | None, module: str) -> str | None:
        """Return the module inside `module` that made a block; what `module` itself computed is followed back."""
        while number is not None:
            block = self.ledger.allocations[number]
            if block.phase == "load":
                return block.op
            if block.module != module and (not module or block.module.startswith(f"{module}.")):
                return block.module
            number = self._made_from.get(number)
        return None

    def _note_move(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is aten._to_copy.default:
            source, target = args[0], kwargs.get("device")
        elif func is aten.copy_.default:
            source, target = args[1], args[0].device
        else:
            return
        if target is None or source.device == target or not source.nbytes:
            return
        where = self._where
        key = (key_of(source.device), key_of(target), where, self.ledger.phase, not self.boundary)
        total = self.moved.setdefault(key, [0, 0])
        total[0] += source.nbytes
        total[1] += 1

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """What went from device to device."""
        return tuple(
            Crossing(source, target, module, size, count, phase, asked)
            for (source, target, module, phase, asked), (size, count) in self.moved.items()
        )


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments, which are in lists at most."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
