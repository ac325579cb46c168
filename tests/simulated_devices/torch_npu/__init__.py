"""A stand-in for torch_npu: the simulated accelerator under the name "npu".

peft, accelerate, transformers and safetensors know NPUs through ``torch_npu`` and ``torch.npu``, so they run on the
simulated devices as they are. Import this before them: they look once, as they are imported.

What tests ask of it: :func:`contexts`, :func:`stats`, :func:`log`, :func:`reset`, :func:`reset_peak`,
:func:`set_limit`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import backend_registration

if TYPE_CHECKING:
    from collections.abc import Callable

    Device = torch.device | str | int | None

__version__ = torch.__version__.split("+")[0]  # torch_npu's versions follow torch's


def _load_library() -> types.ModuleType:
    path = os.environ.get("SIMDEV_LIBRARY")
    if not path:
        raise ImportError("SIMDEV_LIBRARY does not name the built library; simulated_devices/build.py prints its path")
    spec = importlib.util.spec_from_file_location("_simdev", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"SIMDEV_LIBRARY={path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_simdev = _load_library()


def _index(device: Device = None) -> int:
    """The number of `device`; without one, that of the current device."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(_simdev.current_device()) if index is None else index


# What tests ask ------------------------------------------------------------------------------------------------------


def contexts() -> list[int]:
    """The devices on which a context exists."""
    return [device for device, counters in stats().items() if counters["context"]]


def stats() -> dict[int, dict[str, int]]:
    """The counters of each device.

    ``context``, ``live``, ``peak`` and ``limit`` (bytes), ``allocations`` and ``failures`` (how many), and the bytes
    copied: ``from_host`` and ``from_peer`` to this device, ``to_host`` from it, ``within`` it.
    """
    return dict(_simdev.stats())


def log() -> list[tuple[int, str]]:
    """What first touched each device that has a context, in order."""
    return list(_simdev.log())


def reset() -> None:
    """Forget contexts, peaks, counts and the log; device 0 is current again. Living blocks and limits stay."""
    _simdev.reset()


def reset_peak(device: Device = None) -> None:
    """Let the peak of `device` start again from what is alive."""
    _simdev.reset_peak(_index(device))


def set_limit(device: Device, limit: int | None) -> None:
    """Give `device` a memory of `limit` bytes; None is the 64 GiB that it starts with."""
    _simdev.set_limit(_index(device), _simdev.DEFAULT_LIMIT if limit is None else limit)


# torch.npu, as far as the engines ask for it -------------------------------------------------------------------------


class _DeviceGuard:
    """``with torch.npu.device(3):``, with the rules of ``torch.cuda.device``."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = _simdev.exchange_device(self._index)

    def __exit__(self, *exc_info: object) -> None:
        _simdev.restore_device(self._before)


def _memory_info(device: Device = None) -> tuple[int, int]:
    free, total = _simdev.memory_info(_index(device))
    return int(free), int(total)


def _properties(device: Device = None) -> types.SimpleNamespace:
    index = _index(device)  # no context: the limit is a number beside the device
    return types.SimpleNamespace(name="simulated NPU", total_memory=int(_simdev.stats()[index]["limit"]))


def _cap(fraction: float, device: Device = None) -> None:
    index = _index(device)
    _simdev.set_limit(index, int(fraction * int(_simdev.stats()[index]["limit"])))


def _counter(name: str) -> Callable[..., int]:
    def read(device: Device = None) -> int:
        return int(_simdev.stats()[_index(device)][name])

    return read


def _nothing(*args: Any, **kwargs: Any) -> None:
    """For what has no meaning here: caches, streams and the seeds of the devices (the CPU's generator is theirs)."""


def _not_here(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("the simulated accelerator has no fused kernels")


def _torch_npu_module() -> types.ModuleType:
    module = types.ModuleType("torch.npu")
    names: dict[str, Any] = {
        "is_available": lambda: _simdev.device_count() > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": _simdev.device_count,
        "current_device": _simdev.current_device,
        "set_device": lambda device: _simdev.set_device(_index(device)),
        "device": _DeviceGuard,
        "get_device_name": lambda device=None: "simulated NPU",
        "synchronize": _nothing,
        "get_device_properties": _properties,
        # memory
        "set_per_process_memory_fraction": _cap,
        "empty_cache": _nothing,
        "mem_get_info": _memory_info,
        "memory_allocated": _counter("live"),
        "memory_reserved": _counter("live"),
        "max_memory_allocated": _counter("peak"),
        "max_memory_reserved": _counter("peak"),
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        # dtypes
        "is_bf16_supported": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        # random numbers: torch.manual_seed and the CPU's state are all there is
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": _nothing,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


backend_registration.rename_privateuse1_backend("npu")
npu = _torch_npu_module()
torch._register_device_module("npu", npu)  # type: ignore[no-untyped-call]
sys.modules["torch.npu"] = npu
backend_registration.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)

# transformers imports these by name wherever NPUs exist.
npu_fusion_attention = _not_here
npu_rotary_mul = _not_here
npu_rms_norm = _not_here
