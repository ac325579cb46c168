"""The free memory of GPUs, in the order in which the process counts them."""

from __future__ import annotations

import pytest

from safe_loading._core.report import MiB
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
