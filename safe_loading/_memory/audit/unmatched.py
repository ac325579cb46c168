"""Checks of names in an adapter's config that match nothing in the model, or another key once they are saved."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key

from safe_loading._checkpoint.adapter_patterns import key_pattern, pattern_problems
from safe_loading._core.report import Finding, counted

from .audited_model import AuditedModel

_PATTERNS = ("rank_pattern", "alpha_pattern")
_NEAR = 0.4  # of difflib: names of one layer differ by a word


def check_unmatched(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each field of an adapter's config with names that match nothing.

    Not for ``modules_to_save``, whose heads peft itself adds by all names that it knows, and not for
    ``exclude_modules``: what is not there is excluded.
    """
    model: Any = audited.adapted
    if model is None or not audited.training:
        return
    base = audited.base if audited.base is not None else model
    modules = [_without_layers(name) for name, _ in base.named_modules() if name]
    parameters = [_without_layers(name) for name, p in base.named_parameters()]
    adapted = [_without_layers(name) for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)]
    for adapter, config in model.peft_config.items():
        fields = {
            "target_modules": _unmatched(_listed(config, "target_modules"), modules),
            "target_parameters": _unmatched(_listed(config, "target_parameters"), parameters),
            "layers_to_transform": _layers_beyond(config, modules),
        }
        fields |= {name: _unmatched_patterns(config, name, [*adapted, *parameters]) for name in _PATTERNS}
        known = {
            "target_parameters": _last_words(parameters),
            "layers_to_transform": [],
            **dict.fromkeys(_PATTERNS, _last_words(adapted)),
        }
        for field, names in fields.items():
            if names:
                yield _finding(audited, adapter, field, names, known.get(field, _last_words(modules)))
        yield from (found for name in _PATTERNS for found in _lost_order(config, name, adapter, adapted))


def _without_layers(name: str) -> str:
    """Return the name that a module or parameter had before peft put a layer around it, or a trained copy beside it."""
    return name.replace(".base_layer", "").replace(".original_module", "")


def _listed(config: PeftConfig, field: str) -> list[str]:
    """Return the names of a field; none of a text, which is a pattern or a word such as ``all-linear``."""
    value = getattr(config, field, None)
    return [] if value is None or isinstance(value, str) else [name for name in value if isinstance(name, str)]


def _unmatched(names: list[str], paths: Iterable[str]) -> list[str]:
    """Return the names with which no path ends, at a dot; peft compares the names of a list so."""
    if not names:
        return []
    ends = {".".join(parts[at:]) for path in set(paths) for parts in [path.split(".")] for at in range(len(parts))}
    return sorted(set(names) - ends)


def _layers_beyond(config: PeftConfig, modules: list[str]) -> list[str]:
    """Return the numbers in ``layers_to_transform`` that no layer of the model has."""
    numbers: Any = getattr(config, "layers_to_transform", None)
    if numbers is None or not _listed(config, "target_modules"):
        return []
    wanted = [numbers] if isinstance(numbers, int) else numbers
    own = {int(part) for name in modules for part in name.split(".") if part.isdigit()}
    return [str(number) for number in wanted if number not in own]


def _unmatched_patterns(config: PeftConfig, field: str, names: list[str]) -> list[str]:
    """Return the keys of ``rank_pattern`` or ``alpha_pattern`` that peft would match with no name."""
    patterns = getattr(config, field, None)
    if not isinstance(patterns, Mapping) or pattern_problems({field: patterns}, names):
        return []
    return sorted(key for key in patterns if not any(map(key_pattern(key).match, names)))


def _lost_order(config: PeftConfig, field: str, adapter: str, names: list[str]) -> list[Finding]:
    """Return the finding on a module that has another rank or scale once peft has saved the patterns, sorted."""
    patterns = getattr(config, field, None)
    if not isinstance(patterns, Mapping) or list(patterns) == sorted(patterns):
        return []
    if pattern_problems({field: patterns}, names):
        return []
    saved = {key: patterns[key] for key in sorted(patterns)}
    for name in names:
        now, then = (each.get(str(get_pattern_key(list(each), name))) for each in (patterns, saved))
        if now != then:
            message = (
                f"{field} of adapter {adapter!r} gives {name} {now!r} here, and {then!r} once it is saved and loaded "
                f"again: peft takes the first key that matches, and writes them sorted."
            )
            fix = "give each module one key that matches it alone, such as its whole name."
            return [Finding("SL138", "error", field, message, fix)]
    return []


def _last_words(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _finding(audited: AuditedModel, adapter: str, field: str, names: list[str], known: list[str]) -> Finding:
    model = type(audited.base or audited.inner).__name__
    message = (
        f"{counted(len(names), 'entry', 'entries')} of {field} of adapter {adapter!r} "
        f"{'matches' if len(names) == 1 else 'match'} nothing in {model}: {', '.join(map(repr, names))}; peft goes on "
        f"with the others."
    )
    near = sorted({word for name in names for word in difflib.get_close_matches(name, known, n=2, cutoff=_NEAR)})
    instead = f": it has {', '.join(map(repr, near))}" if near else ""
    fix = f"leave the {'entry' if len(names) == 1 else 'entries'} out, or name what the model has{instead}."
    return Finding("SL138", "warning", field, message, fix)
