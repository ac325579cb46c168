"""The modules that a format replaces, their dtype, and the options of its config, as several formats share them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from safe_loading._core.thread_patches import ONE_BUILD
from safe_loading.errors import ArgumentError

from .format import QuantizationRequest

_LONGEST_GROUP = 65536  # codes that share a scale; the widest published layer has 53,248 inputs


def skipped_modules(model: Any, request: QuantizationRequest, *, default_too: bool = False) -> list[str]:
    """Return the names of the modules that stay as they are, by the rule that transformers' quantizers share."""
    from transformers.quantizers.base import HfQuantizer

    asked = request.options.get("modules_to_not_convert")
    in_float32 = getattr(model, "_keep_in_fp32_modules", None)
    with tied_weights_apart(model):
        return HfQuantizer.get_modules_to_not_convert(  # type: ignore[no-any-return]  # transformers' own
            model, asked, in_float32, add_default_skips=default_too
        )


@contextlib.contextmanager
def tied_weights_apart(model: nn.Module) -> Iterator[None]:
    """Inside, a model names each of its tied weights, as it does where transformers quantizes it.

    transformers quantizes before it ties, and leaves out the module of the last parameter: a tied head at the end, and
    not the projection before it.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*ties, *ties.values()}

    def apart(*_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        met = set()
        for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
            if name in tied or parameter not in met:
                met.add(parameter)
                yield name, parameter

    vars(model)["named_parameters"] = apart
    try:
        yield
    finally:
        del vars(model)["named_parameters"]


def convertible(
    model: nn.Module, request: QuantizationRequest, *, default_too: bool = False, of_weights: bool = False
) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that a format replaces, with their paths.

    A quantizer that asks ``of_weights`` compares names with those of the weights, whose ends are no names of modules.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = skipped_modules(model, request, default_too=default_too)
    for path, module in list(model.named_modules()):
        name = f"{path}.weight" if of_weights else path
        if isinstance(module, nn.Linear) and should_convert_module(name, kept):
            yield path, module


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside the block: new layers get their biases in it, as in ``from_pretrained``."""
    with ONE_BUILD:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def layers_on_meta(model: nn.Module) -> Iterator[torch.dtype]:
    """Inside, layers are made on meta and in the dtype of a model's floats, which it gives."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    with torch.device("meta"), default_dtype(dtype):
        yield dtype


@dataclass(frozen=True)
class LayerRule:
    """The bits of a code, and the number of codes along the input that share a scale (-1: all of them)."""

    bits: int
    group_size: int

    def require_known(self) -> None:
        """Refuse numbers that no kernel reads, from which sizes would be computed all the same.

        A rule for layers that stay plain (16 bits, in auto-round's configs) is not asked.
        """
        groups = self.group_size == -1 or 1 <= self.group_size <= _LONGEST_GROUP
        for name, well, allowed in (
            ("bits", 2 <= self.bits <= 8, "2 to 8"),
            ("group_size", groups, f"1 to {_LONGEST_GROUP}, or -1 for one scale a row"),
        ):
            if not well:
                raise ArgumentError(
                    f"quantization_config of config.json: {name} is {getattr(self, name)!r:.40}, and must be "
                    f"{allowed}. Write the number with which the checkpoint was quantized."
                )

    def changed(self, module: str, changes: Mapping[str, Any]) -> LayerRule:
        """Return the rule with the changes that a config makes for one module, or for the modules of a pattern."""
        found = {name: changes.get(name) for name in ("bits", "group_size")}
        for name, value in found.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ArgumentError(
                    f"quantization_config: {name} of {module!r:.120} is {value!r:.40}, no whole number."
                )
        bits, group = found["bits"], found["group_size"]
        return LayerRule(self.bits if bits is None else bits, self.group_size if group is None else group)


def rules_by_module(request: QuantizationRequest, field: str) -> Mapping[str, Mapping[str, Any]]:
    """Return an option that maps names or patterns of modules to changes for them; empty where it is not given."""
    rules = request.options.get(field) or {}
    if not isinstance(rules, Mapping) or not all(isinstance(rule or {}, Mapping) for rule in rules.values()):
        raise ArgumentError(
            f"quantization_config: {field} is {rules!r:.80}, and must map names of modules to changes for them, such "
            f'as {{"-:.*attn.*": {{}}}}.'
        )
    return {key: rule or {} for key, rule in rules.items()}


def block_prefixes(model: nn.Module, request: QuantizationRequest, *fields: str) -> tuple[str, ...]:
    """Return the paths of blocks to which a config restricts its method, from the first of these fields that is given.

    Each names a block of the model: under one that names none, an engine would quantize nothing, and find no codes.
    """
    field = next((field for field in fields if request.options.get(field)), None)
    if field is None:
        return ()
    found = request.options[field]
    blocks = tuple(found.split(",") if isinstance(found, str) else _flat(found))
    paths = [path for path, _ in model.named_modules()]
    for block in blocks:
        if not any(path.startswith(block) for path in paths):
            raise ArgumentError(
                f"quantization_config: {field} names {block!r:.120}, and {type(model).__name__} has no module of that "
                f"name. Write the path of the blocks as the model has it, such as {_some_blocks(model)!r}."
            )
    return blocks


def _flat(names: object) -> Iterator[str]:
    if isinstance(names, (list, tuple)):
        for name in names:
            yield from _flat(name)
    else:
        yield str(names)


def _some_blocks(model: nn.Module) -> str:
    """Return the path of the longest list of modules."""
    lists = {path: len(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return max(lists, key=lambda path: lists[path], default="model.layers")


def whole_option(request: QuantizationRequest, name: str, default: int) -> int:
    """Return an option that is a whole number."""
    value = request.options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"quantization_config: {name} is {value!r:.40} and no whole number, such as {default}.")
    return value
