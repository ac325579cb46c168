"""One rank of benchmarks/wrap_fsdp.py: loads by one method, and writes down its peak, bytes and whether it is right."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _accelerate_on_cpu import prepared
from torch import nn
from torch.distributed.tensor import DTensor

PAGE = os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Context manager: resident and private memory beyond the start, bytes read, and seconds."""

    def __enter__(self) -> Meter:
        self._stop = threading.Event()
        self.start = self.peak = _memory()
        self.timeline: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._time = time.perf_counter()
        self._thread.start()
        self._read = _io()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._time
        self._stop.set()
        self._thread.join()
        self._look()
        self.read = _io() - self._read

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self._look()

    def _look(self) -> None:
        resident, private = _memory()
        self.peak = max(self.peak[0], resident), max(self.peak[1], private)
        self.timeline.append((time.perf_counter() - self._time, resident - self.start[0]))


def _memory() -> tuple[int, int]:
    """Return the resident memory, pages of mapped files included, and the private part of it."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return int(resident) * PAGE, (int(resident) - int(shared)) * PAGE


def _io() -> int:
    """Return what this process has read through read() and pread(), sockets excluded by the kernel's rchar of files."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    return 0


def loopback() -> int:
    """Return the bytes that all processes have sent over loopback."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    return 0


class Counts:
    """What a wrap asks of the file system and of the store, counted while the methods of this package run."""

    def __init__(self) -> None:
        self.reads = self.exchanges = self.asked = self.polls = 0

    def begin(self) -> None:
        """Count from now on; another method than ours asks for none of it."""
        blocks: Any = importlib.import_module("safe_loading._model.layout.read_blocks")
        exchange: Any = importlib.import_module("safe_loading._ranks.exchange")
        read, store_exchange, private_store = blocks.read_adjacent, exchange.StoreExchange, exchange._private_store
        stores: dict[int, Store] = {}

        def counted(*arguments: Any) -> None:
            self.reads += 1
            read(*arguments)

        def counted_exchange(*arguments: Any) -> Any:
            self.exchanges += 1
            return store_exchange(*arguments)

        def counted_store() -> Any:
            real = private_store()
            return stores.setdefault(id(real), Store(real, self))

        blocks.read_adjacent, exchange.StoreExchange, exchange._private_store = counted, counted_exchange, counted_store


class Store:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any, counts: Counts) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        if name == "check":
            self._counts.polls += 1
        else:
            self._counts.asked += 1
        return getattr(self._store, name)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the units that the plain methods shard."""
    return list(model.model.layers)  # type: ignore[union-attr, arg-type]  # a Llama


def ours(folder: str) -> nn.Module:
    """wrap_fsdp_meta_safe from the folder."""
    from safe_loading import meta_model, wrap_fsdp_meta_safe

    return wrap_fsdp_meta_safe(meta_model(folder, attn_implementation="eager"), folder)


def ours_fsdp1(folder: str) -> nn.Module:
    """The same with FSDP1."""
    from safe_loading import meta_model, wrap_fsdp_meta_safe

    return wrap_fsdp_meta_safe(meta_model(folder, attn_implementation="eager"), folder, version=1)


def ours_to_f32(folder: str) -> nn.Module:
    """A bfloat16 checkpoint into a float32 model."""
    from safe_loading import meta_model, wrap_fsdp_meta_safe

    return wrap_fsdp_meta_safe(meta_model(folder, dtype=torch.float32), folder)


def ours_from_f32(folder: str) -> nn.Module:
    """A float32 checkpoint into a bfloat16 model."""
    from safe_loading import meta_model, wrap_fsdp_meta_safe

    return wrap_fsdp_meta_safe(meta_model(f"{folder}/f32", dtype=torch.bfloat16), f"{folder}/f32")


def ours_scatter(folder: str) -> nn.Module:
    """The weights of rank 0, scattered."""
    from safe_loading import meta_model, wrap_fsdp_meta_safe

    model = _real(folder) if dist.get_rank() == 0 else meta_model(folder, attn_implementation="eager")
    return wrap_fsdp_meta_safe(model)


def _real(folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    return model


def _sharded_meta(folder: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    from safe_loading import meta_model

    model = meta_model(folder, attn_implementation="eager")
    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)
    return model


def _buffers(model: nn.Module, folder: str) -> nn.Module:
    # the peers leave inv_freq to their caller; it is given to them, so that only weights are compared
    from safe_loading import meta_model
    from safe_loading._sharding.buffers import compute_buffers

    for name, value in compute_buffers(meta_model(folder)).items():
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._buffers[attribute] = value
    return model


def fsdp1_sync(folder: str) -> nn.Module:
    """FSDP1, rank 0 loads, sync_module_states."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
    from torch.distributed.fsdp.wrap import CustomPolicy

    from safe_loading import meta_model

    # it refuses CPU parameters with sync_module_states; gloo broadcasts them as well
    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None
    rank = dist.get_rank()
    model = _real(folder) if rank == 0 else meta_model(folder, attn_implementation="eager")
    chosen = set(layers(model))

    def empty(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
        param_init_fn=None if rank == 0 else empty,
        sync_module_states=True,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def broadcast(folder: str) -> nn.Module:
    """FSDP2, rank 0 loads, set_model_state_dict(broadcast_from_rank0)."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state = _real(folder).state_dict() if dist.get_rank() == 0 else {}
    model = _sharded_meta(folder)
    model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return _buffers(model, folder)


def accelerate(folder: str) -> nn.Module:
    """accelerate's fsdp2_load_full_state_dict, rank 0 loads."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    class Accelerator:
        is_main_process = dist.get_rank() == 0
        device = torch.device("cpu")
        process_index = dist.get_rank()

    state = _real(folder).state_dict() if dist.get_rank() == 0 else {}
    model = _sharded_meta(folder)
    fsdp2_load_full_state_dict(Accelerator(), model, state)
    return _buffers(model, folder)


def dcp_reader(folder: str) -> nn.Module:
    """FSDP2 and torch.distributed.checkpoint's HuggingFaceStorageReader."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    model = _sharded_meta(folder)
    model.to_empty(device="cpu")
    state = model.state_dict()
    load(state, storage_reader=HuggingFaceStorageReader(folder))
    return _buffers(model, folder)


def native(folder: str) -> nn.Module:
    """transformers' from_pretrained with a distributed_config."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(fsdp_size=dist.get_world_size())
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", distributed_config=config
    )
    return model


def ours_parts(folder: str) -> nn.Module:
    """wrap_fsdp_meta_safe from the folder, with tensor parallelism over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from safe_loading import meta_model, wrap_fsdp_meta_safe

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    return wrap_fsdp_meta_safe(meta_model(folder, attn_implementation="eager"), folder, mesh=mesh)


def native_parts(folder: str) -> nn.Module:
    """transformers' from_pretrained with tensor parallelism over two ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(fsdp_size=dist.get_world_size() // 2, tp_size=2)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", distributed_config=config
    )
    return model


def prepare_ours(folder: str) -> nn.Module:
    """A script with load_at_prepare, until accelerate has prepared it."""
    return prepared(folder, lean=True, efficient=False)


def prepare_plain(folder: str) -> nn.Module:
    """The same script without it: every rank loads the whole."""
    return prepared(folder, lean=False, efficient=False)


def prepare_efficient(folder: str) -> nn.Module:
    """The same script with accelerate's cpu_ram_efficient_loading: rank 0 loads and sends."""
    return prepared(folder, lean=False, efficient=True)


METHODS = {
    method.__name__: method
    for method in (
        ours,
        ours_fsdp1,
        ours_to_f32,
        ours_from_f32,
        ours_scatter,
        fsdp1_sync,
        broadcast,
        accelerate,
        dcp_reader,
        native,
        ours_parts,
        native_parts,
        prepare_ours,
        prepare_plain,
        prepare_efficient,
    )
}


def _touch(model: nn.Module) -> None:
    """Read every page of every shard: what is only mapped is not loaded yet."""
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.numel():
            local.detach().reshape(-1)[::1024].float().sum()


def _equal(model: Any, folder: str, rounded: bool) -> bool:
    """Compare logits (of what is not rounded) and all parameters with the checkpoint, one tensor at a time."""
    from safetensors import safe_open

    wanted = json.loads(Path(folder, "logits.json").read_text())
    tokens = torch.arange(1, 17).reshape(1, 16)
    with torch.no_grad():
        if not rounded and model(input_ids=tokens).logits[0, -1, :64].float().tolist() != wanted:
            return False
    if type(model).__name__ == "FullyShardedDataParallel":
        return True  # the logits went through every weight
    files = {}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        with safe_open(files[name], "pt") as file:
            if not torch.equal(whole, file.get_tensor(name).to(whole.dtype)):
                return False
    return True


def _source(folder: str, method: str) -> str:
    return f"{folder}/f32" if method == "ours_from_f32" else folder


def main(folder: str, method: str, out: str) -> None:
    """Run one method and write what was found."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers.models.llama.modeling_llama

    from safe_loading import meta_model, wrap_fsdp_meta_safe  # noqa: F401 - imports are no part of the load

    del transformers
    dist.init_process_group("gloo")
    meta_model(folder)
    dist.barrier()
    counts = Counts()
    counts.begin()
    wire = loopback()
    with Meter() as meter:
        model = METHODS[method](folder)
        _touch(model)
    dist.barrier()
    wire = loopback() - wire
    facts: dict[str, Any] = {
        "peak": meter.peak[0] - meter.start[0],
        "private": meter.peak[1] - meter.start[1],
        "seconds": meter.seconds,
        "timeline": meter.timeline[:: max(1, len(meter.timeline) // 300)],
        "read": meter.read,
        "wire": wire,
        "equal": _equal(model, _source(folder, method), rounded="f32" in method or "parts" in method),
    }
    report = getattr(model, "fsdp_report", None)
    if report is not None:
        facts |= {"bytes_read": report.bytes_read, "bytes_sent": report.bytes_sent}
        facts |= {"tensors": len([*model.parameters()]), **vars(counts)}
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4])
