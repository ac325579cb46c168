"""Faults of a model's ``config.json``, found before transformers sees it: in sizes, code to fetch, and patterns.

Everything here holds for the folder alone, so that ``check_checkpoint`` and the verbs say the same. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

from .faults import fault, note, shown_number
from .pattern_cost import is_valid, shapes_of
from .pattern_limits import USUAL_MODULES, is_name, pattern_problem

# The most that a config may ask for, by a pattern of the entry's name: far above every published model.
_LARGEST_COUNTS = {  # the first that is found in a name counts
    r"vocab_size": 100_000_000,
    r"num_(?:.*_)?layers$|^n_layers?$|depth": 2_000,  # the deepest published models have less than 200
    # not a width inside of one (block_ff_dim of LFM2), nor the names of quantized ones (each expert of MiniMax-M3)
    r"^(?!quantized_)(?=.*(?:layer|block))(?!.*_(?:dim|size)$)": 10_000,
    r"expert": 100_000,
    r"num_labels|^id2label$|^label2id$": 100_000,
    r"hidden_size|intermediate_size|head_dim|_ffn?_dim|^(?:d_model|d_ff|n_embd|n_inner)$|num_(?:.*_)?heads$": 1_000_000,
}
_WHOLE_NUMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
_MAY_BE_ZERO = ("num_hidden_layers", "vocab_size")
_OF_A_CONFIG = re.compile(r"config$|^(?:en|de)coder$")  # the names of the configs that transformers reads in a config
IMPLEMENTATIONS = frozenset({"attn_implementation", "experts_implementation"})  # arguments of from_pretrained
# Where transformers has these names from packages that are not there, it fetches native code for them (transformers
# 5.23, modeling_flash_attention_utils.py and integrations/hub_kernels.py).
_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn",
    "deepgemm": "deep_gemm",
    "sonicmoe": "sonicmoe",
}
# Models that take the name of a backbone for one of timm, which is built from its name alone.
_BACKBONES_OF_TIMM = frozenset(
    {"conditional_detr", "dab-detr", "deformable_detr", "detr", "maskformer", "omdet-turbo", "table-transformer"}
    | {"timm_backbone"}
)
# tests/checkpoint/test_base_config.py compares these with the installed transformers.
QUANTIZERS = frozenset(
    {"aqlm", "auto-round", "awq", "bitnet", "bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "eetq"}
    | {"compressed-tensors", "fbgemm_fp8", "fouroversix", "fp8", "fp_quant", "gemma", "gguf", "gptq", "higgs", "hqq"}
    | {"metal", "mxfp4", "mxfp8", "nvfp4", "quanto", "quark", "sinq", "spqr", "torchao", "vptq"}
)
# Those whose checkpoints hold codes: one of their tensors is no float of 16 bits or more, or scales one that is (a
# dense checkpoint of compressed-tensors). bitnet's "online" checkpoints are plain, and nobody looked at the others.
STORE_CODES = QUANTIZERS - {"bitnet", "fouroversix", "fp_quant", "gemma", "gguf", "metal", "quark", "sinq"}

_SKIPS = "llm_int8_skip_modules"


def base_config_faults(
    path: Path, config: JsonObject, *, trusted: bool = False, asked: Collection[str] = ()
) -> list[Finding]:
    """Return why a model must not be made from a config.

    ``trusted`` says that the caller lets the repository's code run. ``asked`` holds the arguments of
    ``from_pretrained`` that he passed, which take the place of what the config says.
    """
    correct = "correct it, or save the model again with `save_pretrained`"
    findings = [fault("config-class", path, problem, correct) for problem in _classes(config)]
    wrong = [*_numbers(config), *_counts(config)]
    findings += [fault("config-size", path, problem, correct) for problem in wrong]
    if not trusted:
        inside = "write its config into backbone_config, or pass trust_remote_code=True once you trust what it names"
        findings += [fault("config-path", path, problem, inside) for problem in _backbones(config)]
        name_it = 'pass attn_implementation="sdpa" (experts_implementation="eager"), or one that you trust'
        findings += [fault("config-code", path, problem, name_it) for problem in _kernels(config, asked)]
    return findings


def quantization_findings(path: Path, config: JsonObject, modules: Iterable[str]) -> list[Finding]:
    """Return the findings about a config's quantization settings; ``modules`` are the names of its model's modules."""
    settings = [
        (where, quantized)
        for where, section in _sections(config)
        if isinstance(quantized := section.get("quantization_config") or section.get("compression_config"), dict)
    ]
    if not settings:  # nearly every model, and the names of some are many
        return []
    shapes = shapes_of([*USUAL_MODULES, *modules])
    findings = []
    for where, quantized in settings:
        if problem := _not_names(quantized.get(_SKIPS)):
            fix = "write null without quotes, or a list of names of modules"
            findings.append(fault("config-class", path, f"{where}quantization_config.{_SKIPS} {problem}", fix))
        for inner, part in _sections(quantized):
            if problem := pattern_problem(_matched(part), "(?:{})", shapes):
                place = f"{where}quantization_config.{inner}".removesuffix(".")
                findings.append(fault("config-pattern", path, f"{place} {problem}", "name the modules in it"))
        method = quantized.get("quant_method")
        if isinstance(method, str) and method not in QUANTIZERS:
            message = (
                f"{where}quant_method is {method!r}, which transformers does not know; it takes the weights as plain"
            )
            fix = "upgrade transformers, or remove quantization_config if the weights are plain"
            findings.append(note("warning", "quantization-unknown", path, message, fix))
    return findings


def _not_names(value: object) -> str | None:
    """Return why a value is no list of names, which a quantizer iterates over until one fails; None for no value."""
    if value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return None
    return f"is {value!r:.100}; it must be a list of names of modules"


def named_quantization(config: JsonObject) -> tuple[str, str] | None:
    """Return where a config says that its weights are codes, and by which method; None where it does not."""
    parts = {"": config, "text_config.": config.get("text_config")}
    for where, part in parts.items():
        for key in ("quantization_config", "compression_config"):
            quantized = part.get(key) if isinstance(part, dict) else None
            if not isinstance(quantized, dict) or packs_nothing(quantized):
                continue
            early = quantized.get("load_in_4bit") or quantized.get("load_in_8bit")
            method = quantized.get("quant_method") or ("bitsandbytes" if early else None)
            if method in STORE_CODES and (method != "compressed-tensors" or _compresses_weights(quantized)):
                return f"{where}{key}", str(method)
    return None


# Files in which quantizers said what they did before config.json had an entry for it (AutoGPTQ 0.4, AutoAWQ 0.1), with
# the names of their entries where quantization_config has others.
BESIDE: dict[str, tuple[str, dict[str, str]]] = {
    "quantize_config.json": ("gptq", {"bits": "bits", "group_size": "group_size"}),
    "quant_config.json": ("awq", {"bits": "w_bit", "group_size": "q_group_size"}),
}


def settings_beside(name: str, document: JsonObject) -> JsonObject | None:
    """Return the settings in a file of `BESIDE`, in the words of ``quantization_config``; None of another tool.

    The conversions to ONNX for transformers.js have a ``quantize_config.json``, too, without a number of bits.
    """
    method, names = BESIDE[name]
    numbers = {entry: document.get(theirs) for entry, theirs in names.items()}
    if not all(type(number) is int for number in numbers.values()):
        return None
    others = {
        key: value.lower() if key == "version" and isinstance(value, str) else value
        for key, value in document.items()
        if key not in names.values() and isinstance(value, (bool, int, float, str)) and len(str(value)) < 100
    }
    return {"quant_method": method, **numbers, **others}


def quantization_of(config: JsonObject) -> object:
    """Return the settings that transformers takes: the config's own, or else those of the language model inside."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    found = next((entry for part in parts if (entry := part.get("quantization_config"))), None)
    return None if packs_nothing(found) else found


def packs_nothing(entry: object) -> bool:
    """Return whether settings of bitsandbytes say neither 4 nor 8 bits: transformers passes over them."""
    if not isinstance(entry, dict) or entry.get("quant_method") != "bitsandbytes":
        return False
    return not (entry.get("load_in_4bit") or entry.get("load_in_8bit"))


def reads_quantization(config: JsonObject) -> bool:
    """Return whether transformers finds a quantization in a config, of a method that it may know or not."""
    found = quantization_of(config)
    return isinstance(found, dict) and any(map(found.get, ("quant_method", "load_in_4bit", "load_in_8bit")))


def passed_over(config: JsonObject) -> bool:
    """Return whether transformers finds a quantization in a config and makes plain layers all the same.

    It does so for a method that it does not know, and for GGUF's where no file of that kind is named.
    """
    entry = quantization_of(config)
    if not isinstance(entry, dict) or entry.get("load_in_4bit") or entry.get("load_in_8bit"):
        return False
    method = entry.get("quant_method")
    return isinstance(method, str) and (method == "gguf" or method not in QUANTIZERS)


def _compresses_weights(quantized: JsonObject) -> bool:
    """Return whether compressed-tensors has a format for weights, and not for the cache or activations alone."""
    nested = quantized.get("quantization_config")
    groups = (nested if isinstance(nested, dict) else quantized).get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    return any(isinstance(scheme, dict) and scheme.get("weights") for scheme in schemes)


def _matched(part: JsonObject) -> list[str]:
    """Return the patterns of a quantizer for names: keys, and entries of lists (``modules_to_not_convert``)."""
    lists = [entry for value in part.values() if isinstance(value, list) for entry in value if isinstance(entry, str)]
    # compressed-tensors and torchao mark a pattern by "re:". What is no pattern for re is a name or a glob.
    patterns = (entry.removeprefix("re:") for entry in (*part, *lists))
    return [entry for entry in patterns if not is_name(entry) and is_valid(entry)]


def _sections(config: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """Yield a config and the configs in it (``text_config``, ...), each with the path before its entries."""
    waiting: list[tuple[str, JsonObject]] = [("", config)]
    while waiting:
        where, section = waiting.pop()
        yield where, section
        waiting += [(f"{where}{key}.", part) for key, part in section.items() if isinstance(part, dict)]


def _classes(config: JsonObject) -> Iterator[str]:
    """Refuse entries that name the class in a form that transformers accepts here and fails on later."""
    names = config.get("architectures")
    listed = [names] if isinstance(names, str) else names  # a name alone is loaded by the type of the model
    if listed is not None and not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
        yield f"architectures is {names!r:.100}; it must be a list of names of classes"
    remote = config.get("auto_map")
    if remote is not None and not isinstance(remote, dict):
        yield f"auto_map is {remote!r:.100}; it must be an object"


def _numbers(config: JsonObject) -> Iterator[str]:
    """Refuse values that are no sizes, which transformers passes on until something multiplies them.

    Only those of the configs in a config: what another framework left there (NeMo's ``config_dict`` in Cohere's
    transcriber has the vocab_size "None") makes no module.
    """
    for where, section in _sections(config):
        if not all(_OF_A_CONFIG.search(key) for key in where.split(".")[:-1]):
            continue
        for key in _WHOLE_NUMBERS:
            value = section.get(key)
            if value is None or isinstance(value, (list, dict)):
                continue  # not of this model, or one for each layer
            least = 0 if key in _MAY_BE_ZERO else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                yield f"{where}{key} is {value!r:.60}; it must be a whole number of at least {least}"


def _counts(config: JsonObject) -> Iterator[str]:
    """Refuse counts beyond those of any model: on meta, too, each module is an object, and each label an entry.

    A config of a few bytes could otherwise fill the memory of whoever inspects it.
    """
    for where, section in _sections(config):
        for key, value in section.items():
            if not isinstance(value, (int, list, dict)):
                continue
            most = next((most for pattern, most in _LARGEST_COUNTS.items() if re.search(pattern, key)), None)
            if most is None:
                continue
            listed = [value] if isinstance(value, int) else list(value)  # a count for each stage of the model, say
            too_large = next((entry for entry in listed if type(entry) is int and entry > most), None)
            if too_large is not None:
                yield f"{where}{key} is {shown_number(too_large)}, and no model has more than {most}"
            elif len(listed) > most:
                yield f"{where}{key} lists {len(listed)} entries, and no model has more than {most}"


def _kernels(config: JsonObject, asked: Collection[str]) -> Iterator[str]:
    for where, section in _sections(config):
        for key, value in section.items():
            if key.strip("_").removesuffix("_internal") in IMPLEMENTATIONS.difference(asked):
                yield from _fetched(where + key, value)


def _fetched(where: str, value: object) -> Iterator[str]:
    names = value.values() if isinstance(value, dict) else [value]
    for name in names:
        if isinstance(name, dict):
            yield from _fetched(where, name)
        elif isinstance(name, str):
            kernel = name.removeprefix("paged|")
            if "/" in kernel:
                yield f"{where} is {name!r:.200}: native code of the hub, which transformers would fetch and run"
            elif _missing(_PACKAGES.get(kernel)) and not _missing("kernels"):
                yield f"{where} is {name!r}, which is not installed: transformers would fetch native code of the hub"


def _backbones(config: JsonObject) -> Iterator[str]:
    """Refuse backbones whose config transformers, or timm, would fetch from the hub or read from another folder."""
    for where, section in _sections(config):
        for key in ("backbone", "architecture"):
            name = section.get(key)
            if not isinstance(name, str) or section.get("backbone_config"):
                continue
            # transformers 5.23 (backbone_utils.py) asks the hub for every other name
            takes_timm = section.get("model_type") in _BACKBONES_OF_TIMM and section.get("use_timm_backbone", True)
            of_timm = key == "architecture" or takes_timm
            if "/" in name or ":" in name or not of_timm:
                yield f"{where}{key} is {name!r:.200}: another repository or folder, whose config would be read"


def _missing(package: str | None) -> bool:
    return package is not None and importlib.util.find_spec(package) is None
