"""Right values on the simulated devices: after each operation, the CPU computes it on the same bytes.

The operation itself still runs through torch's CUDA code, so what it allocates is what a GPU would be asked for; its
kernels do nothing, and then its outputs are filled from the host. With ``SIMCUDA_VALUES=all`` every operation is
followed; with a number of bytes only operations whose inputs and outputs are no larger together, which is what decides
about masks, lengths and other control flow of a large model. It holds for the thread that called `install`, for
autograd's threads, and for no other.

With a number of bytes nothing is followed in the backward pass and in attention: while a mode like this one is active,
autograd adds gradients out of place, and unfused attention its mask (``isTensorSubclassLike`` in
aten/src/ATen/TensorSubclassLikeUtils.h), which takes other memory than without. Only ``nonzero`` is right in every
place, also inside of other operations, since its count is the size of what is made, as with boolean masks.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from simulated_cuda_attention import attention
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import graph
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
)

SHADOW = 0x200000000000  # memory.c: where the bytes of a device pointer can be read
DONE_BY_TORCH = {"set_", "resize_", "resize_as_", "empty", "empty_strided", "empty_like", "new_empty", "record_stream"}
DONE_BY_TORCH |= {"new_empty_strided", "is_pinned", "_pin_memory", "_resize_output_", "detach_"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
FOLLOWED = {"aten", "bitsandbytes", "fsdp"}
unsupported: set[str] = set()
_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.sim_wait_for_stream_of.argtypes = (ctypes.c_int, ctypes.c_void_p)
_runtime.sim_answer.argtypes = (ctypes.c_uint64,)
_aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's


def twin(value: Any) -> Any:
    """A tensor of the host over the bytes of a tensor on a simulated device; anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    storage = value.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    raw = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr() + SHADOW)
    bytes_ = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=value.dtype)
    return made.set_(bytes_, value.storage_offset(), value.size(), value.stride())


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Fills what operations on simulated devices return; `limit` is the most bytes of an operation, None for any."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.limit = limit
        self.seed = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        leaves = pytree.tree_leaves((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, leaves)):
            return NotImplemented  # a DTensor calls operations on what is inside, and these come here
        if any(isinstance(x, FakeTensor) for x in leaves):
            return func(*args, **kwargs)  # it has no values: a DTensor asks for shapes so
        devices = {d for d in map(_device, leaves) if d is not None}
        if not devices or func.is_view or name in DONE_BY_TORCH or func.namespace not in FOLLOWED:
            return func(*args, **kwargs)
        if self.limit is not None and _bytes(leaves) > self.limit:
            return func(*args, **kwargs)
        _wait_for_streams(devices)
        if _decides_by_values(func, name, leaves):
            found = self._on_host(func, name, args, kwargs)
            if name.endswith("_"):
                return args[0]
            device = next(x.device for x in leaves if isinstance(x, torch.Tensor) and x.is_cuda)
            return pytree.tree_map(lambda x: _sent(x, device) if isinstance(x, torch.Tensor) else x, found)
        result = func(*args, **kwargs)
        if self.limit is not None and _bytes(result) > self.limit:
            return result
        try:
            found = self._on_host(func, name, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            unsupported.add(f"{func}: {str(error)[:80]}")
            return result
        written = {id(x) for x in leaves if isinstance(x, torch.Tensor)}
        for made, right in zip(pytree.tree_leaves(result), pytree.tree_leaves(found), strict=False):
            if not (isinstance(made, torch.Tensor) and isinstance(right, torch.Tensor)) or id(made) in written:
                continue
            if made.size() == right.size():  # the buffer of logsigmoid is empty on devices
                twin(made).copy_(right)
        return result

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(twin, (args, kwargs))
        kwargs.pop("pin_memory", None)
        if name.startswith("_scaled_dot_product_"):
            return attention(name, args, kwargs)
        if name == "log_sigmoid_backward":
            args = (*args[:2], args[1].abs().neg().exp())  # the buffer of the host's kernel
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        state = torch.get_rng_state()  # the program's own generator of the host is left alone
        self.seed += 1
        torch.default_generator.manual_seed(self.seed)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_rng_state(state)


def _device(value: Any) -> int | None:
    """The index of a simulated device, where a value is one or is on one."""
    if isinstance(value, torch.Tensor):
        return value.get_device() if value.is_cuda else None
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.cuda.current_device() if ":" not in str(value) else value.index
    return None


def _wait_for_streams(devices: set[int]) -> None:
    # Collectives run behind their streams, and the host computes on what they leave. Where there is none, asking for a
    # stream could be the first call that makes a context on the current device.
    for device in devices if _runtime.sim_pending() else ():
        _runtime.sim_wait_for_stream_of(device, torch._C._cuda_getCurrentRawStream(device))


def _decides_by_values(func: Any, name: str, leaves: list[Any]) -> bool:
    if name in INDEXED:
        return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in leaves[1:])
    # the last finds the columns with outliers in its kernel
    return torch.Tag.dynamic_output_shape in func.tags or name in ("equal", "int8_vectorwise_quant")


def _bytes(values: Any) -> int:
    return sum(t.numel() * t.itemsize for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor))


def _sent(found: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(found.size(), found.stride(), dtype=found.dtype, device=device)
    twin(made).copy_(found)
    return made


def _leave_out_functions() -> None:
    """Run autograd's engine and attention without the mode, where no other mode is active."""

    def without(run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _len_torch_dispatch_stack() != 1 or not isinstance(_get_current_dispatch_mode(), Values):
                return run(*args, **kwargs)
            with _disable_current_modes():  # type: ignore[no-untyped-call]  # torch's
                return run(*args, **kwargs)

        return call

    engine = without(graph._engine_run_backward)
    for module in (graph, torch.autograd):
        module._engine_run_backward = engine
    functional.scaled_dot_product_attention = without(functional.scaled_dot_product_attention)


def _count_nonzeros(library: torch.library.Library) -> None:
    """Let the kernel of ``nonzero`` find on the device what the host counts."""
    kernel: Any = torch.library.get_kernel("aten::nonzero", "CUDA")

    def nonzero(keys: Any, tensor: torch.Tensor) -> Any:
        found = twin(tensor).nonzero()
        _runtime.sim_answer(len(found))
        made = kernel.call_boxed(keys, tensor)
        twin(made).copy_(found)
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced
        library.impl("nonzero", nonzero, "CUDA", with_keyset=True)  # type: ignore[no-untyped-call]  # torch's


def _wait_for_autograd() -> None:
    """Return when autograd's threads rest: one that still lets go of Python objects as Python ends aborts it."""
    before, until = None, time.monotonic() + 30
    while time.monotonic() < until:
        now = _autograd_threads()
        if now == before and all(state.startswith("State:\tS") for state, *_ in now):
            return
        before = now
        time.sleep(0.02)  # a thread that waits for Python's lock is given it now, or looks for it every 5 ms


def _autograd_threads() -> list[list[str]]:
    """State and switches of each, which grow while it works."""
    found = []
    for status in Path("/proc/self/task").glob("*/status"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread of another kind that has ended
            lines = status.read_text().splitlines()
            if lines[0].startswith("Name:\tpt_autograd"):
                found.append([line for line in lines if line.startswith("State") or "ctxt_switches" in line])
    return found


def install() -> None:
    """Compute values from here on, as ``SIMCUDA_VALUES`` says."""
    wanted = os.environ.get("SIMCUDA_VALUES")
    if not wanted:
        return
    atexit.register(_wait_for_autograd)
    if wanted != "all":
        _leave_out_functions()
    _count_nonzeros(_aten)
    Values(None if wanted == "all" else int(wanted)).__enter__()  # type: ignore[no-untyped-call]  # torch's
