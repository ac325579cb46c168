"""Torch's switches of a thread, which a trace turns off for single calls; Ctrl-C may come before one is on again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from safe_loading._core.interrupts import undone


@contextlib.contextmanager
def switches_put_back() -> Iterator[None]:
    """Put torch's function modes and dispatch keys back at the end of a block, as they were at its beginning.

    A ``with`` block that disables them leaves them so when an exception comes from its last line, before its exit.
    """
    functions = torch._C.DisableTorchFunction()
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    keys = torch._C._ForceDispatchKeyGuard(included, excluded)

    def put_back() -> None:
        keys.__exit__(None, None, None)
        functions.__exit__(None, None, None)

    with undone(put_back):
        # each remembers what it finds; in one line, since an interruption comes between two
        keys.__enter__(), functions.__enter__(), functions.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # of torch
        yield
