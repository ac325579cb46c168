"""The config of an adapter as it is attached to a base, told by the header of its file: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from peft import PeftConfig

from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._core.log import quiet
from safe_loading._core.names import PEFT_PREFIX
from safe_loading._core.report import errors_of
from safe_loading.errors import AdapterError

from .adapter_file import tensors_on_meta
from .adapter_values import places
from .experts import fit_experts
from .fused_parameters import without_conversion_by_peft
from .old_names import with_new_names


def config_on_base(
    config: PeftConfig, facts: AdapterFolder, base: torch.nn.Module
) -> tuple[PeftConfig, AbstractContextManager[None]]:
    """Return a config by the names that the base has now, over its experts, and the context in which peft builds it.

    Where the weights of the adapter are not there, or have no header, the names are those of its config alone.
    """
    if config.is_prompt_learning:
        return config, nullcontext()
    tensors = {} if facts.header is None else tensors_on_meta(facts.header, is_mlx=facts.is_mlx)
    named = getattr(config, "target_modules", None) or ()
    named = () if isinstance(named, str) else named
    changed, *_, old = places(tensors or [f"{PEFT_PREFIX}{name}.lora_A.weight" for name in named], base)
    tensors = {changed.get(key, key): tensor for key, tensor in tensors.items()}
    fitted = fit_experts(with_new_names(config, old, base), tensors, base, facts)
    errors = [finding.problem for finding in errors_of(fitted.findings)]
    if errors:
        raise AdapterError(f"{facts.path} cannot be attached to {type(base).__name__}:", errors)
    return fitted.config, _over_fused(base) if fitted.is_fused else nullcontext()


@contextmanager
def _over_fused(base: torch.nn.Module) -> Iterator[None]:
    with quiet(), without_conversion_by_peft(base):  # peft looks for the patterns of fused parameters among modules
        yield
