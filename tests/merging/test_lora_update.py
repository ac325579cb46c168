"""The arithmetic of a merge: one rounding, and the same bytes whatever the blocks and the threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from safe_loading._merging.weights import update as update_module
from safe_loading._merging.weights.finite import delta_bound, delta_rms, why_not_finite
from safe_loading._merging.weights.rounding import _Frame, round_into
from safe_loading._merging.weights.update import (
    ROWS,
    PartlyMergedError,
    RowMerger,
    Term,
    Update,
    merge_matrix,
    merge_threads,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def nearest(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The number of `dtype` next to each float64, ties to even, chosen among three; no conversion is trusted."""
    guess = exact.to(dtype)
    bits = guess.view(BITS[dtype])
    around = torch.stack([bits, bits + 1, torch.where(guess == 0, bits, bits - 1)])
    values = around.view(dtype)
    off = (values.double() - exact).abs()
    off[~values.isfinite()] = torch.inf
    best = off.amin(0)
    # among the nearest, an even last bit wins
    score = torch.where(off == best, (around & 1).double(), torch.full_like(off, 2.0))
    return values.gather(0, score.argmin(0, keepdim=True))[0]


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(rows: int, columns: int, rank: int, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> Term:
    return Term(seeded(rows, rank, seed=seed, dtype=dtype), seeded(rank, columns, seed=seed + 1, dtype=dtype), 0.37)


def dora(rows: int, columns: int, rank: int, axis: int, *, seed: int = 5) -> Term:
    term = plain(rows, columns, rank, seed=seed)
    magnitude = seeded((rows, columns)[axis], seed=seed + 9).abs() + 0.1
    return Term(term.left, term.right, term.scaling, magnitude)


def exact(update: Update, weight: torch.Tensor) -> torch.Tensor:
    """The merged weight in float64, the whole of it at once."""
    start = weight.double()
    value = start.clone()
    for term in update.terms:
        delta = term.scaling * (term.left.double() @ term.right.double())
        value = value + delta
        if term.magnitude is not None:
            norm = (start + delta).norm(dim=1 - update.axis)
            value = value * (term.magnitude.double() / norm).unsqueeze(1 - update.axis)
    return value


UPDATES = {
    "one": lambda m, n: Update((m, n), (plain(m, n, 4),)),
    "three": lambda m, n: Update(
        (m, n), tuple(plain(m, n, r, seed=r, dtype=d) for r, d in zip((1, 8, 16), DTYPES, strict=True))
    ),
    "dora rows": lambda m, n: Update((m, n), (dora(m, n, 4, 0),), 0),
    "dora columns": lambda m, n: Update((m, n), (dora(m, n, 4, 1),), 1),
    "dora after plain": lambda m, n: Update((m, n), (plain(m, n, 4), dora(m, n, 8, 0), plain(m, n, 2, seed=30)), 0),
    "two doras, columns": lambda m, n: Update((m, n), (dora(m, n, 4, 1), dora(m, n, 3, 1, seed=40)), 1),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", UPDATES)
def test_every_element_is_rounded_once(dtype: torch.dtype, kind: str) -> None:
    for shape in ((1, 1), (8, 16), (37, 53), (130, 7), (5, 300)):
        update, weight = UPDATES[kind](*shape), seeded(*shape, seed=3).to(dtype)
        expected = nearest(exact(update, weight), dtype)
        merge_matrix(update, weight, scratch_bytes=4096)
        assert torch.equal(weight, expected), shape


def test_torch_s_own_conversion_rounds_twice_and_ours_does_not() -> None:
    # just above the middle between 1 and the next bfloat16: float32 drops the last bit and makes a tie of it
    above = torch.tensor([1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40, -1 - 2**-8 - 2**-40], dtype=torch.float64)
    assert not torch.equal(above.to(torch.bfloat16), nearest(above, torch.bfloat16))
    out = torch.empty(3, dtype=torch.bfloat16)
    round_into(above, out)
    assert torch.equal(out, nearest(above, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 8, 64, 96, 1024])
def test_a_block_of_any_size_is_searched_to_its_end(dtype: torch.dtype, size: int) -> None:
    step = torch.finfo(dtype).eps
    for place in {0, size // 2, size - 1}:
        for value in (1 + step / 2 + 2**-40, 1 + 1.5 * step - 2**-40, 2**-20 * (1 + step / 2 + 2**-40)):
            values = torch.full((size,), 1.25, dtype=torch.float64)
            values[place] = value
            out = torch.empty(size, dtype=dtype)
            round_into(values, out)
            assert torch.equal(out, nearest(values, dtype)), (place, value)


def test_float16_s_subnormal_numbers_are_rounded_once() -> None:
    middle = (torch.arange(0, 1024, dtype=torch.float64) + 0.5) * 2**-24
    values = torch.cat([middle, middle * (1 + 2**-45), middle * (1 - 2**-45)])
    out = torch.empty(values.shape, dtype=torch.float16)
    round_into(values, out)
    assert torch.equal(out, nearest(values, torch.float16))
    assert not torch.equal(values.half(), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_at_and_around_every_tie(dtype: torch.dtype) -> None:
    numbers = torch.arange(0, 0x7BFF, dtype=torch.int16).view(dtype)
    middle = (numbers[:-1].double() + numbers[1:].double()) / 2
    values = torch.cat([middle, middle * (1 + 2**-45), middle * (1 - 2**-45), numbers.double()])
    values = torch.cat([values, -values])
    out = torch.empty(values.shape, dtype=dtype)
    round_into(values, out)
    assert torch.equal(out, nearest(values, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_devices_round_the_same(dtype: torch.dtype) -> None:
    numbers = torch.arange(0, 0x7BFF, 3, dtype=torch.int16).view(dtype).double()
    middle = (numbers[:-1] + numbers[1:]) / 2
    values = torch.cat([middle, middle * (1 + 2**-45), -middle * (1 - 2**-45), -numbers])
    single = values.float()
    frame = _Frame(dtype, single, torch.empty(single.shape, dtype=torch.int32))
    frame._mend_on_device(values)
    assert torch.equal(single.to(dtype), nearest(values, dtype))


def test_what_is_too_large_becomes_infinite_and_nan_stays() -> None:
    values = torch.tensor([1e39, -1e39, torch.nan, torch.inf, 0.0, -0.0], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(6, dtype=dtype)
        round_into(values, out)
        assert out[:4].isinf().tolist() == [True, True, False, True]
        assert bool(out[2].isnan())
        assert out[4:].view(torch.int16).tolist() == [0, -32768]


@pytest.mark.parametrize("kind", UPDATES)
def test_the_bytes_do_not_depend_on_blocks_and_threads(kind: str) -> None:
    for shape, seed in (((83, 64), 1), ((64, 1030), 2), ((260, 27), 3), ((40, 5000), 4)):
        update, weight = UPDATES[kind](*shape), seeded(*shape, seed=seed)
        results = []
        scratches = (1, 1 << 21) if shape[1] > 2000 else (1, 1 << 10, 1 << 14, 1 << 16, 1 << 20)
        for count in (1, 2):
            torch.set_num_threads(count)
            for scratch in scratches:
                merged = weight.double()  # a float64 weight shows every bit of the sum
                merge_matrix(update, merged, scratch_bytes=scratch)
                results.append(merged)
        assert all(torch.equal(result, results[0]) for result in results[1:])


def test_the_bytes_do_not_depend_on_them_with_a_long_rank() -> None:
    update = Update((64, 27), (plain(64, 27, 300),))
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        for scratch in (1, 1 << 20):
            merged = seeded(64, 27).double()
            merge_matrix(update, merged, scratch_bytes=scratch)
            results.append(merged)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("kind", ["one", "three", "dora rows", "dora after plain"])
def test_rows_can_be_merged_in_any_pieces(kind: str) -> None:
    update, weight = UPDATES[kind](71, 40), seeded(71, 40)
    whole = weight.double()
    merge_matrix(update, whole)
    for cuts in ((0, 1, 3, 17, 18, 64, 71), (0, 71), (0, 8, 16, 71), tuple(range(72))):
        pieces = weight.double()
        for start, end in itertools.pairwise(cuts):
            RowMerger(update, pieces.dtype, pieces.device, scratch_bytes=3000).merge(pieces[start:end], start)
        assert torch.equal(pieces, whole), cuts


@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, "cpu"), (torch.bfloat16, "cpu:0")])
@pytest.mark.parametrize("kind", UPDATES)
def test_rows_can_be_merged_into_another_tensor(kind: str, dtype: torch.dtype, device: str) -> None:
    update, weight = UPDATES[kind](71, 40), seeded(71, 40).to(dtype)
    expected, out, left = weight.clone(), torch.full_like(weight, 7.0), weight.clone()
    merge_matrix(update, expected)
    merger = RowMerger(update, dtype, torch.device(device), rows=16)  # torch copies to cpu:0 as to another one
    assert merger.rows_per_block == 16
    if update.needs_norms:
        merger.add_norms(left, 0)
    for start, end in ((0, 5), (5, 48), (48, 71)):
        merger.merge(left[start:end], start, out[start:end])
    assert torch.equal(out, expected)
    assert torch.equal(left, weight)


@pytest.mark.parametrize("kind", UPDATES)
def test_views_of_any_strides_are_written_in_place(kind: str) -> None:
    update, weight = UPDATES[kind](24, 40), seeded(24, 40)
    expected = weight.clone()
    merge_matrix(update, expected)
    transposed = weight.T.contiguous()
    wide = torch.full((24, 100), 7.0)
    wide[:, 3:83:2] = weight
    merge_matrix(update, transposed.T)
    merge_matrix(update, wide[:, 3:83:2])
    assert torch.equal(transposed.T, expected)
    assert torch.equal(wide[:, 3:83:2], expected)
    assert bool((wide[:, 4:84:2] == 7).all())


def test_scratch_is_what_was_asked_for() -> None:
    for dtype, scratch in ((torch.float32, 1 << 16), (torch.bfloat16, 1 << 16), (torch.bfloat16, 1 << 20)):
        merger = RowMerger(Update((4096, 64), (plain(4096, 64, 4),)), dtype, torch.device("cpu"), scratch_bytes=scratch)
        size = merger._values.nbytes + merger._rounder._single.nbytes + merger._rounder._low.nbytes
        assert scratch / 2 < size <= scratch
    least = RowMerger(Update((4096, 64), (plain(4096, 64, 4),)), torch.float32, torch.device("cpu"), scratch_bytes=1)
    assert least.rows_per_block == ROWS


# ------------------------------------------------------------------------------------------------- several threads


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", UPDATES)
def test_bands_of_several_threads_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    monkeypatch.setattr(update_module, "_BAND_ELEMENTS", 64)
    torch.set_num_threads(count)
    with merge_threads() as threads:
        for shape in ((83, 64), (260, 27), (7, 300), (8, 16), (1, 1), (0, 16)):
            update, weight = UPDATES[kind](*shape), seeded(*shape, seed=shape[0]).double()
            expected_norms = merge_matrix(update, expected := weight.clone())
            for scratch in (1, 1 << 20):
                merged = weight.clone()
                norms = merge_matrix(update, merged, scratch_bytes=scratch, threads=threads)
                assert torch.equal(merged, expected), (shape, scratch)
                assert all(torch.equal(norm, expected_norms[index]) for index, norm in norms.items())


def test_each_band_is_merged_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, int, int]]()
    merge = RowMerger.merge

    def noted(self: RowMerger, rows: torch.Tensor, start: int, into: torch.Tensor | None = None) -> None:
        together.wait(60)
        seen.append((start, len(rows), torch.get_num_threads()))
        merge(self, rows, start, into)

    monkeypatch.setattr(update_module, "_BAND_ELEMENTS", 64)
    monkeypatch.setattr(RowMerger, "merge", noted)
    torch.set_num_threads(3)
    together = threading.Barrier(3)
    with merge_threads() as threads:
        merge_matrix(UPDATES["one"](64, 32), seeded(64, 32), threads=threads)
    assert sorted(seen) == [(0, 24, 1), (24, 24, 1), (48, 16, 1)]


def test_weights_of_inference_mode_are_merged_by_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_module, "_BAND_ELEMENTS", 64)
    torch.set_num_threads(2)
    update, weight = UPDATES["dora columns"](40, 16), seeded(40, 16)
    merge_matrix(update, expected := weight.clone())
    with torch.inference_mode(), merge_threads() as threads:
        merge_matrix(update, merged := weight.clone(), threads=threads)
    assert merged.is_inference()
    assert torch.equal(merged, expected)


@pytest.mark.parametrize("failing", [0, 16, 32])
def test_memory_that_runs_out_in_one_thread_leaves_the_bands_of_the_others(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    merge_block = RowMerger._merge_block

    def without_memory(self: RowMerger, stored: torch.Tensor, first: int, target: torch.Tensor) -> None:
        if first >= failing + 8 and first < failing + 16:
            raise MemoryError("no more memory")
        merge_block(self, stored, first, target)

    update, weight = UPDATES["one"](48, 16), seeded(48, 16)
    merge_matrix(update, expected := weight.clone())
    expected[failing + 8 : failing + 16] = weight[failing + 8 : failing + 16]
    monkeypatch.setattr(update_module, "_BAND_ELEMENTS", 64)
    monkeypatch.setattr(RowMerger, "_merge_block", without_memory)
    torch.set_num_threads(3)
    with merge_threads() as threads, pytest.raises(PartlyMergedError, match=r"40 rows are merged, .*no more memory"):
        merge_matrix(update, weight, scratch_bytes=1, threads=threads)
    assert torch.equal(weight, expected)


def test_memory_that_runs_out_before_a_band_is_begun_is_not_taken_for_a_weight_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge = RowMerger.merge

    def without_memory(self: RowMerger, rows: torch.Tensor, start: int, into: torch.Tensor | None = None) -> None:
        if start == 16:
            raise MemoryError("no more memory")
        merge(self, rows, start, into)

    monkeypatch.setattr(update_module, "_BAND_ELEMENTS", 64)
    monkeypatch.setattr(RowMerger, "merge", without_memory)
    torch.set_num_threads(3)
    with merge_threads() as threads, pytest.raises(PartlyMergedError, match=r"32 rows are merged, .*no more memory"):
        merge_matrix(UPDATES["one"](48, 16), seeded(48, 16), threads=threads)


def test_an_error_that_is_not_of_memory_comes_out_once_all_threads_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, ended = RowMerger.merge, list[int]()

    def broken(self: RowMerger, rows: torch.Tensor, start: int, into: torch.Tensor | None = None) -> None:
        if not start:
            raise ZeroDivisionError("a fault")
        time.sleep(0.05)
        merge(self, rows, start, into)
        ended.append(start)

    monkeypatch.setattr(update_module, "_BAND_ELEMENTS", 64)
    monkeypatch.setattr(RowMerger, "merge", broken)
    torch.set_num_threads(3)
    with merge_threads() as threads:
        with pytest.raises(ZeroDivisionError):
            merge_matrix(UPDATES["one"](48, 16), seeded(48, 16), threads=threads)
        assert sorted(ended) == [16, 32]


def threads_of_a_new_thread() -> int:
    found = list[int]()
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_start_beside_a_merge_have_as_many_threads_of_torch_as_before() -> None:
    torch.set_num_threads(3)
    with merge_threads() as threads:
        assert threads is not None
        assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 3)
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 3)


def test_a_system_without_more_threads_merges_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[int]()

    def refused(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(1)
        start(thread)

    torch.set_num_threads(3)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with merge_threads() as threads:
        assert threads is None
        assert started
        assert torch.get_num_threads() == 3
        merge_matrix(UPDATES["one"](8, 16), seeded(8, 16), threads=threads)


def test_norms_are_left_for_whoever_undoes_it() -> None:
    update, weight = UPDATES["two doras, columns"](30, 20), seeded(30, 20)
    norms = merge_matrix(update, weight.clone())
    for index, term in enumerate(update.terms):
        delta = term.scaling * (term.left.double() @ term.right.double())
        assert torch.allclose(norms[index], (weight.double() + delta).norm(dim=0), rtol=1e-14)


# ------------------------------------------------------------------------------------------------------- is it finite


class MemoryRunsOut(TorchDispatchMode):
    """Lets one operation of torch, counted from 1, find no memory; 0 only counts them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError("no more memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", UPDATES)
def test_memory_that_runs_out_at_any_operation_changes_no_byte(kind: str) -> None:
    update, weight = UPDATES[kind](40, 16), seeded(40, 16).to(torch.bfloat16)
    merge_matrix(update, wanted := weight.clone(), scratch_bytes=1)

    def merged(at: int) -> tuple[torch.Tensor, MemoryRunsOut]:
        found = weight.clone()
        merger = RowMerger(update, weight.dtype, weight.device, scratch_bytes=1)
        if update.needs_norms:
            merger.add_norms(found, 0)
        with MemoryRunsOut(at) as mode:
            merger.merge(found, 0)
        return found, mode

    operations = merged(0)[1].count
    for at in range(1, operations + 1):
        try:
            found = merged(at)[0]
        except torch.OutOfMemoryError:  # before the first block
            continue
        assert torch.equal(found, wanted), at


@pytest.mark.parametrize("where", ["left", "right", "magnitude", "weight"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_found(where: str, bad: float) -> None:
    update, weight = UPDATES["dora rows"](20, 30), seeded(20, 30)
    assert why_not_finite(update, weight) is None
    tensor = weight if where == "weight" else getattr(update.terms[0], where)
    tensor.view(-1)[-1] = bad
    assert (why_not_finite(update, weight) or "").find("NaN or infinity") > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflow_is_found_exactly_at_the_limit(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    weight = torch.zeros(16, 16, dtype=dtype)
    weight[5, 7] = limit
    left, right = torch.zeros(16, 1, dtype=torch.float64), torch.zeros(1, 16, dtype=torch.float64)
    left[5], right[0, 7] = 1.0, 1.0
    half = (limit - torch.nextafter(torch.tensor(limit, dtype=dtype), torch.tensor(0.0, dtype=dtype)).item()) / 2
    for factor, finite in ((0.5, True), (0.99, True), (1.01, False), (-3.0, True)):
        update = Update((16, 16), (Term(left, right, factor * half),))
        assert (why_not_finite(update, weight) is None) is finite, factor


@pytest.mark.parametrize("axis", [0, 1])
def test_a_norm_of_zero_is_found(axis: int) -> None:
    weight = seeded(24, 24)
    update = Update((24, 24), (dora(24, 24, 4, axis),), axis)
    assert why_not_finite(update, weight) is None
    line = weight[11] if axis == 0 else weight[:, 11]
    term = update.terms[0]
    line.zero_()
    (term.left[11] if axis == 0 else term.right[:, 11]).zero_()
    assert "norms are zero" in (why_not_finite(update, weight) or "")


def test_columns_that_only_begin_with_zeros_are_not_refused() -> None:
    weight = seeded(24, 24)
    weight[3, :10] = 0
    term = dora(24, 24, 4, 0)
    term.left[3].zero_()
    assert why_not_finite(Update((24, 24), (term,)), weight) is None


def test_the_bound_holds_and_the_size_of_the_delta_is_exact() -> None:
    update = UPDATES["three"](40, 60)
    delta = exact(update, torch.zeros(40, 60))
    assert float(delta.abs().max()) <= delta_bound(update) < 100 * float(delta.abs().max())
    assert delta_rms(update) == pytest.approx(float(delta.square().mean().sqrt()), rel=1e-12)
