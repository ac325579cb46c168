"""The offloaded sizes of each unit: its bytes on the host, and those that each token moves to the main device.

accelerate copies the weights of a module to the device for each of its calls. So a module moves its weights as often as
it is called: an expert that is a module of its own only when a token is routed to it, and experts whose weights are one
tensor all together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property

from safe_loading._core.names import ancestors, nearest
from safe_loading._core.parse_size import UNLIMITED, Device
from safe_loading._memory.trace.accelerate_hooks import main_device
from safe_loading._memory.trace.records import StepTrace
from safe_loading._model.text_config import text_config

from .costs import Cost
from .map_keys import device_of, is_offloaded
from .module_tree import ModuleTree, PlacementUnit, SizedTensor
from .offload import Away, Piece, Split
from .request import PlanRequest

_NO_ROOM = 4 * UNLIMITED  # more than all hosts together have
_NUMBERED = re.compile(r"(expert_?)?[0-9]+")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "moe_top_k", "moe_topk", "top_k")


class OffloadedUnits:
    """Computes the offloaded sizes of a model's units."""

    def __init__(self, tree: ModuleTree, request: PlanRequest, trace: StepTrace | None) -> None:
        self._tree, self._request = tree, request
        calls = {} if trace is None else {trace.own_name(name): count for name, count in trace.calls.items()}
        self._calls = {name: count for name, count in calls.items() if count}
        self._steps = calls.get("", 0)

    def away(self, costs: Sequence[Cost], whole: Collection[str], staying: Collection[str] = ()) -> list[Away]:
        """Return the offloaded sizes of each unit.

        Units whose paths are in ``whole`` may not leave in part, and those in ``staying`` not at all.
        """
        own = self._tree.own_tensors()
        found: list[Away] = []
        for unit, cost in zip(self._tree.units, costs, strict=True):
            if unit.path in own or unit.path in staying:
                # what the model itself holds never leaves: accelerate has it on the main device; no host has the room
                # for the other ones
                stored = 0 if unit.path in own else _NO_ROOM
                found.append(Away(stored, cost.group.resident, cost.transient, 0))
            else:
                found.append(self._away(unit, cost, unit.path not in whole))
        return found

    def moved(self, device_map: Mapping[str, Device]) -> int:
        """Return the bytes that each token moves to the main device, with some map."""
        main = main_device(device_map.values())
        moved = Fraction(0)
        for unit in self._tree.units:
            for tensor in unit.tensors:
                if is_offloaded(device_of(tensor.names[0], device_map), main) and self._leaves(tensor):
                    moved += tensor.bytes * self._times(tensor.owner, unit.path)
        return int(moved)

    def _leaves(self, tensor: SizedTensor) -> bool:
        return tensor.leaves(with_buffers=self._request.offload_buffers)

    def _away(self, unit: PlacementUnit, cost: Cost, divisible: bool) -> Away:
        leaving = [tensor for tensor in unit.tensors if self._leaves(tensor)]
        moved = sum(tensor.bytes * self._times(tensor.owner, unit.path) for tensor in leaving)
        adapters = cost.weights - unit.weights
        stored = sum(tensor.bytes for tensor in leaving) + adapters
        return Away(
            bytes=stored,
            resident=cost.group.resident - stored,
            transient=cost.transient + unit.largest_leaf(with_buffers=self._request.offload_buffers),
            moved=int(moved) + adapters,
            pieces=tuple(self._pieces(unit, leaving)) if divisible else (),
        )

    def _pieces(self, unit: PlacementUnit, leaving: Sequence[SizedTensor]) -> Iterator[Piece]:
        """Yield the experts of a block; none where they are all that it has."""
        own: dict[str, list[SizedTensor]] = {}
        for tensor in leaving:
            path = _expert_of(tensor.owner, unit.path)
            if path is not None:
                own.setdefault(path, []).append(tensor)
        if sum(map(len, own.values())) == len(unit.tensors):
            return
        for path, tensors in own.items():
            if any(len(tensor.names) > 1 for tensor in tensors):
                continue
            leaves: dict[str, int] = {}
            for tensor in tensors:
                leaves[tensor.owner] = leaves.get(tensor.owner, 0) + tensor.bytes
            moved = sum(size * self._times(owner, unit.path) for owner, size in leaves.items())
            yield Piece(path, sum(leaves.values()), max(leaves.values()), int(moved), is_expert=True)

    def _times(self, owner: str, unit: str) -> Fraction:
        """Return how often a module's weights are moved for one token, or in one step when training."""
        expert = _expert_of(owner, unit)
        if expert is not None and _NUMBERED.fullmatch(expert.rpartition(".")[2]):
            return self._share_of_experts
        if not self._steps:
            return Fraction(1)
        # A module whose weights are read from outside is never called; it runs as often as the one around it.
        called = nearest(owner, self._calls)
        inside = called is not None and (
            called == unit or called.startswith(f"{unit}.") or unit.startswith(f"{owner}.")
        )
        return Fraction(self._calls[called], self._steps) if inside and called is not None else Fraction(0)

    @cached_property
    def _share_of_experts(self) -> Fraction:
        """The share of a layer's experts that a batch is expected to reach."""
        text = text_config(getattr(self._request.model, "config", None))
        chosen = next((value for name in _PER_TOKEN if isinstance(value := getattr(text, name, None), int)), 0)
        layers: dict[str, set[str]] = {}
        for unit in self._tree.units:
            for tensor in unit.tensors:
                expert = _expert_of(tensor.owner, "")
                if expert is not None:
                    layers.setdefault(expert.rpartition(".")[0], set()).add(expert)
        count = max((len(experts) for experts in layers.values()), default=0)
        if not 0 < chosen < count:
            return Fraction(1)
        work = self._request.workload
        tokens = max(work.batch_size, 1) * (work.sequence_length if work.kind == "train" else 1)
        missed = (1 - chosen / count) ** tokens
        return Fraction(1 - missed).limit_denominator(1 << 20)


def _expert_of(owner: str, unit: str) -> str | None:
    """Return the path of the expert, or of the experts in one, that holds a tensor inside a unit; None elsewhere."""
    parts = owner.split(".")
    if "experts" not in parts:
        return None
    depth = parts.index("experts") + 1
    if depth < len(parts) and _NUMBERED.fullmatch(parts[depth]):
        depth += 1
    path = ".".join(parts[:depth])
    return path if path != unit and path.startswith(f"{unit}." if unit else "") else None


def split_paths(tree: ModuleTree, split: Split, devices: Sequence[Device]) -> dict[str, Device]:
    """Return the device of each unit by its path, and of the modules of those units that leave in part."""
    found: dict[str, Device] = {}
    inside = {nearest(path, {unit.path for unit in tree.units}): path for path in split.pieces}
    for unit, place in zip(tree.units, split.device_of, strict=True):
        if unit.path not in inside:
            found[unit.path] = devices[place]
            continue
        names = [name for other in tree.units for tensor in other.tensors for name in tensor.names]
        names = [name for name in names if not unit.path or name.startswith(f"{unit.path}.")]
        owners = {name.rpartition(".")[0] for name in names}
        around = {parent for owner in owners for parent in [*ancestors(owner)][1:]}
        for name in names:
            owner = name.rpartition(".")[0]
            piece = nearest(name, split.pieces)
            if piece is not None:
                found[piece] = devices[split.pieces[piece]]
            else:
                found[name if owner in around else owner] = devices[place]
    return found
