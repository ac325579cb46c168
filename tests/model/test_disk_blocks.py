"""The arithmetic of places against torch itself: the pieces of a Whole, put together, are what torch computes."""

from __future__ import annotations

import random

import pytest
import torch

from safe_loading._model.layout import disk_blocks as pieces
from safe_loading._model.layout.disk_blocks import CannotFollow, Whole


def together(whole: Whole, disk: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.full(whole.shape, float("nan"))
    for piece in whole.pieces:
        cut = tuple(slice(begin, begin + size) for begin, size in zip(piece.begin, piece.size, strict=True))
        own = [dim for dim in piece.dims if dim >= 0]
        rest = [dim for dim in range(len(piece.size)) if dim not in own]  # of one element
        block = disk[piece.tensor][cut].permute([*own, *rest])
        block = block.reshape(block.shape[: len(own)])
        for dim, source in enumerate(piece.dims):
            block = block.unsqueeze(dim) if source < 0 else block
        place = tuple(slice(at, at + piece.extent(dim)) for dim, at in enumerate(piece.at))
        assert torch.isnan(out[place]).all(), "two pieces at one place"
        out[place] = block
    return out


@pytest.mark.parametrize("seed", range(60))
def test_any_chain_of_conversions_puts_every_element_where_torch_does(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(2, 5) for _ in range(draw.randint(1, 3)))
    disk = {str(n): torch.randn(shape) for n in range(4)}
    wholes = [pieces.on_disk(name, shape) for name in disk]
    tensors = list(disk.values())
    for _ in range(draw.randint(1, 5)):
        dims = tensors[0].dim()
        kind = draw.choice(["stack", "concatenate", "split", "take", "transpose"])
        dim = draw.randrange(dims)
        if kind == "stack" and dims < 4:
            wholes, tensors = [pieces.stack(wholes, dim)], [torch.stack(tensors, dim)]
        elif kind == "concatenate":
            wholes, tensors = [pieces.concatenate(wholes, dim)], [torch.cat(tensors, dim)]
        elif kind == "split":
            one = draw.randint(1, tensors[0].shape[dim])
            sizes = [size for size in (one, tensors[0].shape[dim] - one) if size]
            keep = draw.randrange(len(sizes))
            wholes = [pieces.split(whole, sizes, dim)[keep] for whole in wholes]
            tensors = [torch.split(tensor, sizes, dim)[keep] for tensor in tensors]
        elif kind == "take":
            size = tensors[0].shape[dim]
            order = draw.sample(range(size), draw.randint(1, size))
            wholes = [pieces.take(whole, order, dim) for whole in wholes]
            tensors = [torch.index_select(tensor, dim, torch.tensor(order)) for tensor in tensors]
        elif kind == "transpose":
            other = draw.randrange(dims)
            wholes = [pieces.transpose(whole, dim, other) for whole in wholes]
            tensors = [torch.transpose(tensor, dim, other) for tensor in tensors]
        for whole, tensor in zip(wholes, tensors, strict=True):
            assert whole.shape == tuple(tensor.shape)
            assert torch.equal(together(whole, disk), tensor)


EXPERTS, HALF, WIDTH = 3, 4, 5


def experts_on_disk(manner: str, value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Whole]:
    """Experts of the shape (EXPERTS, 2 * HALF, WIDTH) as a checkpoint holds them, and what they are made of there."""
    turned = value.transpose(1, 2).contiguous()
    if manner == "fused":
        return {"fused": value}, pieces.on_disk("fused", tuple(value.shape))
    if manner == "transposed":
        return {"turned": turned}, pieces.transpose(pieces.on_disk("turned", tuple(turned.shape)), 1, 2)
    if manner == "each, transposed":
        disk = {f"{n}.turned": turned[n] for n in range(EXPERTS)}
        wholes = [pieces.on_disk(name, (WIDTH, 2 * HALF)) for name in disk]
        return disk, pieces.transpose(pieces.stack(wholes, 0), 1, 2)
    halves = {f"{n}.{half}": value[n].split(HALF)[half] for half in range(2) for n in range(EXPERTS)}
    stacks = [
        pieces.stack([pieces.on_disk(f"{n}.{half}", (HALF, WIDTH)) for n in range(EXPERTS)], 0) for half in range(2)
    ]
    return halves, pieces.concatenate(stacks, 1)


MANNERS = ["fused", "transposed", "each, transposed", "each, gate and up"]


@pytest.mark.parametrize("here", MANNERS)
@pytest.mark.parametrize("there", MANNERS)
def test_a_tensor_of_one_checkpoint_in_terms_of_another(here: str, there: str) -> None:
    value = torch.randn(EXPERTS, 2 * HALF, WIDTH)
    own, other = experts_on_disk(here, value), experts_on_disk(there, value)
    for name, tensor in own[0].items():
        # A tied parameter has two names, under each of which it is the same tensor.
        seen = pieces.in_terms_of(name, tuple(tensor.shape), [(own[1], other[1])] * 2)
        assert seen is not None
        assert torch.equal(together(seen, other[0]), tensor)
    missing = Whole(other[1].shape, other[1].pieces[1:])
    assert any(pieces.in_terms_of(n, tuple(t.shape), [(own[1], missing)]) is None for n, t in own[0].items())


def test_what_torch_would_refuse_cannot_be_followed() -> None:
    one, other = pieces.on_disk("a", (2, 3)), pieces.on_disk("b", (3, 3))
    with pytest.raises(CannotFollow, match="put together"):
        pieces.stack([one, other], 0)
    with pytest.raises(CannotFollow, match="put together"):
        pieces.concatenate([one, other], 1)
    with pytest.raises(CannotFollow, match="is split into"):
        pieces.split(one, [2, 2], 1)
