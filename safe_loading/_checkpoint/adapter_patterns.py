"""The patterns of an ``adapter_config.json`` that peft matches with the names of modules, and their cost.

They are judged before peft sees them: for the file alone, so that ``check_checkpoint`` and the verbs say the same, and
again for the modules of a model when there is one. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from safe_loading._core.names import method_name
from safe_loading._core.report import Finding

from .faults import fault
from .pattern_cost import shapes_of
from .pattern_limits import USUAL_MODULES, pattern_problem

_MOST_NAMES = 10_000  # of a list: peft compares each with each
_MOST_NAME_CHARACTERS = 500
_MODULES_TRIED = 200  # shapes of names in the adapter's file

# How peft writes the entries of these fields into the pattern that it matches (peft 0.21: tuners_utils.py, other.py,
# osf/model.py). Lists of targets are names, which are compared and not matched; of the objects whose names end with
# "_pattern" the keys are patterns.
_WHOLE = "{}"
_LAYERS = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
_SAVED = r"(^|.*\.){}($|\..*)"
_KEY = r"(?s:.*?)({})$"
_FIRST_FACTOR = re.compile(r"\.lora_(?:embedding_)?A(?:\.|$)")  # whose first dimension is the rank
_MATCHED = {
    "target_modules": _WHOLE,
    "exclude_modules": _WHOLE,
    "feedforward_modules": _WHOLE,
    "layers_pattern": _LAYERS,
    "modules_to_save": _SAVED,
}


def costly_patterns(config: Mapping[str, object], keys: Iterable[str]) -> list[str]:
    """Return which fields must not be matched with any base; ``keys`` are those of the adapter's file."""
    own = shapes_of(sorted({_module_of(key)[:_MOST_NAME_CHARACTERS] for key in keys}))
    return pattern_problems(config, [*USUAL_MODULES, *own[:_MODULES_TRIED]])


def pattern_problems(config: Mapping[str, object], names: Iterable[str]) -> list[str]:
    """Return which fields peft could not match with modules of these names in a short time, and why.

    The config is the content of the file, or the attributes of peft's object.
    """
    shapes = shapes_of(names)
    found = (
        (field, _problem_of(field, value, shapes)) for field, value in config.items() if not _is_unused(config, field)
    )
    return [f"{field} {problem}" for field, problem in found if problem is not None]


def key_pattern(key: str) -> re.Pattern[str]:
    """Return the pattern by which peft matches a key of ``rank_pattern`` or ``alpha_pattern`` with a module's name."""
    return re.compile(rf"(.*\.)?({key})$")


def pattern_order(where: object, config: Mapping[str, object], shapes: Mapping[str, Sequence[int]]) -> list[Finding]:
    """Return findings for patterns that peft saved in another order than the adapter was trained with.

    peft takes the first key that matches, and writes them sorted: what came first in training may be last in the file.
    ``shapes`` are those of the adapter's file, by key.
    """
    return [*_order_of_ranks(where, config, shapes), *_order_of_alphas(where, config, shapes)]


def _order_of_ranks(
    where: object, config: Mapping[str, object], shapes: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    """Yield a finding for a key of ``rank_pattern`` before which another comes that gives the rank of the file."""
    ranks, stacked = config.get("rank_pattern"), config.get("target_parameters")
    if not isinstance(ranks, Mapping) or _is_unused(config, "rank_pattern") or stacked or not _sorted_by_peft(ranks):
        return
    trained = {_module_of(key): shape[0] for key, shape in shapes.items() if _FIRST_FACTOR.search(key) and shape}
    for name, (first, *others) in _matched(config, "rank_pattern", trained).items():
        right = next((key for key in others if ranks[key] == trained[name]), None)
        if ranks[first] == trained[name] or right is None:
            continue
        alphas = config.get("alpha_pattern")
        both = isinstance(alphas, Mapping) and {first, right} <= alphas.keys()
        message = (
            f"rank_pattern gives {name} {ranks[first]!r} by its key {first!r:.80} and {ranks[right]!r}, the rank that "
            f"it has in the file, by its key {right!r:.80}: peft takes the first in the file, where it writes them "
            f"sorted, and the first in training was the other"
        )
        fix = (
            f"put {right!r:.80} before {first!r:.80} in rank_pattern{', and in alpha_pattern as well' if both else ''}"
        )
        yield fault("pattern-order", where, message, fix)
        return


def _order_of_alphas(where: object, config: Mapping[str, object], keys: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for a key of ``alpha_pattern`` that counts for none of the modules that it matches.

    Of ``rank_pattern`` the shapes of the tensors tell.
    """
    alphas, modules = config.get("alpha_pattern"), sorted({_module_of(key) for key in keys})
    if not isinstance(alphas, Mapping) or not _sorted_by_peft(alphas) or alphas.keys() <= {*modules}:
        return
    matched = _matched(config, "alpha_pattern", modules)
    counts = {own[0] for own in matched.values()}
    for name, (first, *others) in matched.items():
        beaten = next((key for key in others if key not in counts and alphas[key] != alphas[first]), None)
        if beaten is not None:
            message = (
                f"alpha_pattern gives {name} {alphas[first]!r} by its key {first!r:.80} and {alphas[beaten]!r} by its "
                f"key {beaten!r:.80}, which counts nowhere: peft takes the first in the file, where it writes them "
                f"sorted, and the first in training may have been the other"
            )
            fix = (
                f"put {beaten!r:.80} before {first!r:.80} in the file if it was trained so, or remove it if it was not"
            )
            yield fault("pattern-order", where, message, fix)
            return


def _sorted_by_peft(patterns: Mapping[str, object]) -> bool:
    return list(patterns) == sorted(patterns)


def _matched(config: Mapping[str, object], field: str, modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of a field that match each module, if any do; nothing where that would cost too much."""
    value, names = config[field], sorted(modules)
    if not isinstance(value, Mapping) or pattern_problems({field: value}, names):
        return {}
    patterns = {key: key_pattern(key) for key in value}
    found = {name: [key for key, pattern in patterns.items() if pattern.match(name)] for name in names}
    return {name: keys for name, keys in found.items() if keys}


def _problem_of(field: str, value: object, shapes: Sequence[str]) -> str | None:
    template = _template(field, value)
    entries = _entries(field, value)
    if template is None:
        longest = max(map(len, entries), default=0) if field in _MATCHED else 0
        if longest <= _MOST_NAME_CHARACTERS and (field not in _MATCHED or len(entries) <= _MOST_NAMES):
            return None
        limits = f"at most {_MOST_NAMES} of {_MOST_NAME_CHARACTERS} are compared"
        return f"holds {len(entries)} names of up to {longest} characters, and {limits}"
    return pattern_problem(entries, template, shapes)


def _template(field: str, value: object) -> str | None:
    """Return how peft writes the entries of a field into patterns; None where it matches none."""
    if field.endswith("_pattern") and isinstance(value, Mapping):
        return _KEY
    template = _MATCHED.get(field)
    return template if template != _WHOLE or isinstance(value, str) else None


def _entries(field: str, value: object) -> list[str]:
    if isinstance(value, str) and field == "modules_to_save":
        return list(value)  # LNTuning takes text, through which peft goes character by character
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return [entry for entry in value if isinstance(entry, str)]
    return [value] if isinstance(value, str) else []


def _is_unused(config: Mapping[str, object], field: str) -> bool:
    """Return whether a field holds results of training, by the name of a tensor, and not patterns: AdaLoRA's ranks."""
    return field == "rank_pattern" and method_name(config.get("peft_type")) == "ADALORA"


def _module_of(key: str) -> str:
    """Return the module of the base that a tensor of an adapter belongs to, by its name in the file."""
    name = key.removeprefix("base_model.model.")
    return name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]
