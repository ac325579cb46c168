"""How much the patterns of a config may cost: the limits, and the modules that they are tried on. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .pattern_cost import find_costly, shapes_of

MOST_STEPS = 100_000  # of matching one name: a few milliseconds; patterns of published adapters take about 1 000
_MOST_PATTERNS = 1_000  # of a field
_MOST_CHARACTERS = 128 * 1024  # of all patterns of a field
_KEPT_COMPILED = 400  # re keeps 512 patterns; of more, it compiles each again for each module
_PLAIN = re.compile(r"(?:\w|\\?\.|[-^$])*", re.ASCII)  # a pattern that is a name

# Modules of the architectures that adapters are made for. An adapter's file names only the modules that it changes, and
# peft matches its patterns with all modules of the base.
USUAL_MODULES = (
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


def pattern_problem(entries: Sequence[str], template: str, shapes: Sequence[str]) -> str | None:
    """Return why the engines must not match these patterns with names of these shapes; None if they may.

    They write each entry into ``template`` at its ``{}``.
    """
    characters = sum(map(len, entries))
    most = _MOST_CHARACTERS if len(entries) <= _KEPT_COMPILED else _MOST_CHARACTERS // 4
    if len(entries) > _MOST_PATTERNS or characters > most:
        limits = f"at most {_MOST_PATTERNS} of {most} characters are matched"
        return f"holds {len(entries)} patterns of {characters} characters together, and {limits}"
    # Patterns of layers that differ in their numbers only take the same steps on the shape of a name.
    alike = Counter(shapes_of([entry])[0] if is_name(entry) else entry for entry in entries)
    written = {template.replace("{}", entry): entry for entry in alike}
    counted = {pattern: alike[entry] for pattern, entry in written.items()}
    costly = find_costly(counted, shapes, most=MOST_STEPS)
    return None if costly is None else f"holds the pattern {written[costly.pattern]!r:.120}, which {costly.why}"


def is_name(pattern: str) -> bool:
    """Return whether a pattern repeats and chooses nothing, so that a match takes no more steps than it has letters."""
    return _PLAIN.fullmatch(pattern) is not None
