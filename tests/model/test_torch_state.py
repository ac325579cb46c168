"""What is restored of torch's state when a verb raises: not what other threads set for the process meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from safe_loading._model.torch_state import undone_when_raised


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("error", "left"), [(ValueError, torch.bfloat16), (KeyboardInterrupt, torch.float32)], ids=["error", "Ctrl-C"]
)
def test_an_error_leaves_the_default_dtype_that_another_thread_set(
    error: type[BaseException], left: torch.dtype
) -> None:
    """Of an engine's block that Ctrl-C left half-way, nothing else restores it."""

    @undone_when_raised
    def verb() -> None:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_grad_enabled(False)
        raise error

    with pytest.raises(error):
        verb()
    assert torch.get_default_dtype() is left
    assert torch.is_grad_enabled()


def test_ctrl_c_leaves_no_torch_function_disabled() -> None:
    """The end of a block that disables them is not reached where the interruption comes right before it."""

    @undone_when_raised
    def verb() -> None:
        torch._C.DisableTorchFunctionSubclass().__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verb()
    assert torch._C._is_torch_function_enabled()


def test_the_end_of_a_state_leaves_the_dispatch_keys_of_then() -> None:
    """An exception that is kept refers to the frames of all callers, and the collector finds it at any time."""
    kept = []

    @undone_when_raised
    def verb() -> None:
        kept.append(sys._getframe(1))

    verb()
    with torch._C._DisableTorchDispatch():
        within = torch._C._dispatch_tls_local_exclude_set()
        kept.clear()
        assert torch._C._dispatch_tls_local_exclude_set() == within


def test_ctrl_c_leaves_no_dispatch_key_excluded() -> None:
    before = torch._C._dispatch_tls_local_exclude_set()

    @undone_when_raised
    def verb() -> None:
        torch._C._DisableTorchDispatch().__enter__()
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            verb()
        gc.collect()
        assert torch._C._dispatch_tls_local_exclude_set() == before
