"""``PlanRequest``: everything that one plan is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from safe_loading._core.parse_size import HOST, Device
from safe_loading._core.report import Finding
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.accelerate_hooks import main_device
from safe_loading._memory.trace.step_tensors import Inputs
from safe_loading._model.quantized.kbit_preparation import KbitPreparation

from .search import Objective


@dataclass(frozen=True)
class PlanRequest:
    """The request of a caller of ``plan_device_map``, checked and complete. Limits and overhead are in bytes."""

    model: torch.nn.Module
    limits: Mapping[Device, int]
    overhead: Mapping[Device, int]  # to be kept free
    workload: Workload
    no_split_modules: Iterable[str] | None  # classes that stay whole; None for what the model says
    objective: Objective
    offload: str  # "never", "cpu" or "disk"
    verify: bool
    inputs: Inputs | None = None
    capability: tuple[int, int] | None = None  # of the cards, as far as somebody said; (8, 0) stands for others
    findings: tuple[Finding, ...] = ()  # what the building of the model had to say
    offload_buffers: bool = False  # whether saved buffers leave with the weights
    node_of: Mapping[Device, int] = field(default_factory=dict)  # of each card; empty where all are in one machine
    prepare_for_kbit: KbitPreparation = "none"  # for the adapter: the model is prepared already
    with_attention: Callable[[str], torch.nn.Module] | None = None  # builds the model with another attention
    explains: bool = True  # whether a refusal says what would do, for which there are searches of their own

    @property
    def running(self) -> list[Device]:
        """The devices that compute: the accelerators, or the host where there is none."""
        return [device for device in self.limits if device not in HOST] or ["cpu"]

    def main_of(self, used: Iterable[int]) -> int:
        """Return the number of the main device, which runs offloaded modules, among these running devices."""
        running = self.running
        return running.index(main_device(running[number] for number in used))

    @property
    def hosts(self) -> list[Device]:
        """Where offloaded weights may go, the nearest first."""
        if self.offload == "never":
            return []
        names: list[Device] = ["cpu", "disk"] if self.offload == "disk" else ["cpu"]
        return [name for name in names if name not in self.running]
