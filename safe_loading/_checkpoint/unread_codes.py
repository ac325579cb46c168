"""Weights in codes that no transformers reads, as a config or a file beside it says. Imports no torch.

Those of NVIDIA's modelopt (`modelopt`); those of MLX, whose configs say so in ``quantization``; those of AutoFP8, whose
scales have another name; and those of methods that transformers has, where something else than ``quantization_config``
names them: ``compression_config``, which vLLM reads, or a file of `BESIDE`. transformers makes plain layers, whose
weights no file holds, or takes the codes for values.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import NamedTuple

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .base_config import BESIDE, named_quantization, reads_quantization, settings_beside
from .copy_bytes import range_of
from .faults import fault, listed, raise_faults
from .index import Checkpoint
from .left_over import bytes_in_codes, files_take
from .model_folder import CONFIG, ModelFolder
from .modelopt import modelopt_codes

# Methods by which transformers quantizes while it loads, and whose codes it does not read from files again (5.23): it
# refuses those of the first, and makes the weights of the second at random.
_QUANTIZED_BY_THE_LOAD = ("nvfp4", "quanto")
_QUANTIZE_AGAIN = "take the checkpoint in 16 bits that it was made of, and quantize it while it is loaded"
_OF_QUANTO = "quanto_qmap.json"  # of optimum-quanto's own save_pretrained, which writes nothing into config.json
_GROUPS = ".weight_g_idx"  # the group of each column
_INTEGERS = {"I32": "i", "I64": "q"}
_SCALE, _INVERSE = ".weight_scale", ".weight_scale_inv"  # of AutoFP8; the name that transformers reads under "fp8"
UNREAD_ENTRIES = ("quantization", "compression_config")  # of configs, which transformers does not read


class _Named(NamedTuple):
    """A place that names a quantization, where transformers does not read it."""

    where: Path
    what: str
    fix: str
    why: str = "transformers would make layers in 16 bits, whose weights no file holds"


def unread_codes(folder: ModelFolder) -> Finding | None:
    """Return the finding of codes that transformers does not read; None where the headers show plain weights."""
    if found := modelopt_codes(folder):
        return found
    document = folder.files.try_read(folder.path / CONFIG)
    config = {} if isinstance(document, Finding) else document
    if reads_quantization(config):
        named = _written_by_a_load(folder, config) or _of_auto_fp8(folder, config) or _in_another_order(folder, config)
    else:
        named = _named(folder.path / CONFIG, config) or _beside(folder)
    size = None if named is None else bytes_in_codes(folder)
    if named is None or size is None:
        return None
    message = f"{named.what}{files_take(size)}. {named.why}"
    return fault("unread-codes", named.where, message, named.fix, size)


def refuse_unread_codes(folder: ModelFolder) -> None:
    """Raise `CheckpointError` for weights that would be made in 16 bits though they are in codes."""
    if found := unread_codes(folder):
        raise_faults(Path(found.where), [found])


def refuse_unread_config(config: JsonObject, name: str) -> None:
    """Raise `ArgumentError` for a config without a folder that names codes where transformers does not read them."""
    named = None if reads_quantization(config) else _named(Path(name), config)
    if named is not None:
        raise ArgumentError(
            f"{name} {named.what}. transformers would make layers in 16 bits: pass the folder, whose headers show its "
            f"weights, or {named.fix}."
        )


def _named(where: Path, config: JsonObject) -> _Named | None:
    """Return the entry of a config that names codes and is not ``quantization_config``."""
    if named := named_quantization(config):
        entry, method = named
        what = f"says in {entry} that the weights are quantized ({method}), and transformers does not read it there"
        return _Named(where, what, "rename the entry to quantization_config in config.json")
    quantized = config.get("quantization")
    if not isinstance(quantized, dict) or not all(type(quantized.get(key)) is int for key in ("bits", "group_size")):
        return None
    what = f"says in quantization that MLX quantized the weights ({quantized['bits']} bits)"
    fix = (
        "take the checkpoint in 16 bits that it was made of, whose plan is an upper bound, or write one with "
        "mlx_lm.convert --dequantize; mlx_lm reads these codes"
    )
    return _Named(where, what, fix)


def _written_by_a_load(folder: ModelFolder, config: JsonObject) -> _Named | None:
    """Return the entry of a method whose codes a load makes, where weights are here; plain ones are left over."""
    entry, method = named_quantization(config) or ("", "")
    if method not in _QUANTIZED_BY_THE_LOAD or folder.whole_checkpoint is None:
        return None
    return _Named(
        folder.path / CONFIG,
        f"says in {entry} that the weights are quantized ({method})",
        _QUANTIZE_AGAIN,
        "transformers quantizes so while it loads, and reads no such codes from files",
    )


def _of_auto_fp8(folder: ModelFolder, config: JsonObject) -> _Named | None:
    """Return the entry of codes in fp8 whose scales have the name that AutoFP8 and vLLM give them.

    transformers passes over those scales. It reads them of the embeddings alone that the config names.
    """
    entry, method = named_quantization(config) or ("", "")
    checkpoint = folder.whole_checkpoint
    if method != "fp8" or checkpoint is None or any(name.endswith(_INVERSE) for name in checkpoint.tensors):
        return None
    codes = [name.removesuffix(".weight") for name, info in checkpoint.tensors.items() if info.dtype == "F8_E4M3"]
    read = _embeddings_in_fp8(config)
    found = [name for name in codes if f"{name}{_SCALE}" in checkpoint.tensors and not name.endswith(read)]
    if not found:
        return None
    return _Named(
        folder.path / CONFIG,
        f"says in {entry} that the weights are quantized (fp8), and their scales are named as AutoFP8 names them, "
        f"{_SCALE[1:]}: {listed(found)}",
        "take the checkpoint in 16 bits that it was made of, whose plan is an upper bound; vLLM reads these codes",
        f"transformers reads {_INVERSE[1:]} alone, and would take the codes for values, wrongly",
    )


def _embeddings_in_fp8(config: JsonObject) -> tuple[str, ...]:
    """Return the ends of the names of the embeddings that transformers keeps in fp8."""
    parts = (config, config.get("text_config"))
    settings = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
    lists = [each.get("modules_to_convert") for each in settings if isinstance(each, dict)]
    return tuple(name for names in lists if isinstance(names, list) for name in names if isinstance(name, str))


def _in_another_order(folder: ModelFolder, config: JsonObject) -> _Named | None:
    """Return the entry of a method whose weights on disk have the columns of a group apart, by ``weight_g_idx``.

    Its package passes over that since August 2026, and takes the columns as they lie. Its error where the config says
    so, too, advises to write that the columns do lie so.
    """
    checkpoint = folder.whole_checkpoint
    found = [] if checkpoint is None else [name for name in checkpoint.tensors if name.endswith(_GROUPS)]
    if checkpoint is None or not any(_scatters(checkpoint, name) for name in found):
        return None
    _, method = named_quantization(config) or ("", "")
    return _Named(
        folder.path / CONFIG,
        f"is of weights ({method}) whose groups are columns in another order: {listed(found)}",
        _QUANTIZE_AGAIN,
        "transformers and the package of that method decode them as if each group were columns in a row, wrongly",
    )


def _scatters(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether the groups of a weight are other columns than those that follow one another."""
    info, scales = checkpoint.tensors[name], checkpoint.tensors.get(f"{name.removesuffix(_GROUPS)}.weight_scale")
    count = info.shape[0] if len(info.shape) == 1 else 0
    if info.dtype not in _INTEGERS or not count or scales is None or not scales.shape[-1:] or not scales.shape[-1]:
        return False  # nothing that can be read so
    data = range_of(checkpoint.folder / checkpoint.file_of[name], info.start, info.nbytes)
    groups = array(_INTEGERS[info.dtype], bytes(data))
    width = -(-count // scales.shape[-1])
    return any(group not in (-1, column // width) for column, group in enumerate(groups))


def _beside(folder: ModelFolder) -> _Named | None:
    """Return the file beside the config that names codes."""
    for name in BESIDE:
        path = folder.path / name
        document = folder.files.try_read(path) if path.is_file() else {}
        settings = None if isinstance(document, Finding) else settings_beside(name, document)
        if settings is not None:
            what = f"says that the weights are quantized ({settings['quant_method']}), and config.json does not"
            return _Named(path, what, f'add "quantization_config": {json.dumps(settings)} to config.json')
    path = folder.path / _OF_QUANTO
    what = "lists the layers that optimum-quanto quantized, and config.json does not say it"
    return _Named(path, what, _QUANTIZE_AGAIN) if path.is_file() else None
