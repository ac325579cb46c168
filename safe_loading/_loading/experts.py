"""LoRAs of experts, made to fit a base that fuses its experts, each with the rank and scaling of its own config.

Adapters saved over transformers 4 have a LoRA for each expert. peft 0.20 and later turn some into factors of the fused
parameters. All get the ``r`` and ``lora_alpha`` of the config there: ranks and alphas of single experts are lost,
rsLoRA divides by the root of the fused rank, experts that the config leaves out are missing, dense layers of the same
names are taken for experts, and many families are not converted at all. So the factors are fused here: brought to one
rank and one scaling first, with zeros for what the config leaves out.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists

from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._checkpoint.faults import fault, note
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.names import PEFT_PREFIX
from safe_loading._core.report import Finding, errors_of

from .fused_layouts import RIGHT_BASE, expert_layouts, is_by_older_peft, module_targets, named_as_others, short_name
from .fused_parameters import (
    FusedParameter,
    fused_factors,
    fused_keys,
    fused_parameters,
    is_converted_by_peft,
    parameter_of_leaves,
)
from .peft_config import of_pattern

_FACTOR = re.compile(rf"{re.escape(PEFT_PREFIX)}(?P<path>.+)\.lora_(?P<factor>[AB])\.weight")
_EXPERT = re.compile(r"(?P<owner>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>\w+)")
_OF_A_LIST = re.compile(r"(?P<owner>.+\.experts)\.(?P<leaf>\w+)s\.(?P<expert>\d+)")  # unsloth's, of gpt-oss in 4 bits
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class FittedAdapter(NamedTuple):
    """An adapter whose LoRAs of experts are those of the base's fused parameters."""

    config: PeftConfig
    tensors: dict[str, torch.Tensor]
    findings: list[Finding]
    is_fused: bool = False  # whether it names fused parameters, so that nothing is left to convert


@dataclasses.dataclass
class _Factors:
    """The factors of one LoRA in the file, with the rank and scaling that its config gives it."""

    path: str  # of the module in the base of transformers 4
    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scaling: float


def fit_experts(
    config: PeftConfig, tensors: Mapping[str, torch.Tensor], base: torch.nn.Module, facts: AdapterFolder
) -> FittedAdapter:
    """Return an adapter with LoRAs of experts as peft holds them over fused experts; others as they are.

    ``tensors`` are by the keys that peft writes.
    """
    parameter_of = parameter_of_leaves(base) if isinstance(config, LoraConfig) else {}
    if not parameter_of or not isinstance(config, LoraConfig):
        return FittedAdapter(config, dict(tensors), [])
    parameters = _as_in_file(fused_parameters(base, parameter_of), tensors)
    config, tensors, findings = expert_layouts(config, tensors, base, parameters, facts)
    if errors_of(findings):
        return FittedAdapter(config, tensors, findings)
    fitting = _Fitting(config, tensors, base, parameters, facts)
    fitted = FittedAdapter(config, tensors, [], is_fused=bool(config.target_parameters))
    if fitting.factors:
        fitted = fitting.result()
    elif tensors and not config.target_parameters and is_converted_by_peft(base):
        fitted = fitting.without_experts()
    elif fitting.has_routers_alone:
        fitted = fitting.without_dropout()
    fitted = fitted._replace(findings=[*findings, *fitted.findings])
    return fitted._replace(config=named_as_others(fitted.config, base, parameters)) if fitted.is_fused else fitted


def _as_in_file(parameters: Iterable[FusedParameter], keys: Iterable[str]) -> list[FusedParameter]:
    """Return the parameters with the modules that a file has LoRAs of: some have one where others have gate and up."""
    paths = (_expert(match["path"]) for key in keys if (match := _FACTOR.fullmatch(key)) is not None)
    own = {path["leaf"] for path in paths if path is not None}
    return [one._replace(leaves=(one.name,), is_interleaved=False) if one.name in own else one for one in parameters]


class _Fitting:
    """The work on one adapter."""

    def __init__(
        self,
        config: LoraConfig,
        tensors: dict[str, torch.Tensor],
        base: torch.nn.Module,
        parameters: list[FusedParameter],
        facts: AdapterFolder,
    ) -> None:
        self._config, self._tensors, self._base, self._facts = config, tensors, base, facts
        self._findings: list[Finding] = []
        self._missing: list[str] = []  # the keys that the config asks for and the file has not
        self._paths: dict[str, str] = {}  # one path in the file for each name of a module
        self._parameters = parameters
        self.has_routers_alone = False
        # By the numbers of its layer, its expert and the module's name.
        self.factors: dict[tuple[tuple[str, ...], int | None, str], _Factors] = {}
        self._collect()

    def _collect(self) -> None:
        """Collect the factors that the file has for modules of transformers 4."""
        of_experts = {(_numbers(p.path), leaf) for p in self._parameters if p.experts is not None for leaf in p.leaves}
        of_routers = {(_numbers(p.path), leaf) for p in self._parameters if p.experts is None for leaf in p.leaves}
        paths = (match["path"] for key in self._tensors if (match := _FACTOR.fullmatch(key)) is not None)
        for path in dict.fromkeys(paths):
            match = _expert(path)
            owner, expert, leaf = (match["owner"], int(match["expert"]), match["leaf"]) if match else _router(path)
            if (_numbers(f"{owner}."), leaf) not in (of_routers if match is None else of_experts):
                continue  # such as a dense layer with the name of an expert's
            a, b = (self._tensors.get(f"{PEFT_PREFIX}{path}.lora_{factor}.weight") for factor in "AB")
            if a is None or b is None or a.dim() != 2 or b.dim() != 2:
                continue
            self._paths[leaf] = path
            self.factors[_numbers(f"{owner}."), expert, leaf] = self._judged(path, a, b)
        if all(expert is None for _, expert, _ in self.factors):
            self.has_routers_alone = bool(self.factors)
            self.factors = {}  # they have a name of their own in both

    def _judged(self, path: str, a: torch.Tensor, b: torch.Tensor) -> _Factors:
        """Return the factors of a module with the config's rank and scaling; note a finding if their rank differs."""
        config = self._config
        rank = of_pattern(config.rank_pattern, path, config.r)
        alpha = of_pattern(config.alpha_pattern, path, config.lora_alpha)
        if a.shape[0] != rank or b.shape[1] != rank:
            message = f"lora_A is {list(a.shape)} and lora_B {list(b.shape)}, and the config gives them the rank {rank}"
            fix = "correct r and rank_pattern in adapter_config.json"
            self._findings.append(fault("shape-mismatch", self._key(path), message, fix, a.nbytes + b.nbytes))
        return _Factors(path, a, b, int(rank), alpha / (math.sqrt(rank) if config.use_rslora else rank))

    def _key(self, path: str) -> str:
        return f"{self._facts.weights}: {PEFT_PREFIX}{path}.lora_A.weight"

    def without_experts(self) -> FittedAdapter:
        """Return an adapter of other modules, which peft would take for experts where they have the same names."""
        config, routers = deepcopy(self._config), [p.path for p in self._parameters if p.experts is None]
        # over transformers 5, an older peft left fused experts out, whatever their names
        if not is_by_older_peft(self._facts):
            self._note_left_out()
        if self.has_routers_alone:
            self._set_targets(config, routers)
            self._leave_dropout_out(config)
        elif not isinstance(config.target_modules, str):
            config.target_modules = module_targets(config, self._base, self._parameters)  # type: ignore[assignment]
        return FittedAdapter(config, self._tensors, self._findings, is_fused=True)

    def _note_left_out(self) -> None:
        """Note a finding where the config adapts experts, or routers, of which the file has none."""
        wanted = [p for p in self._parameters if p.experts is not None or not self.has_routers_alone]
        paths = (f"{p.owner}.0.{leaf}" if p.experts is not None else p.owner for p in wanted for leaf in p.leaves)
        path = next((path for path in paths if _selects(self._config, path)), None)
        if path is None or self._config.target_modules is None:  # then those that peft has for the model's type
            return
        message = "the config adapts this module of the experts or their router, and the file has no tensor of any"
        fix = (
            f"{RIGHT_BASE}, or save the adapter again (gathered, from rank 0); where it was trained without them, put "
            f'"exclude_modules": ".*(experts\\\\.\\\\d+\\\\..*|mlp\\\\.gate)" into {ADAPTER_CONFIG}'
        )
        self._findings.append(fault("adapter-key-missing", self._key(path), message, fix))

    def without_dropout(self) -> FittedAdapter:
        """Return the adapter as it is, but for a dropout that peft refuses on the parameter of a router."""
        config = deepcopy(self._config)
        self._leave_dropout_out(config)
        return FittedAdapter(config, self._tensors, self._findings, is_fused=bool(config.target_parameters))

    def result(self) -> FittedAdapter:
        """Return the adapter with the factors of the base's fused parameters."""
        adapted = {parameter: own for parameter in self._parameters if (own := self._factors_of(parameter))}
        self._note_missing()
        for parameter, own in adapted.items():
            self._check_shapes(parameter, own)
        if self._findings:
            return FittedAdapter(self._config, self._tensors, self._findings)
        config, keys = deepcopy(self._config), fused_keys(self._base, adapted)
        settings = {p.path: self._fit(p, own, keys[p.path]) for p, own in adapted.items()}
        self._set_patterns(config, settings)
        self._set_targets(config, settings)
        self._leave_dropout_out(config)
        return FittedAdapter(config, self._tensors, self._findings, is_fused=True)

    def _factors_of(self, parameter: FusedParameter) -> list[_Factors]:
        """Return the factors of a parameter, with zeros where the config leaves modules out; none if it has none."""
        layer = _numbers(parameter.path)
        experts: Iterable[int | None] = (None,) if parameter.experts is None else range(parameter.experts)
        places = [(layer, expert, leaf) for expert in experts for leaf in parameter.leaves]
        if not any(leaf in parameter.leaves for _, _, leaf in self.factors):
            return []
        found = []  # in layers without any too: adapters of a model must have the same parameters
        for place in places:
            factors = self.factors.get(place) or self._zeros(*place, parameter)
            if factors is not None:
                found.append(factors)
        return found

    def _zeros(
        self, layer: tuple[str, ...], expert: int | None, leaf: str, parameter: FusedParameter
    ) -> _Factors | None:
        """Return factors that add nothing, for a module that the config leaves out; None where it is to be there."""
        like = self._paths.get(leaf) or next(self._paths[one] for one in parameter.leaves if one in self._paths)
        path = _alike(like, [*layer] if expert is None else [*layer, str(expert)], leaf)
        if _selects(self._config, path):
            self._missing.append(path)
            return None
        other = next(iter(self.factors.values()))
        rows, columns = parameter.shape[-2] // len(parameter.leaves), parameter.shape[-1]
        return _Factors(path, other.a.new_zeros(1, columns), other.b.new_zeros(rows, 1), 1, 0.0)

    def _note_missing(self) -> None:
        if not self._missing:
            return
        more = f", and for {len(self._missing) - 1} more modules of experts" if self._missing[1:] else ""
        message = f"the config adapts this expert, and the file has no tensor for it{more}"
        fix = f"{RIGHT_BASE}, or save the adapter again (gathered, from rank 0)"
        self._findings.append(fault("adapter-key-missing", self._key(self._missing[0]), message, fix))

    def _check_shapes(self, parameter: FusedParameter, own: list[_Factors]) -> None:
        """Note a finding for the first factors that have not the shape of their part of a parameter."""
        *_, rows, columns = parameter.shape
        for factors in own:
            found = (factors.b.shape[0] * len(parameter.leaves), factors.a.shape[1])
            if found != (rows, columns):
                message = (
                    f"lora_A is {list(factors.a.shape)} and lora_B {list(factors.b.shape)}, and the base's "
                    f"{parameter.path} is {list(parameter.shape)}"
                )
                size = factors.a.nbytes + factors.b.nbytes
                self._findings.append(fault("shape-mismatch", self._key(factors.path), message, RIGHT_BASE, size))
                return

    def _fit(self, parameter: FusedParameter, own: list[_Factors], key: str) -> tuple[int, float]:
        """Replace the factors of a parameter's modules by its own, in one rank and scaling; return rank and alpha."""
        rank = max(factors.rank for factors in own)
        scaling = next((factors.scaling for factors in own if factors.scaling), 1.0)
        ratios = [factors.scaling / scaling if factors.scaling else 1.0 for factors in own]
        exact = all(
            math.frexp(ratio)[0] == 0.5 or one.b.dtype.itemsize >= 4 for ratio, one in zip(ratios, own, strict=True)
        )
        a, b = [], []
        for factors, ratio in zip(own, ratios, strict=True):
            one_a, one_b = (factors.a, factors.b) if exact else (factors.a.float(), factors.b.float())
            missing = rank - factors.rank
            a.append(torch.nn.functional.pad(one_a, (0, 0, 0, missing)))
            b.append(torch.nn.functional.pad(one_b if ratio == 1 else one_b * ratio, (0, missing)))
            for factor in "AB":
                self._tensors.pop(f"{PEFT_PREFIX}{factors.path}.lora_{factor}.weight", None)
        if not exact:
            self._note_wider(parameter, own)
        leaves = len(parameter.leaves)
        for factor, value in fused_factors(parameter, a, b).items():
            self._tensors[f"{key}.lora_{factor}.weight"] = value
        fused = rank * leaves
        return fused, scaling * (math.sqrt(fused) if self._config.use_rslora else fused)

    def _note_wider(self, parameter: FusedParameter, own: list[_Factors]) -> None:
        message = (
            f"its experts are scaled differently, and peft scales all experts of a layer alike, so that the others' "
            f"lora_B are multiplied; {str(own[0].b.dtype).removeprefix('torch.')} would round that, so the factors of "
            f"this layer are float32 here"
        )
        where, size = f"{self._facts.weights}: {parameter.path}", sum(one.a.nbytes + one.b.nbytes for one in own)
        self._findings.append(note("info", "expert-factors-widened", where, message, "none", size))

    def _set_patterns(self, config: LoraConfig, settings: Mapping[str, tuple[int, float]]) -> None:
        """Give the fused parameters their ranks and alphas, before all other patterns: the first that fits counts."""
        ranks = {re.escape(path): rank for path, (rank, _) in settings.items()}
        alphas = {re.escape(path): alpha for path, (_, alpha) in settings.items()}
        config.rank_pattern = {**_by_name(ranks), **(config.rank_pattern or {})}
        config.alpha_pattern = {**_by_name(alphas), **(config.alpha_pattern or {})}

    def _set_targets(self, config: LoraConfig, adapted: Iterable[str]) -> None:
        """Name the adapted parameters, and of the targets only those that are modules of the base."""
        config.target_parameters = sorted({*(config.target_parameters or ()), *map(short_name, adapted)})
        config.target_modules = module_targets(self._config, self._base, self._parameters)  # type: ignore[assignment]

    def _leave_dropout_out(self, config: LoraConfig) -> None:
        """Leave out the dropout, which peft refuses on a parameter, unless the adapter is to be trained."""
        if not config.lora_dropout or not config.inference_mode:
            return
        message = (
            f"lora_dropout is {config.lora_dropout}, which peft has not for fused experts and routers; it does nothing "
            f"outside of training, and is 0 here"
        )
        config.lora_dropout = 0.0
        where = self._facts.config_file
        self._findings.append(note("info", "lora-dropout-ignored", where, message, "none"))


def _expert(path: str) -> re.Match[str] | None:
    return _EXPERT.fullmatch(path) or _OF_A_LIST.fullmatch(path)


def _alike(path: str, numbers: Iterable[str], leaf: str) -> str:
    """Return the path of a module that is named as another one is, with its own numbers and name."""
    own = iter(numbers)
    path = _NUMBER.sub(lambda old: next(own, old[0]), f"{path}.")[:-1]
    match = _expert(path)
    return path if match is None else f"{path[: match.start('leaf')]}{leaf}{path[match.end('leaf') :]}"


def _router(path: str) -> tuple[str, None, str]:
    owner, _, leaf = path.rpartition(".")
    return owner, None, leaf


def _numbers(path: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(path))


def _selects(config: LoraConfig, path: str) -> bool:
    """Return whether a config adapts the module at a path."""
    if config.target_modules is None:
        return True
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        return True
    return bool(check_target_module_exists(config, path))


def _by_name(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Return patterns of full names as those of the last two parts, where all with these have one value."""
    short: dict[str, set[Any]] = {}
    for pattern, value in patterns.items():
        short.setdefault(_last_two(pattern), set()).add(value)
    return {
        (_last_two(pattern) if len(short[_last_two(pattern)]) == 1 else pattern): value
        for pattern, value in patterns.items()
    }


def _last_two(pattern: str) -> str:
    return r"\.".join(pattern.split(r"\.")[-2:])
