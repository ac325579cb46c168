"""An adapter as it was read, and its tensors by the keys that peft writes for the modules of a base."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import torch
from peft import PeftConfig

from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._checkpoint.faults import note
from safe_loading._core.report import Finding
from safe_loading.errors import AdapterError

from .key_names import renames, summarize
from .old_names import OldNames

_SAVED_LEVELS = tuple(re.compile(level) for level in (r"\.modules_to_save(?=\.)", r"\.modules_to_save\.[^.]+(?=\.)"))


class RenamedTensors(NamedTuple):
    """An adapter's tensors by the keys that peft writes."""

    tensors: dict[str, torch.Tensor]  # by canonical key
    renamed: dict[str, str]  # {key on disk: canonical key}, of the keys that differ
    findings: list[Finding]  # one finding if there are such keys
    old_names: OldNames | None = None  # those of modules that the base calls otherwise now


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter that has been read and checked, ready to be attached to a model."""

    name: str  # in the model
    facts: AdapterFolder
    config: PeftConfig
    tensors: dict[str, torch.Tensor]  # on the host, by their key on disk
    findings: tuple[Finding, ...]  # what is wrong or noteworthy about it, whatever the model
    key_mapping: Mapping[str, str] | None = None  # patterns and replacements for its keys; None takes the base's own

    @property
    def file(self) -> str:
        """The path of its weights, for findings."""
        return str(self.facts.weights)

    def renamed(self, base: torch.nn.Module, known: Container[str] = ()) -> RenamedTensors:
        """Return its tensors by the keys that peft writes, of the modules of ``base``; see :func:`rename_keys`."""
        prompts, mapping = self.config.is_prompt_learning, self.key_mapping
        return rename_keys(self.facts, self.tensors, base, prompt_learning=prompts, key_mapping=mapping, known=known)


def rename_keys(
    facts: AdapterFolder,
    tensors: Mapping[str, torch.Tensor],
    base: torch.nn.Module | None = None,
    *,
    prompt_learning: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    known: Container[str] = (),
) -> RenamedTensors:
    """Return the tensors by the keys that peft writes, of the modules of ``base`` as it is now if it is passed.

    ``key_mapping`` holds the patterns that the caller has for the keys; None takes those of the base's class, as peft.
    The keys in ``known`` are known to be right, without a look at the base.
    """
    tensors = _without_copies(tensors)
    changed, collisions, patterns, old = places(tensors, base, prompt_learning, key_mapping, known)
    if collisions:
        raise AdapterError(f"{facts.weights} contains the same tensor under two names:", collisions)
    renamed = {changed.get(key, key): tensor for key, tensor in tensors.items()}
    if not changed:
        return RenamedTensors(renamed, changed, [], old)
    kinds = ["mapped by patterns"] if patterns else []
    if old is not None and old.of:
        kinds.append("placed by the names that transformers, MLX or vLLM have had for the modules")
    message = f"{', or '.join([*kinds, 'saved through a wrapper'])}: {summarize(changed)}"
    fix = "none needed here; peft's own load would ignore these keys"
    return RenamedTensors(renamed, changed, [note("info", "adapter-keys-renamed", facts.weights, message, fix)], old)


def places(
    keys: Iterable[str],
    base: torch.nn.Module | None,
    prompt_learning: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    known: Container[str] = (),
) -> tuple[dict[str, str], list[str], Mapping[str, str], OldNames | None]:
    """Return the keys that are written otherwise now, which of them collide, by which patterns, and the old names."""
    own_module = base is not None and "module" in base._modules
    own_peft = base is None or any(name.endswith("base_model") for name, _ in base.named_modules())
    patterns = key_mapping if key_mapping is not None else getattr(base, "_checkpoint_conversion_mapping", None)
    patterns = patterns if isinstance(patterns, Mapping) and not prompt_learning else {}
    old = None if base is None or prompt_learning else OldNames(base, known)
    place = None if old is None else old.place
    changed, collisions = renames(
        keys,
        prompt_learning=prompt_learning,
        own_module=own_module,
        own_peft=own_peft,
        key_mapping=patterns,
        place=place,
    )
    return changed, collisions, patterns, old


def _without_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the second copies of saved modules.

    peft writes a module to save as ``X.weight``. When a vocabulary was resized in memory, or with ``bias="all"``, it
    writes tensors of it under the names that the model has for them as well: ``X.modules_to_save.bias``, or
    ``X.modules_to_save.default.dense.bias``.
    """

    def is_copy(key: str, tensor: torch.Tensor) -> bool:
        if ".modules_to_save." not in key:
            return False
        firsts = (tensors.get(each.sub("", key, count=1)) for each in _SAVED_LEVELS)
        return any(first is not None and first is not tensor and same_tensor(first, tensor) for first in firsts)

    return {key: tensor for key, tensor in tensors.items() if not is_copy(key, tensor)}


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, dtype and shape."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
