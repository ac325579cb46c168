"""What an ``adapter_config.json`` may make peft do: match, open, import and allocate. Judged before peft sees it.

Everything here holds for the file alone, so that ``check_checkpoint`` and the verbs say the same. How much its patterns
cost on the modules of one model is asked again when there is a model (:func:`pattern_problems`). Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safe_loading._core.report import Finding

from .faults import fault
from .pattern_cost import find_costly, shapes_of

MOST_STEPS = 100_000  # of matching one name: a few milliseconds; patterns of published adapters take about 1 000
_MOST_PATTERNS = 1_000  # of a field
_MOST_CHARACTERS = 128 * 1024  # of all patterns of a field
_KEPT_COMPILED = 400  # re keeps 512 patterns; of more, it compiles each again for each module
_MOST_NAMES = 10_000  # of a list: peft compares each with each
_MOST_NAME_CHARACTERS = 500
_MODULES_TRIED = 200  # shapes of names in the adapter's file
_PLAIN = re.compile(r"(?:\w|\\?\.|[-^$])*", re.ASCII)  # a pattern that is a name

# How peft writes the entries of these fields into the pattern that it matches (peft 0.21: tuners_utils.py, other.py,
# osf/model.py). Lists of targets are names, which are compared and not matched; of the objects whose names end with
# "_pattern" the keys are patterns.
_WHOLE = "{}"
_LAYERS = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
_SAVED = r"(^|.*\.){}($|\..*)"
_KEY = r"(?s:.*?)({})$"
_MATCHED = {
    "target_modules": _WHOLE,
    "exclude_modules": _WHOLE,
    "feedforward_modules": _WHOLE,
    "layers_pattern": _LAYERS,
    "modules_to_save": _SAVED,
}
# Modules of the architectures that adapters are made for. An adapter's file names only the modules that it changes, and
# peft matches its patterns with all modules of the base.
_USUAL_MODULES = (
    "model.language_model.layers.00.self_attn.q_proj",
    "model.layers.00.mlp.experts.000.down_proj",
    "model.vision_tower.vision_model.encoder.layers.00.self_attn.out_proj",
    "model.layers.00.post_attention_layernorm",
    "model.decoder.layers.00.encoder_attn.k_proj",
    "encoder.block.00.layer.0.SelfAttention.q",
    "bert.encoder.layer.00.attention.output.LayerNorm",
    "transformer.h.00.attn.c_attn",
    "transformer_blocks.00.attn.to_out.0",
    "backbone.layers.00.mixer.in_proj",
    "model.embed_tokens",
    "lm_head",
)


def adapter_config_faults(path: Path, config: Mapping[str, object], tensors: Iterable[str]) -> list[Finding]:
    """Return what the config of an adapter must not make peft do; ``tensors`` are the keys of its file."""
    own = shapes_of(sorted({_module_of(key)[:_MOST_NAME_CHARACTERS] for key in tensors}))
    fix = "name the modules in a list, or write the pattern with fewer wildcards"
    problems = pattern_problems(config, [*_USUAL_MODULES, *own[:_MODULES_TRIED]])
    return [fault("config-pattern", path, problem, fix) for problem in problems]


def pattern_problems(config: Mapping[str, object], names: Iterable[str]) -> list[str]:
    """Return which fields peft could not match with modules of these names in a short time, and why.

    The config is the content of the file, or the attributes of peft's object.
    """
    shapes = shapes_of(names)
    found = (
        (field, _problem_of(field, value, shapes)) for field, value in config.items() if not _is_unused(config, field)
    )
    return [f"{field} {problem}" for field, problem in found if problem is not None]


def _problem_of(field: str, value: object, shapes: Sequence[str]) -> str | None:
    template = _template(field, value)
    entries = _entries(field, value)
    characters = sum(map(len, entries))
    if template is None:
        longest = max(map(len, entries), default=0) if field in _MATCHED else 0
        if longest <= _MOST_NAME_CHARACTERS and (field not in _MATCHED or len(entries) <= _MOST_NAMES):
            return None
        limits = f"at most {_MOST_NAMES} of {_MOST_NAME_CHARACTERS} are compared"
        return f"holds {len(entries)} names of up to {longest} characters, and {limits}"
    most = _MOST_CHARACTERS if len(entries) <= _KEPT_COMPILED else _MOST_CHARACTERS // 4
    if len(entries) > _MOST_PATTERNS or characters > most:
        limits = f"at most {_MOST_PATTERNS} of {most} characters are matched"
        return f"holds {len(entries)} patterns of {characters} characters together, and {limits}"
    # Keys of layers that differ in their numbers only take the same steps on the shape of a name.
    alike = Counter(shapes_of([entry])[0] if _PLAIN.fullmatch(entry) else entry for entry in entries)
    written = {template.replace("{}", entry): entry for entry in alike}
    counted = {pattern: alike[entry] for pattern, entry in written.items()}
    costly = find_costly(counted, shapes, most=MOST_STEPS)
    return None if costly is None else f"holds the pattern {written[costly.pattern]!r:.120}, which {costly.why}"


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
    return (
        field == "rank_pattern" and str(getattr(config.get("peft_type"), "value", config.get("peft_type"))) == "ADALORA"
    )


def _module_of(key: str) -> str:
    """Return the module of the base that a tensor of an adapter belongs to, by its name in the file."""
    name = key.removeprefix("base_model.model.")
    return name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]
