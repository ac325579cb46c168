"""Ranges of files against torch: any chain of conversions and any range of elements gives torch's slice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.header import read_header
from safe_loading._model.layout import disk_blocks as pieces
from safe_loading._model.layout.file_ranges import blocks_of_range, boxes_of_range
from safe_loading._sharding.fsdp2 import own_rows


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of four tensors each, of all shapes that the test below draws, numbered elements."""
    folder = tmp_path_factory.mktemp("disk")
    for number in range(12):
        draw = random.Random(number)
        shape = tuple(draw.randint(1, 5) for _ in range(1 + number % 3))
        tensors = {str(n): torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(4)}
        save_file(tensors, folder / f"{number}.safetensors")
    return folder


@settings(max_examples=150, deadline=None)
@given(number=st.integers(0, 11), seed=st.integers(0, 10**6), limit=st.sampled_from([1, 4, 24, 64, 10**6]))
def test_a_range_of_any_conversion_is_the_slice_of_it(disk: Path, number: int, seed: int, limit: int) -> None:
    draw = random.Random(seed)
    header = read_header(disk / f"{number}.safetensors")
    names = sorted(header.tensors)
    wholes = [pieces.on_disk(name, header.tensors[name].shape) for name in names]
    shape = header.tensors["0"].shape
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(int(name))) for name in names]
    for _ in range(draw.randint(0, 4)):
        wholes, tensors = _converted(draw, wholes, tensors)
    whole, tensor = wholes[0], tensors[0]
    start, stop = sorted((draw.randint(0, tensor.numel()), draw.randint(0, tensor.numel())))
    infos = [header.tensors[piece.tensor] for piece in whole.pieces]
    out = torch.full((stop - start,), float("nan"))
    read = 0
    with header.path.open("rb") as file:
        for block in blocks_of_range(whole, infos, [4] * len(infos), start, stop):
            for part in block.split(limit):
                assert part.nbytes <= max(limit, 4)
                packed = part.packed()
                staged = torch.empty(packed.nbytes // 4)
                memory = memoryview(staged.numpy()).cast("B")
                for at, to, count in packed.runs():
                    read_into(file.fileno(), memory[to * 4 : (to + count) * 4], at)
                    read += count
                sizes = [dim.size for dim in part.dims]
                place = out.as_strided(sizes, [dim.in_memory for dim in part.dims], part.to)
                assert place.isnan().all(), "an element is read twice"
                place.copy_(staged.view(sizes))
    assert torch.equal(out, tensor.reshape(-1)[start:stop])
    assert read == stop - start


def _converted(
    draw: random.Random, wholes: list[pieces.Whole], tensors: list[torch.Tensor]
) -> tuple[list[pieces.Whole], list[torch.Tensor]]:
    kind, dims = draw.choice(["stack", "concatenate", "split", "transpose"]), tensors[0].dim()
    dim = draw.randrange(dims)
    if kind == "stack" and dims < 4:
        return [pieces.stack(wholes, dim)], [torch.stack(tensors, dim)]
    if kind == "concatenate":
        return [pieces.concatenate(wholes, dim)], [torch.cat(tensors, dim)]
    if kind == "split":
        one = draw.randint(1, tensors[0].shape[dim])
        sizes = [size for size in (one, tensors[0].shape[dim] - one) if size]
        keep = draw.randrange(len(sizes))
        return (
            [pieces.split(whole, sizes, dim)[keep] for whole in wholes],
            [torch.split(tensor, sizes, dim)[keep] for tensor in tensors],
        )
    other = draw.randrange(dims)
    return (
        [pieces.transpose(whole, dim, other) for whole in wholes],
        [torch.transpose(tensor, dim, other) for tensor in tensors],
    )


def test_a_range_of_a_tensor_is_one_run(disk: Path) -> None:
    shape = (64, 32)
    save_file({"weight": torch.zeros(shape)}, disk / "rows.safetensors")
    header = read_header(disk / "rows.safetensors")
    whole, info = pieces.on_disk("weight", shape), header.tensors["weight"]
    for start, stop in ((16 * 32, 32 * 32), (5, 2000)):
        (block,) = blocks_of_range(whole, [info], [4], start, stop)
        assert [*block.runs()] == [(info.start + 4 * start, 0, stop - start)]


@pytest.mark.parametrize(("rows", "ranks"), [(60, 4), (251, 4), (251, 2), (3, 4), (1, 4), (5, 7)])
def test_the_rows_of_a_rank_are_those_that_torch_gives_it(rows: int, ranks: int) -> None:
    owned = [own_rows((rows, 8), rank, ranks) for rank in range(ranks)]
    assert [row for start, stop in owned for row in range(start, stop)] == list(range(rows))
    for rank, (start, stop) in enumerate(owned):
        size, first = Shard.local_shard_size_and_offset(rows, ranks, rank)
        assert (start, stop - start) == (first, size)


@pytest.mark.parametrize("seed", range(40))
def test_the_boxes_of_a_range_are_the_range_and_few(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4)))
        tensor = torch.arange(torch.Size(shape).numel()).view(shape)
        start = draw.randint(0, tensor.numel())
        stop = draw.randint(start, tensor.numel())
        out, count = torch.full((stop - start,), -1), 0
        for to, box in boxes_of_range(start, stop, shape):
            part = tensor[tuple(slice(at, at + size) for at, size in zip(box.offset, box.size, strict=True))]
            assert (out[to : to + box.numel] == -1).all()
            out[to : to + box.numel] = part.reshape(-1)
            count += 1
        assert torch.equal(out, tensor.reshape(-1)[start:stop])
        assert count <= max(1, 2 * len(shape) - 1)
