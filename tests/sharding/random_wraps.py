"""Random wraps by a seed: a model, a source and options, against the engine's own wrap of a model with its weights.

Rank scripts import it. Sizes do not divide: parameters of one row, of none and of one element, buffers without
dimensions, ties over units, frozen parts and dtypes side by side.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_cases import plain, whole
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

from safe_loading import SafeLoadingError, wrap_fsdp_meta_safe

SHAPES = [(1,), (2,), (0,), (1, 5), (4, 1, 2), (7, 3), (1, 1), (3,), (5,), (2, 3, 1, 2), (13,), (0, 4)]
WIDTH = 10


class Part(nn.Module):
    """Two layers and parameters of odd shapes, all of which count."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        hidden = r.choice([1, 2, 3, 7, 8, 11])
        self.up = nn.Linear(WIDTH, hidden, bias=r.random() < 0.5)
        self.down = nn.Linear(hidden, WIDTH, bias=r.random() < 0.7)
        if r.random() < 0.5:
            self.norm: nn.Module = nn.LayerNorm(WIDTH) if r.random() < 0.5 else nn.RMSNorm(WIDTH)
        else:
            self.norm = nn.Identity()
        for number in range(r.randrange(4)):
            shape = r.choice(SHAPES)
            # torch reduces no gradient that has no elements
            self.register_parameter(f"odd{number}", nn.Parameter(torch.randn(shape), 0 not in shape))
        if r.random() < 0.5:
            self.register_buffer("scale", torch.rand(()))
        if r.random() < 0.3:
            self.register_buffer("count", torch.tensor(r.randrange(1 << 40)))
        if r.random() < 0.3:
            self.register_buffer("mask", torch.rand(1, WIDTH) > 0.3)
        if r.random() < 0.2:
            self.register_buffer("nothing", torch.empty(0, dtype=torch.int32))
        if r.random() < 0.2:
            self.register_buffer("narrow", torch.rand(1).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = getattr(self.norm, "weight", x)
        y = self.norm(x.to(norm.dtype)).to(self.up.weight.dtype)
        y = self.down(torch.tanh(self.up(y)).to(self.down.weight.dtype))
        for parameter in self._parameters.values():
            if parameter is not None:
                y = y + parameter.to(y.dtype).sin().sum()
        for buffer in self._buffers.values():
            if buffer is not None and buffer.numel() and buffer.dtype != torch.int64:
                y = y + buffer.to(y.dtype)
        return x + y.to(x.dtype)


class Odd(nn.Module):
    """Embeddings, parts in a list, and a head that may be tied, here or between parts."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        rows = r.choice([5, 7, 16, 31])
        self.rows = rows
        self.embed = nn.Embedding(rows, WIDTH)
        self.parts = nn.ModuleList([Part(r) for _ in range(r.randrange(1, 5))])
        self.head = nn.Linear(WIDTH, rows, bias=r.random() < 0.5)
        if r.random() < 0.3:
            self.gain = nn.Parameter(torch.randn(r.choice([1, 2, WIDTH])) if r.random() < 0.5 else torch.randn(1))
        if r.random() < 0.3:
            self.norm = nn.BatchNorm1d(rows)
        if r.random() < 0.4:
            self.head.weight = self.embed.weight
        if len(self.parts) > 1 and r.random() < 0.3:
            first, second = r.sample(list(self.parts), 2)
            second.up, second.down = first.up, first.down
            if r.random() < 0.5:
                second.norm = first.norm
        for module in self.modules():
            if r.random() < 0.15:
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)
        if r.random() < 0.3:
            for part in self.parts:
                if r.random() < 0.5:
                    for parameter in part.parameters():
                        parameter.data = parameter.data.bfloat16()
        if all(not parameter.requires_grad for parameter in self.parameters()):
            self.head.requires_grad_(True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).float()
        for part in self.parts:
            x = part(x)
        if hasattr(self, "gain"):
            x = x * self.gain.float().mean()
        x = self.head(x.to(self.head.weight.dtype)).float()
        return self.norm(x.to(self.norm.weight.dtype)).float() if hasattr(self, "norm") else x


def drawn(seed: int) -> Odd:
    """The model of a seed, in one process."""
    torch.manual_seed(seed)
    model = Odd(random.Random(seed)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 or parameter.numel() < 2:
                parameter.copy_(torch.randn(parameter.shape) / 3)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
    return model


def on_meta(seed: int) -> Odd:
    """The same on meta, with its ties."""
    with torch.device("meta"):
        return Odd(random.Random(seed)).train()


def options_of(r: random.Random, model: nn.Module, world: int) -> dict[str, Any]:
    """Random options of a wrap."""
    version = r.choice([1, 2, 2])
    meshes: list[Any] = [None, (world,), (1, world), *([(world, 1)] if version == 2 else [])]
    meshes += [(each, world // each) for each in range(2, world) if world % each == 0]
    mesh = r.choice(meshes)
    shards = world if mesh is None else mesh[-1]
    numbers = [each for each in range(2, shards + 1) if shards % each == 0] if version == 2 else []
    options: dict[str, Any] = {"version": version, "mesh": mesh, "verify": r.choice(["structure", "bytes"])}
    options["reshard_after_forward"] = r.choice([None, True, False, *numbers])
    if r.random() < 0.4 and not hasattr(model, "norm"):
        options["mp_policy"] = r.choice([torch.bfloat16, torch.float32])
    if r.random() < 0.3:
        options["offload_policy"] = True
    if r.random() < 0.3:
        options["ignored_params"] = r.sample(sorted(name for name, _ in model.named_parameters()), 1)
    if r.random() < 0.5:
        policies = [["Part"], ["Linear"], ["Part", "Embedding"], ["parts.0"], ["Part", "head"]]
        options["auto_wrap_policy"] = r.choice(policies)
    return options


def saved_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What safetensors keeps of a model: of tied parameters the first name."""
    kept: dict[int, str] = {}
    state = model.state_dict(keep_vars=True).items()
    return {name: each.detach().clone() for name, each in state if kept.setdefault(id(each), name) == name}


def engine_wrap(model: nn.Module, ours: Any, options: dict[str, Any]) -> nn.Module:
    """The engine's own wrap of a whole model, with the units of ours."""
    sizes = options["mesh"] or (dist.get_world_size(),)
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "fsdp")[-len(sizes) :])
    named = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    ignored = {named[name] for name in ours.fsdp_report.ignored}

    def averaged(gradient: torch.Tensor) -> torch.Tensor:  # a script's own affair with torch
        average = gradient.clone()
        for group in mesh.get_all_groups():
            dist.all_reduce(average, group=group)
            average /= dist.get_world_size(group)
        return average

    for parameter in ignored:
        if parameter.requires_grad:
            parameter.register_hook(averaged)
    units = [(unit.name.split(" + "), unit.keeps) for unit in ours.fsdp_report.units if unit.name != "(root)"]
    reshard, dtype = options["reshard_after_forward"], options.get("mp_policy")
    types: dict[str, Any] = {} if dtype is None else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    if options["version"] == 1:
        kinds = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") if reshard is False else ("FULL_SHARD", "HYBRID_SHARD")
        chosen = {modules[name] for names, _ in units for name in names}
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[kinds[mesh.ndim - 1]],
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
            mixed_precision=MixedPrecision(**types) if types else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            ignored_states=list(ignored) or None,
            device_mesh=mesh,
        )
    told: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**types), "ignored_params": ignored or None}
    for names, keeps in units:
        targets = [modules[name] for name in names]
        targets = targets[0] if len(targets) == 1 else targets  # type: ignore[assignment]  # fully_shard takes both
        fully_shard(targets, reshard_after_forward=False if keeps else reshard, **told)
    fully_shard(model, **told)
    return model


def steps(model: Any, ids: torch.Tensor) -> list[Any] | str:
    """Losses and norms of three steps with an evaluation between them, or the error of torch."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    logged: list[Any] = []
    try:
        for number in range(3):
            loss = model(ids).float().square().mean()
            loss.backward()
            logged += [loss.item(), _clipped(model)]
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                with torch.no_grad():
                    logged.append(model.eval()(ids).float().sum().item())
                model.train()
                if not hasattr(model, "fsdp_report"):
                    # torch's units that are kept would go on with what they gathered, in the dtype of that
                    for unit in (each for each in model.modules() if isinstance(each, FSDPModule)):
                        unit.reshard()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return logged


def _clipped(model: Any) -> float:
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(1.0))
    if not all(isinstance(each, DTensor) for each in model.parameters()):
        return 0.0  # torch takes no norm of sharded and of whole gradients together
    return float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, whole."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return _tensors(model)
    return _tensors(model)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {plain(name): whole(each).detach().clone() for name, each in model.named_parameters()}
    return found | {plain(name): each.detach().clone() for name, each in model.named_buffers()}


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The tensors that differ, or that only one of them has."""
    both = one.keys() & other.keys()
    return sorted(
        (one.keys() ^ other.keys())
        | {name for name in both if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])}
    )


def check(seed: int, folder: Path) -> list[str]:
    """The problems of a seed."""
    r = random.Random(seed)
    one, rank = drawn(seed), dist.get_rank()
    options = options_of(r, one, dist.get_world_size())
    kind = r.choice(["folder", "folder", "model", "real", "state"])
    path = folder / f"odd {seed}"
    if kind == "folder" and rank == 0:
        path.mkdir(exist_ok=True)
        save_file(saved_state(one), path / "model.safetensors", {"format": "pt"})
    dist.barrier()
    model = drawn(seed) if kind == "real" or (kind == "model" and rank == 0) else on_meta(seed)
    source: Any = {"folder": path, "state": one.state_dict() if rank == 0 else None}.get(kind)
    case = f"{seed} from {kind}, {options}"
    try:
        wrapped: Any = wrap_fsdp_meta_safe(model, source, timeout=60, **options)
    except SafeLoadingError as error:
        return [] if "FSDP needs one dtype" in str(error) else [f"{case}: {error}"]
    problems = [f"{case}: loaded other values of {bad}" for bad in unlike(tensors(one), tensors(wrapped))]
    try:
        other = engine_wrap(drawn(seed), wrapped, options)
    except RuntimeError:  # torch takes all that a module has into its unit, and has it twice if another has it too
        if len(dict(one.named_modules())) == len(dict(one.named_modules(remove_duplicate=False))):
            raise
        return problems
    ids = torch.randint(0, one.rows, (4, one.rows), generator=torch.Generator().manual_seed(100 * seed + rank))
    theirs, ours = steps(other, ids), steps(wrapped, ids)
    if theirs != ours:
        problems.append(f"{case}: {ours} and not {theirs}")
    if isinstance(ours, list):  # torch may refuse both, as layers whose weight is ignored under mixed precision
        problems += [f"{case}: trained other values of {bad}" for bad in unlike(tensors(other), tensors(wrapped))]
    return problems
