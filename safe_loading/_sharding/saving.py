"""``save_pretrained`` of a sharded model: called on every rank, gathered tensor by tensor, written by the first rank.

The engines' own methods would write what the first rank has, which is shards: transformers gathers only what it
sharded itself, peft gathers nothing, and a DTensor that one rank alone reads waits for the others forever. torch's
``get_model_state_dict(full_state_dict=True)`` is no replacement: it gathers the whole base for an adapter, waits for a
missing rank without a limit, and uses the ``state_dict()`` of FSDP1 that is wrong on the CPU (:func:`_state_by_unit`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from safe_loading._core.names import WRAPPER_PARTS, ancestors, canonical
from safe_loading._model.tensors import walk_modules
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.waiting import Waiting
from safe_loading.errors import ArgumentError

from .fsdp1 import is_unit

_METHOD = "save_pretrained"
_PROMPTS = "prompt_encoder."  # of a model with prompt learning
_FLAT = "_flat_param"  # of FSDP1, where it keeps no original parameters
_SHARDING = "distributed_config"  # of a transformers config
_CALL = "call save_pretrained, which every rank must do"
_GATHER = "gather the weights"


class TensorOfUnit(NamedTuple):
    """Where a unit of FSDP1 registers a tensor, which is whole there only while the unit is gathered."""

    module: nn.Module
    attribute: str


StateByUnit = Mapping[nn.Module, Mapping[str, "torch.Tensor | TensorOfUnit"]]


def make_saving_whole(model: nn.Module, ranks: Ranks, device: torch.device, timeout: float) -> None:
    """Let ``save_pretrained`` of a wrapped model, and of the models inside it, gather the tensors on ``device``."""
    flat = isinstance(model, FullyShardedDataParallel)  # gathered only through the outermost wrapper
    for path, module in walk_modules(model):
        if callable(getattr(type(module), _METHOD, None)):
            prefix = f"{name}." if flat and (name := canonical(path)) else ""
            saving = SavingWhole(module, model if flat else module, ranks.ranks, device, timeout, prefix)
            module.__dict__[_METHOD] = saving
            if flat and not prefix:
                model.__dict__[_METHOD] = saving


@dataclasses.dataclass(frozen=True)
class SavingWhole:
    """Takes the place of a model's ``save_pretrained``."""

    model: nn.Module
    wrapped: nn.Module  # the module that has its state: the model, or the FSDP1 unit around it
    ranks: tuple[int, ...]  # the ranks that have its shards
    device: torch.device
    timeout: float  # longest wait for the other ranks, in seconds
    prefix: str = ""  # of the model's names in the unit

    def __call__(self, *args: object, **options: Any) -> object:
        """Save the model; arguments as its class has them. Every rank must call it, the first one writes.

        A ``state_dict=`` is saved as it is, by the ranks that pass it.

        Raises:
            ArgumentError: The first rank is told not to write (``is_main_process=False``).
            RankError: A rank failed.
            RankTimeout: A rank did not call it.
        """
        save: Callable[..., object] = getattr(type(self.model), _METHOD)
        # by name, because the state dict is added and the other options are read
        options |= dict(zip(list(inspect.signature(save).parameters)[1:], args, strict=False))
        if (given := options.get("state_dict")) is not None:
            if not given and options.get("is_main_process") is False:
                return None  # accelerate's get_state_dict gives it to other ranks; peft looks for saved modules in it
            with _as_one_process_has_it(self.model):
                return save(self.model, **options)
        options.pop("state_dict", None)
        is_main = options.pop("is_main_process", True)
        ranks = Ranks.resolve(self.ranks)
        writes = ranks.rank == ranks.ranks[0]
        states = self._states()
        # the same on every rank, so that a bit per name tells the others what the first rank saves
        names = [name for state in states.values() for name in state]
        with ranks.together(_CALL, timeout=self.timeout) as phase:
            if writes and not is_main:
                rank = ranks.rank
                raise ArgumentError(
                    f"is_main_process={is_main} on rank {rank}, which writes: pass rank == {rank}, or not at all."
                )
            if writes:
                state = {name: tensor for state in states.values() for name, tensor in state.items()}
                with _as_one_process_has_it(self.model):
                    saved_names = _names_to_save(self.model, state, options)
                phase.payload = "".join("1" if name in saved_names else "0" for name in names)
        with ranks.together(_GATHER, timeout=self.timeout):
            bits = phase.results[0]  # of the first rank
            chosen = {name for name, bit in zip(names, bits, strict=True) if bit == "1"}
            gathered = self._gather(states, chosen, Waiting(ranks, _GATHER, self.device, self.timeout), keep=writes)
        together = ranks.together("write the gathered model", timeout=self.timeout)
        with together, _as_one_process_has_it(self.model), _with_prompts(self.model, gathered):
            return save(self.model, state_dict=gathered, **options) if writes else None

    def _states(self) -> StateByUnit:
        if is_unit(self.wrapped):
            states = _state_by_unit(self.wrapped).items()
            return {
                unit: {n.removeprefix(self.prefix): each for n, each in state.items() if n.startswith(self.prefix)}
                for unit, state in states
            }
        # without keep_vars each name has a tensor of its own, and ties could not be told by identity
        return {self.wrapped: self.model.state_dict(keep_vars=True)}

    def _gather(
        self, states: StateByUnit, names: Collection[str], waiting: Waiting, *, keep: bool
    ) -> dict[str, torch.Tensor | None]:
        """Return some tensors whole, on the host; nothing on ranks that do not keep them."""
        gathered: dict[str, torch.Tensor | None] = {}
        if isinstance(self.wrapped, FullyShardedDataParallel):
            # before a forward pass FSDP1 takes the unit that is asked or gathered first for the root
            waiting.call(self.wrapped.check_is_root)
        for unit, state in states.items():
            of_unit = {name: tensor for name, tensor in state.items() if name in names}
            places = {name: tensor for name, tensor in of_unit.items() if isinstance(tensor, TensorOfUnit)}
            if places:
                gathered |= waiting.call(partial(_gather_unit, unit, places, keep))
                continue
            by_id: dict[int, torch.Tensor | None] = {}  # a tied parameter has several names, and is gathered once
            for name, tensor in of_unit.items():
                if id(tensor) not in by_id:
                    by_id[id(tensor)] = waiting.call(partial(_gather_tensor, tensor, self.device, keep))
                gathered[canonical(name)] = by_id[id(tensor)]
        return gathered if keep else {}


@contextlib.contextmanager
def _as_one_process_has_it(model: nn.Module) -> Iterator[None]:
    """Remove for a while the wrappers inside the model, and transformers' own sharding settings.

    peft 0.21 saves no adapter of a module that is wrapped. transformers 5 gathers a model whose config has a
    ``distributed_config``, and would wait for ranks that have gathered already.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    shardings: dict[int, tuple[Any, object]] = {}
    for _, module in walk_modules(model):
        config = vars(module).get("config")
        if (sharding := getattr(config, _SHARDING, None)) is not None and id(config) not in shardings:
            shardings[id(config)] = (config, sharding)
            setattr(config, _SHARDING, None)
        for name, child in module._modules.items():
            inner: nn.Module | None = child
            while inner is not None and (wrapper := WRAPPER_PARTS & inner._modules.keys()):
                inner = inner._modules[next(iter(wrapper))]
            if child is not None and inner is not child:
                replaced.append((module, name, child))
                module._modules[name] = inner
    try:
        yield
    finally:
        for module, name, child in replaced:
            module._modules[name] = child
        for config, sharding in shardings.values():
            setattr(config, _SHARDING, sharding)


@contextlib.contextmanager
def _with_prompts(model: nn.Module, gathered: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Put gathered values into prompt encoders for a while: peft runs them to get the prompts that it saves."""
    replaced: list[tuple[dict[str, Any], str, object]] = []
    for path, module in model.named_modules():
        parameters: dict[str, Any] = module._parameters
        for name in [*parameters] if path.startswith(_PROMPTS) else ():
            if (value := gathered.get(canonical(f"{path}.{name}"))) is not None:
                replaced.append((parameters, name, parameters[name]))
                parameters[name] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


@torch.no_grad()
def _gather_tensor(tensor: object, device: torch.device, keep: bool) -> torch.Tensor | None:
    """Return a tensor whole on the host; all ranks of its mesh must call it."""
    if isinstance(tensor, DTensor):
        offloaded = tensor.device.type != tensor.device_mesh.device_type
        # the collectives of the mesh take tensors on its own devices only
        sharded: object = tensor.to(device) if offloaded else tensor  # to() is annotated to return a plain tensor
        tensor = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
    return tensor.detach().cpu() if keep and isinstance(tensor, torch.Tensor) else None


def _state_by_unit(model: nn.Module) -> StateByUnit:
    """Return, for each unit of FSDP1, where the tensors of its state are, by canonical name.

    Not its ``state_dict()``, which reads memory that it has freed when the model is on the CPU (torch 2.13).
    """
    units: dict[str, nn.Module] = {}
    states: dict[nn.Module, dict[str, TensorOfUnit]] = {}
    for path, module in walk_modules(model, repeats=True):
        if is_unit(module):
            units[path] = module
        unit = next(units[above] for above in ancestors(path) if above in units)
        state = states.setdefault(unit, {})
        buffers = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in (*module._parameters, *buffers):
            if getattr(module, name) is not None and name != _FLAT:
                state[canonical(f"{path}.{name}")] = TensorOfUnit(module, name)
    return states


@torch.no_grad()
def _gather_unit(unit: nn.Module, state: Mapping[str, TensorOfUnit], keep: bool) -> dict[str, torch.Tensor]:
    """Return tensors of one unit whole on the host; all its ranks must call it."""
    gathered: dict[str, torch.Tensor] = {}
    with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
        by_id: dict[int, torch.Tensor] = {}
        for name, (module, attribute) in state.items() if keep else ():
            tensor = getattr(module, attribute)
            if id(tensor) not in by_id:
                # a copy, because the unit frees its memory at the end of the block
                by_id[id(tensor)] = tensor.detach().to("cpu", copy=True)
            gathered[name] = by_id[id(tensor)]
    return gathered


def _names_to_save(model: nn.Module, state: Mapping[str, object], options: Mapping[str, Any]) -> Collection[str]:
    """Return the names of a state dict that are saved: all of them, or those that peft saves of adapters."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return state.keys()
    peft_model: Any = model  # peft may be absent, so its classes are not imported to narrow the type
    if any(config.is_prompt_learning for config in peft_model.peft_config.values()):
        return {name for name in state if name.startswith(_PROMPTS) or ".modules_to_save." in name}
    # stand-ins on meta: whatever peft does with them starts no collective
    stand_ins = {name: torch.empty(getattr(tensor, "shape", ()), device="meta") for name, tensor in state.items()}
    saved: set[int] = set()
    for adapter in options.get("selected_adapters") or peft_model.peft_config:
        embeddings = options.get("save_embedding_layers", "auto")
        of_adapter = peft.get_peft_model_state_dict(
            model, state_dict=dict(stand_ins), adapter_name=adapter, save_embedding_layers=embeddings
        )
        saved |= {id(tensor) for tensor in of_adapter.values()}
    if not saved <= {id(tensor) for tensor in stand_ins.values()}:  # some are computed from others
        return state.keys()
    return {name for name, tensor in stand_ins.items() if id(tensor) in saved}
