"""Adapters whose LoRAs are of fused experts already, in layouts other than that of this peft.

Before 0.19, peft took the rows of a fused parameter for its columns. NeMo Automodel, until May 2026, saved one tensor
for all experts of a layer, transposed; Megatron-Bridge exports one by the name of the parameter (SkyRL#1852). unsloth,
until September 2026, had the columns of lora_B of one expert next to each other (unsloth-zoo#1269). All hold the same
factors, in another order of their elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import NamedTuple

import torch
from packaging.version import InvalidVersion, Version
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists

from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._checkpoint.faults import fault, note
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.names import PEFT_PREFIX
from safe_loading._core.report import Finding
from safe_loading._model.peft_layers import without_peft_levels

from .fused_parameters import FusedParameter, fused_keys, in_layout_of_peft

_ROWS_FIRST = Version("0.19")  # the first release with the layout of today
_GROUPED = {"gate_up_proj": "lora_gate_and_up", "down_proj": "lora_down"}  # NeMo's names
PACKING = "lora_B_layout"  # the field of adapter_config.json in which unsloth says it since then
_BY_EXPERT, _BY_RANK = "grouped_by_expert", "rank_major"
PACKINGS = (_BY_EXPERT, _BY_RANK)
_BY_UNSLOTH = "unsloth_fixed"  # in the auto_mapping of each config that unsloth writes
RIGHT_BASE = "pass the base that the adapter was trained on as base_model"


class _Whole(NamedTuple):
    """The factors of all experts of a layer in one tensor each: their keys, shapes, and whether they are transposed."""

    keys: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    is_transposed: bool


class _InLayout(NamedTuple):
    config: LoraConfig
    tensors: dict[str, torch.Tensor]
    findings: list[Finding]


def expert_layouts(
    config: LoraConfig,
    tensors: Mapping[str, torch.Tensor],
    base: torch.nn.Module,
    parameters: Iterable[FusedParameter],
    facts: AdapterFolder,
) -> _InLayout:
    """Return an adapter with the factors of fused experts in the layout of this peft, and why they cannot be.

    ``tensors`` are by the keys that peft writes.
    """
    parameters = list(parameters)
    result = _InLayout(config, dict(tensors), [])
    whole = {one: found for one in parameters if (found := _whole(one, tensors, config.r)) is not None}
    if whole or any(key.endswith(tuple(f".{name}_A" for name in _GROUPED.values())) for key in tensors):
        result = _ungrouped(result, base, parameters, whole, facts)
    elif config.target_parameters:
        named = [parameter for parameter in parameters if _is_named(parameter, config.target_parameters)]
        result = _as_peft_packs(result, base, named, facts)
        for path, key in fused_keys(base, named).items():
            parameter = next(one for one in named if one.path == path)
            # What the model has transposed, older releases took as it is, too.
            if parameter.experts is not None and parameter.experts > 1 and not parameter.is_transposed:
                _turn_older(result, parameter, key, facts)
    return result


def _as_peft_packs(
    adapter: _InLayout, base: torch.nn.Module, named: list[FusedParameter], facts: AdapterFolder
) -> _InLayout:
    """Return an adapter of unsloth with the columns of each lora_B as peft has them: the expert is the fastest index.

    No shape tells the two orders apart. Where the config does not say it, peft's is taken, as peft itself does.
    """
    written, tensors = facts.config.get(PACKING), dict(adapter.tensors)
    by_unsloth = bool((adapter.config.auto_mapping or {}).get(_BY_UNSLOTH))
    experts = {one.path: one.experts or 1 for one in named}
    found = {f"{key}.lora_B.weight": experts[path] for path, key in fused_keys(base, named).items()}
    differing = {
        key: count
        for key, count in found.items()
        if key in tensors and tensors[key].dim() == 2 and 1 < count < tensors[key].shape[1]
    }
    if not differing or written not in (*PACKINGS, None) or (written is None and not by_unsloth):
        return adapter
    if written is None:
        message = (
            f"{PACKING} is not in {ADAPTER_CONFIG}: unsloth, which trained this, had the columns of lora_B of fused "
            f"experts in another order than peft until 17 September 2026 (unsloth-zoo#1269), and the shapes are the "
            f"same. They are taken in peft's order"
        )
        fix = (
            f'write "{PACKING}": "{_BY_EXPERT}" into {ADAPTER_CONFIG} if it was trained with a release before that, '
            f'and "{_BY_RANK}" if with a later one'
        )
        size = sum(tensors[key].nbytes for key in differing)
        where = f"{facts.weights}: {next(iter(differing))}"
        finding = note("warning", "expert-packing-unknown", where, message, fix, size)
        return adapter._replace(findings=[*adapter.findings, finding])
    if written == _BY_EXPERT:
        for key, count in differing.items():
            b = tensors[key]
            tensors[key] = b.reshape(b.shape[0], count, -1).transpose(1, 2).reshape(b.shape).contiguous()
    config = deepcopy(adapter.config)  # saved again, it is peft's
    config.auto_mapping = {name: value for name, value in (config.auto_mapping or {}).items() if name != _BY_UNSLOTH}
    return _InLayout(config, tensors, adapter.findings)


def _turn_older(adapter: _InLayout, parameter: FusedParameter, key: str, facts: AdapterFolder) -> None:
    """Turn the factors of a parameter that a peft before 0.19 wrote; note a finding where that cannot be told."""
    names = {factor: f"{key}.lora_{factor}.weight" for factor in "AB"}
    a, b = (adapter.tensors.get(names[factor]) for factor in "AB")
    if a is None or b is None or a.dim() != 2 or b.dim() != 2 or parameter.experts is None:
        return
    experts, rows, columns = parameter.experts, *parameter.shape[1:]
    found = (b.shape[0], a.shape[1])
    if found not in ((rows, columns), (columns, rows)) or a.shape[0] != b.shape[1] or a.shape[0] % experts:
        return  # which the match with the model says
    if rows == columns:
        older = is_by_older_peft(facts)
        if older is None:
            message = (
                f"{parameter.path} is {list(parameter.shape)}, so its shapes do not tell whether a peft before 0.19 "
                f"wrote it, which took rows for columns, and adapter_config.json has no peft_version"
            )
            fix = "write the peft_version that it was trained with into adapter_config.json"
            size = a.nbytes + b.nbytes
            adapter.findings.append(fault("fused-layout-unknown", f"{facts.weights}: {names['A']}", message, fix, size))
            return
    else:
        older = found != (rows, columns)
    if older:
        old_a, old_b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
        turned = in_layout_of_peft(old_b.permute(2, 1, 0), old_a.permute(0, 2, 1))
        adapter.tensors.update({names[factor]: value for factor, value in turned.items()})


def is_by_older_peft(facts: AdapterFolder) -> bool | None:
    """Return whether a peft with the older layout wrote an adapter; None where its config does not say."""
    written_by = facts.config.get("peft_version")
    try:
        # peft appends the commit to the version of a development build: "0.18.0.dev0@3f4e5d6"
        return None if not written_by else Version(str(written_by).split("@")[0]) < _ROWS_FIRST
    except InvalidVersion:
        return None


def _whole(parameter: FusedParameter, tensors: Mapping[str, torch.Tensor], rank: int) -> _Whole | None:
    """Return the factors of a parameter where a file has one tensor each for all experts, and which shapes it has."""
    if parameter.experts is None:
        return None
    experts, rows, columns = parameter.shape
    of_nemo = f"{PEFT_PREFIX}{parameter.owner}.{_GROUPED.get(parameter.name)}"
    if all(f"{of_nemo}_{factor}" in tensors for factor in "AB"):
        shapes = ((experts, columns, rank), (experts, rank, rows))
        return _Whole((f"{of_nemo}_A", f"{of_nemo}_B"), shapes, is_transposed=True)
    a, b = (f"{PEFT_PREFIX}{parameter.path}.lora_{factor}.weight" for factor in "AB")
    if all(key in tensors and tensors[key].dim() == 3 for key in (a, b)):
        return _Whole((a, b), ((experts, rank, columns), (experts, rows, rank)), is_transposed=False)
    return None


def _ungrouped(
    adapter: _InLayout,
    base: torch.nn.Module,
    parameters: list[FusedParameter],
    found: Mapping[FusedParameter, _Whole],
    facts: AdapterFolder,
) -> _InLayout:
    """Return an adapter with peft's factors in place of one tensor for all experts."""
    config, tensors = deepcopy(adapter.config), adapter.tensors
    for parameter, whole in found.items():
        a, b = (tensors[key] for key in whole.keys)
        if (tuple(a.shape), tuple(b.shape)) != whole.shapes:
            message = (
                f"they are {list(a.shape)} and {list(b.shape)}, and for {parameter.path} {list(parameter.shape)} and "
                f"the r={config.r} of the config {list(whole.shapes[0])} and {list(whole.shapes[1])}"
            )
            fix = f"{RIGHT_BASE}, or correct r in {ADAPTER_CONFIG}"
            where, size = f"{facts.weights}: {whole.keys[0]}", a.nbytes + b.nbytes
            adapter.findings.append(fault("shape-mismatch", where, message, fix, size))
    config.target_modules = module_targets(adapter.config, base, parameters)  # type: ignore[assignment]
    if adapter.findings:
        wrong = {key for whole in found.values() for key in whole.keys}
        left = {key: value for key, value in tensors.items() if key not in wrong}
        return _InLayout(config, left, adapter.findings)
    beginnings = fused_keys(base, found)
    for parameter, whole in found.items():
        a, b = (tensors.pop(key) for key in whole.keys)
        a, b = (a.transpose(1, 2), b.transpose(1, 2)) if whole.is_transposed else (a, b)
        for factor, value in in_layout_of_peft(a, b).items():
            tensors[f"{beginnings[parameter.path]}.lora_{factor}.weight"] = value
    names = (short_name(one.path) for one in found)
    config.target_parameters = sorted({*(config.target_parameters or ()), *names})
    return _InLayout(config, tensors, [])


def short_name(path: str) -> str:
    """Return the name of a parameter for ``target_parameters`` that stands for it in all layers."""
    return ".".join(path.split(".")[-2:])


def named_as_others(config: PeftConfig, base: torch.nn.Module, parameters: Iterable[FusedParameter]) -> PeftConfig:
    """Return a config that names its parameters as one of the base's does that has the same: peft compares the names.

    Otherwise as it is.
    """
    parameters = list(parameters)
    names = getattr(config, "target_parameters", None) or ()
    own = [parameter for parameter in parameters if _is_named(parameter, names)]
    others: Mapping[str, PeftConfig] = getattr(base, "peft_config", {})
    for other in others.values():
        others_names = getattr(other, "target_parameters", None) or ()
        same = own and own == [parameter for parameter in parameters if _is_named(parameter, others_names)]
        if same and set(names) != set(others_names):
            config = deepcopy(config)
            vars(config)["target_parameters"] = list(others_names)
            return config
    return config


def _is_named(parameter: FusedParameter, names: Iterable[str]) -> bool:
    return any(f".{parameter.path}".endswith(f".{name}") for name in names)


def module_targets(
    config: LoraConfig, base: torch.nn.Module, parameters: Iterable[FusedParameter]
) -> str | set[str] | None:
    """Return the ``target_modules`` of a config without those that are fused in parameters of the base.

    What they name beside them is kept, so that what the base lacks is still found missing.
    """
    targets = config.target_modules
    if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return targets
    owners = {parameter.owner for parameter in parameters}
    inside = tuple(f"{owner}." for owner in owners)
    modules = [without_peft_levels(name) for name, _ in base.named_modules()]
    modules = [name for name in dict.fromkeys(modules) if name not in owners and not name.startswith(inside)]
    if isinstance(targets, str):
        return {name for name in modules if name and check_target_module_exists(config, name)}
    leaves = {leaf for parameter in parameters for leaf in (*parameter.leaves, parameter.name)}
    lists = "|".join(f"{re.escape(leaf)}s" for leaf in leaves)
    fused = re.compile(rf"(?:.*\.)?(?:experts(?:\.\d+\.\w+)?|(?:{lists})\.\d+)")
    return {
        target
        for target in targets
        if any(f".{name}".endswith(f".{target}") for name in modules)
        or not (target.rpartition(".")[2] in leaves or fused.fullmatch(target))
    }
