"""The undoing of a wrap that fails or is interrupted: the caller's model is as it was, and can be wrapped again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from safe_loading._core.interrupts import undone_on_error
from safe_loading._model.snapshot import Snapshot
from safe_loading._model.torch_state import TorchState

from .fsdp2 import states_of_fsdp2


@contextmanager
def model_as_before(model: nn.Module, others: Iterable[object] = (), *, generator: bool = False) -> Iterator[None]:
    """Put the model, and other objects that change with it, back into their state of now when the block fails.

    Torch's own state too, with ``generator`` that of the process's generator as well.

    The parameters that a wrap replaces are kept by reference. That takes no memory: the plan of the wrap has them until
    its end as well, because FSDP gets new ones, on meta, in their place, and no value of the caller's is given up shard
    by shard.
    """
    # the attributes of the parameters too: FSDP2 numbers those on meta, which it is given themselves
    modules, snapshot = [*model.modules()], Snapshot(model, others=(*model.parameters(), *others))
    torch_state, states = TorchState(generator=generator), states_of_fsdp2()
    before = {module: states[module] for module in modules if module in states}

    def undo() -> None:
        for module in modules:
            states.pop(module, None)
        states.update(before)
        snapshot.restore()
        torch_state.restore()

    with undone_on_error(undo):
        yield
