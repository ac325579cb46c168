"""The error for a model that cannot be traced: the module, the line, and the remedy."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import accelerate
import numpy
import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import PreTrainedConfig, PreTrainedModel

from safe_loading._core.names import method_name
from safe_loading._core.workload import Workload
from safe_loading._model.model_config import fix_for_code
from safe_loading.errors import TraceError

from .inputs import engine_model, forward_arguments
from .known_values import UnknownValue
from .step_tensors import Inputs

# folders whose lines are not the model's own code; the last one is this package
_NOT_THE_MODEL = {Path(str(module.__file__)).parent for module in (torch, accelerate, numpy)} | {
    Path(__file__).parents[2]
}
_DEPENDS_ON_VALUES = (UnknownValue, DataDependentOutputException, DynamicOutputShapeException)
_FIX_FOR_VALUES = (
    "A trace knows integers that follow from the inputs (pass the ones that matter in inputs=, with their values), and "
    "no value that follows from weights. Use an operation with a fixed output shape (torch.where in place of x[mask]), "
    "or skip the line when its tensor is a torch._subclasses.FakeTensor."
)
PICTURES_AND_SOUNDS = ("pixel_values", "input_features", "input_values")
_SPARSE = {"SHIRA": "SHiRA", "FROD": "FRoD"}
FIX_FOR_METHODS = (
    "Measure a step on the GPU (torch.cuda.max_memory_reserved()), or forecast another method: adapter=LoraConfig(...)."
)
_FIX_FOR_SPARSE = f"Sparse tensors have no storage whose bytes could be counted. {FIX_FOR_METHODS}"
FIX_FOR_DEVICES = (
    "Make each tensor where those are that it meets: torch.arange(length, device=input_ids.device), or a buffer of the "
    "module. On the CPU alone the line runs, and on a GPU it fails."
)
_FIX_FOR_PADDING = "The step itself raises this, too: set model.config.pad_token_id, to the tokenizer's."
_MOST_CHARACTERS = 600  # of the error's own message


def trace_error(model: torch.nn.Module, workload: Workload, error: Exception, inputs: Inputs | None) -> TraceError:
    """Return the error to raise for one that the model's own code raised."""
    if isinstance(error, TraceError):
        return error
    module, line = _locate(model, error.__traceback__)
    where = f"{module or 'its forward'}{f' ({line})' if line else ''}"
    message = str(error).strip()[:_MOST_CHARACTERS]
    if _devices_differ(error):  # torch's message names the fake devices
        message = re.sub(r"\bcpu:(\d+)\b", r"device \1", message)
        message = re.sub(r"\bcpu\b", "the host", message)
    fix = _fix_for_layer(model, module, error) or _fix(model, error, inputs or {})
    raised = TraceError(
        f"{type(model).__name__} cannot be traced for {workload!r}: {type(error).__name__} in {where}: {message}"
        + (f"{'' if message.endswith(('.', '!')) else '.'} {fix}" if fix else "")
    )
    raised.fix = fix
    return raised


def refuse_untraced_methods(config: PeftConfig) -> None:
    """Raise `TraceError` for an adapter whose layers no trace can follow, before peft looks for values."""
    kind = method_name(config.peft_type)
    refused = f"adapter={type(config).__name__}(...) cannot be traced:"
    if kind in _SPARSE:
        raise TraceError(f"{refused} {_SPARSE[kind]} computes with sparse tensors. {_FIX_FOR_SPARSE}")
    if getattr(config, "monteclora_config", None) is not None:
        raise TraceError(f"{refused} MonteCLoRA draws samples of its own on a GPU that it chooses. {FIX_FOR_METHODS}")


def _fix_for_layer(model: torch.nn.Module, module: str, error: Exception) -> str:
    """Return the remedy for a layer of peft around one that is no plain linear layer: a router, or one of groups."""
    paths = [module[:end] for end in range(len(module), 0, -1) if module[end : end + 1] in ("", ".")]
    path = next((path for path in paths if isinstance(model.get_submodule(path), BaseTunerLayer)), "")
    if not path:
        return ""
    layer: Any = model.get_submodule(path)
    name, inner = path.rpartition(".")[2], layer.get_base_layer()
    road = f"Leave it as it is: exclude_modules=[{name!r}] in the adapter's config."
    if "'tuple' object has no attribute" in str(error) and path == module:
        return f"The step itself raises this, too: {name!r} returns several tensors, and peft's layer takes one. {road}"
    own = isinstance(inner, torch.nn.Linear) and type(inner).forward is not torch.nn.Linear.forward
    if own and isinstance(error, RuntimeError) and not _devices_differ(error):
        kind = type(inner).__name__
        return f"The step itself raises this, too: {name!r} is a {kind}, which multiplies in another way. {road}"
    return ""


def _fix(model: torch.nn.Module, error: Exception, inputs: Inputs) -> str:
    if "SparseTensorImpl" in str(error):
        return _FIX_FOR_SPARSE
    if isinstance(error, _DEPENDS_ON_VALUES):
        return _FIX_FOR_VALUES
    if _devices_differ(error):
        return FIX_FOR_DEVICES
    if "no padding token" in str(error):  # transformers' own check of a classifier of several rows
        return _FIX_FOR_PADDING
    if type(model).forward is torch.nn.Module.forward:
        parts = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
        return f"Pass the part that the step runs, such as meta_model(...).{parts[0]}." if parts else ""
    missing_argument = "missing" in str(error) and "required" in str(error) and isinstance(error, TypeError)
    names = re.findall(r"'(\w+)'", str(error)) if missing_argument else []
    main = getattr(engine_model(model), "main_input_name", "input_ids")
    made = main == "input_ids" or (main == "pixel_values" and "input_ids" not in forward_arguments(model))
    if not names and not made and main not in inputs:
        names = [main]
    if not names and "NoneType" in str(error):  # of a model that compares texts with images or sounds, such as CLIP
        taken = forward_arguments(model)
        names = [name for name in PICTURES_AND_SOUNDS if name in taken and name not in inputs]
    if not names:
        config = getattr(model, "config", None)
        return fix_for_code(error, vars(config)) or "" if isinstance(config, PreTrainedConfig) else ""
    example = ", ".join(f"{name!r}: torch.empty(..., device='meta')" for name in names)
    return f"A workload describes tokens only. Pass what else the model needs, as inputs={{{example}}}."


def _devices_differ(error: Exception) -> bool:
    return "device" in type(error).__name__.lower()


def _locate(model: torch.nn.Module, trace: TracebackType | None) -> tuple[str, str]:
    """Return the path of the innermost module that ran, and file, number and text of the model's innermost line."""
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    module, line = "", ""
    # the innermost frame of each kind wins: modules by their forward's `self`, lines by their file
    while trace is not None:
        module = names.get(id(trace.tb_frame.f_locals.get("self")), module)
        if not _NOT_THE_MODEL.intersection(Path(trace.tb_frame.f_code.co_filename).parents):
            (frame,) = traceback.extract_tb(trace, limit=1)
            line = f"{frame.filename}:{frame.lineno}" + (f", `{frame.line}`" if frame.line else "")
        trace = trace.tb_next
    return module, line
