"""Whether a checkpoint fits a model, told from its headers before a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from safe_loading._checkpoint.faults import listed
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.names import canonical, prefix_of_all, without_peft_prefix, wrapper_part
from safe_loading._core.report import counted
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.peft_layers import without_peft_levels
from safe_loading._model.tensors import all_names

from .layout import CheckpointLayout, HasShape

_DOT = re.compile(r"\.")
_NUMBERED = re.compile(r"(.+)\.(\d+)\.")
_EXCUSED = "_keys_to_ignore_on_load_missing"


class ShapeAndDtype(HasShape, Protocol):
    """The tensor that a model expects under a name, or a record of its shape and dtype."""

    @property
    def dtype(self) -> torch.dtype: ...


def misfits(
    model: torch.nn.Module, checkpoint: Checkpoint, layout: CheckpointLayout, excused: Callable[[str], bool]
) -> list[str]:
    """Return a problem for everything that would leave a weight at random, or drop or distort one.

    Tensors that the class does not know, such as a head for another task, are not reported, unless they belong to
    layers beyond the last one of the model; nor are parameters that get their value from elsewhere (``excused``).
    """
    state: dict[str, torch.Tensor] = {name: t for name, t in model.state_dict().items() if not excused(name)}
    wrapped = wrapped_names(checkpoint, layout, state)
    if wrapped:
        return [wrapped]  # all other problems would follow from this one
    problems = [
        shape_problem(name, state[name], shape, checkpoint, [d for d, key in layout.key_of.items() if key == name])
        for name, shape in layout.mismatched.items()
        if name in state
    ]
    problems += [
        f"{name}: the checkpoint has it under {len(disk)} names, of which one would be taken: {listed(disk)} "
        f"({_files(checkpoint, disk)}). Delete the one that is left over"
        for name, disk in layout.repeated.items()
        if name in state
    ]
    problems += _cast_across_kinds(checkpoint, layout, state)
    aliases, stored = all_names(model), {*layout.of, *layout.opaque}
    prefixed = _under_a_prefix(checkpoint, layout, missing_names(state, stored, aliases), aliases)
    if prefixed:
        return [*problems, prefixed]
    problems += missing_problems(model, checkpoint, state, stored, aliases)
    return problems + _beyond_last_layer(model, checkpoint, layout)


def shape_problem(
    name: str, expected: ShapeAndDtype, shape: Sequence[int], checkpoint: Checkpoint, disk: Collection[str]
) -> str:
    """Return the problem of a tensor that has another shape in the checkpoint, where ``disk`` are its parts."""
    return (
        f"{name}: the model has {list(expected.shape)}, the checkpoint makes {list(shape)} of it "
        f"({_files(checkpoint, disk)})"
    )


def missing_names(
    expected: Collection[str], stored: Collection[str], aliases: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the names whose tensor is stored under none of its names; ``aliases`` are all those of a tied one."""
    stored = frozenset(stored)
    return [name for name in expected if stored.isdisjoint(aliases.get(name, (name,)))]


def missing_problems(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    expected: Mapping[str, ShapeAndDtype],
    stored: Collection[str],
    aliases: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return a problem for each tensor that the model needs, its class does not excuse, and the checkpoint lacks."""
    optional = optional_names(model)
    return [
        f"{name}: the model has {str(expected[name].dtype).removeprefix('torch.')} {list(expected[name].shape)}, and "
        f"the checkpoint {str(checkpoint.folder)!r} has no tensor of that name, so it would start at random"
        for name in missing_names(expected, stored, aliases)
        if not optional(name)
    ]


def optional_names(model: torch.nn.Module) -> Callable[[str], bool]:
    """Return whether the class of a model excuses checkpoints that lack a name: the model computes it, say.

    transformers tries the patterns of each model inside on all names of the whole, so that one part would excuse
    weights of another: SeamlessM4T's converter of text to units excuses ``text_encoder``, which is the whole's, and it
    starts at random. A parameter needs the word of a model that it is in. Buffers are computed by their modules.
    """
    anywhere = _matcher(getattr(model, _EXCUSED, None))
    within = [(f"{path}." if path else "", _matcher(own)) for path, own in _own_excuses(model)]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def optional(name: str) -> bool:
        if not anywhere(name) or name not in parameters:
            return anywhere(name)
        return any(name.startswith(prefix) and own(name.removeprefix(prefix)) for prefix, own in within)

    return optional


def _own_excuses(model: torch.nn.Module) -> Iterator[tuple[str, Collection[str]]]:
    """Yield the path of each model inside, and the patterns that it has from no model inside itself."""
    for path, module in model.named_modules():
        patterns = set(getattr(module, _EXCUSED, None) or ())
        inner = {each for child in module.children() for each in getattr(child, _EXCUSED, None) or ()}
        own = patterns - inner | set(getattr(type(module), _EXCUSED, None) or ())
        if own:
            yield path, own


def unexpected_tensors(model: torch.nn.Module, layout: CheckpointLayout) -> list[str]:
    """Return the tensors on disk that the class neither has nor tells to ignore, by transformers' rules."""
    if not layout.unknown:
        return []
    patterns: set[str] = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    # as PreTrainedModel._adjust_missing_and_unexpected_keys: old checkpoints hold these, of every layer
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    ignored = _matcher(patterns)
    return [disk for disk in layout.unknown if not ignored(layout.key_of[disk])]


def wrapped_names(checkpoint: Checkpoint, layout: CheckpointLayout, state: Collection[str]) -> str | None:
    """Return the problem of a checkpoint that was saved through a wrapper: of the model, or of modules inside it."""
    names = list(checkpoint.tensors)
    prefix = prefix_of_all(names)
    bare = [name.removeprefix(prefix) for name in names]
    if prefix and names[0] in layout.unknown and any(name in state for name in bare):
        return (
            f"{_files(checkpoint, names)}: all {len(names)} names begin with {prefix!r}, which a wrapper put there "
            f"({listed(names[:1])} is {bare[0]!r} of the model). Save the model that is inside the wrapper, or rename "
            f"the tensors without the prefix"
        )
    within = [name for name in layout.unknown if canonical(name) in state]
    if within:
        return (
            f"{_files(checkpoint, within)}: {counted(len(within), 'tensor')} with "
            f"{wrapper_part(within[0])!r} inside the name, which a wrapper put there ({listed(within[:1])} is "
            f"{canonical(within[0])!r} of the model). Save the model without it, or rename the tensors without it"
        )
    return _of_peft_model(checkpoint, layout, state)


def _of_peft_model(checkpoint: Checkpoint, layout: CheckpointLayout, state: Collection[str]) -> str | None:
    """Return the problem of a folder with all of a PeftModel's tensors: its base's, and those of its adapters."""
    plain = {disk: without_peft_levels(without_peft_prefix(disk)) for disk in layout.unknown}
    of_base = {disk: name for disk, name in plain.items() if name != disk and name in state}
    of_layers = [disk for disk in of_base if ".base_layer." in disk]
    if not of_layers:
        return None
    others = len(layout.unknown) - len(of_base)
    return (
        f"{_files(checkpoint, of_layers)}: the tensors of a whole PeftModel, {counted(len(of_base), 'weight')} of its "
        f"base ({listed(of_layers[:1])} is {of_base[of_layers[0]]!r} of the model) and {counted(others, 'other')}. "
        f"Save the adapter alone with the PeftModel's save_pretrained, or the base after merge_lora_inplace; or, of "
        f"these files, rename the base's tensors as the model has them, and move the others to a folder with the "
        f"adapter_config.json"
    )


def _under_a_prefix(
    checkpoint: Checkpoint, layout: CheckpointLayout, missing: Collection[str], aliases: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the problem of a checkpoint that has all that a model misses, with one more prefix before the names."""
    wanted, there = frozenset(missing), {layout.key_of[disk]: disk for disk in layout.unknown}
    cuts = ((key, match.end()) for key in there for match in _DOT.finditer(key))
    prefix = next((key[:cut] for key, cut in cuts if key[cut:] in wanted), None)
    found = [name for name in missing if f"{prefix}{name}" in there]
    if prefix is None or missing_names(missing, found, aliases):
        return None
    first, mapping = there[f"{prefix}{found[0]}"], {f"^{re.escape(prefix)}": ""}
    return (
        f"{checkpoint.folder}: {counted(len(found), 'name')} of the model with {prefix!r} before them ({first!r} is "
        f"{found[0]!r}). Pass base_kwargs={{'key_mapping': {mapping}}}, or rename the tensors without the prefix"
    )


def _cast_across_kinds(
    checkpoint: Checkpoint, layout: CheckpointLayout, state: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return a problem for each integer stored for a float or the other way round: the engines cast them silently.

    A cast from one float to another, fp8 included, is left to transformers, which loads these weights.
    """
    problems = []
    for name, whole in layout.of.items():
        expected = state[name].dtype if name in state else None
        for disk in dict.fromkeys(piece.tensor for piece in whole.pieces):
            info = checkpoint.tensors[disk]
            stored = DTYPES.get(info.dtype)
            if expected is not None and stored is not None and expected.is_floating_point != stored.is_floating_point:
                problems.append(
                    f"{name}: the model has {str(expected).removeprefix('torch.')}, {checkpoint.file_of[disk]} stores "
                    f"{disk!r} as {info.dtype}, and no quantization_config in config.json explains it. Save the "
                    f"checkpoint again"
                )
    return problems


def _beyond_last_layer(model: torch.nn.Module, checkpoint: Checkpoint, layout: CheckpointLayout) -> list[str]:
    """Return a problem for each tensor of a layer whose number is beyond the model's list of such layers."""
    lengths = {name: len(module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    problems = []
    for disk in unexpected_tensors(model, layout):
        for match in _NUMBERED.finditer(layout.key_of[disk]):
            # An unknown name may have a prefix in front that the model's names lack: the end of the path decides.
            path = next((path for path in lengths if match[1] == path or match[1].endswith(f".{path}")), None)
            if path is not None and int(match[2]) >= lengths[path]:
                problems.append(
                    f"{disk}: {checkpoint.file_of[disk]} has a layer {match[2]} of {path}, and the model has "
                    f"{lengths[path]} layers; correct the number of layers in config.json"
                )
                break
    return problems


def _files(checkpoint: Checkpoint, disk: Collection[str]) -> str:
    return ", ".join(dict.fromkeys(str(checkpoint.file_of[name]) for name in disk))


def _matcher(patterns: Collection[str] | None) -> Callable[[str], bool]:
    """Return whether one of several regular expressions is found in a name."""
    if not patterns:
        return lambda name: False
    pattern = re.compile("|".join(f"({each})" for each in sorted(patterns)))
    return lambda name: pattern.search(name) is not None
