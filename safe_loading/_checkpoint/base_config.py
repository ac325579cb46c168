"""What a model's ``config.json`` may make transformers do: build, fetch and match. Judged before transformers sees it.

Everything here holds for the folder alone, so that ``check_checkpoint`` and the verbs say the same. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

from .faults import fault, note
from .pattern_cost import is_valid, shapes_of
from .pattern_limits import USUAL_MODULES, is_name, pattern_problem

# The most that a config may ask for, by a pattern of the entry's name: far above every published model.
_LARGEST_COUNTS = {  # the first that is found in a name counts
    r"vocab_size": 100_000_000,
    r"num_(?:.*_)?layers$|^n_layers?$|depth": 2_000,  # the deepest published models have less than 200
    r"layer|block": 10_000,
    r"expert": 100_000,
    r"num_labels|^id2label$|^label2id$": 100_000,
    r"hidden_size|intermediate_size|head_dim|_ffn_dim|^(?:d_model|d_ff|n_embd|n_inner)$|num_(?:.*_)?heads$": 1_000_000,
}
_WHOLE_NUMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
_MAY_BE_ZERO = ("num_hidden_layers", "vocab_size")
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
    """Return what is wrong with how a config says that its model, which has these modules, is quantized."""
    shapes = shapes_of([*USUAL_MODULES, *modules])
    findings = []
    for where, section in _sections(config):
        quantized = section.get("quantization_config") or section.get("compression_config")
        if not isinstance(quantized, dict):
            continue
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


def _matched(part: JsonObject) -> list[str]:
    """Return what a quantizer may match with names: keys, and entries of lists (``modules_to_not_convert``)."""
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
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield f"architectures is {names!r:.100}; it must be a list of names of classes"
    remote = config.get("auto_map")
    if remote is not None and not isinstance(remote, dict):
        yield f"auto_map is {remote!r:.100}; it must be an object"


def _numbers(config: JsonObject) -> Iterator[str]:
    """Refuse what is no size, which transformers passes on until something multiplies it."""
    for where, section in _sections(config):
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
                yield f"{where}{key} is {_shown(too_large)}, and no model has more than {most}"
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


def _shown(value: int) -> str:
    return str(value) if abs(value) < 10**40 else f"a number of {len(str(value))} digits"
