"""The order in which kernels lay their outputs down, for inputs whose dimensions were changed over.

Fake tensors often keep an input's order where a kernel does not, and what reads the output then copies, or does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from safe_loading._memory.trace.cuda_scratch import CARD, card_of
from safe_loading._memory.trace.operation import OperationCall
from safe_loading._memory.trace.operation_cache import outputs_of

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

aten = torch.ops.aten
ALL = [True] * 3


def calls(device: str) -> Iterator[tuple[str, OperationCall]]:
    """Yield operations on each pair of orders of their first two inputs, with a name for each."""
    with torch.device(device):
        weight, mean = torch.ones(5), torch.ones(2, 7, 1)
        of_tokens = [torch.ones(2, 7, 5), torch.ones(2, 5, 7).transpose(1, 2)]
        for (a, gradient), (b, x) in ((g, y) for g in enumerate(of_tokens) for y in enumerate(of_tokens)):
            cases: list[tuple[str, Any, tuple[Any, ...]]] = [
                ("layer_norm", aten.native_layer_norm_backward, (gradient, x, [5], mean, mean, weight, weight, ALL)),
                ("log_softmax", aten._log_softmax_backward_data, (gradient, x, -1, x.dtype)),
                ("softmax", aten._softmax_backward_data, (gradient, x, -1, x.dtype)),
                ("mse", aten.mse_loss_backward, (gradient.sum(), gradient, x, 1)),
                ("gelu", aten.gelu_backward, (gradient, x)),
                ("hardswish", aten.hardswish_backward, (gradient, x)),
            ]
            if device != "cpu":  # which has no such kernel
                cases.append(("rms_norm", aten._fused_rms_norm_backward, (gradient, x, [5], mean, weight, [True] * 2)))
            yield from ((f"{name} {a} {b}", OperationCall(func.default, args, {})) for name, func, args in cases)
        weight = torch.ones(8)
        first, last, mixed = torch.ones(2, 8, 4, 4), torch.ones(2, 4, 4, 8), torch.ones(2, 4, 8, 4)
        images = [first, last.permute(0, 3, 1, 2), mixed.transpose(1, 2)]
        for (a, gradient), (b, x) in ((g, y) for g in enumerate(images) for y in enumerate(images)):
            for trains in (True, False):
                of_norm = (gradient, x, weight, weight, weight, weight, weight, trains, 1e-5, ALL)
                yield (
                    f"batch_norm {trains} {a} {b}",
                    OperationCall(aten.native_batch_norm_backward.default, of_norm, {}),
                )
        pixel = torch.ones(2, 8, 1, 1).as_strided((2, 8, 1, 1), (8, 1, 8, 8))
        yield "relu of a pixel", OperationCall(aten.relu.default, (pixel,), {})
        yield "sum of pixels", OperationCall(aten.add.Tensor, (pixel, pixel), {})
        yield "pixel plus one", OperationCall(aten.add.Tensor, (pixel, 1), {})
        yield "copy of a pixel", OperationCall(aten.clone.default, (pixel,), {})
        rows, picture = torch.ones(1, 6, 8).transpose(1, 2), torch.ones(1, 2, 3, 8).permute(0, 3, 1, 2)
        gap = torch.ones(8, 12)[:, 4:5]  # a view that does not begin where its storage does
        for func in (aten.view.default, aten._unsafe_view.default):
            for a, (x, size) in enumerate(
                [(rows, [1, 8, 2, 3]), (rows, [8, 1, 3, 2]), (picture, [1, 8, 6]), (picture, [8, 6, 1]), (gap, [1, 8])]
            ):
                yield f"{func} {a}", OperationCall(func, (x, size), {})
        for b, x in enumerate(images):
            kernel = torch.ones(8, 8, 3, 3)
            convolved = (x, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            yield f"convolution {b}", OperationCall(aten.convolution.default, convolved, {})
            yield f"pixel_shuffle {b}", OperationCall(aten.pixel_shuffle.default, (x, 2), {})
            yield f"reflection {b}", OperationCall(aten.reflection_pad2d.default, (x, [1, 1, 1, 1]), {})


def strides(out: Any) -> list[int]:
    first: torch.Tensor = out[0] if isinstance(out, (tuple, list)) else out
    return list(first.stride())


def test_views_lie_where_torch_lays_them() -> None:
    with FakeTensorMode():
        (x,) = torch.ones(9, 8).split(9)
        call = OperationCall(aten.view.default, (x[3:4].transpose(0, 1), [8, 1, 1]), {})
        out = outputs_of(call, call.run())
    assert isinstance(out, torch.Tensor)
    assert out.storage_offset() == 24
    assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def predicted() -> dict[str, list[int]]:
    """The strides that a trace gives the outputs."""
    with FakeTensorMode():
        return {name: strides(outputs_of(call, call.run())) for name, call in calls("cpu")}


def test_outputs_lie_as_the_cpu_lays_them_down() -> None:
    assert predicted() == {name: strides(call.run()) for name, call in calls("cpu")}


@pytest.mark.gpu
def test_outputs_lie_as_cuda_lays_them_down(cuda: CudaRunner) -> None:
    script = """
        from test_output_orders import calls, strides
        case(lambda: {name: strides(call.run()) for name, call in calls("cuda")}, "orders")
    """
    token = CARD.set(card_of((9, 0)))
    try:
        mine = predicted()
    finally:
        CARD.reset(token)
    found = cuda.run(script, env={"SIMCUDA_VALUES": "0"})["orders"]
    assert len(mine) > 50
    assert {name: found[name] for name in mine} == mine
    assert all(found[name] == [35, 5, 1] for name in found.keys() - mine.keys())
