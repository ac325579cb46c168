"""``plan_device_map``: an exact placement under hard limits, before a byte is loaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.hub import HubOptions
from safe_loading._core.arguments import compute_capability
from safe_loading._core.engine_names import PLAN, PlanNames
from safe_loading._core.parse_size import HOST, UNLIMITED, Device, Limits, Size, parse_device, parse_limits, parse_size
from safe_loading._core.report import Finding
from safe_loading._core.workload import Workload, require_workload
from safe_loading._model.formats.format import TargetCard
from safe_loading._model.layout.source_model import ModelSource, model_of
from safe_loading._model.positions import long_rows
from safe_loading._model.quantized.kbit_preparation import (
    KbitPreparation,
    check_preparation,
    preparation_assumed,
    prepare_base,
)
from safe_loading._model.quantized_meta_model import QuantizationConfig
from safe_loading._model.torch_state import undone_when_raised
from safe_loading.errors import ArgumentError

from .plan.device_map_plan import DeviceMapPlan
from .plan.device_memory import CUDA_CONTEXT, accelerator, capability_here, free_host, free_now
from .plan.planner import Planner
from .plan.request import PlanRequest
from .trace.inputs import assume_padding_token
from .trace.read_adapter import base_and_workload, naming_base, with_read_adapter
from .trace.step_tensors import Inputs

if TYPE_CHECKING:
    from typing_extensions import Unpack


@undone_when_raised
def plan_device_map(
    model: str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    max_memory: Limits | None = None,
    *,
    workload: Workload | None = None,
    dtype: torch.dtype | str | None = None,
    quantization_config: QuantizationConfig = None,
    no_split_modules: Iterable[str] | None = None,
    objective: Literal["balance", "fill"] = "balance",
    offload: Literal["never", "cpu", "disk"] = "never",
    verify: bool = True,
    overhead: Size | Limits | None = None,
    inputs: Inputs | None = None,
    auto_class: type | str | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    capability: tuple[int, int] | None = None,
    offload_buffers: bool = False,
    nodes: Sequence[Sequence[object]] | None = None,
    prepare_for_kbit: KbitPreparation | None = None,
    **other: Unpack[PlanNames],
) -> DeviceMapPlan:
    """Plan which module goes to which device, so that no limit is exceeded and nothing is offloaded without need.

    The layers of the model are a chain, and the placement is a partition of it into contiguous stages: the one with the
    least largest load (as a fraction of a limit), and among those the fewest crossings. It is exact, and so is the
    answer that there is none. Nothing is loaded, and no device is touched.

    Args:
        model: A hub id, a folder, a config, or a module (real or on meta). The folder of an adapter stands for the
            base that it names, with the adapter.
        max_memory: What this model may take on each device, to the byte: ``{0: "20GiB", 1: 16e9, "cpu": "64GiB"}``.
            None takes what is free now on each visible accelerator less a context's overhead, or the host's memory
            where there is none.
        workload: What the model will be asked to do; None for its weights alone.
        dtype: The dtype of the weights, as for ``from_pretrained``. None takes the checkpoint's.
        quantization_config: As for ``from_pretrained``, or the dict that a config.json has. No package of a method is
            needed, and no GPU.
        no_split_modules: Names of classes that stay on one device. None takes what the model says, and every entry of
            its lists of layers; a list that is passed replaces all of this.
        objective: "balance" evens out the loads; "fill" takes the fewest devices, one after the other.
        offload: Where weights may go that no accelerator has room for: "never", "cpu", or "disk" once the host is
            full. What leaves is what moves the fewest bytes per token: any blocks, and experts of mixtures.
        verify: Whether the step is run with the map, on simulated devices. Modules whose tensors meet there from two
            devices are kept together, and the plan is made again.
        overhead: Bytes to keep free on each accelerator, or by device. None keeps nothing free under explicit limits.
        inputs: Tensors, or dicts and lists of them, by argument name, whose shapes and dtypes are used, for models
            whose inputs are not tokens.
        auto_class: The class to build from a config, or its name; by default the one that the config names.
        attn_implementation: As for ``from_pretrained``; it changes what activations take.
        revision: Branch, tag or commit of a hub id.
        subfolder: Folder inside the folder or hub id.
        token: Token for the hub, as for ``huggingface_hub``.
        trust_remote_code: Whether the repository's own code may run.
        capability: Compute capability of the cards on which the model will run, such as (8, 0) for an A100 and (9, 0)
            for an H100. It decides which kernels run, and whether quantized weights stay so or are dequantized.
            None takes that of this machine's GPUs where ``max_memory`` is None; otherwise kernels are those of an A100,
            and formats stay as they are.
        offload_buffers: Whether buffers that are saved are offloaded with the weights. Pass the same to
            ``from_pretrained`` or ``accelerate.dispatch_model``.
        nodes: The cards of each node, such as ``[[0, 1, 2, 3], [4, 5, 6, 7]]``, for limits of more cards than one
            machine has. Of the placements with the least largest load, the plan is then one with the fewest crossings
            between nodes. :meth:`DeviceMapPlan.stages` hands it to an engine that runs on several nodes.
        prepare_for_kbit: Who prepares a base in 4 or 8 bits for training: "trl", whose trainers leave the base as it
            was loaded and cast the adapter to bfloat16; "peft", whose ``prepare_model_for_kbit_training`` casts what is
            not packed to float32 and leaves the adapter in float32; or "none". None takes trl's, which most people
            use. A base that is passed as a module is as it is, and only the adapter of the workload is cast.
        **other: Names of transformers and accelerate that mean one thing here: ``torch_dtype`` is ``dtype``,
            ``no_split_module_classes`` is ``no_split_modules``.

    Returns:
        A ``dict`` for ``device_map=`` that has a table, a picture and ``verified``.

    Raises:
        DeviceMapInfeasible: It does not fit. The text says how much is missing where, and which change is enough.
        ArgumentError: A limit or another argument cannot be read, or no model can be built from the config.
        CheckpointError: The folder's checkpoint is incomplete or damaged.
    """
    passed = {name: value for name, value in locals().items() if name != "other"}
    return Planner(plan_request(**passed, **other)).plan()


def plan_request(
    model: str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    max_memory: Limits | None = None,
    *,
    workload: Workload | None = None,
    dtype: torch.dtype | str | None = None,
    quantization_config: QuantizationConfig = None,
    no_split_modules: Iterable[str] | None = None,
    objective: Literal["balance", "fill"] = "balance",
    offload: Literal["never", "cpu", "disk"] = "never",
    verify: bool = True,
    overhead: Size | Limits | None = None,
    inputs: Inputs | None = None,
    auto_class: type | str | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    capability: tuple[int, int] | None = None,
    offload_buffers: bool = False,
    nodes: Sequence[Sequence[object]] | None = None,
    prepare_for_kbit: KbitPreparation | None = None,
    **other: Unpack[PlanNames],
) -> PlanRequest:
    """Return the request that :func:`plan_device_map` plans for: its arguments, checked, with the model built."""
    own = {"dtype": dtype, "no_split_modules": no_split_modules}
    dtype, no_split_modules, _ = PLAN.placed(plan_device_map, other, own, None)
    _check_choices(objective, offload)
    model, asked, naming = base_and_workload(model, _checked_workload(workload))
    limits = parse_limits(max_memory) if max_memory is not None else free_now()
    if set(limits) == {"disk"}:
        raise ArgumentError('max_memory names the disk alone, where nothing runs: add {0: "20GiB"} or {"cpu": "9GB"}.')
    reserved = _overhead(overhead, limits, derived=max_memory is None)
    limits = _without_useless_cards(limits, offload)
    capability = capability_here() if capability is None and max_memory is None else capability
    if capability is not None:
        compute_capability(capability)
    options = {"dtype": dtype, "quantization_config": quantization_config, "auto_class": auto_class}
    build = functools.partial(
        _planned_model,
        model,
        options | {"trust_remote_code": trust_remote_code},
        card=TargetCard(
            capability,
            on_host=all(device in HOST for device in limits),
            trains=workload is not None and workload.kind == "train",
        ),
        prepare_for_kbit=prepare_for_kbit,
        hub=HubOptions(revision, subfolder, token),
        by_trainer=None if workload is None else workload.model_init_kwargs,
    )
    with naming_base(naming):
        planned, findings = build(attn_implementation=attn_implementation)
    return PlanRequest(
        model=planned,
        limits=_with_hosts(limits, offload),
        overhead=reserved,
        workload=asked,
        no_split_modules=_class_names(no_split_modules),
        objective=objective,
        offload=offload,
        verify=verify,
        inputs=inputs,
        capability=capability,
        findings=(*findings, *long_rows(planned, workload)),
        offload_buffers=bool(offload_buffers),
        prepare_for_kbit=check_preparation(prepare_for_kbit),
        node_of=_node_of(nodes, limits, offload),
        with_attention=lambda name: build(attn_implementation=name)[0],
    )


def _planned_model(
    source: ModelSource,
    options: Mapping[str, Any],
    *,
    card: TargetCard,
    prepare_for_kbit: KbitPreparation | None,
    hub: HubOptions,
    by_trainer: Mapping[str, Any] | None,
    attn_implementation: str | None,
) -> tuple[torch.nn.Module, Sequence[Finding]]:
    """Return the model to plan for and the findings about it; ``options`` are those of `model_of`."""
    asked = {**options, "attn_implementation": attn_implementation}
    made = model_of(source, asked, card=card, hub=hub, whole=True, by_trainer=by_trainer)
    if isinstance(source, torch.nn.Module):
        return source, ()
    assume_padding_token(made.model)
    if not (card.trains and made.packs_on_device):
        return made.model, made.findings
    preparation = check_preparation(prepare_for_kbit)
    prepare_base(made.model, preparation)
    assumed = [preparation_assumed(preparation)] if prepare_for_kbit is None else []
    return made.model, (*made.findings, *assumed)


def _check_choices(objective: str, offload: str) -> None:
    if objective not in ("balance", "fill"):
        raise ArgumentError(f"objective={objective!r} is neither 'balance' nor 'fill'.")
    if offload not in ("never", "cpu", "disk"):
        raise ArgumentError(f"offload={offload!r} is none of 'never', 'cpu' and 'disk'.")


def _checked_workload(workload: object) -> Workload:
    if workload is None:
        return Workload.weights_only()
    workload = require_workload(workload, "Workload.generate(1, 4096)")
    workload.require_sizes()
    return with_read_adapter(workload)


def _class_names(names: object) -> list[str] | None:
    if names is None:
        return None
    entries = list(names) if isinstance(names, Iterable) and not isinstance(names, (str, bytes)) else [None]
    class_names = [entry for entry in entries if isinstance(entry, str)]
    if len(class_names) < len(entries):
        raise ArgumentError(
            f"no_split_modules={names!r:.80}: pass a list of class names, for example ['LlamaDecoderLayer']."
        )
    return class_names


def _overhead(overhead: object, limits: Mapping[Device, int], *, derived: bool) -> dict[Device, int]:
    accelerators = [device for device in limits if device not in HOST]
    if overhead is None:
        size = CUDA_CONTEXT if derived and accelerators and accelerator() == "cuda" else 0
        return dict.fromkeys(accelerators, size)
    if isinstance(overhead, Mapping):
        reserved = parse_limits(overhead, "overhead") if overhead else {}
        unknown = [device for device in reserved if device not in limits]
        if unknown:
            raise ArgumentError(f"overhead names {unknown}, and the limits are for {[*limits]}; name one of these.")
        return reserved
    return dict.fromkeys(accelerators or ["cpu"], parse_size(overhead, "overhead"))


def _node_of(nodes: Sequence[Sequence[object]] | None, limits: Mapping[Device, int], offload: str) -> dict[Device, int]:
    """Return the number of each card's node; refuse cards without a limit, without a node, or on two."""
    if nodes is None:
        return {}
    if offload != "never":
        raise ArgumentError(f"nodes= and offload={offload!r} do not go together: what is offloaded runs on one card.")
    if isinstance(nodes, str) or not all(isinstance(cards, Sequence) and not isinstance(cards, str) for cards in nodes):
        raise ArgumentError(f"nodes={nodes!r:.80}: pass the cards of each node, such as [[0, 1], [2, 3]].")
    node_of: dict[Device, int] = {}
    problems = []
    for number, cards in enumerate(nodes):
        for card in (parse_device(card, "nodes") for card in cards):
            if card in HOST or card not in limits:
                problems.append(f"{card!r} of node {number} has no limit; name it in max_memory.")
            if card in node_of:
                problems.append(f"{card!r} is on node {node_of[card]} and on node {number}; name it once.")
            node_of[card] = number
    lost = [card for card in limits if card not in HOST and card not in node_of]
    problems += [f"{card!r} has a limit and is on no node; name it in nodes." for card in lost]
    if problems:
        raise ArgumentError("nodes= does not go with max_memory:", problems)
    return node_of


def _without_useless_cards(limits: dict[Device, int], offload: str) -> dict[Device, int]:
    """Return the limits of the host and the disk alone where every card's is 0 and offloading is allowed.

    accelerate, too, then puts all modules on the host, which runs them.
    """
    hosts: dict[Device, int] = {device: limit for device, limit in limits.items() if device in HOST}
    has_room = any(limit for device, limit in limits.items() if device not in hosts)
    return limits if has_room or offload == "never" else hosts


def _with_hosts(limits: Mapping[Device, int], offload: str) -> dict[Device, int]:
    """Return the limits with the host's and the disk's, where they may be used and were not named."""
    complete = dict(limits)
    # without an accelerator the host computes
    if offload != "never" or all(device in HOST for device in complete):
        complete.setdefault("cpu", free_host())
    if offload == "disk":
        complete.setdefault("disk", UNLIMITED)
    return complete
