"""4-bit weights of bitsandbytes: each rank packs the elements that it owns, and all ranks get all statistics.

bitsandbytes packs blocks of (mostly) 64 elements on their own, so a rank that reads whole blocks gets the codes that
every other one would. The statistic of each block is one number, which every rank needs to unpack gathered weights;
with double quantization they are quantized once they are together, as the engine does.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from safe_loading._model.formats.four_bit_on_meta import PackedFrom, packed_from
from safe_loading._model.layout.checkpoint_source import CheckpointSource
from safe_loading._model.layout.pinned import PinnedBuffers, pinned_buffers
from safe_loading._model.layout.reading import ShardTarget, read_targets
from safe_loading._model.tensors import ModelTensor
from safe_loading._ranks.waiting import Waiting
from safe_loading.errors import ArgumentError

from .local_shard import ElementRange, LocalShard

_ELEMENTS_AT_ONCE = 4 * 2**20  # of a weight that is being packed, beside the shards
_ELEMENTS_ON_THE_HOST = 2**18  # where bitsandbytes compares each element with all 16 codes at once: 64 bytes for each


@dataclasses.dataclass(frozen=True)
class FourBitWeight:
    """A weight that is read in 16 or 32 bits and kept in four."""

    name: str  # of the packed weight in the model
    disk_name: str  # of the weight in the checkpoint's class
    weight: Any  # bitsandbytes' parameter on meta, which knows its layer
    whole: PackedFrom  # what it is packed from

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.whole.shape)

    @property
    def block_size(self) -> int:
        """How many elements share a statistic."""
        return int(self.weight.blocksize)

    @property
    def blocks(self) -> int:
        """How many statistics it has."""
        return math.ceil(self.numel / self.block_size)

    def elements(self, own: ElementRange) -> tuple[int, int]:
        """Return the first element of a range of the packed weight, and the one after its last."""
        of_one = 2 * own.dtype.itemsize
        return own.start * of_one, own.stop * of_one

    def blocks_of(self, own: ElementRange | None) -> tuple[int, int]:
        """Return the first block that a range of the packed weight touches, and the one after the last."""
        if own is None or own.start == own.stop:
            return 0, 0
        start, stop = self.elements(own)
        return start // self.block_size, math.ceil(stop / self.block_size)


class _Packed(NamedTuple):
    """Some blocks of a weight, packed."""

    place: slice  # the bytes that the rank owns of them, in its shard
    codes: torch.Tensor  # those bytes
    blocks: slice  # the blocks, counted from the first that the rank touches
    absmax: torch.Tensor  # their statistics
    bytes_read: int


def four_bit_weights(tensors: Sequence[ModelTensor], disk_name: Mapping[str, str]) -> dict[str, FourBitWeight]:
    """Return the weights that a folder has and the model wants packed, by their names in the model."""
    found = [(each, packed_from(each.tensor)) for each in tensors if each.name in disk_name]
    return {
        each.name: FourBitWeight(each.name, disk_name[each.name], each.tensor, whole)
        for each, whole in found
        if whole is not None
    }


def refuse_packed_by_root(tensors: Sequence[ModelTensor], names_of_root: Set[str]) -> None:
    """Refuse weights that rank 0 would send packed: the layers here would have no statistics."""
    wrong = [each.name for each in tensors if each.name in names_of_root and packed_from(each.tensor) is not None]
    if wrong:
        raise ArgumentError(
            "These weights are packed in 4 bits on rank 0 and on meta here, and their statistics are not sent. Pass "
            "the folder of the checkpoint as the source, with the model on meta on every rank:",
            wrong,
        )


@torch.no_grad()
def read_packed(
    source: CheckpointSource, weights: Mapping[str, FourBitWeight], shard: LocalShard, device: torch.device
) -> tuple[dict[str, torch.Tensor], int]:
    """Read and pack this rank's ranges; return the statistics of its blocks by weight, and how many bytes were read.

    The weights are packed on ``device``, as ``from_pretrained`` packs them on the device of its ``device_map``.
    """
    statistics: dict[str, torch.Tensor] = {}
    bytes_read = 0
    with pinned_buffers() as buffers:
        for own, weight in _owned(weights, shard):
            first, last = weight.blocks_of(own)
            absmax = torch.empty(last - first, dtype=torch.float32, device=device)
            shard_bytes = shard.local[own.name].view(-1).view(torch.uint8)
            for part in _packed_parts(source, weight, own, device, buffers):
                shard_bytes[part.place].copy_(part.codes)
                absmax[part.blocks] = part.absmax
                bytes_read += part.bytes_read
            statistics[own.name] = absmax
    return statistics, bytes_read


@torch.no_grad()
def differing_packed(
    source: CheckpointSource, weights: Mapping[str, FourBitWeight], shard: LocalShard, device: torch.device
) -> list[str]:
    """Read and pack a second time, and return the weights of which this rank has other codes."""
    wrong: dict[str, None] = {}
    with pinned_buffers() as buffers:
        for own, weight in _owned(weights, shard):
            shard_bytes = shard.local[own.name].view(-1).view(torch.uint8)
            for part in _packed_parts(source, weight, own, device, buffers):
                if not torch.equal(shard_bytes[part.place], part.codes.to(shard_bytes.device)):
                    wrong[own.name] = None
    return list(wrong)


@torch.no_grad()
def share_statistics(
    weights: Mapping[str, FourBitWeight],
    statistics: Mapping[str, torch.Tensor],
    shard: LocalShard,
    group: dist.ProcessGroup,
    waiting: Waiting,
) -> None:
    """Give every rank the statistics of all blocks, and put them into the layers."""
    size = dist.get_world_size(group)
    by_rank = [{own.name: own for own in shard.owned_by(rank)} for rank in range(size)]
    for name, weight in weights.items():
        spans = [weight.blocks_of(own.get(name)) for own in by_rank]
        width = max(last - first for first, last in spans)
        mine = torch.zeros(width, dtype=torch.float32, device=waiting.device)
        if (own := statistics.get(name)) is not None:
            mine[: len(own)] = own
        parts = [torch.empty_like(mine) for _ in spans]
        waiting.work(waiting.begin(partial(dist.all_gather, parts, mine, group=group, async_op=True)))
        absmax = torch.empty(weight.blocks, dtype=torch.float32, device=waiting.device)
        for (first, last), part in zip(spans, parts, strict=True):
            absmax[first:last] = part[: last - first]
        weight.weight.module.quant_state = _state(weight, absmax)


def _owned(weights: Mapping[str, FourBitWeight], shard: LocalShard) -> Iterator[tuple[ElementRange, FourBitWeight]]:
    for own in shard.owned:
        if own.name in weights and own.start < own.stop:
            yield own, weights[own.name]


def _packed_parts(
    source: CheckpointSource, weight: FourBitWeight, own: ElementRange, device: torch.device, buffers: PinnedBuffers
) -> Iterator[_Packed]:
    """Pack a rank's range of a weight, some whole blocks at a time."""
    quantize: Callable[..., Any] = importlib.import_module("bitsandbytes").functional.quantize_4bit
    size, (start, stop) = weight.block_size, weight.elements(own)
    first, last = weight.blocks_of(own)
    step = (_ELEMENTS_ON_THE_HOST if device.type == "cpu" else _ELEMENTS_AT_ONCE) // size
    if source.stored_as(weight.disk_name) in source.conversions:  # which make a parameter whole, each time
        step = last - first
    for block in range(first, last, step):
        after = min(block + step, last)
        low, high = block * size, min(after * size, weight.numel)
        values = torch.empty(high - low, dtype=weight.whole.dtype, device=device)
        bytes_read = read_targets(source, [ShardTarget(weight.disk_name, low, high, values)], buffers)
        codes, state = quantize(values, blocksize=size, compress_statistics=False, quant_type=weight.weight.quant_type)
        begin, end = max(low, start), min(high, stop)
        yield _Packed(
            slice((begin - start) // 2, (end - start) // 2),
            codes.view(-1)[(begin - low) // 2 : (end - low) // 2],
            slice(block - first, after - first),
            state.absmax,
            bytes_read,
        )


def _state(weight: FourBitWeight, absmax: torch.Tensor) -> Any:
    """Return bitsandbytes' QuantState from the statistics of all blocks, as its ``quantize_4bit`` makes it."""
    engine: Any = importlib.import_module("bitsandbytes").functional
    options: dict[str, Any] = {}
    if weight.weight.compress_statistics:
        options["offset"] = absmax.mean()
        absmax, options["state2"] = engine.quantize_blockwise(absmax - options["offset"], blocksize=256)
    kind = weight.weight.quant_type
    return engine.QuantState(
        absmax=absmax,
        shape=torch.Size(weight.whole.shape),
        dtype=weight.whole.dtype,
        blocksize=weight.block_size,
        code=engine.get_4bit_type(kind, device=absmax.device),
        quant_type=kind,
        **options,
    )
