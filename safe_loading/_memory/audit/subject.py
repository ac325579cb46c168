"""What is audited: the model as a trainer sees it, and what it really is inside."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, and what it meets.

    Attributes:
        model: As it was given, wrapper included.
        trainer: A ``transformers.Trainer``, or None.
        optimizer: An optimizer, or None.
        training: Whether it will be trained: a trainer, an optimizer or a training workload is there.
    """

    model: torch.nn.Module
    trainer: Any = None
    optimizer: Any = None
    training: bool = True

    @functools.cached_property
    def known(self) -> tuple[str, torch.nn.Module]:
        """Path and module of the outermost model that trainers recognize; the model itself where there is none."""
        for name, module in self.model.named_modules():
            if isinstance(module, (PeftModel, PreTrainedModel)):
                return name, module
        return "", self.model

    @property
    def inner(self) -> torch.nn.Module:
        """The model that trainers recognize."""
        return self.known[1]

    @functools.cached_property
    def peft(self) -> Any:
        """The ``PeftModel``, or None."""
        return self.inner if isinstance(self.inner, PeftModel) else None

    @functools.cached_property
    def base(self) -> Any:
        """The ``PreTrainedModel`` without the adapter around it, or None."""
        model = self.peft.get_base_model() if self.peft is not None else self.inner
        return model if isinstance(model, PreTrainedModel) else None

    @property
    def wrapped(self) -> bool:
        """Whether something that trainers do not recognize is around the model."""
        return self.inner is not self.model

    @functools.cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The inner model's parameters under its own names, each once."""
        return dict(self.inner.named_parameters())

    @functools.cached_property
    def saved(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that ``save_pretrained`` of the adapter writes, under the model's names."""
        if self.peft is None:
            return self.parameters
        from peft import get_peft_model_state_dict

        with torch.no_grad():
            state = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        storages = {value.untyped_storage()._cdata for value in state.values()}
        return {n: p for n, p in self.parameters.items() if p.untyped_storage()._cdata in storages}

    @functools.cached_property
    def adapter_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that peft added, of every adapter."""
        if self.peft is None:
            return {}
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        found: dict[int, None] = {}
        for module in self.peft.modules():
            if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                continue
            for name in module.adapter_layer_names:
                held = getattr(module, name, None)
                found |= dict.fromkeys(map(id, held.parameters() if isinstance(held, torch.nn.Module) else ()))
        prompt = getattr(self.peft, "prompt_encoder", None)
        found |= dict.fromkeys(map(id, prompt.parameters() if prompt is not None else ()))
        return {name: parameter for name, parameter in self.parameters.items() if id(parameter) in found}

    def others(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the other models that a trainer or a wrapper holds: references, teachers, rewards."""
        seen = {id(self.model), id(self.inner), *(id(module) for module in self.inner.modules())}
        for owner, holder in (("trainer", self.trainer), ("model", self.model if self.wrapped else None)):
            for name, value in [*vars(holder).items(), *_children(holder)] if holder is not None else []:
                if (
                    isinstance(value, torch.nn.Module)
                    and id(value) not in seen
                    and any(True for _ in value.parameters())
                ):
                    seen.add(id(value))
                    yield f"{owner}.{name}", value


def _children(holder: Any) -> list[tuple[str, Any]]:
    return list(holder.named_children()) if isinstance(holder, torch.nn.Module) else []


def size_of(tensors: Any) -> int:
    """Return the bytes of some tensors, each storage once."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
