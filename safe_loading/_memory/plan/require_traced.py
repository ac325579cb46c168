"""A search needs plans whose steps were traced: one without its caches would say that anything fits."""

from __future__ import annotations

from safe_loading.errors import DeviceMapInfeasible, TraceError

from .device_map_plan import DeviceMapPlan


def require_traced(plan: DeviceMapPlan) -> DeviceMapPlan:
    """Return the plan, or raise `TraceError` if its caches and activations are not counted.

    Raises `DeviceMapInfeasible` for a plan that is over a limit, since no map was found whose step keeps it.
    """
    if any(finding.code == "not-traced" for finding in plan.findings):
        raise TraceError(
            f"No size can be searched for this {plan.facts.model}: its step cannot be traced, so that caches and "
            f"activations are not counted. {plan.reason} Plan one size with plan_device_map, and leave room for them "
            f"with overhead=."
        )
    facts = plan.facts
    if any(use.used > use.limit for use in facts.devices):
        raise DeviceMapInfeasible(f"{facts.model} for {facts.workload} does not fit: {facts.reason}.")
    return plan
