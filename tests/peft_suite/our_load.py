"""Our load in the place of ``PeftModel.from_pretrained``, ``load_adapter`` and ``hotswap_adapter``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import peft.utils.hotswap
import torch
from peft import PeftModel

from safe_loading import load_adapter_on_rank, load_peft_on_rank

WORDS = r"Peft\w*Model\w*\.from_pretrained|load_adapter\(|hotswap_adapter"
# Arguments of peft that ours has by another name, or whose effect it always has.
_NAMES = {"subfolder": "adapter_subfolder", "revision": "adapter_revision", "key_mapping": "key_mapping"}
_ALWAYS = {"low_cpu_mem_usage", "torch_device"}
_from_pretrained = PeftModel.__dict__["from_pretrained"].__func__
_load_adapter = PeftModel.load_adapter
_hotswap = peft.utils.hotswap.hotswap_adapter
_inside = threading.local()  # peft's own load must not come back here


def replace(note_call: Callable[[], None]) -> None:
    """Put ours in the place of peft's; ``note_call`` is called when one of them is used."""

    def from_pretrained(cls: Any, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        given = _by_name(("adapter_name", "is_trainable", "config", "autocast_adapter_dtype"), args, kwargs)
        options = _options(given)
        if options is None or cls not in (PeftModel, *PeftModel.__subclasses__()) or _is_busy():
            return _plainly(_from_pretrained, cls, model, model_id, *args, **kwargs)
        note_call()
        name = options.pop("adapter_name", "default")
        loaded = load_peft_on_rank(model, {name: model_id}, device=_device(model), **options)
        return _cast_like_peft(loaded, name, given)

    def load_adapter(self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("adapter_name", "is_trainable", "torch_device", "autocast_adapter_dtype")
        given = _by_name(names, args, kwargs)
        options = _options(given)
        # Of a name that is there, peft overwrites the values: what hotswap=True asks ours for.
        if options is None or _is_busy() or given.get("adapter_name") in self.peft_config:
            return _plainly(_load_adapter, self, model_id, *args, **kwargs)
        note_call()
        name = options.pop("adapter_name")
        load_adapter_on_rank(self, model_id, name, **options)
        _cast_like_peft(self, name, given)
        return torch.nn.modules.module._IncompatibleKeys([], [])  # strict: there are none

    def hotswap(model: Any, path: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        given = _by_name(("torch_device",), args, kwargs)
        if set(given) - {"torch_device"} or not isinstance(model, PeftModel):
            _hotswap(model, path, adapter_name, *args, **kwargs)
        else:
            note_call()
            load_adapter_on_rank(model, path, adapter_name, hotswap=True)

    replaced: Any = PeftModel
    replaced.from_pretrained = classmethod(from_pretrained)
    replaced.load_adapter = load_adapter
    peft.utils.hotswap.hotswap_adapter = hotswap


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _options(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments for ours; None when the call is about something that ours does not have."""
    options: dict[str, Any] = {"allow_pickle": True}  # which peft reads without being asked to
    for name, value in given.items():
        if name in _ALWAYS or name == "autocast_adapter_dtype" or value is None:
            continue
        if name in ("adapter_name", "is_trainable"):
            options[name] = value
        elif name in _NAMES:
            options[_NAMES[name]] = value
        else:
            return None
    return options


def _device(model: torch.nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _cast_like_peft(model: Any, name: str, given: Mapping[str, Any]) -> Any:
    """Cast as peft does unless told not to: ours keeps the dtype on disk, and the tests look at peft's."""
    if hasattr(model.base_model, "_cast_adapter_dtype"):
        model.base_model._cast_adapter_dtype(name, given.get("autocast_adapter_dtype", True))
    return model


def _is_busy() -> bool:
    return bool(getattr(_inside, "busy", False))


def _plainly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = _is_busy()
    _inside.busy = True
    try:
        return call(*args, **kwargs)
    finally:
        _inside.busy = before
