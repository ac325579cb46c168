"""The dispatch mode of a trace: every operation passes it, and so every storage and every transfer between devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from safe_loading._core.interrupts import HeldSignals

from .cuda_scratch import ADDS_IN_PLACE, CTC_BACKWARD, SCRATCH_FIRST, scratch_of
from .known_values import GUESSES, KnownValues, UnknownValue
from .ledger import Ledger, device_key
from .operation import OperationCall, tensors_in
from .operation_cache import NEW, OperationCache, changes_a_list, outputs_of
from .records import Crossing, Problem

aten = torch.ops.aten
_COPIES = frozenset({aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default})
# indices on the CPU may index a tensor on an accelerator: ``make_info`` of aten's TensorAdvancedIndexing moves them
_INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)
# autograd fills a gradient of zeros in place, except for tensor subclasses such as fake tensors, for which it takes
# the variant that copies (``areAnyTensorSubclassLike`` in torch/csrc/autograd/FunctionsManual.cpp)
_IN_PLACE_VARIANT: dict[OpOverload[..., Any], OpOverload[..., Any]] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
_BY_MASK = frozenset({aten.index.Tensor, aten.masked_select.default})
_ZEROS = frozenset({"aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default"})
# the use counts of a gradient, and of its storage, that only autograd's buffer refers to: the references of the calls
# between autograd and the place that counts are included
_UNSHARED_TENSOR, _UNSHARED_STORAGE = 4, 2

# FakeTensorMode knows the output shapes of CUDA's kernel, which takes bfloat16 only; the CPU's takes every dtype
_BF16_ONLY = frozenset({aten._grouped_mm.default})

# the loss of models that write down sounds: its table of paths is as wide as the longest text
_CTC = frozenset({aten._ctc_loss.default, aten._ctc_loss.Tensor})
_LENGTHS = 3  # the place of the lengths of the texts


class _Transfer(NamedTuple):
    source: int | str
    target: int | str
    module: str
    phase: str
    in_model_code: bool


class TraceDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Records each operation's allocations in the ledger, and the transfers from device to device."""

    def __init__(self, ledger: Ledger, values: KnownValues, cache: OperationCache, *, multi_device: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.ledger = ledger
        self.values = values
        self.problems: dict[Problem, None] = {}  # a set that keeps its order
        self.held = HeldSignals()  # Ctrl-C among them, until the next operation
        self._cache = cache
        self._multi_device = multi_device
        self._in_hook = False
        self._transfers: dict[_Transfer, list[int]] = {}  # bytes and number of tensors
        self._made_from: dict[int, int | None] = {}

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """Inside, tensors are moved by a hook at the boundary of a module, and not by the model's own code."""
        self._in_hook = True
        try:
            yield
        finally:
            self._in_hook = False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # C++ code asks for devices more often than operations run, and an exception in its question would end the
            # process (std::terminate): that is why signals are held back
            return args[0].fake_device
        if self.held.arrived:
            self.held.deliver()
        call = OperationCall(func, args, kwargs or {})
        if func is aten._local_scalar_dense.default:  # Tensor.item()
            return self.values.item(args[0], self._module)
        if self._multi_device:
            call = self._on_one_device(call)
        if func in _IN_PLACE_VARIANT and self._fills_gradient(call.args[0]):
            call = call._replace(func=_IN_PLACE_VARIANT[func])
        out = outputs_of(call, self._run(call))
        in_place = func is aten.add.Tensor and (ADDS_IN_PLACE.get() or self._sums_gradients(call))
        if in_place and isinstance(out, torch.Tensor):
            self.ledger.reuse_storage(call.args[0], out)
            return out
        made = list(tensors_in((out,)))
        scratch = scratch_of(call, made[:1])
        taken = self._take(call, scratch, made) if scratch and func in SCRATCH_FIRST else None
        # dropout_cuda makes its mask before its output
        for tensor in made if func is not aten.native_dropout.default else reversed(made):
            self.values.adopt_constant(tensor)
            index = self.ledger.add(tensor, str(call.func))
            if self._multi_device and index not in self._made_from:
                self._made_from[index] = self._first_input(call)
        if scratch:
            self.ledger.give_back(taken or self._take(call, scratch, made))
        self.values.propagate(call, out)
        return out

    def _take(self, call: OperationCall, scratch: Sequence[int], made: Sequence[torch.Tensor]) -> range:
        return self.ledger.take(scratch, made[0].device, str(call.func))

    def _run(self, call: OperationCall) -> object:
        if changes_a_list(call.func):
            return None
        key = self._cache.key(call)
        out = NEW if key is None else self._cache.recall(key, call)
        if out is not NEW:
            return out
        if (of_texts := _outputs_of_ctc_loss(call, self.values)) is not None:
            return of_texts  # which depend on values: nothing to be remembered
        try:
            out = call.run() if call.func not in _BF16_ONLY else _run_in_bf16(call)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._run_on_values(call)
        if key is not None:
            self._cache.remember(key, call, out)
        return out

    def _fills_gradient(self, target: torch.Tensor) -> bool:
        """Whether autograd itself, and not a module that is computed again, fills a gradient of zeros."""
        if not self._between_nodes:
            return False
        allocation = self.ledger.allocation_of(target)
        return allocation is not None and allocation.op in _ZEROS

    def _sums_gradients(self, call: OperationCall) -> bool:
        """Whether autograd adds one gradient to another between two nodes, which it does in place for real tensors.

        The rule is ``can_accumulate_inplace`` of ``torch/csrc/autograd/input_buffer.cpp``, which leaves subclasses out.
        """
        if not self._between_nodes or not isinstance(call.args[1], torch.Tensor):
            return False
        first, second = call.args
        storage = first.untyped_storage()
        return (
            _is_dense(first)
            and first.shape == second.shape
            and first.dtype == second.dtype
            and storage.nbytes() == first.nbytes
            and first._use_count() <= _UNSHARED_TENSOR
            and torch._C._storage_Use_Count(storage._cdata) <= _UNSHARED_STORAGE
        )

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor with the values of a fake one; ones, noted as an assumption, where they are unknown."""
        return self.values.value_or_guess(tensor, self._module)

    @property
    def _between_nodes(self) -> bool:
        """Whether the backward pass itself runs, and no module, nor a layer that a checkpoint computes again.

        A checkpoint may call a layer's ``forward`` alone, and not its hooks; it records a graph, as autograd does not.
        """
        return self.ledger.phase == "backward" and not self.ledger.stack and not torch.is_grad_enabled()

    @property
    def _module(self) -> str:
        return self.ledger.stack[-1] if self.ledger.stack else ""

    def _run_on_values(self, call: OperationCall) -> object:
        """Run an operation whose output shape depends on values, which fake tensors do not have."""
        value = self.values.compute(call)
        if value is None and call.func in _BY_MASK:
            return self._select_by_mask(call)
        kind = str(call.func._schema.returns[0].type)
        if value is None and kind in GUESSES:  # `torch.equal`, for one
            return self.values.guess(kind, self._module)
        tensors = call.tensors()
        if value is None or not tensors:
            raise UnknownValue(f"the output shape of {call.func} depends on values")

        def fake(real: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=tensors[0].device)
            self.values.set(made, real)
            return made

        result: object = tree_map_only(torch.Tensor, fake, value)
        return result

    def _select_by_mask(self, call: OperationCall) -> torch.Tensor:
        """Select unknown numbers by known masks: through the indices of the masks' true elements, as CUDA does."""
        x, masks = call.args
        if call.func is aten.masked_select.default:
            shape = torch.broadcast_shapes(x.shape, masks.shape)  # type: ignore[no-untyped-call]  # of torch
            x, masks = x.expand(shape), [self.__torch_dispatch__(aten.expand.default, (), (masks, list(shape)))]
        indices: list[torch.Tensor | None] = []
        for mask in masks:
            if mask is None or mask.dtype not in (torch.bool, torch.uint8):
                indices.append(mask)
            else:  # raises UnknownValue where the mask is unknown too
                indices += self.__torch_dispatch__(aten.nonzero.default, (), (mask,)).unbind(1)
        result: torch.Tensor = aten.index.Tensor(x, indices)
        self.ledger.add(result, str(call.func))  # while the indices are still alive, as they are on CUDA
        return result

    def _on_one_device(self, call: OperationCall) -> OperationCall:
        """Note a transfer, or a problem where the tensors of a call are on several devices."""
        if call.func in _COPIES:
            self._note_transfer(call)
            return call
        # a CPU tensor without dimensions may meet tensors on any device (``allow_cpu_scalars`` of TensorIterator.cpp)
        tensors = [t for t in call.tensors() if t.dim() or t.device.index is not None]
        if call.func in _INDEXING:
            tensors = [t for t in tensors if t is call.args[0] or t.device.index is not None]
        devices = list(dict.fromkeys(t.device for t in tensors))
        if len(devices) < 2:
            return call
        self._note_problem(call.func, tensors, devices)
        # go on as if everything had been moved to where most of it is, so that one trace finds every such place
        target = max(devices, key=lambda d: sum(t.nbytes for t in tensors if t.device == d))
        moved = {id(t): t.to(target) for t in tensors if t.device != target}
        return call.with_tensors(lambda t: moved.get(id(t), t))

    def _note_problem(
        self, func: OpOverload[..., Any], tensors: list[torch.Tensor], devices: list[torch.device]
    ) -> None:
        words = tuple(
            f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {device_key(t.device)}" for t in tensors
        )
        module = self._module
        keys = tuple(device_key(device) for device in devices)
        makers = tuple(self._maker(self.ledger.index_of(tensor), module) for tensor in tensors)
        self.problems.setdefault(Problem(str(func), module, keys, words, self.ledger.phase, makers))

    def _first_input(self, call: OperationCall) -> int | None:
        return next((i for t in tensors_in(call.args) if (i := self.ledger.index_of(t)) is not None), None)

    def _maker(self, index: int | None, module: str) -> str | None:
        """Return the module inside `module` that an allocation comes from, or its name if it was there before the step.

        What `module` itself computed is followed back to the first input of the operation that computed it.
        """
        while index is not None:
            allocation = self.ledger.allocations[index]
            if allocation.phase == "load":
                return allocation.op
            if allocation.module != module and (not module or allocation.module.startswith(f"{module}.")):
                return allocation.module
            index = self._made_from.get(index)
        return None

    def _note_transfer(self, call: OperationCall) -> None:
        if call.func is aten._to_copy.default:
            source, target = call.args[0], call.kwargs.get("device")
        elif call.func is aten.copy_.default:
            source, target = call.args[1], call.args[0].device
        else:
            return
        if target is None or source.device == target or not source.nbytes:
            return
        # between the modules of a backward pass autograd moves gradients back, along the crossings of the forward pass
        by_autograd = self.ledger.phase == "backward" and not self.ledger.stack
        own = not (self._in_hook or by_autograd)
        transfer = _Transfer(device_key(source.device), device_key(target), self._module, self.ledger.phase, own)
        total = self._transfers.setdefault(transfer, [0, 0])
        total[0] += source.nbytes
        total[1] += 1

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """The transfers from device to device."""
        return tuple(
            Crossing(of.source, of.target, of.module, size, count, of.phase, of.in_model_code)
            for of, (size, count) in self._transfers.items()
        )


def _run_in_bf16(call: OperationCall) -> object:
    """Run an operation in bfloat16, and return its output in the dtype of the first argument."""
    to_bf16 = partial(torch.Tensor.to, dtype=torch.bfloat16)
    out = call.with_tensors(lambda t: to_bf16(t) if t.is_floating_point() else t).run()
    return out.to(call.args[0].dtype) if isinstance(out, torch.Tensor) else out


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie without gaps, in any order of dimensions (``is_non_overlapping_and_dense``)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _outputs_of_ctc_loss(call: OperationCall, values: KnownValues) -> object:
    """Return the loss of each row and the table of its paths, or the gradient of the scores.

    None for another operation, and for lengths that are unknown.
    """
    if call.func in CTC_BACKWARD:
        return torch.empty_like(call.args[1])  # torch would compute it for real, and forget its device
    if call.func not in _CTC:
        return None
    scores, lengths = call.args[0], call.args[_LENGTHS]
    known = values.numbers(lengths) if isinstance(lengths, torch.Tensor) else lengths
    if known is None:
        return None
    frames, rows, _ = scores.shape
    # a blank before each token of the text, and one at its end
    return scores.new_empty(rows), scores.new_empty(rows, frames, 2 * max(known, default=0) + 1)
