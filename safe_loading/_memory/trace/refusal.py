"""Why a model cannot be traced: in which module, at which line, and what to do about it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import accelerate
import numpy
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from safe_loading._core.workload import Workload
from safe_loading.errors import TraceError

from .inputs import known, takes
from .known_values import UnknownValue

# whose lines are not the model's own
_HERE = {Path(str(module.__file__)).parent for module in (torch, accelerate, numpy)} | {Path(__file__).parents[2]}
_UNKNOWN = (UnknownValue, DataDependentOutputException, DynamicOutputShapeException)
_WITHOUT_VALUES = (
    "Known are whole numbers that come from the inputs (pass those that decide in inputs=, with their values), and "
    "nothing that comes from weights. Take an operation whose shape is fixed (torch.where in place of x[mask]), or "
    "leave the line out where its tensor is a torch._subclasses.FakeTensor."
)


def refusal(
    model: torch.nn.Module, workload: Workload, error: Exception, inputs: Mapping[str, torch.Tensor] | None
) -> TraceError:
    """Return the error to raise for one that came out of the model's own code.

    Args:
        model: What was run, as it is called.
        workload: What it was asked to do.
        error: What came of it.
        inputs: What the caller gave it.
    """
    if isinstance(error, TraceError):
        return error
    module, line = _place(model, error.__traceback__)
    where = f"{module or 'its forward'}{f' ({line})' if line else ''}"
    said = str(error).strip()[:600]
    if "device" in type(error).__name__.lower():  # torch's own words, of the devices that stand for the real ones
        said = re.sub(r"\bcpu:(\d+)\b", r"device \1", said)
        said = re.sub(r"\bcpu\b", "the host", said)
    hint = _way_out(model, error, inputs or {})
    return TraceError(
        f"{type(model).__name__} cannot be traced for {workload!r}: {type(error).__name__} in {where}: {said}"
        + (f"{'' if said.endswith(('.', '!')) else '.'} {hint}" if hint else "")
    )


def _way_out(model: torch.nn.Module, error: Exception, inputs: Mapping[str, torch.Tensor]) -> str:
    if isinstance(error, _UNKNOWN):
        return _WITHOUT_VALUES
    missing = "missing" in str(error) and "required" in str(error) and isinstance(error, TypeError)
    asked = re.findall(r"'(\w+)'", str(error)) if missing else []
    main = getattr(known(model), "main_input_name", "input_ids")
    made = main == "input_ids" or (main == "pixel_values" and "input_ids" not in takes(model))
    if not asked and not made and main not in inputs:
        asked = [main]
    if not asked:
        return ""
    words = ", ".join(f"{name!r}: torch.empty(..., device='meta')" for name in asked)
    return f"A workload describes tokens only. Pass what else the model needs, as inputs={{{words}}}."


def _place(model: torch.nn.Module, trace: TracebackType | None) -> tuple[str, str]:
    """Return the path of the innermost module that ran, and file, number and text of its innermost line."""
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    module, line = "", ""
    while trace is not None:
        held: Any = trace.tb_frame.f_locals.get("self")
        module = names.get(id(held), module)
        if not _HERE.intersection(Path(trace.tb_frame.f_code.co_filename).parents):
            (found,) = traceback.extract_tb(trace, limit=1)
            line = f"{found.filename}:{found.lineno}" + (f", `{found.line}`" if found.line else "")
        trace = trace.tb_next
    return module, line
