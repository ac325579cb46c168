"""Patches hold in the thread that makes them, and are gone when the last block ends, in whatever order blocks end."""

from __future__ import annotations

import math
import re
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.nn import functional

from safe_loading._core import thread_patches
from safe_loading._core.thread_patches import patched, patched_item, seen_here


@contextmanager
def beside(block: Callable[[], object]) -> Iterator[None]:
    """Hold a context of another thread open while the block runs here."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            stack.enter_context(block())  # type: ignore[arg-type]  # a context manager
            entered.set()
            leave.wait(60)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        assert entered.wait(60)
        try:
            yield
        finally:
            leave.set()
            held.result()


class Base:
    def method(self) -> str:
        return "base's"

    @property
    def kind(self) -> str:
        return "base's"

    @classmethod
    def made(cls) -> str:
        return cls.__name__


class Derived(Base):
    pass


def test_a_function_of_a_module_is_replaced_in_its_own_thread_alone() -> None:
    own = math.sqrt
    with patched(math, "sqrt", lambda x: -x):
        assert math.sqrt(4.0) == -4.0
        with patched(math, "sqrt", lambda x: 0.0):
            assert math.sqrt(4.0) == 0.0
        kept = math.sqrt
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: math.sqrt(4.0)).result() == 2.0
    assert math.sqrt is own
    assert kept(4.0) == 2.0  # whoever imported it meanwhile has the engine's own


def test_members_of_classes_and_what_is_no_function() -> None:
    with patched(Derived, "method", lambda self: "replaced"), patched(Derived, "kind", "replaced"):
        assert (Derived().method(), Derived().kind, Base().method()) == ("replaced", "replaced", "base's")
    assert set(vars(Derived)) & {"method", "kind"} == set()
    with beside(lambda: patched(Derived, "method", None)), beside(lambda: patched(Derived, "kind", 7)):
        assert (Derived().method(), Derived().kind) == ("base's", "base's")
    with beside(lambda: patched(Derived, "made", classmethod(lambda cls: "replaced"))):
        assert (Derived.made(), Derived().made()) == ("Derived", "Derived")
    module = types.ModuleType("module")
    module.re = re  # type: ignore[attr-defined]
    with beside(lambda: patched(module, "re", types.SimpleNamespace(match=None))):
        assert module.re.match("a", "ab")
    assert module.re is re


def test_what_was_not_there_is_created_and_taken_away() -> None:
    module, mapping = types.ModuleType("module"), {"there": len}
    with pytest.raises(AttributeError, match="has no absent"), patched(module, "absent", len):
        pass
    with (
        patched(module, "absent", len, create=True),
        patched_item(mapping, "new", len),
        beside(lambda: patched_item(mapping, "there", max)),
    ):
        assert (module.absent([1]), mapping["new"]([1]), mapping["there"]([1])) == (1, 1, 1)
        with ThreadPoolExecutor(1) as pool, pytest.raises(AttributeError, match="has no absent"):
            pool.submit(lambda: module.absent([1])).result()
    assert not hasattr(module, "absent")
    assert mapping == {"there": len}


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_blocks_of_two_threads_may_end_in_any_order(first_ends_first: bool) -> None:
    own, first, second = math.floor, ExitStack(), ExitStack()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        one.submit(first.enter_context, patched(math, "floor", lambda x: 1)).result()
        two.submit(second.enter_context, patched(math, "floor", lambda x: 2)).result()

        def seen() -> tuple[int, int, int]:
            return one.submit(math.floor, 9.5).result(), two.submit(math.floor, 9.5).result(), math.floor(9.5)

        def seen_by_call() -> tuple[int, int, int]:
            return one.submit(lambda: math.floor(9.5)).result(), two.submit(lambda: math.floor(9.5)).result(), own(9.5)

        assert seen() == seen_by_call() == (1, 2, 9)
        (one if first_ends_first else two).submit((first if first_ends_first else second).close).result()
        assert seen() == ((9, 2, 9) if first_ends_first else (1, 9, 9))
        (two if first_ends_first else one).submit((second if first_ends_first else first).close).result()
        assert math.floor is own


def test_what_somebody_else_has_put_over_it_stays() -> None:
    module = types.ModuleType("module")
    module.function = own = len  # type: ignore[attr-defined]
    with patched(module, "function", max):
        under = module.function
        module.function = lambda values: under(values) + 100  # type: ignore[attr-defined]
        assert module.function([1, 7]) == 107
    assert module.function([1, 7]) == own([1, 7]) + 100


def test_torch_compile_looks_through_a_patch_of_another_thread() -> None:
    functional, own = torch.nn.functional, torch.nn.functional.softmax
    with beside(lambda: patched(functional, "softmax", None)):
        assert functional.softmax is not own

        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.softmax(x, dim=0) * 2

        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 0.5))
    assert functional.softmax is own


def test_ctrl_c_while_a_patch_begins_leaves_the_original_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    true_dropout = functional.dropout
    with monkeypatch.context() as patches:
        patches.setattr(thread_patches._Attribute, "install", interrupted)
        with pytest.raises(KeyboardInterrupt), patched(functional, "dropout", print):
            pass
    assert seen_here(functional, "dropout") is true_dropout
    with patched(functional, "dropout", print):
        assert seen_here(functional, "dropout") is print
    assert functional.dropout is true_dropout
