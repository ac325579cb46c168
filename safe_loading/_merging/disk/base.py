"""The base of a merge, opened once: its config.json, the headers of its weight files, and its model on meta."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from safe_loading._checkpoint.base_config import quantization_of
from safe_loading._checkpoint.hub import Resolved
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.left_over import holds_codes, is_passed_over
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._checkpoint.unread_codes import refuse_unread_codes
from safe_loading._core.log import quiet
from safe_loading._core.protocols import EngineKwargs, JsonObject
from safe_loading._loading.base_arguments import for_constructor, refuse_unknown
from safe_loading._loading.base_model import base_config, changed_config
from safe_loading._loading.sources import HUB_OPTIONS
from safe_loading._loading.vocabulary import LABELS
from safe_loading._model.formats.registry import format_named
from safe_loading._model.formats.stored import QuantizedTensor
from safe_loading._model.meta_model import build_on_meta
from safe_loading._model.quantized.on_disk import refuse_quantization
from safe_loading._model.weights_dtype import weights_dtype
from safe_loading.errors import ArgumentError, MergeError

from .kept_format import weights_by_part
from .quantized_base import read_as_plain, road_into_plain

# Arguments of from_pretrained that say where files are, and not what model is built.
_NOT_OF_THE_CONFIG = HUB_OPTIONS | {"variant", "trust_remote_code"}
# Entries whose values are dicts and no configs of parts: they are written as a whole, because a key may have gone.
_WHOLE = {"id2label", "label2id", "rope_parameters", "rope_scaling"}


@dataclasses.dataclass(frozen=True, eq=False)
class MergeBase:
    """The base of a merge, opened once; ``kwargs`` are more arguments of its ``from_pretrained``."""

    source: str
    opened: ModelFolder  # what was read of its folder
    commit: str | None  # None for a local folder
    kwargs: EngineKwargs
    checkpoint: Checkpoint  # of a quantized base, the plain tensors that its codes stand for
    quantized: Mapping[str, QuantizedTensor]  # what those are on disk
    stale_headers: frozenset[str]  # the files whose headers do not describe ``template``
    template: Checkpoint  # what the output is like: ``checkpoint``, or the files as they are where codes are kept
    dtype: torch.dtype | None = None  # of the output; None for that of the config

    @property
    def folder(self) -> Path:
        """The folder on this machine."""
        return self.opened.path

    @property
    def config(self) -> JsonObject:
        """Its config.json; empty where there is none."""
        return self.opened.config or {}

    @property
    def keeps_codes(self) -> bool:
        """Whether the output is quantized as the base is."""
        return bool(self.quantized) and self.template is not self.checkpoint

    @property
    def plain_on_disk(self) -> Checkpoint:
        """The checkpoint without the weights that the disk holds as codes."""
        plain = {name: info for name, info in self.checkpoint.tensors.items() if name not in self.quantized}
        return dataclasses.replace(self.checkpoint, tensors=plain) if self.quantized else self.checkpoint

    @functools.cached_property
    def weight_of(self) -> dict[str, str]:
        """Which weight each tensor of codes or scales is a part of, where the output keeps them."""
        return weights_by_part(self.quantized) if self.keeps_codes else {}

    @functools.cached_property
    def model_config(self) -> PreTrainedConfig:
        """The config as transformers reads it, without the entries that ``kwargs`` change."""
        return base_config(self.folder, self.kwargs, self.config or None)

    @functools.cached_property
    def _changed_config(self) -> tuple[PreTrainedConfig, dict[str, object]]:
        """The config with the entries that ``kwargs`` change, and those that no config takes."""
        if self.kwargs.keys() <= _NOT_OF_THE_CONFIG:
            return self.model_config, {}
        with quiet():
            return changed_config(self.opened, self.kwargs)

    @functools.cached_property
    def asked(self) -> dict[str, object]:
        """The entries of config.json that ``kwargs`` make other than they were, by their dotted keys, in JSON."""
        if self.kwargs.keys() <= _NOT_OF_THE_CONFIG:
            return {}
        with quiet():
            before, _ = changed_config(self.opened, {k: v for k, v in self.kwargs.items() if k in _NOT_OF_THE_CONFIG})
        documents = [json.loads(each.to_json_string(use_diff=False)) for each in (before, self._changed_config[0])]
        return dict(_changed_entries(*documents))

    @property
    def num_labels(self) -> int | None:
        """The number of labels that ``kwargs`` ask for, if they do, by a number or by names."""
        if LABELS.isdisjoint(self.kwargs):
            return None
        labels: int | None = getattr(self._changed_config[0], "num_labels", None)
        return labels

    def refuse_unknown_arguments(self, model_class: Any) -> None:
        """Refuse ``kwargs`` that neither the config nor this class takes."""
        config, others = self._changed_config
        refuse_unknown(for_constructor(others), config, model_class)

    def on_meta(self, model_class: Any, *, num_labels: int | None = None) -> PreTrainedModel:
        """Return the base on meta, in the wider dtype of its weights and the output; its class may raise anything."""
        config = copy.deepcopy(self._changed_config[0])  # the model keeps it, and whoever builds may change it
        if num_labels is not None:
            config.num_labels = num_labels
        trusted = bool(self.kwargs.get("trust_remote_code", False))
        dtype = weights_dtype("auto", config, self.opened, self.kwargs.get("variant"))
        if self.dtype is not None and torch.promote_types(dtype, self.dtype) == self.dtype:  # it holds more
            dtype = self.dtype
        arguments = for_constructor(self._changed_config[1])
        model = build_on_meta(model_class, config, dtype, trust_remote_code=trusted, arguments=arguments)
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"{type(model).__name__} is not a PreTrainedModel")
        return model


def _changed_entries(before: JsonObject, after: JsonObject, outer: str = "") -> Iterator[tuple[str, object]]:
    for key, value in after.items():
        own = before.get(key)
        if key.startswith("_") or (key in before and own == value):
            continue
        if isinstance(value, dict) and isinstance(own, dict) and key not in _WHOLE:
            yield from _changed_entries(own, value, f"{outer}{key}.")
        else:
            yield f"{outer}{key}", value


def open_base(resolved: Resolved, kwargs: EngineKwargs, *, dtype: torch.dtype | None, dequantize: bool) -> MergeBase:
    """Read the config and the headers of a base; ``dequantize``: a quantized one is written in plain weights."""
    opened = ModelFolder(resolved.folder)
    checkpoint = opened.read_checkpoint(variant=kwargs.get("variant"))
    path, config = resolved.folder / CONFIG, opened.config or {}
    refuse_quantization(checkpoint, config)
    refuse_unread_codes(opened)
    quantization = None if is_passed_over(config, checkpoint.tensors) else quantization_of(config)
    facts = resolved.source, opened, resolved.commit, kwargs
    if not quantization:
        return MergeBase(*facts, checkpoint, {}, frozenset(), checkpoint, dtype)
    if not dequantize:
        _require_kept_format(path, quantization, dtype, in_codes=any(map(holds_codes, checkpoint.tensors.values())))
    plain, quantized, stale = read_as_plain(checkpoint, config)
    if dequantize:
        return MergeBase(*facts, plain, quantized, stale, plain, dtype)
    return MergeBase(*facts, plain, quantized, frozenset(), checkpoint)


def _require_kept_format(path: Path, quantization: object, dtype: torch.dtype | None, *, in_codes: bool) -> None:
    """Refuse a base whose codes are not merged into, or whose plain weights its layers round themselves."""
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    known = format_named(method)
    if known is None or not known.merged_on_disk:
        road = (
            "Merge into the base that it was made from, and quantize the result; or pass dequantize=True, which writes "
            "a plain one."
        )
        raise MergeError(
            f"{path} says that the base is quantized ({method}); adding to its {'codes' if in_codes else 'weights'} "
            f"would be wrong{'' if in_codes else ', which its layers round in each forward pass'}. "
            f"{road if known is not None and known.read_on_disk and in_codes else road_into_plain(method)}"
        )
    if dtype is not None:
        raise ArgumentError(
            f"dtype={dtype}: {path} says that the base is quantized ({method}), and codes keep their dtype. Leave it "
            f"out; or pass dequantize=True (--dequantize) too, which writes a plain base in that dtype."
        )
