"""Spans of files against torch: any chain of conversions, any region, any order of reading gives torch's slice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.header import read_header
from safe_loading._model.layout import disk_blocks as pieces
from safe_loading._sharding.file_ranges import blocks_of
from safe_loading._sharding.tensor_slices import Box, Flat, Region


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
def test_a_region_of_any_conversion_is_the_slice_of_it(disk: Path, number: int, seed: int, limit: int) -> None:
    draw = random.Random(seed)
    header = read_header(disk / f"{number}.safetensors")
    names = sorted(header.tensors)
    wholes = [pieces.on_disk(name, header.tensors[name].shape) for name in names]
    shape = header.tensors["0"].shape
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(int(name))) for name in names]
    for _ in range(draw.randint(0, 4)):
        wholes, tensors = _converted(draw, wholes, tensors)
    whole, tensor = wholes[0], tensors[0]
    region = _region(draw, tensor)
    wanted = _slice(tensor, region)
    infos = [header.tensors[piece.tensor] for piece in whole.pieces]
    out = torch.full((region.numel,), float("nan"))
    read = 0
    with header.path.open("rb") as file:
        for block in blocks_of(whole, infos, [4] * len(infos), region):
            for part in block.parts(limit):
                assert part.nbytes <= max(limit, 4)
                packed = part.packed()
                staged = torch.empty(packed.nbytes // 4)
                memory = memoryview(staged.numpy()).cast("B")
                for at, to, count in packed.runs():
                    read_into(file.fileno(), memory[to * 4 : (to + count) * 4], at)
                    read += count
                sizes = [count for count, _, _ in part.dims]
                place = out.as_strided(sizes, [apart for _, _, apart in part.dims], part.to)
                assert place.isnan().all(), "an element is read twice"
                place.copy_(staged.view(sizes))
    assert torch.equal(out, wanted)
    assert read == region.numel


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


def _region(draw: random.Random, tensor: torch.Tensor) -> Region:
    if draw.random() < 0.5:
        start = draw.randint(0, tensor.numel())
        return Flat(start, draw.randint(start, tensor.numel()))
    offset = tuple(draw.randrange(size) for size in tensor.shape)
    return Box(offset, tuple(draw.randint(0, size - at) for size, at in zip(tensor.shape, offset, strict=True)))


def _slice(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    if isinstance(region, Flat):
        return tensor.reshape(-1)[region.start : region.stop]
    cut = tuple(slice(at, at + size) for at, size in zip(region.offset, region.size, strict=True))
    return tensor[cut].reshape(-1)


def test_rows_of_a_tensor_are_one_run_and_columns_one_a_row(disk: Path) -> None:
    shape = (64, 32)
    save_file({"weight": torch.zeros(shape)}, disk / "rows.safetensors")
    header = read_header(disk / "rows.safetensors")
    whole, info = pieces.on_disk("weight", shape), header.tensors["weight"]

    def runs(region: Region) -> list[int]:
        return [count for block in blocks_of(whole, [info], [4], region) for _, _, count in block.runs()]

    assert runs(Box((16, 0), (16, 32))) == [512]
    assert runs(Box((0, 16), (64, 16))) == [16] * 64
    assert runs(Flat(5, 2000)) == [1995]
