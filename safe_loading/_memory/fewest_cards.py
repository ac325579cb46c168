"""``fewest_cards``: how many cards of a kind a model needs.

It does not stand on the one search: a plan that is refused counts the cards that are missing, so that the first number
that does is mostly the answer, and no limit is known up to which to search.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedConfig

from safe_loading._core.cards import card_memory
from safe_loading._core.log import logger
from safe_loading._core.parse_size import Device
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError, DeviceMapInfeasible

from .plan.device_map_plan import DeviceMapPlan
from .plan.device_memory import CUDA_CONTEXT
from .plan.module_tree import cut_model
from .plan.options import CardOptions
from .plan.planner import Planner
from .plan.request import PlanRequest
from .plan.require_traced import require_traced
from .plan.step_traces import StepTraces
from .plan_device_map import plan_request

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NOT_HERE = ("offload", "offload_buffers", "nodes")


def fewest_cards(
    model: str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    max_memory: int | str,
    *,
    workload: Workload | None = None,
    **options: Unpack[CardOptions],
) -> DeviceMapPlan:
    """Return the plan on the fewest cards of one kind for which :func:`plan_device_map` finds one.

    The plan for one card fewer was made, too, and refused. Nothing is offloaded.

    Args:
        model: As for :func:`plan_device_map`.
        max_memory: The memory that the model may take on each card, such as ``"80GB"``, or the name of a card, such as
            ``"h100"`` or ``"rtx-4090"``: all its memory then, less a CUDA context, with the kernels that it runs.
        workload: What the model will be asked to do; None for its weights alone.
        **options: The other arguments of :func:`plan_device_map`, but not ``offload`` and ``nodes``.

    Returns:
        The plan; ``len(plan.devices)`` is the number of cards.

    Raises:
        DeviceMapInfeasible: One piece of the model needs more than a card has, however many there are.
        ArgumentError: An argument cannot be read.
        TraceError: The model's step cannot be traced, so that caches and activations would be missing.
    """
    refused = [name for name in _NOT_HERE if name in options]
    if refused:
        raise ArgumentError(f"fewest_cards takes no {refused[0]}=: the cards are alike, and hold all of the model.")
    memory = card_memory(max_memory, cast("dict[str, Any]", options), overhead=CUDA_CONTEXT)
    return _CardSearch(plan_request(model, {0: memory}, workload=workload, **options)).fewest()


class _CardSearch:
    """Plans one request over several numbers of cards."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.traces, self.plans = request, StepTraces(request), 0

    def fewest(self) -> DeviceMapPlan:
        """Return the plan with the fewest cards, or raise `DeviceMapInfeasible`."""
        least = 0  # so many are too few
        count, plan = 1, self._plan(1)
        while isinstance(plan, DeviceMapInfeasible):
            if not plan.more_cards:
                raise self._too_small() from None
            least, count = count, count + plan.more_cards[0]
            plan = self._plan(count)
        # what was counted may be more than what is needed, so that fewer may do
        step = count - 1
        while count - least > 1:
            fewer = self._plan(step)
            if isinstance(fewer, DeviceMapInfeasible):
                least = step
            else:
                count, plan = step, fewer
            step = (least + count) // 2
        logger.info("%d plans to find that %d cards do", self.plans, count)
        return plan

    def _plan(self, count: int) -> DeviceMapPlan | DeviceMapInfeasible:
        self.plans += 1
        try:
            return require_traced(Planner(self._over(count), self.traces).plan())
        except DeviceMapInfeasible as error:
            return error

    def _over(self, count: int) -> PlanRequest:
        limits: dict[Device, int] = dict.fromkeys(range(count), self.request.limits[0])
        return replace(self.request, limits=limits, overhead=dict.fromkeys(limits, self.request.overhead.get(0, 0)))

    def _too_small(self) -> DeviceMapInfeasible:
        """Return the error of a plan that has a card for each piece."""
        pieces = len(cut_model(self.request.model, self.request.no_split_modules).units)
        error = self._plan(pieces)
        if isinstance(error, DeviceMapPlan):
            raise AssertionError(f"{pieces} cards do, and no number was found that does")
        return error
