"""Names that the engines have for a verb's arguments: taken where they mean one thing, else answered with the place."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from safe_loading.errors import ArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardingStrategy,
    )
    from transformers.utils.quantization_config import QuantizationConfigMixin

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")  # of accelerate, for device_map=


class HubNames(TypedDict, total=False):
    """The names of huggingface_hub."""

    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    local_files_only: bool


class AdapterNames(TypedDict, total=False):
    """The names of peft that a load of adapters takes with the value that always holds here."""

    low_cpu_mem_usage: Literal[True]


class LaterNames(HubNames, AdapterNames, total=False):
    """The names of the engines that the load of a later adapter takes."""

    torch_device: torch.device | str | int | None


class VerifyNames(HubNames, total=False):
    """The names of the engines that the verification of a merge takes."""

    trust_remote_code: bool


class MergeNames(VerifyNames, total=False):
    """The names of the engines that a merge on disk takes."""

    torch_dtype: torch.dtype | str | None


class LoadNames(MergeNames, AdapterNames, total=False):
    """The names of the engines that a load takes."""

    attn_implementation: str | None
    quantization_config: Mapping[str, object] | QuantizationConfigMixin | None
    torch_device: torch.device | str | int | None


class InplaceNames(TypedDict, total=False):
    """The names of peft that a merge in memory takes."""

    progressbar: bool | None
    safe_merge: Literal[True]


class WrapNames(TypedDict, total=False):
    """The names of FSDP1 and of accelerate that a wrap takes."""

    mixed_precision: MixedPrecisionPolicy | MixedPrecision | torch.dtype | None
    cpu_offload: OffloadPolicy | CPUOffload | bool | None
    ignored_modules: Iterable[nn.Module] | None
    ignored_states: Iterable[nn.Module | nn.Parameter] | None
    device_mesh: DeviceMesh | None
    device_id: torch.device | int | None
    use_orig_params: Literal[True]
    sync_module_states: Literal[True]
    sharding_strategy: ShardingStrategy  # FULL_SHARD
    backward_prefetch: BackwardPrefetch | None  # BACKWARD_PRE
    forward_prefetch: Literal[False]
    limit_all_gathers: Literal[True]


class PlanNames(TypedDict, total=False):
    """The names of the engines that a plan takes."""

    torch_dtype: torch.dtype | str | None
    no_split_module_classes: object


@dataclass(frozen=True)
class EngineNames:
    """The names of the engines that one verb knows."""

    same: Mapping[str, str]  # the argument of the verb that means the same
    in_base_kwargs: tuple[str, ...] = ()
    answers: Mapping[str, str] = field(default_factory=dict)  # what to write in the place of the others
    # what is so anyway, and is taken if this is its value, or the name of its value in an enumeration
    holds: Mapping[str, bool | str] = field(default_factory=dict)

    def placed(
        self, verb: Callable[..., object], other: Mapping[str, object], own: Mapping[str, object], base_kwargs: object
    ) -> tuple[Any, ...]:
        """Return the values of ``own``, in their order, and of ``base_kwargs``, with those of ``other`` put in.

        An argument that is None, in any place, was not passed; "auto" is the default of dtypes.
        """
        if base_kwargs is not None and not isinstance(base_kwargs, Mapping):
            raise ArgumentError(f"base_kwargs={base_kwargs!r:.80}: pass a dict of arguments of from_pretrained.")
        passed_on: dict[str, object] = dict(base_kwargs or {})
        values, taken, problems = dict(own), dict[str, str](), list[str]()
        for name, value in other.items():
            place = self.same.get(name)
            if value is None and (place or name in self.in_base_kwargs or name in self.answers):
                continue
            if name in self.holds and self.holds[name] in (value, getattr(value, "name", value)):
                continue
            if answer := _PLANNED if _is_strategy(name, value) and place else self.answers.get(name):
                problems.append(f"{name}=: {answer}")
            elif place is not None:
                if values[place] is not None and not (isinstance(values[place], str) and values[place] == "auto"):
                    problems.append(f"{name}= is {taken.get(place, place)}=, which is passed too; leave {name} out")
                values[place], taken[place] = value, name
            elif name in self.in_base_kwargs:
                if name in passed_on:
                    problems.append(f"{name}= is in base_kwargs too; leave one of the two out")
                passed_on[name] = value
            else:
                problems.append(f"{name}=: {_nearest(name, verb)}")
        if problems:
            # Without the values, of which one may be a token.
            message = f"{verb.__name__} cannot take what was passed"
            raise (
                ArgumentError(f"{message}: {problems[0]}.")
                if len(problems) == 1
                else ArgumentError(f"{message}:", problems)
            )
        return (*values.values(), passed_on if passed_on or base_kwargs is not None else None)


def _is_strategy(name: str, value: object) -> bool:
    return name == "device_map" and isinstance(value, str) and value in _STRATEGIES


def _nearest(name: str, verb: Callable[..., object]) -> str:
    parameters = inspect.signature(verb).parameters
    near = difflib.get_close_matches(name, [each for each in parameters if each != "other"], n=2)
    hint = f" (nearest: {', '.join(near)})" if near else ""
    more = "; those of from_pretrained go into base_kwargs" if "base_kwargs" in parameters else ""
    return f"no argument of that name{hint}{more}"


OF_ADAPTERS = {
    "adapter_name": "leave it out; a load names its adapters as {name: folder or hub id}",
    "adapter_kwargs": "leave it out; adapter_revision= and adapter_subfolder= are for the adapter's repository",
}
CONFIG_OF_PEFT = "an adapter's config is read from its folder; config.save_pretrained(folder) changes it there"
# Names of other releases and of peft that no from_pretrained of transformers takes.
NOT_TAKEN = {
    "use_flash_attention_2": "use attn_implementation='flash_attention_2'",
    "use_auth_token": "use token=",
    "resume_download": "leave it out: a download goes on where it stopped",
    "ephemeral_gpu_offload": "leave it out: the norms of a DoRA are read from its file, and not computed",
}
_WHICH = {
    "revision": "pass base_revision= or adapter_revision=, of which each is for its own repository",
    "subfolder": "pass base_subfolder= or adapter_subfolder=, of which each is for its own repository",
}
_ON_THE_WAY = ("trust_remote_code", "token", "cache_dir", "local_files_only")
_WITH_ITS_MODEL = "leave it out: an adapter goes where its model is"
HELD_BY_LOADS = {"low_cpu_mem_usage": True}
LATER = EngineNames(
    {"torch_device": "device"},
    ("token", "cache_dir", "local_files_only"),
    {
        "revision": "use adapter_revision=",
        "subfolder": "use adapter_subfolder=",
        "device_map": _WITH_ITS_MODEL,
        "max_memory": _WITH_ITS_MODEL,
        "config": CONFIG_OF_PEFT,
        "ephemeral_gpu_offload": NOT_TAKEN["ephemeral_gpu_offload"],
        "torch_dtype": "use adapter_dtype=, None for the dtype on disk",
        "autocast_adapter_dtype": "use adapter_dtype=, None for the dtype on disk",
        "low_cpu_mem_usage": "leave it out: it is always on",
    },
    HELD_BY_LOADS,
)
_ONE_DEVICE = "use device=, the one device that computes the merged blocks"
MERGE = EngineNames(
    {"torch_dtype": "dtype"}, _ON_THE_WAY, {**_WHICH, "device_map": _ONE_DEVICE, "torch_device": _ONE_DEVICE}
)
_FACTORS = (
    "call set_scale(name, factor) of every layer that has one, before the merge; a merge on disk takes adapter_weights="
)
INPLACE = EngineNames(
    {"progressbar": "progress"},
    answers={
        "safe_merge": "leave it out: all is checked before the first weight is written; see check_finite=",
        "adapter_weights": _FACTORS,
        "weights": _FACTORS,
    },
    holds={"safe_merge": True},
)
_JUDGED = "leave it out: the dtypes of the folder are judged as they are"
VERIFY = EngineNames({}, _ON_THE_WAY, {**_WHICH, "torch_dtype": _JUDGED, "dtype": _JUDGED})
_PLANNED = "pass device_map=plan_device_map(base_model, max_memory), or leave it out for the device of this rank"
LOAD = EngineNames(
    {"torch_dtype": "dtype", "device_map": "device", "torch_device": "device"},
    (*_ON_THE_WAY, "attn_implementation", "quantization_config"),
    {
        **_WHICH,
        **NOT_TAKEN,
        **OF_ADAPTERS,
        "max_memory": _PLANNED,
        "adapter_name": "pass the adapter as {name: folder or hub id}",
        "config": f"{CONFIG_OF_PEFT}. That of the base goes into base_kwargs",
        "state_dict": "leave it out: put the values into a model, and pass that as the base",
        "autocast_adapter_dtype": "use adapter_dtype=, None for the dtype on disk",
        "low_cpu_mem_usage": "leave it out: it is always on",
    },
    HELD_BY_LOADS,
)
_PLACED = "leave it out: every rank gets its own shard, by whatever road"
_ON_UNITS = (
    "set it on each unit of FSDP1 after the wrap, before the first forward pass: for unit in "
    "FullyShardedDataParallel.fsdp_modules(model)"
)
WRAP = EngineNames(
    {
        "mixed_precision": "mp_policy",
        "cpu_offload": "offload_policy",
        "ignored_modules": "ignored_params",
        "ignored_states": "ignored_params",
        "device_mesh": "mesh",
        "device_id": "device",
    },
    answers={
        "sync_module_states": _PLACED,
        "param_init_fn": "leave it out: memory is made here. For what the source does not have, use init_new=",
        "use_orig_params": "leave it out: it is always on",
        "sharding_strategy": "use reshard_after_forward=False for SHARD_GRAD_OP, and mesh=(replicas, shards) for "
        "HYBRID_SHARD",
        "process_group": "use mesh=",
        **dict.fromkeys(("backward_prefetch", "forward_prefetch", "limit_all_gathers"), _ON_UNITS),
    },
    holds={
        "use_orig_params": True,
        "sync_module_states": True,
        "sharding_strategy": "FULL_SHARD",
        "backward_prefetch": "BACKWARD_PRE",
        "forward_prefetch": False,
        "limit_all_gathers": True,
    },
)
PLAN = EngineNames(
    {"torch_dtype": "dtype", "no_split_module_classes": "no_split_modules"},
    (),
    {
        "device_map": "leave it out: the plan is the map, for device_map= of from_pretrained",
        "offload_folder": "leave it out: pass it to from_pretrained, with device_map=plan",
        "special_dtypes": "leave it out: each tensor has the dtype that from_pretrained gives it",
        "tied_parameters": "leave it out: ties are those of the model",
        "fallback_allocation": "leave it out: the search tries every placement",
        "clean_result": "leave it out: modules on one device always share a key",
        "verbose": "leave it out: print(plan) says what is where",
        **dict.fromkeys(
            ("low_cpu_mem_usage", "offload_state_dict", "use_safetensors"),
            "leave it out: a plan reads no weights. It is for from_pretrained",
        ),
        **dict.fromkeys(
            ("load_in_4bit", "load_in_8bit"),
            "pass quantization_config= with it, the object that from_pretrained takes",
        ),
    },
    {"clean_result": True, "verbose": False, "low_cpu_mem_usage": True, "load_in_4bit": False, "load_in_8bit": False},
)
