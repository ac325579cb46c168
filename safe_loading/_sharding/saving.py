"""``save_pretrained`` of a sharded model: called on every rank, gathered tensor by tensor, written by the first rank.

The engines' own would write what the first rank has: parts. transformers gathers what it has sharded itself, and peft
gathers nothing; a DTensor that one rank alone reads waits for the others for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

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

_NAME = "save_pretrained"
_FLAT = "_flat_param"  # of FSDP1, where it keeps no original parameters
_MEET = "call save_pretrained, which every rank must do"
_GATHER = "gather the weights"


def make_saving_whole(model: nn.Module, ranks: Ranks, device: torch.device, timeout: float) -> None:
    """Let ``save_pretrained`` of a wrapped model, and of the models inside it, gather what it saves.

    Args:
        model: The model, wrapped by FSDP1 or FSDP2.
        ranks: Who holds a part of it.
        device: Where its parts are gathered.
        timeout: Longest wait for the other ranks, in seconds.
    """
    if is_unit(model):
        inner: Any = model.module  # what it holds is whole only through the outermost wrapper
        if callable(getattr(type(inner), _NAME, None)):
            saving = SavingWhole(inner, model, ranks.ranks, device, timeout)
            model.__dict__[_NAME] = inner.__dict__[_NAME] = saving
        return
    for module in model.modules():
        if callable(getattr(type(module), _NAME, None)):
            module.__dict__[_NAME] = SavingWhole(module, module, ranks.ranks, device, timeout)


@dataclasses.dataclass(frozen=True)
class SavingWhole:
    """Stands in the place of a model's ``save_pretrained``.

    Attributes:
        model: The model whose method is called.
        wrapped: What holds its state: the model, or the FSDP1 unit around it.
        ranks: The ranks that hold it.
        device: Where its parts are gathered.
        timeout: Longest wait for the other ranks, in seconds.
    """

    model: nn.Module
    wrapped: nn.Module
    ranks: tuple[int, ...]
    device: torch.device
    timeout: float

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Save the model; arguments as its class has them. Every rank must call it, the first one writes.

        A ``state_dict=`` is saved as it is, by the ranks that pass it.

        Raises:
            ArgumentError: The first rank is told not to write (``is_main_process=False``).
            RankError: A rank failed.
            RankTimeout: A rank did not come.
        """
        save: Any = getattr(type(self.model), _NAME)
        options |= dict(zip(list(inspect.signature(save).parameters)[1:], args, strict=False))
        if options.get("state_dict") is not None:
            return save(self.model, **options)
        options.pop("state_dict", None)
        is_main = options.pop("is_main_process", True)
        ranks = Ranks.resolve(self.ranks)
        writes = ranks.rank == ranks.ranks[0]
        held = _units(self.wrapped) if is_unit(self.wrapped) else {self.wrapped: self.model.state_dict(keep_vars=True)}
        names = [name for state in held.values() for name in state]
        with ranks.together(_MEET, timeout=self.timeout) as phase:
            if writes and not is_main:
                at = ranks.rank
                raise ArgumentError(
                    f"is_main_process={is_main} on rank {at}, which writes: pass rank == {at}, or not at all."
                )
            if writes:
                state = {name: tensor for state in held.values() for name, tensor in state.items()}
                with _bare(self.model):
                    kept = _kept(self.model, state, options)
                phase.payload = "".join("1" if name in kept else "0" for name in names)
        with ranks.together(_GATHER, timeout=self.timeout):
            wanted = {name for name, bit in zip(names, phase.results[0], strict=True) if bit == "1"}
            whole = self._gathered(held, wanted, Waiting(ranks, _GATHER, self.device, self.timeout), keep=writes)
        with ranks.together("write the gathered model", timeout=self.timeout), _bare(self.model):
            return save(self.model, state_dict=whole, **options) if writes else None

    def _gathered(
        self, held: Mapping[nn.Module, Mapping[str, Any]], wanted: Collection[str], waiting: Waiting, *, keep: bool
    ) -> dict[str, Any]:
        """Return the wanted tensors whole, on the host; nothing on ranks that do not keep them."""
        whole: dict[str, Any] = {}
        for unit, state in held.items():
            asked = {name: tensor for name, tensor in state.items() if name in wanted}
            if asked and is_unit(unit):
                whole |= waiting.call(partial(_of_unit, unit, asked, keep))
                continue
            seen: dict[int, Any] = {}  # a tied parameter stands under several names, and is gathered once
            for name, tensor in asked.items():
                if id(tensor) not in seen:
                    seen[id(tensor)] = waiting.call(partial(_whole, tensor, self.device, keep))
                whole[canonical(name)] = seen[id(tensor)]
        return whole if keep else {}


@contextlib.contextmanager
def _bare(model: nn.Module) -> Iterator[None]:
    """Take the wrappers inside a model away for a while: peft 0.21 saves no adapter whose module has one around it."""
    taken: list[tuple[nn.Module, str, nn.Module]] = []
    for _, module in walk_modules(model):
        for name, child in module._modules.items():
            inner: Any = child
            while inner is not None and (wrapper := WRAPPER_PARTS & inner._modules.keys()):
                inner = inner._modules[next(iter(wrapper))]
            if child is not None and inner is not child:
                taken.append((module, name, child))
                module._modules[name] = inner
    try:
        yield
    finally:
        for module, name, child in taken:
            module._modules[name] = child


@torch.no_grad()
def _whole(tensor: Any, device: torch.device, keep: bool) -> Any:
    if isinstance(tensor, DTensor):
        sharded: Any = tensor if tensor.device.type == tensor.device_mesh.device_type else tensor.to(device)
        tensor = sharded.full_tensor()
    return tensor.detach().cpu() if keep and isinstance(tensor, torch.Tensor) else None


def _units(model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Return the state of each unit of FSDP1, by its canonical names: ``(module, attribute)``.

    Not its ``state_dict()``, which reads memory that it has freed when the model is on the CPU (torch 2.13).
    """
    units: dict[str, nn.Module] = {}
    held: dict[nn.Module, dict[str, Any]] = {}
    for path, module in walk_modules(model, repeats=True):
        if is_unit(module):
            units[path] = module
        unit = next(units[above] for above in ancestors(path) if above in units)
        state = held.setdefault(unit, {})
        saved = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in (*module._parameters, *saved):
            if getattr(module, name) is not None and name != _FLAT:
                state[canonical(f"{path}.{name}")] = (module, name)
    return held


@torch.no_grad()
def _of_unit(unit: nn.Module, state: Mapping[str, tuple[nn.Module, str]], keep: bool) -> dict[str, torch.Tensor]:
    """Return tensors of one unit whole; all its ranks gather it."""
    whole: dict[str, torch.Tensor] = {}
    with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
        seen: dict[int, torch.Tensor] = {}
        for name, (module, attribute) in state.items() if keep else ():
            tensor = getattr(module, attribute)
            if id(tensor) not in seen:
                seen[id(tensor)] = tensor.detach().to("cpu", copy=True)
            whole[name] = seen[id(tensor)]
    return whole


def _kept(model: Any, state: Mapping[str, Any], options: Mapping[str, Any]) -> Collection[str]:
    """Return the names of a state dict that are saved: all of them, or what peft saves of a model with adapters."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return state.keys()
    # stand-ins: whatever peft does with them, it waits for nobody
    standing = {name: torch.empty(getattr(tensor, "shape", ()), device="meta") for name, tensor in state.items()}
    kept: set[int] = set()
    for adapter in options.get("selected_adapters") or model.peft_config:
        embeddings = options.get("save_embedding_layers", "auto")
        of_adapter = peft.get_peft_model_state_dict(
            model, state_dict=dict(standing), adapter_name=adapter, save_embedding_layers=embeddings
        )
        kept |= {id(tensor) for tensor in of_adapter.values()}
    if not kept <= {id(tensor) for tensor in standing.values()}:  # some are computed from others
        return state.keys()
    return {name for name, tensor in standing.items() if id(tensor) in kept}
