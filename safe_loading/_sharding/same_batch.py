"""Whether the ranks that have the parts of one layer are given the same batch, compared in the first forward pass.

With other batches each rank would add parts of another sample's results, and nothing would fail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from safe_loading._model.tensor_values import as_buffer
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import RanksDisagree


def compare_first_batch(model: nn.Module, ranks: Ranks, sizes: Sequence[int], timeout: float) -> None:
    """Let the first forward pass raise on all ranks if those with parts of one layer have other batches.

    ``sizes`` are those of the mesh, the parts last: so many ranks in a row have the parts of one layer.
    """
    parts = sizes[-1]
    place, places = "mesh.get_local_rank(0)", "mesh.size(0)"
    if len(sizes) > 2:  # replicas of shards
        place, places = f"{place} * mesh.size(1) + mesh.get_local_rank(1)", f"{places} * mesh.size(1)"

    def compare(module: nn.Module, arguments: tuple[object, ...], options: dict[str, object]) -> None:
        handle.remove()
        digest = hashlib.sha256()
        for tensor in _tensors_in([arguments, options]):
            digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(as_buffer(tensor.detach().cpu().contiguous()))
        digests = ranks.exchange("compare the batches", digest.hexdigest()[:16], timeout=timeout)
        groups = [range(first, first + parts) for first in range(0, ranks.size, parts)]
        wrong = [group for group in groups if len({digests[place] for place in group}) > 1]
        if wrong:
            raise RanksDisagree(
                f"Ranks that have the parts of one layer need one batch, and were given others. Sample by the place "
                f"among the batches, {place} of {places}:",
                [", ".join(f"rank {ranks.ranks[place]}: {digests[place]}" for place in group) for group in wrong],
            )

    handle = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each)
