"""The most memory during a call."""

from __future__ import annotations

import mmap

import pytest
import torch

from safe_loading._sharding.peak_memory import Peak


def test_an_accelerators_peak_is_the_allocators_where_it_is_the_highest_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ever = 100, 150
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: now)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: ever)
    with Peak(torch.device("cuda:0")) as peak:
        now = 130  # and back, below what there was once
    assert peak.bytes == 30
    with Peak(torch.device("cuda:0")) as peak:
        ever = 900  # between two looks
    assert peak.bytes == 770


def test_a_hosts_peak_is_beyond_what_there_was() -> None:
    size = 64 << 20
    with Peak(torch.device("cpu")) as peak:
        # pages of its own: malloc may give some that the process has freed, which are resident already
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        seen = peak.bytes
    assert held.nbytes == size <= seen + (1 << 20) <= 2 * size
