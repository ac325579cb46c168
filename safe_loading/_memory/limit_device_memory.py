"""``limit_device_memory``: a hard cap of this process on each device."""

from __future__ import annotations

from safe_loading._core.parse_size import Limits, Size

from .plan.device_memory import cap_devices


def limit_device_memory(max_memory: Limits, *, overhead: Size | Limits = 0) -> dict[int, float]:
    """Cap the memory of this process on each device, in the same units as the planner's limits.

    An allocation beyond the cap raises ``torch.OutOfMemoryError``, as if the device were that small. torch counts what
    its allocator reserves, not the context, so `overhead` is what the allocator may take on top of the limit: the
    rounding of its segments (2 MiB for small blocks, 20 MiB for larger ones). A cap above the device's memory has no
    effect.

    Args:
        max_memory: By device, as for :func:`plan_device_map`. ``"cpu"`` and ``"disk"`` have no cap and are left out.
        overhead: Bytes added to each limit.

    Returns:
        The fraction of its memory that was set for each device.

    Raises:
        ArgumentError: A limit cannot be read.
        DeviceError: There is no accelerator, no such device, or no such cap in its backend. Nothing was set.
    """
    return cap_devices(max_memory, overhead)
