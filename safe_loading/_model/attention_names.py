"""Implementations of attention that need a package or a kernel of the hub, which planning does not need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from safe_loading._core.thread_patches import patched, seen_here

FLEX = "flex_attention"
FLASH_2 = "flash_attention_2"


def comes_from_a_package(name: object) -> bool:
    """Return whether an ``attn_implementation`` needs a package: flash attention of any version, or a hub kernel."""
    return isinstance(name, str) and (name.startswith("flash_attention_") or "/" in name)


def is_traced_by_stand_in(name: object) -> bool:
    """Return whether the kernels of an ``attn_implementation`` cannot run on tensors without content."""
    return comes_from_a_package(name) or name == FLEX


def scratch_is_known(name: object) -> bool:
    """Return whether all that the kernels allocate is known: those of flash attention 2 are torch's own, too."""
    return not is_traced_by_stand_in(name) or name == FLASH_2


def may_be_flash(model: torch.nn.Module, autocast: object) -> bool:
    """Return whether the kernels of flash attention get the 16 bits that they take: of autocast, or of any weight."""
    return autocast is not None or any(parameter.dtype != torch.float32 for parameter in model.parameters())


def attention_of(model: Any) -> list[str]:
    """Return the names of the implementations that a model and the models inside it use."""
    configs = [vars(module).get("config") for module in model.modules() if isinstance(module, PreTrainedModel)]
    names = [getattr(config, "_attn_implementation", None) for config in configs]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


@contextlib.contextmanager
def without_packages() -> Iterator[None]:
    """Let transformers build models for implementations of attention whose packages are not installed.

    What the class does not support is refused as before.
    """
    check = seen_here(PreTrainedModel, "_check_and_adjust_attn_implementation")

    def accept(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if not comes_from_a_package(attn_implementation):
            return check(self, attn_implementation, *args, **kwargs)
        if not getattr(self, "_supports_flash_attn", False):
            raise ValueError(f"{type(self).__name__} does not support {attn_implementation}.")
        # a class may name the only flash kernels that suit it, of which transformers takes the first
        suitable = getattr(self, "_compatible_flash_implementations", None)
        return suitable[0] if suitable and attn_implementation not in suitable else attn_implementation

    with patched(PreTrainedModel, "_check_and_adjust_attn_implementation", accept):
        yield
