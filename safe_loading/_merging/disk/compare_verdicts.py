"""From the sums of a tensor to its verdict, and from the verdicts of all tensors to findings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.report import Finding, Severity, counted
from safe_loading._model.dtypes import DTYPES

from .changes import ChangedRows
from .compare_bounds import UNIT
from .compare_report import CheckedTensor, MergeVerdict
from .compare_roads import NOISE
from .compare_sums import Sums
from .compare_tensors import Compared
from .output_plan import TensorPlan

_MORE_TWICE_THAN_ONCE = 1.5
# From the worst verdict to the best: a tensor of several sections has the worst of them.
_WORST = (
    "not finite", "other", "transposed", "scaled", "twice", "base", "narrowed", "rounding", "exact",
)  # fmt: skip
_OTHER_WAY_ROUND = "pass the base first and the merged folder last, if they stand in each other's place"
_AGAIN = "merge again: merge_lora_checkpoint(base, adapter, merged, overwrite=True)"


class _Meaning(NamedTuple):
    """The words of a finding."""

    code: str
    severity: Severity
    means: str
    fix: str


def _meaning(code: str, severity: Severity, means: str, fix: str) -> _Meaning:
    return _Meaning(code, severity, means, fix)


_MEANS: Mapping[str, _Meaning] = {
    "base": _meaning("update-absent", "error", "hold the base's values: the adapter's update is absent", _AGAIN),
    "twice": _meaning("update-twice", "error", "hold the base and twice the adapter's update", _AGAIN),
    "scaled": _meaning(
        "update-scaled",
        "error",
        "hold the adapter's update with another factor (lora_alpha, r, use_rslora, rank_pattern, or a weight)",
        f"{_AGAIN}; or pass adapter_weights, if the factor was meant",
    ),
    "transposed": _meaning("update-transposed", "error", "hold the transposed update (fan_in_fan_out)", _AGAIN),
    "narrowed": _meaning("values-narrowed", "warning", "went through a narrower dtype than they are stored in", _AGAIN),
    "swapped": _meaning("values-swapped", "error", "hold what belongs to another tensor or to other rows", _AGAIN),
    "other": _meaning("values-differ", "error", "are neither base plus update nor anything known", _AGAIN),
    "not finite": _meaning("merged-not-finite", "error", "hold NaN or infinity", _AGAIN),
    "shape": _meaning("merged-shape", "error", "have another shape than the merge gives them", _AGAIN),
    "missing": _meaning("merged-missing", "error", "are missing", _AGAIN),
    "left out": _meaning(
        "merged-left-out",
        "info",
        "are missing that the class of the merge does not read; others may, such as a tower, or layers for more tokens",
        f"none where that class alone reads the folder; or {_AGAIN}",
    ),
    "extra": _meaning(
        "merged-extra", "warning", "are neither of the base nor of the adapter", f"none if meant; or {_AGAIN}"
    ),
    "unchecked": _meaning(
        "merged-unchecked",
        "error",
        "belong to a quantized weight whose other part is missing or of another shape: not compared",
        _AGAIN,
    ),
}
_OF_ONE = {"are": "is", "belong": "belongs", "have": "has", "hold": "holds"}
_NAMED = 4
UNREAD = "no part of the model's class"  # of what is left out: no tied weight stands for it


def judge(plan: TensorPlan, file: str, compared: Compared, shape: tuple[int, ...]) -> CheckedTensor:
    """Return the verdict on a tensor that was compared; ``shape`` is that of its values."""
    verdicts: list[tuple[MergeVerdict, ChangedRows | None, Sums]] = [
        (_section_verdict(plan, changed, sums), changed, sums) for changed, sums in compared.sections if sums.wrong
    ]
    info, action = plan.target, "copied" if plan.codes is not None and not plan.rows else plan.action
    if not verdicts:
        return CheckedTensor(info.name, file, "exact", action, info.dtype, info.nbytes)
    verdict, changed, sums = min(verdicts, key=lambda entry: _WORST.index(entry[0]))
    wrong = sum(own.outside for _, _, own in verdicts)
    scale = sums.scale if changed is not None and math.isfinite(sums.scale) else None
    distance = max(own.distance for _, _, own in verdicts)
    detail = "" if verdict == "rounding" else _detail(shape, sums, len([v for v in verdicts if v[0] == verdict]), plan)
    return CheckedTensor(info.name, file, verdict, action, info.dtype, info.nbytes, wrong, distance, scale, detail)


def is_better(one: CheckedTensor, other: CheckedTensor) -> bool:
    """Return whether one verdict on a tensor explains more of it than another."""
    return (_WORST.index(one.verdict), -one.wrong) > (_WORST.index(other.verdict), -other.wrong)


def _section_verdict(plan: TensorPlan, changed: ChangedRows | None, sums: Sums) -> MergeVerdict:
    """Return the verdict on one section; the likeliest mistake that explains every value comes first."""
    if not sums.wrong:
        return "exact"
    if sums.not_finite:
        return "not finite"
    replaced = changed is None and plan.value is not None
    added = changed is not None and (changed.update is not None or changed.by_peft is not None)
    if not sums.outside:  # an update below the bound is told by its factor alone
        return "rounding" if not added or _is_whole(sums) else _by_factor(sums)
    if sums.has_base and not sums.not_base and (added or replaced or changed is not None):
        return "base"
    if added and sums.has_base:
        if not sums.not_twice:
            return "twice"
        if not sums.not_transposed:
            return "transposed"
        if not sums.not_negated or _is_scaled(sums):
            return "scaled"
    narrow = [dtype for dtype, is_wrong in sums.not_narrow.items() if not is_wrong]
    for dtype in narrow:  # the base's own precision is none that is lost
        own = plan.source is not None and DTYPES.get(plan.source.dtype) is dtype
        if own and (not added or _is_whole(sums, (1 + UNIT[dtype]) ** 4 - 1)):
            return "rounding"
    return "narrowed" if narrow else "other"


def _by_factor(sums: Sums) -> MergeVerdict:
    """Return the verdict on values of which each might be right, and the update as a whole is not."""
    if sums.has_base and not sums.not_base:
        return "base"
    if not math.isfinite(sums.scale) or abs(sums.along) <= NOISE * math.sqrt(sums.noise):
        return "other"  # none of the update
    return "twice" if sums.scale > _MORE_TWICE_THAN_ONCE else "scaled"


def _is_whole(sums: Sums, error: float = 0.0) -> bool:
    """Return whether the update as a whole has the factor 1, as far as rounding lets one tell."""
    if not sums.update:
        return True
    if sums.told.roads:
        return sums.told.is_whole()
    return sums.off_along <= max(error, sums.factor) * sums.update + NOISE * math.sqrt(sums.noise)


def _is_scaled(sums: Sums) -> bool:
    """Return whether the update times some factor explains the folder's values, but for rounding."""
    if not sums.update or not sums.change:
        return False
    explained = sums.along**2 / sums.update
    factor = sums.along / sums.update
    left = max(sums.change - explained, 0.0)
    # In few values, their distances from the nearest ones are those of the factor itself, and no noise.
    most = left * sums.update / sums.elements
    if sums.told.is_whole(most):
        return False
    noise = min(sums.noise, most)
    if not sums.told.roads and sums.off_along <= sums.factor * sums.update + NOISE * math.sqrt(noise):
        return False
    return explained >= sums.change / 4 and left <= sums.rounding + max(1.0, factor**2) * sums.bound


def _detail(shape: tuple[int, ...], sums: Sums, sections: int, plan: TensorPlan) -> str:
    parts = []
    if sections > 1 or (len(plan.rows) > 1 and sections):
        parts.append(f"{sections} of its {len(plan.rows)} updates")
    if sums.rows and sums.wrong_rows <= len(sums.rows):
        first, last = sums.rows[0], sums.rows[-1]
        is_run = last - first > 1 and list(sums.rows) == list(range(first, last + 1))
        numbers = f"{first} to {last}" if is_run else ", ".join(map(str, sums.rows))
        parts.append(f"row{'s' * (len(sums.rows) > 1)} {numbers}")
    if sums.codes_off:
        parts.append(f"up to {counted(sums.codes_off, 'code')} off the nearest")
    if sums.outside == 1 and sums.first >= 0:
        right, found = sums.one
        place = list(map(int, torch.unravel_index(torch.tensor(sums.first), shape))) if shape else []
        parts.append(f"one element, {place}, is {found:g} and should be {right:g}")
    return "; ".join(parts)


def findings_of(tensors: Sequence[CheckedTensor]) -> list[Finding]:
    """Return a finding for each verdict that some tensors have, with the first of them by name."""
    findings = []
    for verdict, (code, severity, means, fix) in _MEANS.items():
        own = [tensor for tensor in tensors if tensor.verdict == verdict and (verdict != "left out" or tensor.detail)]
        if not own:
            continue
        where = ", ".join(tensor.name for tensor in own[:_NAMED])
        where += f" and {len(own) - _NAMED} more" if len(own) > _NAMED else ""
        verb, _, rest = means.partition(" ")
        verb = _OF_ONE.get(verb, verb) if len(own) == 1 else verb
        message = f"{counted(len(own), 'tensor')} {verb} {rest}{_more(verdict, own)}."
        nbytes = sum(tensor.bytes for tensor in own)
        if verdict == "scaled" and all(math.isclose(tensor.scale or 0, -1, rel_tol=0.01) for tensor in own):
            fix = f"{_OTHER_WAY_ROUND}; otherwise {fix}"  # a merge over "merged" would then overwrite the base
        findings.append(Finding(code, severity, where, message, f"{fix}.", nbytes))
    return findings


def _more(verdict: str, own: Sequence[CheckedTensor]) -> str:
    """Return the detail that the tensors of one verdict have in common, or the first one's."""
    said = ""
    scales = [tensor.scale for tensor in own if tensor.scale is not None]
    if verdict == "scaled" and scales:
        low, high = min(scales), max(scales)
        said += f": {low:.4g} times" if math.isclose(low, high, rel_tol=0.01) else f": {low:.4g} to {high:.4g} times"
    if verdict == "other":
        said += f": up to {max(tensor.distance for tensor in own):.3g} from it"
    experts = [*dict.fromkeys(tensor.detail for tensor in own if tensor.detail)]
    if verdict == "missing" and experts:
        said += f": {', '.join(experts[:_NAMED])}" + f" and {len(experts) - _NAMED} more" * (len(experts) > _NAMED)
    elif own[0].detail:
        said += f" ({own[0].name}: {own[0].detail})"
    files = {tensor.file for tensor in own}
    if len(own) > 1 and len(files) == 1 and "" not in files:
        said += f"; all are in {files.pop()}"
    return said


def dtype_findings(tensors: Sequence[CheckedTensor], sources: Mapping[str, TensorInfo | None]) -> list[Finding]:
    """Return a finding on tensors that are stored in another dtype than those of the base that they are made from."""
    dtypes = {name: info.dtype for name, info in sources.items() if info is not None}
    other = [tensor for tensor in tensors if tensor.file and tensor.dtype != dtypes.get(tensor.name, tensor.dtype)]
    if not other:
        return []
    pairs = sorted({f"{dtypes[tensor.name]} to {tensor.dtype}" for tensor in other})
    message = f"{counted(len(other), 'tensor')} of another dtype than the base's: {', '.join(pairs)}."
    fix = "none if meant; otherwise merge_lora_checkpoint keeps the base's."
    return [Finding("merged-dtype", "info", other[0].name, message, fix, sum(tensor.bytes for tensor in other))]
