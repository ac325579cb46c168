"""What load_peft.py measures, each part in processes of its own: ``python _peft_child.py JSON``."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import PeakSampler, median, private_bytes

if os.environ.get("SIMDEV_LIBRARY"):
    importlib.import_module("torch_npu")  # the engines look for it once, as they are imported

import torch
from _peft_methods import METHODS, differing, load_base, save_adapter, save_base
from safetensors.torch import load_file

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make(spec: dict[str, Any]) -> dict[str, Any]:
    """Make the checkpoints: a bf16 base with two fp32 adapters, a tiny one to warm up, nine tiny pairs of dtypes.

    Returns their sizes, and which accelerator of CUDA there is.
    """
    folder, rank = Path(spec["folder"]), spec["rank"]
    torch.manual_seed(0)
    for name, hidden, layers in (("real", spec["hidden"], spec["layers"]), ("tiny", 64, 2)):
        save_base(folder / name, hidden, layers, torch.bfloat16)
        save_adapter(folder / f"{name}-first", folder / name, rank, torch.float32, 1)
        save_adapter(folder / f"{name}-second", folder / name, rank, torch.float32, 2)
    for base, dtype in DTYPES.items():
        save_base(folder / f"base-{base}", 64, 2, dtype)
        for adapter, other in DTYPES.items():
            save_adapter(folder / f"base-{base}-{adapter}", folder / f"base-{base}", 8, other, 3)
    sizes = {}
    for name in ("real", "real-first"):
        files = list((folder / name).glob("*.safetensors"))
        sizes[name] = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    modules = len(load_file(folder / "real-first" / "adapter_model.safetensors")) // 2
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "base_bytes": sizes["real"],
        "adapter_bytes": sizes["real-first"],
        "modules": modules,
        "cuda": cuda,
        "accelerator": torch.cuda.get_device_name(0) if cuda else "",
    }


def exact(spec: dict[str, Any]) -> dict[str, Any]:
    """Load every pair of dtypes by every method; compare bits and dtype with the file, and the random state."""
    folder, device = Path(spec["folder"]), _device(spec)
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        pairs = {}
        drawn = False
        for base in DTYPES:
            for adapter in DTYPES:
                paths = str(folder / f"base-{base}"), str(folder / f"base-{base}-{adapter}")
                before = _random_state(device)
                model = method.load(*paths, device)
                drawn |= _random_state(device) != before
                pairs[f"{adapter} on {base}"] = differing(model, paths[1])
        before = _random_state(device)
        model = method.load(str(folder / "real"), str(folder / "real-first"), device)
        found[name] = {
            "pairs": pairs,
            "real": differing(model, str(folder / "real-first")),
            "random": drawn or _random_state(device) != before,
        }
        del model
        gc.collect()
    return found


def _random_state(device: torch.device) -> tuple[bytes, object, bytes]:
    own = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), own


def attach(spec: dict[str, Any]) -> dict[str, Any]:
    """Time every method's attachment to a base that lies on the device already.

    The methods take turns, so that a slow moment of the machine meets all of them, and each round begins with another
    one. Each time the base is a fresh one: it is loaded and the garbage collected before the clock starts. Round 0 is
    the warm-up. The floor reads the adapter's file and moves each tensor once, and does nothing else.
    """
    folder, device = Path(spec["folder"]), _device(spec)
    base, adapter = str(folder / "real"), str(folder / "real-first")
    names = [*METHODS, "floor"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(spec["repeats"] + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            spent = _attach_once(name, base, adapter, device)
            if number:
                seconds[name].append(spent)
    return {name: {"median": median(values), "all": values} for name, values in seconds.items()}


def _attach_once(name: str, base: str, adapter: str, device: torch.device) -> float:
    work: Callable[[], Any]
    if name == "floor":
        work = lambda: _floor(adapter, device)  # noqa: E731
    else:
        loaded, method = load_base(base, device), METHODS[name]
        work = lambda: method.attach(loaded, adapter, device)  # noqa: E731
    gc.collect()
    _synchronize(device)
    start = time.perf_counter()
    kept = work()
    _synchronize(device)
    spent = time.perf_counter() - start
    del kept
    return spent


def _floor(adapter: str, device: torch.device) -> list[torch.Tensor]:
    file = load_file(f"{adapter}/adapter_model.safetensors")
    return [value.clone() if device.type == "cpu" else value.to(device) for value in file.values()]


def rank(spec: dict[str, Any]) -> dict[str, Any]:
    """Load by one method as one of several ranks, and return what this process and its devices held.

    How the private memory of a load is computed:

    * The ranks run at the same time and wait for one another before and after the load, so pages of the checkpoint
      that all of them map are shared pages when they are counted, as they are in a real job.
    * A tiny model of the same architecture is loaded by the same method first. What that leaves behind is paid once per
      process, whatever is loaded: imported modules, threads, the allocator's arenas. It is reported apart (`fixed`).
    * private(end) - private(before), after a garbage collection each time, minus what the device holds more: the
      simulated devices' bytes lie in host memory, and their counters know them exactly. On the CPU the adapter is
      subtracted instead, which has to lie in private memory there; the base's pages are shared by mmap.
    * With simulated devices malloc is told to give every block of 32 KiB and more a mapping of its own (load_peft.py
      sets GLIBC_TUNABLES). Else the device and the host share one heap: a device's block that is freed would stay
      there and look like host memory, and one that fills a hole which the load left would be subtracted for nothing.
      The CPU's ranks, which have no such device, run with malloc as it is.
    """
    method, device = METHODS[spec["method"]], _device(spec)
    folder = Path(spec["folder"])
    _join(spec)
    start = private_bytes()[0] - _living(device)
    model = method.load(str(folder / "tiny"), str(folder / "tiny-first"), device)
    method.later(model, str(folder / "tiny-second"))
    method.swap(model, str(folder / "tiny-first"))
    del model
    gc.collect()
    _meet()
    before, dirty = (value - _living(device) for value in private_bytes())
    _forget(device)
    with PeakSampler(lambda: _living(device)) as sampler:
        model = method.load(str(folder / "real"), str(folder / "real-first"), device)
    gc.collect()
    steps = {"load": _devices(device)}
    _meet()
    after = private_bytes()[0] - _living(device)
    _meet()
    facts = {
        "fixed": before - start,
        "private": after - before - (spec["adapter_bytes"] if device.type == "cpu" else 0),
        "peak": sampler.peak - dirty - (spec["adapter_bytes"] if device.type == "cpu" else 0),
        "slack": sampler.slack,
        "samples": sampler.samples,
        "base_bytes": _base_bytes(model),
    }
    for step, work in (("later", method.later), ("swap", method.swap)):
        _forget(device)
        work(model, str(folder / ("real-second" if step == "later" else "real-first")))
        gc.collect()
        steps[step] = _devices(device)
    _meet()
    return {**facts, "steps": steps}


def _join(spec: dict[str, Any]) -> None:
    os.environ.update(
        RANK=str(spec["rank"]),
        LOCAL_RANK=str(spec["rank"]),
        WORLD_SIZE=str(spec["ranks"]),
        LOCAL_WORLD_SIZE=str(spec["ranks"]),
    )
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{spec['meeting']}", rank=spec["rank"], world_size=spec["ranks"]
    )
    _meet()


def _meet() -> None:
    torch.distributed.barrier()


def _base_bytes(model: Any) -> int:
    tensors = (*model.named_parameters(), *model.named_buffers())
    own = {tensor.untyped_storage()._cdata: tensor.nbytes for name, tensor in tensors if ".lora_" not in name}
    return sum(own.values())


def _device(spec: dict[str, Any]) -> torch.device:
    if spec["target"] == "cpu":
        return torch.device("cpu")
    return torch.device(spec["target"], spec.get("rank", 0) % torch.accelerator.device_count())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# What the devices held. On the simulated ones by their counters, on CUDA by the driver's contexts and the allocator's
# statistics, for every device of this process.


def _simulated() -> Any:
    return importlib.import_module("torch_npu")


def _living(device: torch.device) -> int:
    """The bytes of all simulated devices: they lie in host memory. CUDA's do not."""
    if device.type != "npu":
        return 0
    return sum(counters["live"] for counters in _simulated().stats().values())


def _forget(device: torch.device) -> None:
    if device.type == "npu":
        _simulated().reset()
        # as a script under torchrun does; it makes the one context that is this rank's own
        torch.accelerator.set_device_index(device.index)
    elif device.type == "cuda":
        torch.cuda.set_device(device)
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def _devices(device: torch.device) -> dict[str, int]:
    """The peak on the own device; on the others the bytes at their peak and at the end, and the contexts."""
    if device.type == "npu":
        stats = _simulated().stats()
        seen = {i: (s["peak"], s["live"], bool(s["context"])) for i, s in stats.items()}
    elif device.type == "cuda":
        seen = {index: _cuda(index) for index in range(torch.cuda.device_count())}
    else:
        return {}
    others = [values for index, values in seen.items() if index != device.index]
    return {
        "peak": seen[device.index or 0][0],
        "stray_peak": sum(peak for peak, _, _ in others),
        "stray_left": sum(live for _, live, _ in others),
        "stray_contexts": sum(context for _, _, context in others),
    }


def _cuda(index: int) -> tuple[int, int, bool]:
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # only CUDA builds have it
    if not has_context(index):
        return 0, 0, False
    return torch.cuda.max_memory_allocated(index), torch.cuda.memory_allocated(index), True


def alone(spec: dict[str, Any]) -> dict[str, Any]:
    """Do the parts that need one process only; an import of the engines takes seconds."""
    return {"attach": attach(spec), "exact": exact(spec)}


def main() -> None:
    """Do the part that the specification names, and write its facts to the file that it names."""
    spec = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(spec.get("threads", 1))
    parts = {"make": make, "alone": alone, "rank": rank}
    Path(spec["result"]).write_text(json.dumps(parts[spec["part"]](spec)))


if __name__ == "__main__":
    main()
