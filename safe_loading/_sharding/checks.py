"""Checks of a sharded model: no tensor on meta, no trained plain tensor, no holder of replaced parameters outside."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from safe_loading._core.engines import kept_dtypes
from safe_loading._core.report import Finding, counted
from safe_loading._model.tensors import ModelTensor, walk_modules
from safe_loading.errors import DeviceError

from .parameters import buffers_of, parameters_of


def check_whole(model: nn.Module, version: int, ignored: Collection[str]) -> None:
    """Make sure that the wrapped model has all its values and shards."""
    problems = []
    for tensor in (*parameters_of(model), *buffers_of(model)):
        # not to_local(), which goes through autograd
        local = tensor.tensor._local_tensor if isinstance(tensor.tensor, DTensor) else tensor.tensor
        if local.is_meta:
            problems.append(f"{tensor.line()}: on meta")
    problems += [f"{name}: trained, and not sharded" for name in plain_trained(model, version) if name not in ignored]
    if problems:
        raise DeviceError("The wrapped model is incomplete:", problems)


def plain_trained(model: nn.Module, version: int) -> list[str]:
    """Return the trained parameters that are plain tensors, which every rank would train alone.

    None with FSDP1, where the parameters of a unit are views into its flat parameter, and so plain tensors themselves.
    """
    if version == 1:
        return []
    return [
        parameter.name
        for parameter in parameters_of(model)
        if parameter.tensor.requires_grad and not isinstance(parameter.tensor, DTensor)
    ]


def stale_holders(model: nn.Module, replaced: Iterable[ModelTensor]) -> list[Finding]:
    """Return findings on optimizers and modules of this process that hold parameters which are now replaced."""
    names = {id(parameter.tensor): parameter.name for parameter in replaced}
    objects = gc.get_objects()
    # by type(): isinstance reads __class__, which lazy objects answer with an import
    kinds = set(map(type, objects))
    of_kinds = {base: {kind for kind in kinds if issubclass(kind, base)} for base in (torch.optim.Optimizer, nn.Module)}
    optimizers = [each for each in objects if type(each) in of_kinds[torch.optim.Optimizer]]
    modules = [each for each in objects if type(each) in of_kinds[nn.Module]]
    return [*_stale_optimizers(optimizers, names), *_shared_outside(model, modules, names)]


def _stale_optimizers(optimizers: Iterable[object], names_by_id: Mapping[int, str]) -> list[Finding]:
    findings = []
    for candidate in optimizers:
        groups = getattr(candidate, "param_groups", None) or ()
        parameters = [parameter for group in groups for parameter in group.get("params", ())]
        names = [names_by_id[id(parameter)] for parameter in parameters if id(parameter) in names_by_id]
        if names:
            findings.append(
                Finding(
                    "optimizer-before-wrap",
                    "warning",
                    type(candidate).__name__,
                    f"it was made before the wrap: the model no longer has {counted(len(names), 'parameter')} of it "
                    f"({names[0]}, ...), so that its steps change nothing.",
                    "make the optimizer after wrap_fsdp_meta_safe; assert_optimizer_sharded checks it.",
                )
            )
    return findings


def _shared_outside(model: nn.Module, modules: Sequence[nn.Module], names: Mapping[int, str]) -> list[Finding]:
    """Return a finding for each model around or beside this one that has some of its parameters in other modules."""
    inside = {id(module) for module in model.modules()}
    found: dict[int, tuple[nn.Module, list[tuple[str, str]]]] = {}
    around: dict[int, tuple[str, nn.Module]] = {}
    for module in modules:
        if id(module) in inside:
            continue
        for attribute, parameter in (vars(module).get("_parameters") or {}).items():
            if id(parameter) not in names:
                continue
            around = around or {id(child): (name, each) for each in modules for name, child in each._modules.items()}
            outermost, path = _path_of(module, attribute, around)
            found.setdefault(id(outermost), (outermost, []))[1].append((names[id(parameter)], path))
    return [
        Finding(
            "shared-outside",
            "warning",
            shared[0][0],
            f"{shared[0][1]} of {type(outermost).__name__} is the same parameter"
            f"{f', and so for {len(shared)} parameters in all' if len(shared) > 1 else ''}. The wrapped model has "
            f"another one now: the two are tied no longer, and every rank trains the one outside alone.",
            f"wrap the {type(outermost).__name__}, so that both are in it; if they may differ, give {shared[0][1]} a "
            f"copy of the values before the wrap.",
        )
        for outermost, shared in found.values()
    ]


def _path_of(module: nn.Module, name: str, around: Mapping[int, tuple[str, nn.Module]]) -> tuple[nn.Module, str]:
    """Return the outermost module around another, and the name in it of something that the other has."""
    passed = set[int]()
    while id(module) in around and id(module) not in passed:
        passed.add(id(module))
        own, module = around[id(module)]
        name = f"{own}.{name}"
    return module, name


def kept_precision_findings(model: nn.Module, sharded: Iterable[ModelTensor], policy: object) -> list[Finding]:
    """Return a finding for parameters that ``policy`` gathers in 16 bits against the wish of their class."""
    dtype = getattr(policy, "param_dtype", None)
    models = [module for _, module in walk_modules(model) if isinstance(module, PreTrainedModel)]
    of_classes = [
        kept for module in models if dtype in (torch.float16, torch.bfloat16) and (kept := kept_dtypes(module, dtype))
    ]
    cast = [
        each
        for each in sharded
        if each.tensor.dtype == torch.float32 and any(kept(each.name) is torch.float32 for kept in of_classes)
    ]
    if not cast:
        return []
    return [
        Finding(
            "float32-computed-narrow",
            "info",
            cast[0].name,
            f"{type(models[0]).__name__} keeps {counted(len(cast), 'parameter')} in float32 where it computes in "
            f"{dtype}, and mp_policy= gathers them in {dtype} too, as autocast would.",
            f"build the model with dtype={dtype} and leave mp_policy= out, which computes with these in float32; or "
            f"none, as under accelerate, which always casts them.",
            sum(each.nbytes for each in cast),
        )
    ]
