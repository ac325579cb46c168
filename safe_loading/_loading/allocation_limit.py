"""A limit on peft's allocations while it builds an adapter on a model with values: in proportion to file and base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from safe_loading.errors import AdapterError

_ELEMENTS_ALLOWED = 1 << 24
# VeRA and its kin draw projections that no file holds, BOFT keeps permutations of every weight, OSF a decomposition.
_TIMES_BASE, _TIMES_FILE = 4, 16


class AllocationLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Context manager: inside it, tensors that are made from numbers alone may not have more elements than ``most``.

    Counted before each is made, and all together. Tensors that are computed from others are as large as these, so they
    are not counted.
    """

    def __init__(self, most: int, where: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._left, self._most, self._where = most, most, where

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Count the elements that a factory function would allocate, and run it."""
        options = dict(kwargs or {})
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, options))):
            self._count(func, args, options)
        return func(*args, **options)

    def _count(self, func: Callable[..., object], args: tuple[object, ...], options: dict[str, object]) -> None:
        if options.get("device") == torch.device("meta"):
            return
        try:
            planned = func(*args, **{**options, "device": torch.device("meta"), "pin_memory": False})
        except (TypeError, RuntimeError, NotImplementedError):  # no factory: it makes no tensor, or a single number
            return
        made = sum(leaf.numel() for leaf in tree_leaves(planned) if isinstance(leaf, torch.Tensor))
        if made > self._left:
            raise AdapterError(
                f"{self._where} makes peft allocate more than {self._most} values ({made} at once), out of proportion "
                f"to the adapter's file and the base. Correct its numbers, or save the adapter again."
            )
        self._left -= made


def allocation_limit(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], where: object) -> AllocationLimit:
    """Return the limit for an adapter of these tensors on this model; ``where`` names the adapter's config."""
    base = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    file = sum(tensor.numel() for tensor in tensors.values())
    return AllocationLimit(_ELEMENTS_ALLOWED + _TIMES_BASE * base + _TIMES_FILE * file, where)
