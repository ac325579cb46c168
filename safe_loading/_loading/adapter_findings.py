"""Findings on the files next to the weights of an adapter: its config, against its tensors too. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safe_loading._checkpoint.adapter_config import (
    adapter_config_faults,
    config_problems,
    factors_of_other_rank,
    of_other_library,
)
from safe_loading._checkpoint.adapter_patterns import pattern_order
from safe_loading._checkpoint.faults import fault, listed, note
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.json_files import JsonFiles
from safe_loading._checkpoint.mlx import is_mlx, mlx_problems, peft_config_of
from safe_loading._checkpoint.other_things import names_of_others
from safe_loading._checkpoint.tokenizer_ids import rows_of, tokenizer_findings
from safe_loading._checkpoint.trained_beside import trained_beside
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.report import Finding, counted

_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"})
_SAVE_ADAPTER = "save the adapter again with `save_pretrained` of peft"
_CORRECT = f"correct {ADAPTER_CONFIG} to what it was trained with, or {_SAVE_ADAPTER}"


def adapter_findings(folder: Path, tensors: Mapping[str, TensorInfo], files: JsonFiles) -> list[Finding]:
    """Return findings on the config of an adapter, also compared with its tensors."""
    path = folder / ADAPTER_CONFIG
    config = files.try_read(path)
    if isinstance(config, Finding):
        return [config]
    shapes = {name: info.shape for name, info in tensors.items()}
    if is_mlx(config):
        if found := mlx_problems(config, shapes):
            return [fault("adapter-config", path, found[0].partition("; ")[0], found[0].partition("; ")[2])]
        config = peft_config_of(config, shapes)
    if (other := of_other_library(config)) is not None:
        return [fault("adapter-config", path, *other)]
    problems = config_problems(config)
    other_rank = factors_of_other_rank(config, shapes)
    if other_rank and names_of_others(folder, shapes, config) is None:  # a load names the program
        name, rank = next(iter(other_rank.items()))
        problems.append(f"r is {config['r']}, and {name!r} has rank {rank}: it would be scaled for another rank")
    findings = [fault("adapter-config", path, problem, _CORRECT) for problem in problems]
    findings += adapter_config_faults(path, config, shapes)
    findings += pattern_order(path, config, shapes)
    integers = [name for name, info in tensors.items() if ".lora_" in name and info.dtype in _INTEGERS]
    if integers:
        message = (
            f"holds {counted(len(integers), 'LoRA factor')} as integers, which peft would cast without a warning: "
            f"{listed(integers)}"
        )
        findings.append(fault("adapter-dtype", folder, message, _SAVE_ADAPTER))
    findings += tokenizer_findings(folder, rows_of(tensors))
    findings += trained_beside(folder)
    if isinstance(config.get("peft_type"), str) and not isinstance(config.get("base_model_name_or_path"), str):
        message = "names no base model (base_model_name_or_path)"
        fix = "pass base_model= when you load it"
        findings.append(note("warning", "adapter-base", path, message, fix))
    return findings
