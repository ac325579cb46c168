"""The dtype of a model's weights: one order of truth, for plans, forecasts, models on meta, loads and merges.

What the caller asks for; else what the config says at its top, which ``from_pretrained`` takes before it looks at a
weight; else the headers of the weights, which it takes then. Where the weights are not here: what the configs inside
say (``text_config``), if they agree; else 16 bits, if the config names a quantization that computes in them; else
torch's default dtype, which is an assumption, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError, CheckpointError

from .dtypes import DTYPES, dtype_named
from .formats.registry import FORMATS

# Bytes for each parameter: of buffers, headers and heads that files hold twice or not at all, there may be a tenth.
_IN_16_BITS, _IN_32_BITS = (1.8, 2.3), (3.6, 4.6)


class WeightsDtype(NamedTuple):
    """The dtype of the weights; where nothing says which it is, the finding of that and the folder without them."""

    dtype: torch.dtype
    assumed: Finding | None = None
    folder: ModelFolder | None = None


def find_weights_dtype(
    asked: torch.dtype | str | None,
    config: PreTrainedConfig,
    folder: ModelFolder | None = None,
    variant: str | None = None,
) -> WeightsDtype:
    """Return the dtype of the weights, by the order of truth.

    None and ``"auto"`` ask for none. The folder is the one of the config, where its weights may lie; without one it is
    the folder that the config was read from, if it is still there. What is no floating-point dtype is refused.
    """
    if asked is not None and asked != "auto":
        named = _floating(asked)
        if named is None:
            raise ArgumentError(
                f"dtype={asked!r}; pass a floating-point torch.dtype such as torch.bfloat16, its name, or 'auto'."
            )
        return WeightsDtype(named)
    if config.dtype is not None:
        return WeightsDtype(_of_config(config, folder))
    source = str(config.name_or_path or "")
    if folder is None and source and Path(source).is_dir():
        folder = ModelFolder(Path(source))
    known = dtype_on_disk(folder, variant) or _of_parts(config) or _of_quantization(config)
    if known is not None:
        return WeightsDtype(known)
    default = torch.get_default_dtype()
    if folder is None and not source:
        return WeightsDtype(default)  # made by hand: there are no weights but those that from_config() makes
    where = str(folder.path / CONFIG if folder is not None else source)
    return WeightsDtype(default, _assumed(default, where), folder)


def built_with(
    found: WeightsDtype, build: Callable[[torch.dtype], torch.nn.Module]
) -> tuple[torch.nn.Module, WeightsDtype]:
    """Return the model that ``build`` makes of a dtype, and the dtype: if it was assumed, the one that its files show.

    How many bytes they have for each parameter is known of a built model only.
    """
    model = build(found.dtype)
    checked = _checked_by_size(found, model)
    return model if checked.dtype == found.dtype else build(checked.dtype), checked


def _checked_by_size(found: WeightsDtype, model: torch.nn.Module) -> WeightsDtype:
    stored = None if found.folder is None else found.folder.bytes_elsewhere
    elements = sum(parameter.numel() for parameter in model.parameters() if parameter.is_floating_point())
    if found.folder is None or not stored or not elements:
        return found
    if _IN_32_BITS[0] < stored / elements < _IN_32_BITS[1]:
        return WeightsDtype(torch.float32)
    if not _IN_16_BITS[0] < stored / elements < _IN_16_BITS[1]:
        return found
    where = str(found.folder.path / CONFIG)
    return WeightsDtype(torch.float16, _assumed(torch.float16, where, "by the size of its files"))


def weights_dtype(
    asked: torch.dtype | str | None, config: PreTrainedConfig, folder: ModelFolder | None, variant: str | None = None
) -> torch.dtype:
    """Return the dtype of the weights, as :func:`find_weights_dtype`, for whoever reads the weights anyway."""
    return find_weights_dtype(asked, config, folder, variant).dtype


def loaded_by_trainer(dtype: str, config: PreTrainedConfig, folder: ModelFolder | None) -> Finding | None:
    """Return the finding of a dtype that a trainer chooses, where it is not that of the weights."""
    if folder is None or dtype == "auto":
        return None
    own = str(weights_dtype(None, config, folder)).removeprefix("torch.")
    if dtype == own:
        return None
    message = (
        f"a folder or id is loaded by trl in {dtype}, as model_init_kwargs of its arguments says or, where that names "
        f'no dtype, by default: so its weights are counted, and with dtype="auto" in their own {own}.'
    )
    fix = (
        f'set model_init_kwargs={{"dtype": "{own}"}} in the arguments; or pass dtype="auto" here, for a model that '
        f"your script loads."
    )
    return Finding("loaded-by-trainer", "warning", str(folder.path), message, fix)


def dtype_on_disk(folder: ModelFolder | None, variant: str | None = None) -> torch.dtype | None:
    """Return the dtype that an index names, else that of the first floating-point tensor: transformers' own "auto".

    The first is that of the first file by its name in the alphabet, whatever the order in the header. Codes are passed
    over, as transformers does: no model computes in 8 bits.
    """
    checkpoint = folder.inspect_checkpoint(variant=variant, kind="model")[0] if folder is not None else None
    if checkpoint is None:
        return None
    named = _floating(checkpoint.index.dtype) if checkpoint.index is not None else None
    if named is not None and named.itemsize > 1:
        return named
    for header in checkpoint.headers.values():
        for _, info in sorted(header.tensors.items()):
            dtype = DTYPES.get(info.dtype)
            if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
    return None


def _floating(value: object) -> torch.dtype | None:
    named = dtype_named(value)
    return named if named is not None and named.is_floating_point else None


def _of_config(config: PreTrainedConfig, folder: ModelFolder | None) -> torch.dtype:
    named = _floating(config.dtype)
    if named is not None:
        return named
    if folder is not None:
        raise CheckpointError(
            f"{folder.path / CONFIG}: dtype is {config.dtype!r:.80}, which is no floating-point dtype of torch. Set it "
            f'to the dtype of the weights, such as "bfloat16", or pass dtype=.'
        )
    raise ArgumentError(
        f"dtype of this {type(config).__name__} is {config.dtype!r:.80}; pass a floating-point torch.dtype such as "
        f"torch.bfloat16 as dtype=, or its name."
    )


def _of_parts(config: PreTrainedConfig) -> torch.dtype | None:
    """Return the one dtype that the configs inside name; None if they name none, or two."""
    named = {_floating(part.dtype) for part in _parts(config) if part.dtype is not None}
    return named.pop() if len(named) == 1 else None


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _parts(value)


def _of_quantization(config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype that a config's own quantization computes in, be it at its top or in a config inside."""
    for part in (config, *_parts(config)):
        quantized = vars(part).get("quantization_config")
        if quantized is None:
            continue
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized.quant_method
        known = FORMATS.get(str(getattr(method, "value", method)))
        return None if known is None else known.computes_in
    return None


def _assumed(dtype: torch.dtype, where: str, how: str = "") -> Finding:
    name = str(dtype).removeprefix("torch.")
    message = (
        f"neither the config nor a weight on this machine says in which dtype the weights are: {name} is assumed "
        f"{how + ' ' if how else ''}(dtype= names another), with {dtype.itemsize} bytes for each parameter."
    )
    fix = 'pass dtype=, such as "bfloat16", or pass the folder with its weights.'
    return Finding("dtype-assumed", "warning", where, message, fix)
