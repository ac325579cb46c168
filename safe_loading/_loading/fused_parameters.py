"""Parameters that fuse a layer's experts, and the factors and keys by which peft holds a LoRA of one.

transformers 5 keeps the experts of a layer in parameters of three dimensions. peft wraps a module once for each of them
that it adapts, so the keys in a file depend on which others are adapted, and on which were before.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import core_model_loading as loader
from transformers.conversion_mapping import get_model_conversion_mapping

from safe_loading._core.names import PEFT_PREFIX
from safe_loading._core.thread_patches import patched, seen_here
from safe_loading._model.peft_layers import without_peft_levels

_CONVERSION = "peft.utils.transformers_weight_conversion"  # of peft 0.19 and later, which has the layout made here
_SOURCE = re.compile(r"experts\.\*\.(?P<leaf>\w+)\.weight$")
# Of experts that are fused on disk, too, of which each may have been a module of its own where an adapter was trained.
_ON_DISK = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_ROUTER = {"gate": "gate.weight"}


class FusedParameter(NamedTuple):
    """A parameter of the base that peft adapts in place of modules of transformers 4."""

    path: str  # in the base
    experts: int | None  # None for a router
    leaves: tuple[str, ...]  # the modules that are fused in it, by the last part of their names, in order
    shape: tuple[int, ...]  # rows before columns, whatever their order in the model
    is_transposed: bool = False  # whether the model, or that of transformers 4, has the columns first, as gpt-oss
    is_interleaved: bool = False  # whether the rows of its modules take turns, as gpt-oss's

    @property
    def owner(self) -> str:
        """The path of its module."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Its name in its module."""
        return self.path.rpartition(".")[2]


def parameter_of_leaves(base: torch.nn.Module) -> dict[str, str]:
    """Return the end of the parameter's name for each module of transformers 4 that a base fuses; empty if none.

    The table is that of transformers' loader. What it does more than stack experts and join their rows is left out.
    """
    if importlib.util.find_spec(_CONVERSION) is None or not hasattr(getattr(base, "config", None), "model_type"):
        return {}
    found: dict[str, str] = {}
    rules = _conversions(base)
    for rule in rules:
        if len(rule.target_patterns) != 1:
            continue
        leaves = [match["leaf"] for source in rule.source_patterns if (match := _SOURCE.search(source)) is not None]
        kinds = [(type(step).__name__, getattr(step, "dim", None)) for step in rule.operations]
        fuses = kinds[:1] == [("MergeModulelist", 0)] and kinds[1:] in ([], [("Concatenate", 1)])
        if fuses and len(leaves) == len(rule.source_patterns):
            found |= dict.fromkeys(leaves, rule.target_patterns[0].rpartition(".")[2])
    # Files without other steps hold experts as the model does, which says its layout where it is a usual one.
    if not found and _steps_of_experts(rules) <= {"Transpose"}:
        found = _ON_DISK if any(hasattr(module, "is_concatenated") for module in base.modules()) else {}
    return {**_ROUTER, **found} if found else {}


def _conversions(base: torch.nn.Module) -> list[loader.WeightConverter]:
    rules = get_model_conversion_mapping(base)  # type: ignore[arg-type]  # a PreTrainedModel
    return [rule for rule in rules if isinstance(rule, loader.WeightConverter)]


def _steps_of_experts(rules: Iterable[loader.WeightConverter]) -> set[str]:
    of_experts = [rule for rule in rules if any("experts" in target for target in rule.target_patterns)]
    return {type(step).__name__ for rule in of_experts for step in rule.operations}


def fused_parameters(base: torch.nn.Module, parameter_of: Mapping[str, str]) -> Iterator[FusedParameter]:
    """Yield the parameters of a base that fuse experts as (experts, rows, columns), and its routers."""
    was_transposed = "Transpose" in _steps_of_experts(_conversions(base)) if parameter_of else False
    for name, tensor in base.named_parameters():
        path = without_peft_levels(name)
        owner, _, attribute = path.rpartition(".")
        leaves = tuple(leaf for leaf, parameter in parameter_of.items() if parameter == attribute)
        if owner.endswith(".experts") and leaves and tensor.dim() == 3:
            experts, rows, columns = tensor.shape
            module = _innermost(base.get_submodule(owner))
            is_transposed = getattr(module, "is_transposed", False) is True
            shape = (experts, columns, rows) if is_transposed else (experts, rows, columns)
            takes_turns = len(leaves) > 1 and getattr(module, "is_concatenated", True) is False
            yield FusedParameter(path, experts, leaves, shape, is_transposed or was_transposed, takes_turns)
            continue
        is_router = tensor.dim() == 2 and path.endswith(tuple(f".{router}" for router in _ROUTER.values()))
        if is_router and not isinstance(_innermost(base.get_submodule(owner)), torch.nn.Linear):
            yield FusedParameter(path, None, tuple(_ROUTER), tuple(tensor.shape))


def fused_keys(base: torch.nn.Module, adapted: Iterable[FusedParameter]) -> dict[str, str]:
    """Return the beginning of the keys of each adapted parameter by its path, as peft nests their layers."""
    by_owner: dict[str, list[FusedParameter]] = {}
    for parameter in adapted:
        by_owner.setdefault(parameter.owner, []).append(parameter)
    keys = {}
    for owner, parameters in by_owner.items():
        module: Any = base.get_submodule(owner)
        nested: list[str] = []  # from the outermost
        while (name := getattr(module, "parameter_name", None)) is not None:
            nested.append(name)
            module = module.base_layer
        order = [name for name, _ in module.named_parameters(recurse=False)]
        new = [parameter.name for parameter in parameters if parameter.name not in nested]
        nested = [*sorted(new, key=order.index, reverse=True), *nested]
        for parameter in parameters:
            keys[parameter.path] = f"{PEFT_PREFIX}{owner}{'.base_layer' * nested.index(parameter.name)}"
    return keys


def fused_factors(
    parameter: FusedParameter, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return peft's factors of a fused parameter from those of its modules, of one rank: each expert's leaf by leaf."""
    leaves = len(parameter.leaves)
    experts = range(0, len(a), leaves)
    fused_a = torch.stack([torch.cat(list(a[at : at + leaves])) for at in experts])
    fused_b = torch.stack([torch.block_diag(*b[at : at + leaves]) for at in experts])  # type: ignore[no-untyped-call]  # torch's
    if parameter.is_interleaved:
        fused_b = torch.unflatten(fused_b, 1, (leaves, -1)).transpose(1, 2).flatten(1, 2)
    return in_layout_of_peft(fused_a, fused_b)


def in_layout_of_peft(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return peft's factors from ``a`` (experts, rank, columns) and ``b`` (experts, rows, rank)."""
    # The experts are the slowest index of lora_A and the fastest of lora_B.
    return {"A": a.flatten(0, 1).contiguous(), "B": b.permute(1, 2, 0).flatten(1).contiguous()}


def is_converted_by_peft(base: torch.nn.Module) -> bool:
    """Return whether peft converts the configs of adapters on this base: it knows some families alone."""
    conversion: Any = importlib.import_module(_CONVERSION)
    model_type = getattr(getattr(base, "config", None), "model_type", "")
    family = seen_here(conversion, "_MODEL_TO_CONVERSION_PATTERN").get(model_type)
    tables = (getattr(conversion, name, {}) for name in ("_MOE_TARGET_MODULE_MAPPING", "_MOE_FUSED_TARGETS"))
    return all(table.get(family) for table in tables)


@contextmanager
def without_conversion_by_peft(base: torch.nn.Module) -> Iterator[None]:
    """Keep peft from converting a config that names fused parameters already.

    It would take each target with an expert's name, such as a dense layer's, for the experts of all layers.
    """
    conversion: Any = importlib.import_module(_CONVERSION)
    table: dict[str, str] = seen_here(conversion, "_MODEL_TO_CONVERSION_PATTERN")
    model_type = getattr(getattr(base, "config", None), "model_type", "")
    others = {name: pattern for name, pattern in table.items() if name != model_type}
    with patched(conversion, "_MODEL_TO_CONVERSION_PATTERN", others):
        yield


def _innermost(module: torch.nn.Module) -> torch.nn.Module:
    while isinstance(inner := getattr(module, "base_layer", None), torch.nn.Module):
        module = inner
    return module
