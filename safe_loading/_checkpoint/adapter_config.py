"""Faults of an ``adapter_config.json``, found before peft sees it: in fields, patterns, sources, code and sizes.

Everything here holds for the folder alone, so that ``check_checkpoint`` and the verbs say the same. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType

from safe_loading._core.report import Finding

from .adapter_patterns import costly_patterns
from .faults import fault, shown_number

# Fields that say how large or how many tensors peft makes, of all methods of peft 0.21. Seeds, steps and factors are no
# sizes. tests/checkpoint/test_adapter_config.py asks for each field of the installed peft which of the two it is.
SIZES = frozenset(
    {
        "adapter_layers", "adapter_len", "asa_target_subspaces", "block_size", "boft_block_num",
        "boft_block_size", "boft_n_butterfly_factor", "decompose_factor", "depth", "effective_rank",
        "encoder_hidden_size", "encoder_num_layers", "gralora_k", "group_size", "hidden_size", "hybrid_r",
        "init_r", "mini_r", "n_frequency", "n_skills", "n_splits", "n_tasks", "num_attention_heads", "num_B",
        "num_cayley_neumann_terms", "num_frozen_tokens", "num_layers", "num_ranks", "num_subspaces",
        "num_tasks", "num_transformer_submodules", "num_vectors", "num_virtual_tokens", "oft_block_size",
        "qalora_group_size", "r", "shadow_hidden_size", "shadow_intermediate_size",
        "shadow_num_attention_heads", "shadow_num_hidden_layers", "stride_A", "subspace_rank", "target_r",
        "theta_d_length", "token_dim", "top_k_lora", "topk", "u", "update_hidden_size", "vector_length",
        "xlora_depth", "xlora_size",
    }
)  # fmt: skip
_OF_ADAPTERHUB = "it is an adapter of AdapterHub, with modules that peft does not have"
# Initializations that subtract something from the base's weights when peft injects the adapter (peft
# `LoraLayer.pissa_init`, `olora_init`, `corda_init`, `loftq_init`, `lora_ga_init`).
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "lora-ga")  # the last as ms-swift spells it
# The factors of all experts of a layer, as peft names those of target_parameters. vLLM takes such a file with a config
# that names the module of the experts.
OF_FUSED_EXPERTS = re.compile(r"\.experts(\.base_layer)?\.lora_[AB]\.")
TO_PARAMETERS = (
    'take "experts" out of target_modules, and write the parameters into target_parameters, such as '
    '["experts.gate_up_proj", "experts.down_proj"]'
)
_BIASES = ("none", "all", "lora_only")
# Names under which other programs write what peft reads as these.
_OTHERWISE_NAMED = {"r": ("rank", "lora_r", "lora_rank"), "lora_alpha": ("alpha",)}
_PATTERNS_OF_SIZES = frozenset({"rank", "block_size", "n_frequency"})
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")
# An adapter may be smaller on disk than in memory: what training has pruned, what is drawn again from a seed.
_SIZE_ALLOWED = 16_384
_TIMES_ON_DISK = 16
_ELEMENTS_ALLOWED = 1 << 20
_ELEMENTS_UNSEEN = 1 << 28  # of a pickle, or of a pointer of Git LFS; a prefix of a model of 3B has 2 ** 25
_MOST_REPLICATED = 1_000  # layers; the deepest published models have less than 200
_MOST_LAYERS = 10_000
_LONGEST_LIST = 10_000
_MOST_ITERATIONS = 1_000  # of a start that factorizes each weight of the base; published adapters take up to 64


def start_changes_base(init_lora_weights: object) -> bool:
    """Return whether a LoRA with this start changes the base's weights."""
    return str(init_lora_weights).startswith(_CHANGES_BASE)  # peft knows no "PiSSA"


def of_other_library(config: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the kind of an adapter that no correction makes one of peft's, and who loads it; None for any other.

    AdapterHub's configs have the adapter's own config under ``config``; ms-swift's name its method as ``swift_type``.
    """
    if config.get("peft_type"):
        return None
    if isinstance(config.get("config"), Mapping) and "model_name" in config:
        return (
            _OF_ADAPTERHUB,
            "load it with the library adapters (adapters.init(model), then model.load_adapter(folder))",
        )
    method = config.get("swift_type")
    if not isinstance(method, str) or method.upper() == "LORA":  # which is that of peft, with fields more
        return None
    return (
        f"it is a {method:.80} of ms-swift, with modules that peft does not have",
        "load it with ms-swift (Swift.from_pretrained(model, folder))",
    )


def config_problems(config: Mapping[str, object]) -> list[str]:
    """Return the problems that make an adapter's config unusable, without asking peft."""
    method = config.get("peft_type")
    if not isinstance(method, str) or not method:
        if (other := of_other_library(config)) is not None:
            return ["; ".join(other)]
        mend = 'it must name the method, such as "LORA"'
        if {"r", "lora_alpha"} <= config.keys():
            mend = 'add "peft_type": "LORA", whose r and lora_alpha it has'
        return [f"peft_type is {method!r}; {mend}"]
    problems = [
        f"{name} is {value!r:.80}; it must be a list of names"
        for name in ("modules_to_save", "target_modules", "exclude_modules", "layers_pattern")
        if not isinstance(value := config.get(name), (list, str, NoneType))
        or (isinstance(value, list) and not all(isinstance(entry, str) for entry in value))
        or (isinstance(value, str) and name == "modules_to_save")  # peft would read it letter by letter
    ]
    problems += [
        f"{name} is {value!r:.80}; it must be an object with a value for each pattern"
        for name, value in config.items()
        if name.endswith("_pattern") and name != "layers_pattern" and not isinstance(value, (dict, NoneType))
    ]
    if _method(config) in _PROMPTS and config.get("task_type") is None:
        problems.append(
            "task_type is missing, without which peft leaves the prompt out and computes what the base does; add what "
            'it was trained for, such as "task_type": "CAUSAL_LM"'
        )
    return [*problems, *_lora_problems(config)] if _is_lora(config) else problems


def _lora_problems(config: Mapping[str, object]) -> Iterator[str]:
    """Yield the problems of the values by which peft builds and scales a LoRA."""
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if name not in config:
            # LoraConfig has a default for both, so the adapter would be scaled by a number that nobody chose.
            yield f"{name} is missing; peft would silently take its default, 8{_unread(config, name)}"
        elif not _is_number(value):
            yield f"{name} is {value!r}; it must be a number, because it scales the adapter"
        elif name == "r":
            yield from _rank_problems(name, value)
        elif value == 0 and not config.get("alpha_pattern"):  # as verl's merger writes it, which does not know it
            yield f"{name} is 0, by which peft multiplies all that the adapter adds; it must be that of its training"
    for name in ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out"):
        if isinstance(value := config.get(name), str) and value:  # which peft would take for true, whatever it says
            yield f"{name} is {value!r:.80}; it must be true or false"
    dropout, bias = config.get("lora_dropout", 0), config.get("bias", "none")
    if not _is_number(dropout) or not 0 <= _number(dropout) <= 1:
        yield f"lora_dropout is {dropout!r:.80}; it must be a number from 0 to 1, and 0 where there is none"
    if bias not in _BIASES:
        yield f"bias is {bias!r:.80}; it must be one of {', '.join(_BIASES)}"
    tokens = config.get("trainable_token_indices")
    if any(rows == [] for rows in (tokens.values() if isinstance(tokens, Mapping) else [tokens])):
        yield f"trainable_token_indices is {tokens!r:.80}, without a row; it must be null where none is trained"
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name, {})
        if patterns is None:
            yield f"{name} is null, in which peft looks for patterns; it must be {{}} where there are none"
        for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
            field = f"{name}[{pattern!r:.80}]"
            if not _is_number(value):
                yield f"{field} is {value!r:.80}; it must be a number, because it scales the adapter"
            elif name == "rank_pattern":
                yield from _rank_problems(field, value)


def _unread(config: Mapping[str, object], name: str) -> str:
    """Return the fields in which a config has a value that peft reads from the field ``name`` alone."""
    mlx = config.get("lora_parameters")
    fields = {**(mlx if isinstance(mlx, Mapping) else {}), **config}
    found = [f'"{other}": {fields[other]!r:.80}' for other in _OTHERWISE_NAMED[name] if other in fields]
    return f", and does not read {', '.join(found)}" if found else ""


def _rank_problems(name: str, value: object) -> Iterator[str]:
    if _number(value) < 1:
        yield f"{name} is {value!r}; a rank must be at least 1"
    elif not isinstance(value, int):
        yield f"{name} is {value!r}; a rank must be a whole number, as the length of a tensor is"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def factors_of_other_rank(config: Mapping[str, object], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the rank of every ``lora_A`` whose rank is not the config's ``r``: it would be scaled for another rank."""
    rank = config.get("r")
    if not _is_lora(config) or isinstance(rank, bool) or not isinstance(rank, (int, float)):
        return {}
    # A pattern gives some layers other ranks; with target_parameters the factors of all experts are stacked.
    if config.get("rank_pattern") or config.get("target_parameters"):
        return {}
    return {
        key: shape[0]
        for key, shape in shapes.items()
        if ".lora_A." in key and shape and shape[0] != rank and not OF_FUSED_EXPERTS.search(key)
    }


def _is_lora(config: Mapping[str, object]) -> bool:
    return str(config.get("peft_type")).upper() == "LORA"


def adapter_config_faults(
    path: Path, config: Mapping[str, object], shapes: Mapping[str, Sequence[int]] | None
) -> list[Finding]:
    """Return the faults of an adapter's config; ``shapes`` are those of its tensors, if it has a header."""
    simpler = "name the modules in a list, or write the pattern with fewer wildcards"
    findings = [fault("config-pattern", path, problem, simpler) for problem in costly_patterns(config, shapes or ())]
    with_peft = "load this adapter with peft itself, once you trust what it names"
    findings += [fault("config-path", path, problem, with_peft) for problem in _other_sources(config)]
    usual = 'set megatron_core to "megatron.core", or megatron_config to null'
    findings += [fault("config-code", path, problem, usual) for problem in _code(config)]
    correct = "correct the number, or save the adapter again with `save_pretrained` of peft"
    wrong = [*_sizes(config, shapes), *_lists(config, shapes), *_iterations(config)]
    return [*findings, *(fault("config-size", path, problem, correct) for problem in wrong)]


def _method(config: Mapping[str, object]) -> str:
    return str(config.get("peft_type")).upper()


def _other_sources(config: Mapping[str, object]) -> list[str]:
    """Return the problems of fields that make peft load other adapters or models, by a path or a hub id."""
    problems = []
    if _method(config) == "XLORA" and config.get("adapters"):
        problems.append(f"adapters names other adapters, by a path or a hub id: {config['adapters']!r:.200}")
    shadow = config.get("shadow_model", "mirror")
    if _method(config) == "SHADOW" and shadow != "mirror":
        problems.append(f"shadow_model names another model, by a path or a hub id: {shadow!r:.200}")
    return problems


def _code(config: Mapping[str, object]) -> list[str]:
    module = config.get("megatron_core")
    if not config.get("megatron_config") or module == "megatron.core":
        return []
    return [f"megatron_core is {module!r:.200}, a Python module that peft would import"]


def _sizes(config: Mapping[str, object], shapes: Mapping[str, Sequence[int]] | None) -> list[str]:
    every = list((shapes or {}).values())
    largest = max((length for shape in every for length in shape), default=0)
    most = max(_SIZE_ALLOWED, _TIMES_ON_DISK * largest)
    problems = [
        f"{field} is {shown_number(value)}, which peft would build; "
        f"the longest side of a tensor of the file is {largest}"
        for field, value in _sized(config)
        if _number(value) > (_MOST_LAYERS if "layers" in field else most)
    ]
    if _method(config) in _PROMPTS and not problems:
        elements = _prompt_elements(config)
        on_disk = sum(math.prod(shape) for shape in every)
        allowed = max(_ELEMENTS_ALLOWED, _TIMES_ON_DISK * on_disk) if every else _ELEMENTS_UNSEEN
        if elements > allowed:
            held = f"the file holds {on_disk}" if every else "no header says that the file holds so many"
            problems.append(f"describes a prompt of {shown_number(elements)} values, and {held}")
    replicated = config.get("layer_replication")
    if isinstance(replicated, list):
        spans = [pair for pair in replicated if isinstance(pair, list) and len(pair) == 2]
        layers = sum(max(0, _number(end) - _number(start)) for start, end in spans)
        if layers > _MOST_REPLICATED:
            problems.append(
                f"layer_replication makes {shown_number(layers)} layers, and at most {_MOST_REPLICATED} are made"
            )
    return problems


def _sized(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the fields that are sizes, and the entries of those that give single modules another size."""
    for field, value in config.items():
        if field in SIZES:
            yield field, value
        elif field.removesuffix("_pattern") in _PATTERNS_OF_SIZES and isinstance(value, Mapping):
            yield from ((f"{field}[{key!r:.80}]", entry) for key, entry in value.items())


def _prompt_elements(config: Mapping[str, object]) -> int:
    def size(field: str, otherwise: int = 1) -> int:
        return int(_number(config.get(field))) or otherwise

    layers = 2 * size("num_layers") if _method(config) in ("PREFIX_TUNING", "CARTRIDGE") else 1
    columns = size("token_dim") * layers
    tasks = size("num_tasks") * size("num_ranks") if _method(config) == "MULTITASK_PROMPT_TUNING" else 0
    return size("num_virtual_tokens") * (columns + tasks) + tasks * size("token_dim")


def _lists(config: Mapping[str, object], shapes: Mapping[str, Sequence[int]] | None) -> list[str]:
    largest = max((length for shape in (shapes or {}).values() for length in shape), default=0)
    most = max(_LONGEST_LIST, largest)  # tokens that were trained: a row for each
    return [
        f"{field} lists {len(value)} numbers, and at most {most} are read"
        for field, value in config.items()
        if isinstance(value, list) and len(value) > most and not any(isinstance(entry, str) for entry in value)
    ]


def _iterations(config: Mapping[str, object]) -> list[str]:
    """Return the fields by which peft would factorize each weight in more steps than anybody trains with."""
    counts = {"psoft_svd_lowrank_niter": _number(config.get("psoft_svd_lowrank_niter"))}
    loftq = config.get("loftq_config")
    if isinstance(loftq, Mapping):
        counts["loftq_config.loftq_iter"] = _number(loftq.get("loftq_iter"))
    start = config.get("init_lora_weights")
    if isinstance(start, str) and "_niter_" in start:  # "pissa_niter_4", which peft reads with int()
        with contextlib.suppress(ValueError):
            counts["init_lora_weights"] = int(start.rpartition("_niter_")[2])
    return [
        f"{field} asks for {shown_number(count)} iterations on each weight, and at most {_MOST_ITERATIONS} are made"
        for field, count in counts.items()
        if count > _MOST_ITERATIONS
    ]


def _number(value: object) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
