"""The audited model: as a trainer sees it, and inside its wrappers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from safe_loading._core.engines import is_integrated
from safe_loading._core.interrupts import undone
from safe_loading._core.names import method_name
from safe_loading._wrapping.wrap_order import HidingWrapper, find_wrappers, inside_engines

_CLASSIFIER = "internal_xlora_classifier"  # the part of an X-LoRA that weighs its LoRAs


Optimizers: TypeAlias = "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None"


@dataclass(frozen=True, eq=False)
class AuditedModel:
    """A model as it was passed, wrapper included, and the trainer and optimizer that it is used with."""

    model: torch.nn.Module
    trainer: object = None  # a ``transformers.Trainer`` or one that looks like it
    optimizer: Optimizers = None
    # whether it will be trained: there is a trainer, an optimizer or a training workload, or a parameter requires
    # gradients
    training: bool = True

    @functools.cached_property
    def outermost(self) -> torch.nn.Module:
        """The model inside the modules of engines, such as ``DistributedDataParallel``."""
        return inside_engines(self.model)[1]

    @functools.cached_property
    def wrappers(self) -> tuple[HidingWrapper, ...]:
        """The plain modules that hide a model from the engines, at any depth, outermost first."""
        return tuple(find_wrappers(self.model))

    @functools.cached_property
    def engine_model(self) -> tuple[str, torch.nn.Module]:
        """Path and module of the outermost model that trainers recognize; if there is none, of `outermost`."""
        wrapper = next(iter(self.wrappers), None)
        inner = self.outermost if wrapper is None or wrapper.above is not None else wrapper.inside
        return next(path for path, module in self.model.named_modules() if module is inner), inner

    @property
    def inner(self) -> torch.nn.Module:
        """The outermost model that trainers recognize."""
        return self.engine_model[1]

    @functools.cached_property
    def peft(self) -> PeftModel | None:
        """The ``PeftModel``, or None."""
        return self.inner if isinstance(self.inner, PeftModel) else None

    @functools.cached_property
    def adapted(self) -> PeftModel | PreTrainedModel | None:
        """The ``PeftModel``, or the model into which transformers' own ``add_adapter`` put adapters, or None."""
        return self.peft or (self.base if is_integrated(self.base) else None)

    @functools.cached_property
    def base(self) -> PreTrainedModel | None:
        """The ``PreTrainedModel`` without an adapter and wrappers around it, or None."""
        model = self.peft.get_base_model() if self.peft is not None else self.inner
        if self.wrappers and self.wrappers[-1].module is model:
            model = self.wrappers[-1].inside
        return model if isinstance(model, PreTrainedModel) else None

    @property
    def wrapped(self) -> bool:
        """Whether something that trainers do not recognize is around the model."""
        return self.inner is not self.outermost

    @property
    def adapter_configs(self) -> dict[str, Any]:
        """The configs of the adapters by their names."""
        return getattr(self.adapted, "peft_config", {})

    @functools.cached_property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint that the base says it was loaded from; None if it is not on this machine."""
        config = getattr(self.base, "config", None)
        named = getattr(config, "_name_or_path", "") or getattr(self.base, "name_or_path", "")
        try:
            found = cached_file(named, "config.json", local_files_only=True) if named else None
        except (OSError, ValueError):
            return None
        return None if found is None else Path(str(found)).parent

    @property
    def training_arguments(self) -> object:
        """The trainer's arguments, or None."""
        return getattr(self.trainer, "args", None)

    def uses(self, engine: str) -> bool:
        """Whether the trainer uses "deepspeed" or "fsdp": its arguments say so, or ``accelerate launch`` does."""
        return bool(
            getattr(self.training_arguments, engine, None) or getattr(self.trainer, f"is_{engine}_enabled", False)
        )

    @property
    def torch_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers of torch, which accelerate may have wrapped (``AcceleratedOptimizer``)."""
        held = self.optimizer if isinstance(self.optimizer, Sequence) else (self.optimizer,)
        return tuple(getattr(each, "optimizer", each) for each in held if each is not None)

    @functools.cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The inner model's parameters under its own names, each once."""
        return dict(self.inner.named_parameters())

    @functools.cached_property
    def unsavable(self) -> dict[str, str]:
        """The error of peft for each adapter that it cannot save; filled by ``saved_by``, which takes all of theirs."""
        return {}

    @functools.cached_property
    def saved_by(self) -> dict[str, dict[str, torch.nn.Parameter]]:
        """The parameters that ``save_pretrained`` writes for each adapter by its name, under the model's names."""
        if self.adapted is None:
            return {}
        model: Any = self.adapted  # peft's type is of a PeftModel, and transformers calls it with a model of its own
        saved = {}
        for adapter in model.peft_config:
            parts = self._parts_of_prompt(adapter)
            if any(p.is_meta for p in parts.values()):  # peft computes the prompt, and copies it to the host
                kept = f".modules_to_save.{adapter}."
                saved[adapter] = {name: p for name, p in self.parameters.items() if kept in name} | parts
                continue
            # matched by storage, because the keys that peft writes are not the model's names
            try:
                with torch.no_grad(), _not_gathered(model):
                    state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
            except Exception as error:  # whatever peft raises, it raises when the adapter is saved
                self.unsavable[adapter] = f"{type(error).__name__}: {error}"
                saved[adapter] = {n: p for n, p in self.parameters.items() if adapter in n.split(".")}
                continue
            storages = {value.untyped_storage()._cdata for value in state.values()}
            saved[adapter] = {n: p for n, p in self.parameters.items() if p.untyped_storage()._cdata in storages}
            if adapter in self.weighed:  # peft writes more into their files, and does not read it there again
                own = {n for n in self.adapter_parameters if _CLASSIFIER not in n}
                saved[adapter] = {n: p for n, p in saved[adapter].items() if n in own}
            saved[adapter] |= parts
        return saved

    @functools.cached_property
    def weighed(self) -> frozenset[str]:
        """The names of the LoRAs that an X-LoRA weighs, which peft leaves frozen unless it is told to train them."""
        configs = {} if self.adapted is None else self.adapted.peft_config
        others = frozenset(name for name, config in configs.items() if method_name(config.peft_type) != "XLORA")
        return others if len(others) < len(configs) else frozenset()

    def _parts_of_prompt(self, adapter: str) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that a prompt is computed from; the file of such an adapter has the prompt itself."""
        start = f"prompt_encoder.{adapter}."
        parts = {name: p for name, p in self.parameters.items() if name.startswith(start)}
        # a method may freeze some, such as the tokens to which another part is added
        return {name: p for name, p in parts.items() if p.requires_grad} or parts

    @functools.cached_property
    def saved(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that ``save_pretrained`` writes, of every adapter, under the model's names."""
        if self.adapted is None:
            return self.parameters
        return {name: p for parameters in self.saved_by.values() for name, p in parameters.items()}

    @functools.cached_property
    def adapter_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that peft added, of every adapter."""
        if self.adapted is None:
            return {}
        # by what peft's layers declare; names such as "lora_" would miss the other tuners
        added: set[int] = set()
        for module in self.adapted.modules():
            if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                continue
            for name in module.adapter_layer_names:
                layers = getattr(module, name, None)
                added.update(map(id, layers.parameters() if isinstance(layers, torch.nn.Module) else ()))
        for part in (getattr(self.adapted, "prompt_encoder", None), getattr(self.adapted, _CLASSIFIER, None)):
            added.update(map(id, part.parameters() if part is not None else ()))
        return {name: parameter for name, parameter in self.parameters.items() if id(parameter) in added}

    def others(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the other models that a trainer or a wrapper holds: references, teachers, reward models."""
        seen = {id(self.model), id(self.outermost), id(self.inner), *(id(module) for module in self.inner.modules())}
        for owner, holder in (("trainer", self.trainer), ("model", self.outermost if self.wrapped else None)):
            if holder is None:
                continue
            children = holder.named_children() if isinstance(holder, torch.nn.Module) else ()
            for name, value in [*vars(holder).items(), *children]:
                if not isinstance(value, torch.nn.Module) or id(value) in seen:
                    continue
                if any(True for _ in value.parameters()):
                    seen.add(id(value))
                    yield f"{owner}.{name}", value

    def not_optimized(self) -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
        """Yield the other models of a trainer that no optimizer has, and their parameters that require gradients."""
        optimizers = [self.optimizer, *(vars(self.trainer).values() if hasattr(self.trainer, "__dict__") else ())]
        groups = [group for held in optimizers for group in _groups_of(held)]
        known = {id(p) for group in groups for p in group.get("params", ())}
        known |= {id(p) for p in self.model.parameters()}
        for where, other in self.others():
            trainable = [p for p in other.parameters() if p.requires_grad]
            if where.startswith("trainer.") and trainable and not any(id(p) in known for p in trainable):
                yield where, trainable


@contextlib.contextmanager
def _not_gathered(model: torch.nn.Module) -> Iterator[None]:
    """Inside, peft gathers no values for a file, as it does of a model that transformers split: no other rank may."""
    before = {name: value for name, value in vars(model).items() if name == "_tp_size"}

    def put_back() -> None:
        vars(model).pop("_tp_size", None)
        vars(model).update(before)

    with undone(put_back):
        vars(model)["_tp_size"] = None
        yield


def _groups_of(held: object) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, or of several in a container."""
    values = [*held.values()] if isinstance(held, dict) else [*held] if isinstance(held, (list, tuple)) else [held]
    groups = [getattr(value, "param_groups", None) for value in values if not isinstance(value, torch.nn.Module)]
    return [group for each in groups if isinstance(each, list) for group in each if isinstance(group, dict)]


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all its values here: not on meta, and not sharded."""
    return not tensor.is_meta and not isinstance(tensor, DTensor)


def by_value(mapping: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys of each value, in their order."""
    found: dict[str, list[str]] = {}
    for key, value in mapping.items():
        found.setdefault(value, []).append(key)
    return found


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors, each storage once."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
