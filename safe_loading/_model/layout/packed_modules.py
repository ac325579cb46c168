"""The corrections of a quantized folder's headers to its config: which modules hold codes, and whether any do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from safe_loading._checkpoint.faults import listed, note
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._core.names import nearest
from safe_loading._core.report import Finding, counted
from safe_loading._model.formats.registry import FORMATS
from safe_loading._model.quantized.request import read_request
from safe_loading.errors import CheckpointError

from .layout import CheckpointLayout, read_layout


class ByHeaders(NamedTuple):
    """The entries of a ``quantization_config`` that headers correct, and the finding that says so."""

    entries: dict[str, object]
    finding: Finding


def corrected_in_folder(model: nn.Module, folder: ModelFolder, settings: object) -> ByHeaders | None:
    """Return the corrections of a folder's weights to its quantization, for a model on meta; None where they agree."""
    checkpoint = folder.whole_checkpoint
    return None if checkpoint is None else corrected_by_headers(model, checkpoint, settings)


def corrected_by_headers(
    model: nn.Module,
    checkpoint: Checkpoint,
    settings: object,
    layout: CheckpointLayout | None = None,
    *,
    mends: bool = False,
) -> ByHeaders | None:
    """Return the same of headers that were read; ``settings`` are the config's own ``quantization_config``.

    Codes that the model holds as parts of one tensor are refused where transformers cannot put them together, or only
    a load of this package, which mends that, can.
    """
    request = read_request(settings)
    known = None if request is None else FORMATS.get(request.method)
    if request is None or known is None:
        return None
    if known.packed_names is None:
        if not (mends and known.mended()):
            _refuse_left_out(model, checkpoint, request.method, known.scales_left_out(checkpoint.tensors))
        if known.linear_only:
            _refuse_single_experts(model, checkpoint, request.method, layout)
        entries = known.corrected(request.options, {name: info.dtype for name, info in checkpoint.tensors.items()})
        return ByHeaders(entries, _differing(checkpoint, request.options, entries)) if entries else None
    codes = known.codes_on_disk(checkpoint.tensors)
    if not codes:
        return None
    layout = layout or read_layout(model, checkpoint.tensors)
    linear = {
        f"{name}.weight": name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    }
    _refuse_parts(model, checkpoint, layout, codes, linear)
    _refuse_single_experts(model, checkpoint, request.method, layout)
    held = {linear[key] for name in codes if (key := layout.key_of.get(name, "")) in linear}
    on_disk = {linear[key] for key in layout.key_of.values() if key in linear}
    asked = known.packed_names(model, request)
    wrong = sorted((asked & on_disk) ^ held)
    if not wrong:
        return None
    skips = sorted(name for name in linear.values() if name not in held and (name in on_disk or name not in asked))
    plain = [name for name in wrong if name not in held]
    message = (
        f"names the modules that are not packed as an older release did (llm_int8_skip_modules), and the headers say "
        f"otherwise of {counted(len(wrong), 'module')}, {len(plain)} of them plain: {listed(wrong)}. The headers were "
        f"taken; transformers alone would make layers for codes that are not there, and their first forward fails"
    )
    fix = "write the names that the modules have into llm_int8_skip_modules, for a load without this package"
    return ByHeaders(
        {"llm_int8_skip_modules": skips}, note("warning", "skips-differ", checkpoint.folder / CONFIG, message, fix)
    )


def _differing(checkpoint: Checkpoint, options: Mapping[str, Any], entries: Mapping[str, object]) -> Finding:
    (name, right), *_ = entries.items()
    message = (
        f"says {name}={options.get(name)!r:.40}, and the headers show {right} weights, as which they were taken; "
        f"transformers alone would take their codes for values (transformers#47145)"
    )
    fix = f'write "{right}" as {name} into config.json, for a load without this package'
    return note("warning", "status-differs", checkpoint.folder / CONFIG, message, fix)


def _refuse_parts(
    model: nn.Module, checkpoint: Checkpoint, layout: CheckpointLayout, codes: frozenset[str], linear: Mapping[str, str]
) -> None:
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    parts = sorted(name for name in codes if (key := layout.key_of.get(name)) in parameters and key not in linear)
    if parts:
        held = sorted({layout.key_of[name] for name in parts})
        raise CheckpointError(
            f"{checkpoint.folder} holds codes one by one, such as {parts[0]}, and {type(model).__name__} holds them in "
            f"one tensor, {held[0]}, which transformers cannot put together from codes: "
            f"{counted(len(parts), 'tensor')}. merge_lora_checkpoint(..., dequantize=True) reads them and writes a "
            f"plain base; or load the base that it was made from, with quantization_config."
        )


def _stacked(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each parameter that may hold all experts of a layer, by its dimensions."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and parameter.shape[0] > 1:  # of one row are tokens and positions of images
            path, _, leaf = name.rpartition(".")
            yield path, leaf


def _refuse_left_out(model: nn.Module, checkpoint: Checkpoint, method: str, scales: list[str]) -> None:
    """Refuse codes of single experts that would be decoded without a part of their scales, and so be wrong."""
    if not scales:
        return
    replaced: Mapping[str, Any] = MODULES_TO_PATCH_FOR_QUANTIZATION  # whose experts are layers of their own again
    apart = {name for name, facts in replaced.items() if method in facts["quantization_methods"]}
    held = [(path, name) for path, name in _stacked(model) if type(model.get_submodule(path)).__name__ not in apart]
    if held:
        raise CheckpointError(
            f"{checkpoint.folder} holds each expert in layers of its own, as codes of {method}, and "
            f"{type(model).__name__} holds them together in {'.'.join(held[0])}. transformers decodes these without "
            f"their {scales[0].rpartition('.')[2]} (transformers#48371), so that their weights would be wrong by its "
            f"factor: {counted(len(scales), 'tensor')}, such as {scales[0]}. Load the base in 16 bits that it was made "
            f"from."
        )


def _refuse_single_experts(
    model: nn.Module, checkpoint: Checkpoint, method: str, layout: CheckpointLayout | None
) -> None:
    """Refuse codes of experts in layers of their own, for which a model that holds them in one tensor has no place."""
    stacked = {path for path, _ in _stacked(model)}
    unknown = (layout or read_layout(model, checkpoint.tensors)).unknown if stacked else ()
    modules = {path for path, _ in model.named_modules()}
    # what belongs to a layer that the model has inside, beside a class token of three dimensions, is in its place
    single = [name for name in unknown if nearest(name, modules) in stacked]
    if single:
        named = next((name for name in single if not name.endswith(".bias")), single[0])
        held = nearest(named, stacked)
        raise CheckpointError(
            f"{checkpoint.folder} holds each expert in layers of its own, as codes of {method} ({named}), and "
            f"{type(model).__name__} holds them together in {held}, which transformers would leave at random: "
            f"{counted(len(single), 'tensor')}. Load the base that it was made from, with quantization_config; or take "
            f"a checkpoint in fp8."
        )
