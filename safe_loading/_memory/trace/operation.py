"""One call of an operation, as the dispatch mode of a trace receives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only


class OperationCall(NamedTuple):
    """An operation and its arguments, which are as untyped as torch's own modes have them."""

    func: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> object:
        """Return the operation's result."""
        return self.func(*self.args, **self.kwargs)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, in order."""
        return [*tensors_in(self.args), *tensors_in(self.kwargs.values())]

    def with_tensors(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> OperationCall:
        """Return the same call with each tensor among the arguments replaced."""
        args, kwargs = tree_map_only(torch.Tensor, replace, (self.args, self.kwargs))
        return OperationCall(self.func, args, kwargs)

    def written(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments to which the operation writes, such as an ``out``."""
        arguments = self.func._schema.arguments
        given = [*zip(arguments, self.args, strict=False)]
        given += [(each, self.kwargs[each.name]) for each in arguments if each.name in self.kwargs]
        return list(tensors_in(value for each, value in given if each.alias_info and each.alias_info.is_write))

    @property
    def mutates(self) -> bool:
        """Whether the operation writes to an argument."""
        return self.func._schema.is_mutable


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments or outputs, which are nested in lists and tuples at most."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
