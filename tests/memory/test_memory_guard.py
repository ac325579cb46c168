"""What the guard records of loops that keep their memory, and of loops that do not."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from safe_loading import MemoryGuard


def loop(steps: int, keep: list[Any] | None) -> MemoryGuard:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryGuard() as guard:
        for _ in range(steps):
            loss = model(torch.ones(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if keep is not None:
                keep.append(model(torch.ones(32, 64)))
            del loss
            guard.step()
    return guard


def test_a_clean_loop_does_not_grow_after_the_optimizers_state() -> None:
    guard = loop(5, None)
    assert guard.steps[0].growth_bytes >= 2 * 64 * 65 * 4
    assert [record.growth_bytes for record in guard.steps[1:]] == [0, 0, 0, 0]
    assert not guard.leaking
    assert guard.peak_bytes >= guard.steps[0].live_bytes


def test_a_loop_that_keeps_its_outputs(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Any] = []
    with caplog.at_level(logging.INFO, logger="safe_loading"):
        guard = loop(6, kept)
    assert guard.leaking
    assert guard.steps[-1].growth_bytes >= 32 * 64 * 4
    assert any(grown.shape == (32, 64) for grown in guard.steps[-1].grown)
    assert [r.levelname for r in caplog.records] == ["INFO"] * 4 + ["WARNING"] * 2
    assert all(len(r.getMessage().splitlines()) == 1 for r in caplog.records)
    assert "[32, 64] float32" in str(guard)


def test_logging_says_what_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="safe_loading"):
        loop(3, None)
    assert not caplog.records


def test_the_report(engines_objects: None) -> None:
    guard = loop(2, None)  # among all the objects of the engines
    facts = json.loads(guard.to_json())
    assert [step["step"] for step in facts["steps"]] == [1, 2]
    assert "<table>" in guard._repr_html_()
    title, _, header, *_ = str(guard).splitlines()
    assert title.startswith("2 steps, peak ")
    assert header.split() == ["step", "live", "growth", "peak"]


def test_tensors_that_are_not_what_they_seem(one_rank: None) -> None:
    def made(make: Callable[[], Any]) -> int:
        with MemoryGuard() as guard:
            kept.append(make())
            gc.collect()
            return guard.step().growth_bytes

    def ragged() -> torch.Tensor:
        return torch.nested.nested_tensor([torch.ones(256)], layout=torch.jagged)

    def mapped(row: torch.Tensor) -> torch.Tensor:
        assert made(lambda: torch.ones(256)) == 1024
        return row

    kept: list[Any] = []
    mesh = init_device_mesh("cpu", (1,))
    with FakeTensorMode():
        fake = torch.ones(1024)
    assert made(lambda: fake.clone()) == 0
    assert made(lambda: nn.LazyLinear(4)) == 0
    # what it is around, once; distribute_tensor() would leave the whole one to gloo's thread for a while
    assert made(lambda: DTensor.from_local(torch.ones(1024), mesh, [Shard(0)])) == 4096
    assert made(ragged) == 1024 + 2 * 8  # and its offsets
    torch.func.vmap(mapped)(torch.ones(4, 256))


ON_TWO_DEVICES = """
import torch
from safe_loading import MemoryGuard
kept, first, last = [], f"{KIND}:0", f"{KIND}:{COUNT - 1}"
weight = torch.ones(1024, device=first, requires_grad=True)
with MemoryGuard() as guard:
    for _ in range(3):
        kept.append([torch.ones(1024, device=last), weight.exp().exp(), torch.ones(1024)])
        passing = torch.ones(4096, device=last)
        del passing
        record = guard.step()
report({
    "growth": [step.growth_bytes for step in guard.steps],
    "above": [step.peak_bytes - step.live_bytes for step in guard.steps],
    "devices": sorted({grown.device for grown in record.grown}),
})
"""


def test_on_the_simulated_accelerator(simulated: Any) -> None:
    found = simulated.run_forked("import torch_npu\nKIND, COUNT = 'npu', 2\n" + ON_TWO_DEVICES)
    # a tensor on each device and on the host, and what exp saved, which no object of Python's refers to
    assert found["growth"] == [4 * 4096] * 3
    assert found["devices"] == ["cpu", "npu:0", "npu:1"]
    assert found["above"] == [4 * 4096] * 3  # what was there for a moment


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    found: dict[str, Any] = {}
    exec(ON_TWO_DEVICES, {"KIND": "cuda", "COUNT": torch.cuda.device_count(), "report": found.update})
    assert found["growth"] == [4 * 4096] * 3
    assert found["devices"][:2] == ["cpu", "cuda:0"]
