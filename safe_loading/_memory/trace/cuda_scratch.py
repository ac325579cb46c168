"""The scratch memory that CUDA's kernels take and the CPU's do not, for tensors without data.

A reduction whose threads would each add up many numbers is split over several blocks of threads, which meet in a buffer
of the caching allocator; sorts, grouped products and some gradients have buffers of their own. The rules of reductions
are those of ``setReduceConfig`` in ``ATen/native/cuda/Reduce.cuh`` and of ``TensorIterator.cpp``, torch 2.13; tests
hold all of them against torch's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from .operation import OperationCall

aten = torch.ops.aten
_WARP, _MOST_THREADS = 32, 512
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # that a thread adds up
_INDEXABLE = 2**31 - 1  # bytes that a kernel with 32-bit indices reaches
_FEW_TOKENS = 3072  # for which the gradient of an embedding is added up in place
_ROWS_OF_A_PART = 10  # NROWS_PER_THREAD of EmbeddingBackwardKernel.cu
_FEW_KEYS = 4096  # which one block of threads sorts
_KEYS_OF_A_TILE = 4608  # of CUB's sort on an H100; on other cards the counters differ by a few KiB
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)


class Processors(NamedTuple):
    """The multiprocessors of a GPU, which decide how a reduction is split."""

    number: int
    threads: int  # of each
    groups: bool = False  # whether CUTLASS's grouped products of bfloat16 run on them


# by compute capability; cards of one capability differ in their multiprocessors, and the largest common one is here
_CARDS = {
    (7, 0): Processors(80, 2048),
    (7, 5): Processors(40, 1024),
    (8, 0): Processors(108, 2048),
    (8, 6): Processors(84, 1536),
    (8, 9): Processors(58, 1536),
    (9, 0): Processors(132, 2048, groups=True),
    (10, 0): Processors(148, 2048),
    (12, 0): Processors(170, 1536),
}
_USUAL_CARD = Processors(108, 2048)
CARD: ContextVar[Processors | None] = ContextVar("CARD", default=None)
"""The card whose kernels a trace counts; None where they are not CUDA's."""
ADDS_IN_PLACE: ContextVar[bool] = ContextVar("ADDS_IN_PLACE", default=False)
"""Whether torch itself adds in place, where it does not for fake tensors."""


def card_of(capability: tuple[int, int]) -> Processors:
    """Return the card of a compute capability."""
    return _CARDS.get(capability, _USUAL_CARD)


@dataclass(frozen=True)
class _Rule:
    """How one kernel reduces: the bytes that a thread keeps, by the input's dtype, and how many numbers it loads."""

    kept: int = 0  # 0: of the dtype in which sums are added up
    loads: int = 4
    whole: bool = False  # integers are converted first


_SUM = _Rule(whole=True)
_PAIR = _Rule(kept=16)  # a value and its index
_SPREAD = _Rule(kept=16, loads=2)  # Welford's mean, sum of squares and counts
_VALUE = _Rule(kept=-1)  # in the input's own dtype
_TRUTH = _Rule(kept=1)
_RULES = {
    aten.sum.default: _SUM,
    aten.sum.dim_IntList: _SUM,
    aten.mean.default: _SUM,
    aten.mean.dim: _SUM,
    aten.linalg_vector_norm.default: _SUM,
    aten.max.default: _VALUE,
    aten.min.default: _VALUE,
    aten.amax.default: _VALUE,
    aten.amin.default: _VALUE,
    aten.max.dim: _PAIR,
    aten.min.dim: _PAIR,
    aten.argmax.default: _PAIR,
    aten.argmin.default: _PAIR,
    aten.all.default: _TRUTH,
    aten.all.dim: _TRUTH,
    aten.any.default: _TRUTH,
    aten.any.dim: _TRUTH,
    aten.var.correction: _SPREAD,
    aten.std.correction: _SPREAD,
    aten.var_mean.correction: _SPREAD,
}

CTC_BACKWARD = frozenset({aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor})
PATCHES = frozenset({aten.im2col.default, aten.col2im.default})
_MASK = 10  # the place of the gradients that are asked for among the arguments of a convolution's backward pass
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_TRAINING = 5  # the place of the switch among the arguments of a batch norm
_TABLE = 6  # the place of the first table among their arguments

_OF_A_COPY = frozenset({aten.max.default, aten.min.default})  # of what is not contiguous


def scratch_of(call: OperationCall, outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the bytes of each buffer that a call takes while it runs on the card of this context, in their order."""
    if call.func in CTC_BACKWARD:  # the second table, from the end of the texts, on any device
        return (call.args[_TABLE].nbytes,)
    if call.func in PATCHES and outputs:
        x = call.args[0]
        copied = () if x.is_contiguous() else (x.nbytes,)
        return (*copied, x.nbytes) if outputs[0].nbytes > x.nbytes else copied  # an output starts as large as the input
    card, rule = CARD.get(), _RULES.get(call.func)
    if card is None or not outputs:
        return ()
    if call.func in _OTHERS:
        return _OTHERS[call.func](call, outputs[0], card)
    if rule is None:
        return ()
    x = call.args[0]
    if not isinstance(x, torch.Tensor) or x.numel() == 0:
        return ()
    asked = call.kwargs.get("dtype")
    converted: tuple[int, ...] = ()
    size = x.itemsize
    if rule.whole and x.dtype in _INTEGERS:
        size = (asked or torch.int64).itemsize
        converted = (x.numel() * size,)
    elif call.func in _OF_A_COPY and not x.is_contiguous():
        converted = (x.nbytes,)
    kept = size if rule.kept < 0 else rule.kept or (8 if size == 8 else 4)
    dims = _reduced(call, x.dim())
    strides = x.stride() if not converted else torch.empty(x.shape, device="meta").stride()
    split = split_over_blocks(x.shape, strides, dims, size, kept, rule.loads, card)
    return (*converted, *split)


def _of_softmax_backward(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    # gradient * output, which the kernel adds up, and those of both that do not lie in order
    copied = (tensor.nbytes for tensor in call.args[:2] if not tensor.is_contiguous())
    return (call.args[0].numel() * max(tensor.itemsize for tensor in call.args[:2]), *copied)


def _of_safe_softmax(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    # what is masked, the rows that are, and a number
    return out.numel(), out.numel() // max(out.shape[call.args[1]], 1), out.itemsize


def _of_embedding_backward(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the scratch of an embedding's gradient (``embedding_backward_cuda_kernel``): parts of it, in float32."""
    gradient, indices, weights = call.args[:3]
    if indices.numel() <= _FEW_TOKENS:
        return ()
    segments = min(indices.numel(), weights)
    parts = indices.numel() // _ROWS_OF_A_PART + segments
    # sorted tokens, their places, where each token begins, its parts, and where they begin
    lists = (indices.numel(), indices.numel(), indices.numel(), segments, segments, parts)
    return (*(8 * length for length in lists), parts * gradient.shape[-1] * 4)


def _of_grouped_products(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the scratch of CUTLASS's grouped products (``GroupMM.cu``): addresses and sizes of each, and workspace."""
    if not card.groups:
        return ()
    rows, _, *others = call.args
    offsets = others[0] if others else call.kwargs.get("offs")
    groups = rows.shape[0] if offsets is None else offsets.numel()
    # six lists of 8 bytes a group, three of which begin at multiples of 16, and the sizes
    return 60 * groups + 24 * (groups % 2), 512 * card.number


def _of_sort(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the scratch of sorting a list: places; for a long one, CUB's copies of keys and places, and counters."""
    keys = call.args[0]
    places = 8 * keys.numel()
    if keys.dim() != 1:
        return ()
    if keys.numel() <= _FEW_KEYS:
        return (places,)
    copies = sum(-(-size // 256) * 256 for size in (keys.nbytes, places))
    return places, copies + 2048 * keys.itemsize + 1024 * -(-keys.numel() // _KEYS_OF_A_TILE) + 511


def _of_index_put(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the scratch of adding up at indices (``index_put_with_sort_kernel``): lists as long as the indices."""
    _, places, _, *others = call.args
    accumulates = others[0] if others else call.kwargs.get("accumulate", False)
    indices = [index for index in places if index is not None]
    if not accumulates or any(index.dtype == torch.bool for index in indices):
        return ()
    shape = torch.broadcast_shapes(*(index.shape for index in indices))  # type: ignore[no-untyped-call]  # of torch
    size = 8 * math.prod(shape)
    return size, size, size, size, 1  # the last is CUB's, and some KiB for a long list


def _of_index(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the copies of indices that are broadcast in different ways (``AdvancedIndex``)."""
    indices = [index for index in call.args[1] if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return ()
    indices = torch.broadcast_tensors(*indices)  # type: ignore[no-untyped-call]  # of torch
    if len({index.stride() for index in indices}) < 2:
        return ()
    return tuple(8 * index.numel() for index in indices if not index.is_contiguous())


def _of_contiguous(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the copies of a kernel's inputs that do not lie in the order in which it reads them."""
    count = _CONTIGUOUS[call.func]
    inputs = [value for value in call.args[:count] if isinstance(value, torch.Tensor)]
    return tuple(value.nbytes for value in inputs if not value.is_contiguous())


def _of_convolution(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the copies that cuDNN's convolutions take of an input in no order of theirs, or else of the weight."""
    x, weight = call.args[:2]
    order = _order_of_convolution(x, weight)
    return tuple(each.nbytes for each in (x, weight) if not each.is_contiguous(memory_format=order))


def _order_of_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    last = _LAST.get(x.dim())
    return last if last and any(_is_last(each, last) for each in (x, weight)) else torch.contiguous_format


def _of_convolution_backward(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the larger scratch of a convolution's gradients: copies in the order of the kernel, or the bias's sum.

    The copies are of the input, the weight and the gradient of the output. That of the weight is gone before the
    weight's own gradient is made, which is as large.
    """
    gradient, x, weight = call.args[:3]
    of_input, of_weight, of_bias = call.args[_MASK]
    order = _order_of_convolution(x, weight)
    read = [x] if of_weight else [weight] if of_input else []
    copied = [each.nbytes for each in read if not each.is_contiguous(memory_format=order)]
    # the gradient comes into the order of the input first, which is the kernel's where it is read as well
    first = order if of_weight or x.dim() not in _LAST else suggest_memory_format(x)
    moved = not gradient.is_contiguous(memory_format=first)
    again = first != order if moved else not gradient.is_contiguous(memory_format=order)
    copied += [gradient.nbytes] * (moved + again)
    how = frozenset(range(x.dim())) - {1}, gradient.itemsize, max(gradient.itemsize, 4), 4, card
    summed = split_over_blocks(gradient.shape, gradient.stride(), *how) if of_bias else ()
    return tuple(copied) if sum(copied) >= sum(summed) else summed


def _of_image(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the copies of images with their channels neither first nor last, or, for most kernels, with gaps."""
    images, gaps = call.args[: _IMAGES[call.func]], call.func in _WITH_GAPS
    return tuple(x.nbytes for x in images if not (is_in_order(x) or (gaps and _is_last(x, torch.channels_last))))


def _of_resizing_backward(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the copies of a gradient that is put in order first, and of the output that is then put into its own."""
    gradient, bilinear = call.args[0], call.func is aten.upsample_bilinear2d_backward.default
    if gradient.is_contiguous() or (bilinear and is_in_order(gradient) and gradient.shape[1] >= _CHANNELS):
        return ()
    return gradient.nbytes, *((out.nbytes,) if bilinear and not out.is_contiguous() else ())


def _of_product(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the copies of matrices whose rows and columns both lie apart (``prepare_batch_matrix_for_cublas``)."""
    first = 1 if "add" in call.func._schema.name else 0
    return tuple(m.nbytes for m in call.args[first : first + 2] if not _is_for_blas(m) and not m.is_contiguous())


def _is_for_blas(matrix: torch.Tensor) -> bool:
    (rows, columns), (down, along) = matrix.shape[-2:], matrix.stride()[-2:]
    return (along == 1 and down >= max(1, columns)) or (down == 1 and along >= max(1, rows))


def _of_batch_norm(call: OperationCall, out: torch.Tensor, card: Processors) -> tuple[int, ...]:
    """Return the copy in float32 from which statistics of bfloat16 in no usual order are computed."""
    x, training = call.args[0], call.args[_TRAINING]
    return (2 * x.nbytes,) if training and x.dtype == torch.bfloat16 and not is_in_order(x) else ()


def _is_last(x: torch.Tensor, last: torch.memory_format) -> bool:
    """Whether an image lies with its channels last, by the order of its strides, as kernels ask."""
    return suggest_memory_format(x) == last


def is_in_order(x: torch.Tensor) -> bool:
    """Whether an image or a sequence lies with its channels first or last."""
    return x.is_contiguous() or x.is_contiguous(memory_format=suggest_memory_format(x))


# the kernels that read their first tensors in order alone, and how many these are
_CONTIGUOUS: dict[object, int] = {
    aten.native_layer_norm.default: 1,
    aten.native_layer_norm_backward.default: 2,
    aten._fused_rms_norm.default: 1,
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
    aten.roll.default: 1,
    aten.cumsum.default: 1,
    aten.topk.default: 1,
    aten.reflection_pad2d.default: 1,
}
# the kernels that take images with their channels first or last, and how many images these are
_IMAGES: dict[object, int] = {
    aten.avg_pool2d.default: 1,
    aten._adaptive_avg_pool2d.default: 1,
    aten.max_pool2d_with_indices.default: 1,
    aten.upsample_nearest2d.default: 1,
    aten.native_batch_norm_backward.default: 2,
}
_WITH_GAPS = (aten._adaptive_avg_pool2d.default, aten.native_batch_norm_backward.default)
_CHANNELS = 16  # of an image with its channels last, from which on a kernel of its own resizes it
_OTHERS: dict[object, Callable[[OperationCall, torch.Tensor, Processors], tuple[int, ...]]] = {
    aten._softmax_backward_data.default: _of_softmax_backward,
    aten._safe_softmax.default: _of_safe_softmax,
    aten.embedding_dense_backward.default: _of_embedding_backward,
    aten._grouped_mm.default: _of_grouped_products,
    aten.sort.default: _of_sort,
    aten.sort.stable: _of_sort,
    aten.index.Tensor: _of_index,
    aten.index_put.default: _of_index_put,
    aten.index_put_.default: _of_index_put,
    aten.convolution.default: _of_convolution,
    aten.convolution_backward.default: _of_convolution_backward,
    aten.native_batch_norm.default: _of_batch_norm,
    aten.upsample_bilinear2d_backward.default: _of_resizing_backward,
    aten.upsample_bicubic2d_backward.default: _of_resizing_backward,
    **dict.fromkeys(_CONTIGUOUS, _of_contiguous),
    **dict.fromkeys(_IMAGES, _of_image),
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), _of_product),
}
# which take it before their output
SCRATCH_FIRST = frozenset(
    {aten.index.Tensor, aten.convolution.default, aten.convolution_backward.default, *PATCHES, *_CONTIGUOUS}
)


def _reduced(call: OperationCall, dims: int) -> frozenset[int]:
    """Return the dimensions that a call reduces."""
    schema = [argument.name for argument in call.func._schema.arguments]
    place = schema.index("dim") if "dim" in schema else len(call.args)
    asked = call.args[place] if place < len(call.args) else call.kwargs.get("dim")
    if asked is None or asked == []:
        return frozenset(range(dims))
    return frozenset(dim % dims if dims else 0 for dim in ([asked] if isinstance(asked, int) else asked))


class _Dim(NamedTuple):
    """A dimension of the iteration, with its input's stride in elements."""

    size: int
    stride: int
    reduced: bool


def split_over_blocks(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: frozenset[int],
    size: int,
    kept: int,
    loads: int,
    card: Processors,
) -> tuple[int, ...]:
    """Return the bytes of the buffer and of the counters of a reduction over several blocks; empty for one block.

    `size` is the input's bytes of an element, `kept` what a thread keeps of the numbers that it reduced, and `loads`
    how many it takes at once.
    """
    dims = _in_32_bits(_iteration(shape, strides, reduced), size)
    outputs = math.prod(dim.size for dim in dims if not dim.reduced)
    inputs = math.prod(dim.size for dim in dims if dim.reduced)
    folded = [dim for dim in dims if dim.reduced]
    along_input = len(folded) == len(dims) or dims[0].stride < dims[len(folded)].stride
    wide, high = (inputs, outputs) if along_input else (outputs, inputs)
    lanes = 1  # output_vec_size
    if not dims or (dims[0] if along_input else dims[len(folded)]).stride == 1:
        if along_input and wide >= 128 and len(folded) == 1:
            wide //= loads
        elif not along_input:
            lanes = _output_lanes(dims, len(folded))
            wide //= lanes
    width, height = _block(wide, high, lanes)
    step_input, step_output = (width, 1) if along_input else (1, width)
    across_warps = -(-inputs // step_input) >= min(height * 16, _MOST_VALUES)
    if not across_warps:
        return ()
    step_input *= height
    grid = -(-(outputs // lanes) // step_output)
    values = -(-inputs // step_input)
    target = card.number * (card.threads // (width * height))
    if values < _MOST_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if blocks <= 1:
        return ()
    buffer = kept * outputs * blocks * (1 if along_input else width * lanes)
    return buffer, 4 * grid


def _iteration(shape: Sequence[int], strides: Sequence[int], reduced: frozenset[int]) -> list[_Dim]:
    """Return the dimensions as TensorIterator orders and merges them: reduced ones first, and the fastest first."""
    places = [dim for dim in range(len(shape)) if shape[dim] != 1]
    # the output is contiguous, so that what is kept stays in its order
    places.sort(key=lambda dim: (dim not in reduced, strides[dim] if dim in reduced else -dim))
    merged: list[_Dim] = []
    for place in places:
        dim = _Dim(shape[place], strides[place], place in reduced)
        last = merged[-1] if merged else None
        if last is not None and last.reduced == dim.reduced and last.size * last.stride == dim.stride:
            merged[-1] = _Dim(last.size * dim.size, last.stride, dim.reduced)
        else:
            merged.append(dim)
    return merged


def _in_32_bits(dims: list[_Dim], size: int) -> list[_Dim]:
    """Return the first part of an iteration that 32-bit indices cannot reach as a whole: halves of the longest."""
    dims = list(dims)
    while dims and 1 + sum((dim.size - 1) * dim.stride * size for dim in dims) > _INDEXABLE:
        longest = max(range(len(dims)), key=lambda place: (dims[place].size - 1) * dims[place].stride)
        dims[longest] = dims[longest]._replace(size=dims[longest].size // 2)
    return dims


def _output_lanes(dims: list[_Dim], first: int) -> int:
    """Return how many outputs a thread computes at once (``get_output_vec_size``)."""
    lanes = 4
    for number in (dims[first].size, *(dim.stride for place, dim in enumerate(dims) if place != first)):
        while number % lanes:
            lanes //= 2
    return lanes


def _block(wide: int, high: int, lanes: int) -> tuple[int, int]:
    """Return the threads of a block in both directions (``set_block_dimension``)."""
    most = _MOST_THREADS // lanes
    wide, high = (_power_below(side) if side < most else most for side in (wide, high))
    width = min(wide, _WARP)
    height = min(high, most // width)
    return min(wide, most // height), height


def _power_below(number: int) -> int:
    return 1 << max(number, 1).bit_length() - 1
