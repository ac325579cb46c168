"""What a model is fed with in a traced step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from safe_loading.errors import TraceError

from .known_values import Values

_ONE_LABEL = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")
_SEEING = ("vision_config", "encoder")  # the part of a config that describes the images
_THE_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def takes(model: torch.nn.Module) -> dict[str, bool]:
    """Return the arguments of the model's forward, through wrappers that pass everything on: name, and whether needed.

    Args:
        model: The model, wrapped or not.
    """
    seen: Any = model
    names: dict[str, bool] = {}
    for _ in range(8):
        parameters = inspect.signature(seen.forward).parameters
        for name, each in parameters.items():
            if each.kind not in _THE_REST:
                names.setdefault(name, each.default is inspect.Parameter.empty)
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            break
        if hasattr(_text_config(seen), "use_cache"):
            names.setdefault("use_cache", False)  # which the model within the model takes
        inner = _within(seen)
        if inner is None:
            break
        seen = inner
    return names


def _within(model: Any) -> torch.nn.Module | None:
    """Return the model to which a model passes its arguments: a head's base, or what a wrapper is around."""
    inner = getattr(model, "base_model", None)
    if isinstance(inner, torch.nn.Module) and inner is not model:
        deeper = getattr(inner, "model", None)
        return deeper if isinstance(deeper, torch.nn.Module) else inner
    within = known(model)
    if within is not model:
        return within
    children = list(model.children())
    return children[0] if len(children) == 1 and not isinstance(model, PreTrainedModel) else None


def known(model: torch.nn.Module) -> torch.nn.Module:
    """Return the outermost model of transformers or peft, which a wrapper of one's own is around; else the model."""
    found = (m for m in model.modules() if isinstance(m, PreTrainedModel) or hasattr(m, "get_base_model"))
    return next(found, model)


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


class Inputs:
    """Makes the tensors of a step, with the values that whole numbers have.

    Args:
        model: The model with its twins in place.
        values: Where true values are kept.
        device: The device on which a user would put the inputs.
        given: Tensors of the caller's, by name, of which shape and dtype are taken; they replace what would be made.
            Whole numbers that are not on meta keep their values, such as the places of images in a text.
    """

    def __init__(
        self, model: torch.nn.Module, values: Values, device: torch.device, given: Mapping[str, torch.Tensor] | None
    ) -> None:
        self.names = takes(model)
        inner: Any = known(model)
        self.kind = type(inner.get_base_model() if hasattr(inner, "get_base_model") else inner).__name__
        self.config: Any = getattr(inner, "config", None)
        self.decodes = bool(getattr(self.config, "is_encoder_decoder", False))
        self.device = device
        self.values = values
        self.given = given or {}

    def tokens(self, *shape: int) -> torch.Tensor:
        """Return a batch of whole numbers, all the same."""
        fake = torch.empty(shape, dtype=torch.long, device=self.device)
        self.values.keep(fake, 1)
        return fake

    def rows(self, rows: int) -> int:
        """Return how many rows a batch has: those of given tokens, else `rows`."""
        return self._shape(rows, 1)[0]

    def prompt(self, rows: int, columns: int) -> dict[str, Any]:
        """Return the arguments of a forward pass over `columns` tokens."""
        batch: dict[str, Any] = {}
        for name, tensor in self.given.items():
            batch[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            self.values.copy(batch[name], tensor)
        shape = self._shape(rows, columns)
        wanted = {"input_ids": shape, "attention_mask": shape} if "input_ids" in self.names else {}
        if self.decodes:
            wanted["decoder_input_ids"] = (shape[0], columns)
        for name, size in wanted.items():
            embeds = name.replace("input_ids", "inputs_embeds")
            if name in self.names and name not in batch and embeds not in batch:
                batch[name] = self.tokens(*size)
        if "input_ids" in batch:
            self._finish(batch["input_ids"])
        seeing = "input_ids" not in self.names or self.names.get("pixel_values")
        if "pixel_values" in self.names and seeing and "pixel_values" not in batch:
            batch["pixel_values"] = self._images(rows)
        return batch

    def labels(self, rows: int, columns: int) -> torch.Tensor:
        """Return what a loss is computed against: one class a row for classifiers of whole inputs, else one a token."""
        shape = self._shape(rows, columns)
        if self.kind.endswith(_ONE_LABEL):
            return self.tokens(shape[0])
        if self.decodes:
            decoded = self.given.get("decoder_input_ids")
            shape = tuple(decoded.shape) if decoded is not None else (shape[0], columns)
        return self.tokens(*shape)

    def _shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of tokens that are given, else that of the workload's."""
        if "input_ids" in self.given:
            return tuple(self.given["input_ids"].shape)
        if "inputs_embeds" in self.given:
            return tuple(self.given["inputs_embeds"].shape[:-1])
        if self.kind.endswith("ForMultipleChoice"):
            raise TraceError(
                f"{self.kind}: a workload does not say how many choices a question has. Pass the tokens, as "
                f"inputs={{'input_ids': torch.ones({rows}, choices, {columns}, dtype=torch.long)}}."
            )
        return rows, columns

    def _finish(self, tokens: torch.Tensor) -> None:
        """End each text as a tokenizer does, for classifiers that read the decoder's state at its end."""
        end = getattr(self.config, "eos_token_id", None)
        end = end[0] if isinstance(end, (list, tuple)) else end
        if self.decodes and self.kind.endswith(_ONE_LABEL) and end is not None and "input_ids" not in self.given:
            self.values.end(tokens, end)

    def _images(self, rows: int) -> torch.Tensor:
        config = next(
            (c for c in (getattr(self.config, n, None) for n in _SEEING) if hasattr(c, "image_size")), self.config
        )
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        if size is None:
            raise TraceError(
                f"The config of {self.kind} does not say how large its images are: pass them, as "
                f"inputs={{'pixel_values': torch.empty({rows}, {channels}, height, width, device='meta')}}."
            )
        height, width = (size, size) if isinstance(size, int) else size
        return torch.empty((rows, channels, height, width), device=self.device)
