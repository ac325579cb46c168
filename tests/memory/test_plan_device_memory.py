"""The free memory of GPUs, in the order in which the process counts them, and that of the host in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from safe_loading._core.report import MiB
from safe_loading._memory.plan import device_memory
from safe_loading._memory.plan.device_memory import in_process_order

ROWS = [("0", "GPU-aaaa-1", "100"), ("1", "GPU-bbbb-2", "200"), ("2", "GPU-cccc-3", "300")]


@pytest.mark.parametrize(
    ("visible", "count", "free"),
    [
        (None, 3, [100, 200, 300]),
        ("2,0", 2, [300, 100]),
        ("GPU-bbbb", 1, [200]),  # the beginning of a UUID is enough
        ("GPU-cccc-3,1", 2, [300, 200]),
        ("7", 1, None),
        ("0", 2, None),  # torch sees more than the variable names
    ],
)
def test_nvidia_smi_counts_all_gpus_and_the_process_its_visible_ones(visible, count, free):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    expected = None if free is None else [size * MiB for size in free]
    assert in_process_order(ROWS, environ, count) == expected


def test_a_size_that_is_not_told_makes_all_of_them_unknown():
    assert in_process_order([*ROWS[:2], ("2", "GPU-cccc-3", "[N/A]")], {}, 2) is None


@pytest.mark.parametrize(
    ("limit", "free"),
    [
        (str(3 << 30), (3 << 30) - (2 << 30) + (1 << 20)),
        (str(1 << 30), 0),  # what is used may be above a limit that was lowered
        ("max", None),
        (None, None),  # no such file: not in a container, or not on Linux
        (str(1 << 62), None),  # how the first version says that there is none
    ],
)
def test_free_memory_of_the_host_is_what_a_container_may_still_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, free: int | None
) -> None:
    files = tuple(tmp_path / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit is not None:
        files[0].write_text(f"{limit}\n")
    files[1].write_text(f"{2 << 30}\n")
    files[2].write_text(f"anon 7\ninactive_file {1 << 20}\nactive_file 9\n")
    monkeypatch.setattr(device_memory, "_GROUPS", (files,))
    monkeypatch.setattr(device_memory, "_free_of_machine", lambda: 64 << 30)
    assert device_memory.free_host() == (64 << 30 if free is None else free)
