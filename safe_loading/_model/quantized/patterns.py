"""The patterns of a quantization config, which name the modules that stay: none of them may take for ever."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace

from transformers.quantizers import quantizers_utils

from safe_loading._checkpoint.pattern_cost import shapes_of
from safe_loading._checkpoint.pattern_limits import is_name, pattern_problem
from safe_loading._core.thread_patches import patched
from safe_loading._model.formats.format import QuantizationRequest
from safe_loading.errors import ArgumentError

# What transformers' should_convert_module matches with the names of modules.
_MATCHED = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "llm_int8_skip_modules")
# Patterns by which rules for modules are kept; some begin with a sign.
_RULES = ("dynamic", "extra_config")
_SIGNS = ("-:", "+:")
_PREFIX = "re:"  # before patterns in lists whose other entries are names


def refuse_costly_patterns(request: QuantizationRequest, names: Iterable[str]) -> None:
    """Raise `ArgumentError` for a pattern that takes too long to match with modules of these names."""
    shapes = shapes_of(names)
    for field, entries in _patterns(request.options):
        problem = pattern_problem([entry for entry in entries if not is_name(entry)], "(?:{})", shapes)
        if problem is not None:
            raise ArgumentError(f"quantization_config: {field} {problem}. Write the names of modules instead.")


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Let transformers' ``should_convert_module`` compile each pattern once, however many there are.

    It gives each of them as text to ``re.match`` for each module, and ``re`` keeps 512: of more (GLM-5 in fp8 names 704
    modules), every one is compiled again for every module, which takes more than a minute.
    """
    compiled = cache(re.compile)

    def match(pattern: str, name: str) -> re.Match[str] | None:
        return compiled(pattern).match(name)

    with patched(quantizers_utils, "re", SimpleNamespace(**{**vars(re), "match": match}), create=True):
        yield


def _patterns(options: Mapping[str, object]) -> Iterable[tuple[str, list[str]]]:
    for field in _MATCHED:
        yield field, _texts(options.get(field))
    for field in _RULES:
        rules = options.get(field)
        keys = [key for key in rules if isinstance(key, str)] if isinstance(rules, Mapping) else []
        yield field, [key[2:] if key.startswith(_SIGNS) else key for key in keys]
    groups = options.get("config_groups")
    mappings = [group for group in _values(groups) if isinstance(group, Mapping)]
    targets = [target for group in mappings for target in _texts(group.get("targets"))]
    for field, entries in (("ignore", _texts(options.get("ignore"))), ("targets", targets)):
        yield field, [entry.removeprefix(_PREFIX) for entry in entries if entry.startswith(_PREFIX)]


def _texts(value: object) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, (list, tuple)) else []


def _values(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, Mapping) else []
