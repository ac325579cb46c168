"""Buffers that no checkpoint holds: computed again as ``from_pretrained`` does, to the bit and with their dtype."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from safe_loading._core.names import canonical
from safe_loading._model.stand_ins import MetaStandIns
from safe_loading.errors import CheckpointError

Init = Callable[[torch.nn.Module], object]
# What plain modules call it, the most particular first; torchtitan's and torchvision's names among them.
_METHODS = ("reset_buffers", "init_buffers", "_init_buffers", "reset_parameters", "_reset_parameters", "init_weights")


def compute_buffers(model: torch.nn.Module, *, init: Init | None = None) -> dict[str, torch.Tensor]:
    """Return the value of every buffer that is on meta and that no state dict holds, on the CPU, by canonical name.

    It works on the model's tree while every parameter is a twin on meta: no parameter can be touched, and no memory is
    needed. transformers models initialize themselves whole, as ``from_pretrained`` lets them; other modules through
    the method by which their class resets them. Each buffer is filled with what no code computes first; so it is known
    that every element was written. Random generators are left as they were.

    Args:
        model: The model, with its parameters on meta or not, before FSDP1 or ``fully_shard`` wrap it.
        init: For modules whose buffers nothing else fills: called with each of them.

    Raises:
        CheckpointError: Buffers that nothing fills.
    """
    wanted = {name: place for name, place in _places(model).items() if _is_lost(*place)}
    if not wanted:
        return {}
    dtypes = _true_dtypes(model, {name: module._buffers[leaf] for name, (module, leaf) in wanted.items()})
    first, unwritten = _filled(model, wanted, dtypes, init, poison=0)
    # one byte has no value that cannot be computed: what another poison changes was not written either
    small = {name: place for name, place in wanted.items() if _is_small(dtypes[name])}
    if small:
        again, _ = _filled(model, wanted, dtypes, init, poison=1)
        unwritten |= {name for name in small if not torch.equal(first[name], again[name])}
    if unwritten:
        raise CheckpointError(
            "These buffers are on meta, no checkpoint holds them, and nothing computes them again:",
            [_what_to_do(name, *wanted[name]) for name in wanted if name in unwritten],
        )
    return first


def place_buffers(model: torch.nn.Module, values: Mapping[str, torch.Tensor], *, device: torch.device | str) -> None:
    """Put buffers in their places, each on ``device``.

    Args:
        model: The model, wrapped or not.
        values: What :func:`compute_buffers` returned.
        device: Where they belong.
    """
    for name, (module, leaf) in _places(model).items():
        if name in values:
            module._buffers[leaf] = values[name].to(device)


def _places(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    return {
        canonical(f"{path}.{leaf}" if path else leaf): (module, leaf)
        for path, module in model.named_modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None
    }


def _is_lost(module: torch.nn.Module, leaf: str) -> bool:
    buffer = module._buffers[leaf]
    return buffer is not None and buffer.is_meta and leaf in module._non_persistent_buffers_set


def _is_small(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def _true_dtypes(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.dtype]:
    """Return the dtype that each buffer has in a model which its class makes, and which nobody cast as a whole.

    ``model.to(torch.bfloat16)`` casts rotary frequencies too; on meta that loses nothing but their dtype.
    """
    dtypes = {name: buffer.dtype for name, buffer in buffers.items() if buffer is not None}
    if all(dtype == torch.float32 or not dtype.is_floating_point for dtype in dtypes.values()):
        return dtypes  # what a cast to a narrow dtype would not have left
    for path, module in _transformers_models(model):
        prefix, again = f"{canonical(path)}." if path else "", _made_again(module)
        for name, (other, leaf) in _places(again).items() if again is not None else ():
            made = other._buffers[leaf]
            if f"{prefix}{name}" in dtypes and made is not None:
                dtypes[f"{prefix}{name}"] = made.dtype
    return dtypes


def _made_again(model: PreTrainedModel) -> torch.nn.Module | None:
    """Return a skeleton of a model as ``from_pretrained`` makes it in the model's dtype; None where it cannot."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    dtype = max(counts, key=counts.__getitem__, default=torch.float32)
    if dtype.itemsize < 2:
        dtype = torch.bfloat16
    make: Any = type(model)._from_config
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made: torch.nn.Module = make(copy.deepcopy(model.config), dtype=dtype)
    except Exception:  # a class of its own, that wants more than a config; its dtypes are taken as they are
        return None
    return made


def _transformers_models(model: torch.nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the outermost transformers models of a tree with their paths."""
    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(
            not outer or path.startswith(f"{outer}.") for outer in found
        ):
            found.append(path)
            yield path, module


def _filled(
    model: torch.nn.Module,
    wanted: Mapping[str, tuple[torch.nn.Module, str]],
    dtypes: Mapping[str, torch.dtype],
    init: Init | None,
    *,
    poison: int,
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Let the model fill its buffers; return their values, and the names of those that still hold poison."""
    with MetaStandIns(model), _flagged(model), torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, (module, leaf) in wanted.items():
            buffer: Any = module._buffers[leaf]
            module._buffers[leaf] = _poisoned(buffer.shape, dtypes[name], poison)
        for _, inner in _transformers_models(model):
            initialize: Any = inner.initialize_weights  # transformers annotates nothing here
            initialize()
        left = {name: place for name, place in wanted.items() if _holds_poison(*place, poison)}
        for module in dict.fromkeys(module for module, _ in left.values()):
            _reset(module)
        left = {name: place for name, place in left.items() if _holds_poison(*place, poison)}
        for module in dict.fromkeys(module for module, _ in left.values()):
            if init is not None:
                init(module)
        values = {name: _value(*place) for name, place in wanted.items()}
        unwritten = {
            name
            for name, place in wanted.items()
            if _holds_poison(*place, poison) or values[name].dtype != dtypes[name]
        }
    return values, unwritten


def _reset(module: torch.nn.Module) -> None:
    for method in _METHODS:
        reset = getattr(module, method, None)
        if callable(reset):
            with contextlib.suppress(Exception):  # it asks for arguments, or cannot work on meta: the poison tells
                reset()
                return


def _poisoned(shape: torch.Size, dtype: torch.dtype, poison: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan"), dtype=dtype, device="cpu")
    if _is_small(dtype):
        return torch.full(shape, poison, dtype=dtype, device="cpu")
    return torch.full(shape, torch.iinfo(dtype).min + 12345, dtype=dtype, device="cpu")


def _holds_poison(module: torch.nn.Module, leaf: str, poison: int) -> bool:
    value = module._buffers[leaf]
    if value is None or not value.numel():
        return False
    if value.is_meta:
        return True
    if _is_small(value.dtype):
        return False
    mark = _poisoned(torch.Size(()), value.dtype, poison)
    return bool((value.isnan() if mark.isnan() else value == mark).any())


def _value(module: torch.nn.Module, leaf: str) -> torch.Tensor:
    value = module._buffers[leaf]
    return torch.empty(0) if value is None else value.detach()


@contextlib.contextmanager
def _flagged(model: torch.nn.Module) -> Iterator[None]:
    """Mark every parameter as loaded and no module as done, which is where ``from_pretrained`` initializes."""
    flag = "_is_hf_initialized"
    before = [(module, module.__dict__.pop(flag)) for module in model.modules() if flag in module.__dict__]
    for parameter in model.parameters():
        setattr(parameter, flag, True)  # a twin's: it goes with it
    try:
        yield
    finally:
        for module in model.modules():
            module.__dict__.pop(flag, None)
        for module, value in before:
            module.__dict__[flag] = value


def _what_to_do(name: str, module: torch.nn.Module, leaf: str) -> str:
    kind = type(module).__name__
    buffer: Any = module._buffers[leaf]
    return (
        f"{name}: {buffer.dtype} {list(buffer.shape)} of {kind}. Give {kind} a method reset_buffers() that fills it, "
        f"build the model with this buffer on the CPU, or fill it in init_new="
    )
