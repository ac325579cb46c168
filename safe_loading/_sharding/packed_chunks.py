"""The places of the pieces of packed projections' parts, of which ``torch.distributed.checkpoint`` is told.

torch takes a part for one block. It refuses to save packed parts, which overlap so, and loads wrong rows into them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

_REPLACED = "_true_method_of_safe_loading"
_CHUNKS, _ITEMS, _SHARD = "__create_chunk_list__", "__create_write_items__", "__get_tensor_shard__"


def tell_checkpoints() -> None:
    """Let DTensor tell a checkpoint of the pieces of packed parts; all others are as before."""
    for name, answer in ((_CHUNKS, _chunks), (_ITEMS, _write_items), (_SHARD, _piece)):
        setattr(DTensor, name, _for_packed(getattr(DTensor, name), answer))


def _for_packed(method: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    true_method: Callable[..., Any] = getattr(method, _REPLACED, method)

    @functools.wraps(true_method)
    def of_pieces(self: DTensor, *args: Any) -> Any:
        # the parts are the mesh's last dimension, and FSDP's are before it
        packed = self.placements[-1]
        return answer(self, packed, *args) if isinstance(packed, _StridedShard) else true_method(self, *args)

    vars(of_pieces)[_REPLACED] = true_method
    return of_pieces


def _chunks(tensor: DTensor, packed: _StridedShard) -> list[ChunkStorageMetadata]:
    dim, count = packed.dim, int(packed.split_factor)
    # as if the parts were one after the other; each piece is a like part of its own projection
    contiguous = (*tensor.placements[:-1], Shard(dim))
    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, contiguous)
    projection = tensor.shape[dim] // count
    sizes = torch.Size([*shape[:dim], shape[dim] // count, *shape[dim + 1 :]])
    starts = [at * projection + first[dim] // count for at in range(count)]
    return [ChunkStorageMetadata(torch.Size([*first[:dim], start, *first[dim + 1 :]]), sizes) for start in starts]


def _write_items(tensor: DTensor, packed: _StridedShard, name: str, _: object) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in _chunks(tensor, packed)
    ]


def _piece(tensor: DTensor, packed: _StridedShard, index: MetadataIndex) -> torch.Tensor:
    """Return a piece of this rank's part, by where it lies in the whole."""
    chunks = _chunks(tensor, packed)
    at = [chunk.offsets for chunk in chunks].index(index.offset if index.offset is not None else chunks[0].offsets)
    size = chunks[at].sizes[packed.dim]
    return tensor.to_local().narrow(packed.dim, at * size, size)
