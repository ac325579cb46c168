"""The traced steps of one model, each kept: plans of a search ask for the same step again and again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from safe_loading._core.parse_size import Device
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.cuda_attention import AMPERE
from safe_loading._memory.trace.cuda_paths import cuda_paths
from safe_loading._memory.trace.operation_cache import CachedOutputs
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading.errors import TraceError

from .device_memory import accelerator
from .request import PlanRequest

_MOST_KEPT = 64


class StepTraces:
    """Runs steps of a request's model on the request's devices, each once."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._cached_outputs: CachedOutputs = {}
        self._known: dict[object, StepTrace | TraceError] = {}

    def run(self, workload: Workload, device_map: Mapping[str, Device] | None) -> StepTrace | None:
        """Return the traced step, or None when it cannot be traced."""
        try:
            return self.step(workload, device_map)
        except TraceError:
            return None

    def step(self, workload: Workload, device_map: Mapping[str, Device] | None) -> StepTrace:
        """Return the step with a map, or for None on the first device alone; or raise `TraceError`."""
        request = self._request
        placement = {"": request.running[0]} if device_map is None else dict(device_map)
        key = (repr(workload), tuple(placement.items()))
        if key not in self._known:
            if len(self._known) >= _MOST_KEPT:
                self._known.pop(next(iter(self._known)))
            try:
                # the kernels of quantized layers cannot be traced
                with self._kernels(), with_stand_ins(request.model):
                    self._known[key] = trace_step(
                        request.model,
                        workload,
                        placement=placement,
                        inputs=request.inputs,
                        cached_outputs=self._cached_outputs,
                        offload_buffers=request.offload_buffers,
                        prepare_for_kbit=request.prepare_for_kbit,
                    )
            except TraceError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, TraceError):
            raise found
        return found

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Take the kernels of the cards, of an A100 where nobody said which they are, or of the host."""
        if self._request.running == ["cpu"]:
            return contextlib.nullcontext()
        known = self._request.capability
        return cuda_paths(known or (AMPERE if accelerator() in ("cuda", "cpu") else None))
