"""The patterns of a quantization config, which say what stays as it is: none of them may take for ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from safe_loading._checkpoint.pattern_cost import shapes_of
from safe_loading._checkpoint.pattern_limits import is_name, pattern_problem
from safe_loading.errors import ArgumentError

from .request import QuantizationRequest

# What transformers' should_convert_module matches with the names of modules.
_MATCHED = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "llm_int8_skip_modules")
_PREFIX = "re:"  # before the patterns of compressed-tensors, whose other entries are names


def refuse_costly_patterns(request: QuantizationRequest, names: Iterable[str]) -> None:
    """Raise `ArgumentError` for a pattern that takes too long to match with modules of these names."""
    shapes = shapes_of(names)
    for field, entries in _patterns(request.options):
        problem = pattern_problem([entry for entry in entries if not is_name(entry)], "(?:{})", shapes)
        if problem is not None:
            raise ArgumentError(f"quantization_config: {field} {problem}. Write the names of modules instead.")


def _patterns(options: Mapping[str, object]) -> Iterable[tuple[str, list[str]]]:
    for field in _MATCHED:
        yield field, _texts(options.get(field))
    groups = options.get("config_groups")
    mappings = [group for group in _values(groups) if isinstance(group, Mapping)]
    targets = [target for group in mappings for target in _texts(group.get("targets"))]
    for field, entries in (("ignore", _texts(options.get("ignore"))), ("targets", targets)):
        yield field, [entry.removeprefix(_PREFIX) for entry in entries if entry.startswith(_PREFIX)]


def _texts(value: object) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, (list, tuple)) else []


def _values(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, Mapping) else []
