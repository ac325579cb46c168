"""Scratch and choice of CUDA's attention kernels, beside what torch's own code took on simulated cards."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from safe_loading import Workload, predict_memory
from safe_loading._memory.trace.cuda_attention import _efficient_workspace, fused_attention
from safe_loading._memory.trace.cuda_paths import cuda_paths
from safe_loading._memory.trace.trace_step import trace_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuda_runs import CudaRunner

T4, A100, L4, H100 = (7, 5), (8, 0), (8, 9), (9, 0)
HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("card", "dtype", "head", "shape", "taken"),
    [
        (T4, HALF, 64, (2, 8, 128, 128), 524800),
        (T4, HALF, 128, (2, 8, 128, 128), 1049088),
        (T4, HALF, 192, (1, 4, 200, 200), 2883968),
        (T4, HALF, 192, (4, 64, 1000, 1000), 234979328),
        (T4, HALF, 192, (1, 2, 128, 1000), 4391008),
        (T4, FLOAT, 80, (1, 4, 200, 200), 524800),
        (A100, HALF, 128, (2, 8, 128, 128), 1048832),
        (A100, FLOAT, 32, (2, 8, 128, 128), 524800),
        (A100, FLOAT, 192, (2, 8, 128, 128), 1573632),
        (L4, HALF, 96, (2, 8, 128, 128), 1049088),
        (L4, HALF, 128, (2, 8, 128, 128), 3146752),
        (L4, FLOAT, 128, (2, 8, 128, 128), 1049600),
        (H100, HALF, 80, (2, 8, 128, 128), 1048832),
        (H100, FLOAT, 256, (2, 8, 128, 128), 2098176),
    ],
)
def test_the_workspace_of_efficient_attention(
    card: tuple[int, int], dtype: torch.dtype, head: int, shape: tuple[int, int, int, int], taken: int
) -> None:
    batch, heads, queries, keys = shape
    query = torch.empty(batch, heads, queries, head, dtype=dtype, device="meta")
    key = torch.empty(batch, heads, keys, head, dtype=dtype, device="meta")
    assert _efficient_workspace(card, query, key, key) == taken


@pytest.mark.parametrize(
    ("card", "dtype", "head", "groups", "mask", "kernel"),
    [
        (H100, torch.bfloat16, 64, 2, None, "Cudnn"),
        (H100, torch.bfloat16, 64, 2, "bool", "Cudnn"),
        (H100, torch.bfloat16, 64, 8, "trained", "Efficient"),
        (H100, torch.bfloat16, 36, 8, None, "Slice"),  # padded to 40 for flash attention
        (H100, FLOAT, 64, 8, None, "Efficient"),
        (A100, torch.bfloat16, 64, 2, None, "Flash"),
        (A100, torch.bfloat16, 64, 8, "bool", "Efficient"),
        (A100, torch.bfloat16, 64, 2, "bool", None),
        (A100, FLOAT, 33, 8, None, None),
        (T4, torch.bfloat16, 64, 8, None, None),
        (T4, HALF, 64, 8, None, "Efficient"),
        (T4, HALF, 100, 8, None, None),
        (T4, FLOAT, 33, 8, None, "Efficient"),
    ],
)
def test_the_kernel_that_cuda_chooses(
    card: tuple[int, int], dtype: torch.dtype, head: int, groups: int, mask: str | None, kernel: str | None
) -> None:
    with FakeTensorMode():
        query = torch.empty(2, 8, 128, head, dtype=dtype, requires_grad=True)
        key = torch.empty(2, groups, 128, head, dtype=dtype, requires_grad=True)
        bias = None
        if mask is not None:
            bias = torch.empty(2, 1, 128, 128, dtype=torch.bool if mask == "bool" else dtype)
            bias = bias.requires_grad_() if mask == "trained" else bias
        options = (0.0, mask is None, None)
        output = fused_attention(card, query, key, key, bias, groups != 8, options)
        if kernel is None:
            assert output is None
            return
        assert output is not None
        assert output.grad_fn is not None
        assert kernel in output.grad_fn.name()
        output.sum().backward()  # type: ignore[no-untyped-call]  # torch's
        assert query.grad is not None
        assert key.grad is not None
        assert query.grad.shape == query.shape
        assert key.grad.shape == key.shape


@pytest.mark.parametrize(
    ("dropout", "mask", "kernel"),
    [(0.5, False, "Cudnn"), (0.0625, True, "Cudnn"), (0.1, False, "Flash"), (0.1, True, "Efficient")],
)
def test_cudnn_takes_a_dropout_of_so_many_sixteenths_only(dropout: float, mask: bool, kernel: str) -> None:
    with FakeTensorMode():
        query = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.empty(2, 1, 128, 128, dtype=torch.bfloat16) if mask else None
        output = fused_attention(H100, query, query, query, bias, False, (dropout, not mask, None))
        assert output is not None
        assert output.grad_fn is not None
        assert kernel in output.grad_fn.name()


def test_a_trained_bias_has_a_gradient_for_each_row_and_head_in_lines_of_16_numbers() -> None:
    """As T5's relative positions: one bias for all rows, whose gradient is summed over them afterwards."""
    with FakeTensorMode():
        query = torch.empty(2, 8, 128, 64, dtype=HALF, requires_grad=True)
        key = torch.empty(2, 8, 120, 64, dtype=HALF)
        bias = torch.empty(1, 8, 128, 120, dtype=HALF, requires_grad=True)
        gradients: list[torch.Tensor] = []
        output = fused_attention(A100, query, key, key, bias, False, (0.0, False, None))
        assert output is not None
        assert output.grad_fn is not None
        output.grad_fn.register_hook(lambda found, _: gradients.append(found[3]))
        output.sum().backward()  # type: ignore[no-untyped-call]  # torch's
        assert gradients[0].shape == (2, 8, 128, 120)
        assert gradients[0].untyped_storage().nbytes() == 2 * 8 * 128 * 128 * 2
        assert bias.grad is not None
        assert bias.grad.shape == bias.shape


SHAPES = [
    # query, key and value: rows, heads and tokens
    ((2, 8, 16), (2, 8, 16), (2, 8, 16)),
    ((2, 8, 1), (2, 8, 16), (2, 8, 16)),
    ((2, 8, 16), (2, 8, 1), (2, 8, 1)),
    ((2, 8, 16), (2, 2, 16), (2, 2, 16)),
    ((2, 8, 16), (2, 1, 16), (2, 1, 16)),  # as in Falcon, which leaves it to the product to broadcast
    ((2, 8, 16), (2, 3, 16), (2, 3, 16)),
    ((2, 8, 16), (2, 2, 16), (2, 4, 16)),
    ((2, 8, 16), (2, 8, 16), (2, 1, 16)),
    ((2, 8, 16), (1, 8, 16), (1, 8, 16)),
    ((1, 8, 16), (2, 8, 16), (2, 8, 16)),
    ((2, 1, 16), (2, 8, 16), (2, 8, 16)),
]
BACKENDS = {None: 0, "Flash": 1, "Efficient": 2, "Cudnn": 3}


@pytest.mark.gpu
@pytest.mark.parametrize(("card", "capability"), [("T4", T4), ("A100", A100), ("H100", H100)])
def test_the_kernel_for_rows_and_heads_of_other_numbers_is_torch_s(
    simulated_cuda: CudaRunner, card: str, capability: tuple[int, int]
) -> None:
    script = """
        import torch
        from test_cuda_attention import _cases

        def chosen():
            found = []
            for shapes, dtype, masked, grouped in _cases():
                tensors = [torch.empty(*shape, 64, dtype=dtype, device="cuda") for shape in shapes]
                tensors = [tensor.requires_grad_() for tensor in tensors]
                mask = torch.empty(2, 1, shapes[0][2], shapes[1][2], dtype=dtype, device="cuda") if masked else None
                found.append(torch._fused_sdp_choice(*tensors, mask, 0.0, False, enable_gqa=grouped))
            return found
        case(chosen, "chosen")
    """
    found = simulated_cuda.run(script, env={"SIMCUDA_GPU": card, "SIMCUDA_VALUES": "0"})["chosen"]
    assert [_backend(capability, *case) for case in _cases()] == found


def _cases() -> Iterator[tuple[tuple[tuple[int, ...], ...], torch.dtype, bool, bool]]:
    return itertools.product(SHAPES, (torch.bfloat16, HALF, FLOAT), (False, True), (False, True))


def _backend(
    card: tuple[int, int], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, masked: bool, grouped: bool
) -> int:
    with FakeTensorMode():
        query, key, value = (torch.empty(*shape, 64, dtype=dtype, requires_grad=True) for shape in shapes)
        mask = torch.empty(2, 1, shapes[0][2], shapes[1][2], dtype=dtype) if masked else None
        output = fused_attention(card, query, key, value, mask, grouped, (0.0, False, None))
    name = None if output is None or output.grad_fn is None else output.grad_fn.name()
    return next(
        number for kernel, number in BACKENDS.items() if (kernel in name if kernel and name else kernel is name)
    )


@pytest.mark.parametrize(
    ("keys", "values", "grouped", "kernels"),
    [
        ((2, 1, 16), (2, 1, 16), False, (0, 0)),
        ((1, 8, 16), (1, 8, 16), False, (0, 0)),
        ((2, 2, 16), (2, 4, 16), True, (0, 3)),
        ((2, 8, 1), (2, 8, 1), False, (1, 1)),
    ],
)
def test_fused_kernels_broadcast_no_rows_or_heads(
    keys: tuple[int, ...], values: tuple[int, ...], grouped: bool, kernels: tuple[int, int]
) -> None:
    shapes = ((2, 8, 16), keys, values)
    assert tuple(_backend(card, shapes, torch.bfloat16, False, grouped) for card in (A100, H100)) == kernels


class _HeadsFirst(torch.nn.Module):
    """Attention whose query lies with its heads before its tokens, or as it came out of a projection."""

    def __init__(self, *, in_order: bool) -> None:
        super().__init__()
        self.project, self.in_order = torch.nn.Linear(64, 64, dtype=torch.bfloat16), in_order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(2, 16, 4, 16).transpose(1, 2)
        query = heads.contiguous() if self.in_order else heads
        return functional.scaled_dot_product_attention(query, heads, heads).transpose(1, 2).reshape(2, 16, 64).sin()


@pytest.mark.parametrize("in_order", [True, False])
def test_flash_attention_copies_an_output_with_heads_first_for_its_backward_pass(in_order: bool) -> None:
    """As Whisper's is: an output lies as the query does, and the kernel of the backward pass wants tokens first."""
    model, step = _HeadsFirst(in_order=in_order), Workload.train(2, 16, labels=False, optimizer="none")
    with cuda_paths((8, 0)):
        trace = trace_step(model, step, inputs={"x": torch.empty(2, 16, 64, dtype=torch.bfloat16)})
    copies = [a for a in trace.allocations if "clone" in a.op and a.phase == "backward" and a.bytes == 2 * 16 * 64 * 2]
    assert len(copies) == in_order


class _OddHeads(torch.nn.Module):
    """Attention whose heads are of a size that no fused kernel takes with a mask, without anything around it."""

    def __init__(self, *, dropout: float, causal: bool, trained: bool) -> None:
        super().__init__()
        self.project, self.options, self.trained = torch.nn.Linear(144, 144), (dropout, causal), trained

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        heads = self.project(x).view(2, 256, 8, 18).transpose(1, 2)
        with torch.set_grad_enabled(self.trained):
            output = functional.scaled_dot_product_attention(heads, heads, heads, mask, *self.options)
        return (output + heads).transpose(1, 2).reshape(2, 256, 144).sin()


def test_the_mask_of_a_dropout_in_unfused_attention_takes_a_byte_for_each_score() -> None:
    model, step = _OddHeads(dropout=0.1, causal=True, trained=True), Workload.train(2, 256, labels=False)
    with cuda_paths(A100):
        trace = trace_step(model, step, inputs={"x": torch.empty(2, 256, 144)})
    scores = 2 * 8 * 256 * 256
    assert [a.bytes for a in trace.allocations if "native_dropout.default" in a.op] == [scores, 4 * scores]
    assert not [a for a in trace.allocations if "bernoulli" in a.op]


def unfused() -> dict[str, list[int]]:
    """Forecast and run a step with each mask and dropout."""
    found = {}
    masks = {"none": None, "causal": None, "bool": torch.ones(2, 1, 256, 256, dtype=torch.bool)}
    masks["float"] = torch.zeros(2, 1, 256, 256)
    for dropout, (kind, mask), trained in itertools.product((0.0, 0.1), masks.items(), (True, False)):
        model = _OddHeads(dropout=dropout, causal=kind == "causal", trained=trained)
        batch = {"x": torch.empty(2, 256, 144), **({} if mask is None else {"mask": mask})}
        step = Workload.train(2, 256, labels=False, optimizer="sgd")
        forecast = predict_memory(model, step, inputs={k: v.to("meta") for k, v in batch.items()}, capability=A100)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer = torch.optim.SGD(model.cuda().parameters())
        for _ in range(2):
            given = {name: tensor.cuda() for name, tensor in batch.items()}  # held until the step ends, as a loop does
            loss = model(**given).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, given
        found[f"{kind}, {dropout}, {trained}"] = [
            forecast.allocated_peak_bytes,
            torch.cuda.max_memory_allocated() - before,
        ]
        del model, optimizer
        torch._C._cuda_clearCublasWorkspaces()
    return found


@pytest.mark.gpu
def test_unfused_attention_takes_what_it_takes_on_a_card(simulated_cuda: CudaRunner) -> None:
    script = """
        from test_cuda_attention import unfused
        case(unfused, "unfused")
    """
    found = simulated_cuda.run(script, env={"SIMCUDA_GPU": "A100", "SIMCUDA_VALUES": "4096"})["unfused"]
    assert {name for name, (predicted, real) in found.items() if predicted != real} == set()
    assert len(found) == 16
