"""The values of a head in the folder of an adapter, held against the module that they are for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftConfig
from torch import nn

from safe_loading._checkpoint.adapter_folder import read_adapter
from safe_loading._checkpoint.hub import Resolved
from safe_loading._loading.adapter_file import read_tensors
from safe_loading._loading.adapter_values import rename_keys
from safe_loading.errors import AdapterError


def saved_head(folder: Path, key: str, module: nn.Module, config: PeftConfig | None) -> dict[str, torch.Tensor]:
    """Return the state of a head from a folder that ``save_pretrained`` wrote; ``key`` is its path in the file.

    The folder must hold exactly the tensors of ``module``, which is like the one that was saved.
    """
    facts = read_adapter(Resolved(str(folder), folder, None))
    prompts = bool(config is not None and config.is_prompt_learning)
    tensors = rename_keys(facts, read_tensors(facts), prompt_learning=prompts).tensors
    saved = {name.removeprefix(f"{key}."): tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}
    problems = list(_differences(saved, module.state_dict()))
    if problems:
        raise AdapterError(f"{facts.weights} does not hold this head ({key}); nothing was changed:", problems)
    return saved


def _differences(saved: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Iterator[str]:
    for name in sorted({*saved, *expected}):
        if name not in saved:
            yield f"{name}: the module has it ({list(expected[name].shape)}), the file does not."
        elif name not in expected:
            yield f"{name}: the file has it ({list(saved[name].shape)}), the module does not."
        elif saved[name].shape != expected[name].shape:
            yield f"{name}: the file has {list(saved[name].shape)}, the module {list(expected[name].shape)}."
