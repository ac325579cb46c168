"""Tensors from the host into their slots on the device, each moved once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from safe_loading._core.report import Finding
from safe_loading._model.snapshot import Snapshot

from .slots import AdapterSlot, named_tensors


def fill(
    slots: Mapping[str, AdapterSlot],
    values: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    copy: bool = True,
) -> None:
    """Put each value into its slot, on ``device``, in its own dtype or in ``dtype`` when one is given.

    Slots that share storage (adapters tied to one another) share it afterwards as well, unless their values differ:
    peft casts the factors of a base in 16 bits one by one, and what was tied is trained apart. A slot without a value
    keeps its start, in the dtype of the others: a layer computes with both of its factors.
    """
    common = dtype or next((value.dtype for value in values.values() if value.is_floating_point()), None)
    groups: dict[int, list[AdapterSlot]] = defaultdict(list)
    for slot in slots.values():
        groups[slot.tensor.untyped_storage()._cdata].append(slot)
    for group in groups.values():
        held = [slot for slot in group if slot.key in values]
        if not held:
            for slot in group:
                if common is not None and slot.is_parameter and slot.tensor.is_floating_point():
                    _set(slot, _like(slot, slot.tensor.detach().to(common)))
            continue
        if len({id(slot.tensor) for slot in group}) == 1:
            moved = _moved(values[held[0].key], device, dtype, copy=copy)
            made = _like(group[0], moved)
            for slot in group:
                _set(slot, made)
        elif len(held) < len(group) or agree(group, values):
            _fill_shared(group, values, device, dtype)
        else:
            for slot in held:
                _set(slot, _like(slot, _moved(values[slot.key], device, dtype, copy=copy)))


def agree(slots: Sequence[AdapterSlot], values: Mapping[str, torch.Tensor]) -> bool:
    """Return whether slots that share storage are given the same values for it."""
    given = [slot for slot in slots if slot.key in values]
    storage = torch.empty(max(_end(s.tensor) for s in given), dtype=values[given[0].key].dtype, device="cpu")
    for slot in given:
        _seen_as(storage, slot.tensor).copy_(values[slot.key])
    return all(torch.equal(_seen_as(storage, s.tensor), values[s.key].to("cpu", storage.dtype)) for s in given)


def _fill_shared(
    group: list[AdapterSlot], values: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype | None
) -> None:
    first = next(values[slot.key] for slot in group if slot.key in values)
    storage = torch.empty(max(_end(slot.tensor) for slot in group), dtype=dtype or first.dtype, device=device)
    for slot in group:
        view = _seen_as(storage, slot.tensor)
        if slot.key in values:
            view.copy_(values[slot.key])
        _set(slot, _like(slot, view))


def _seen_as(storage: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _end(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


def _moved(value: torch.Tensor, device: torch.device, dtype: torch.dtype | None, *, copy: bool) -> torch.Tensor:
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    if device.type == "cpu":
        # A copy: the adapter's tensors may go into several models, each of which changes its own.
        return value.clone(memory_format=torch.contiguous_format) if copy else value.contiguous()
    return value.to(device).contiguous()


def _like(slot: AdapterSlot, value: torch.Tensor) -> torch.Tensor:
    if not slot.is_parameter:
        return value
    return torch.nn.Parameter(value, requires_grad=slot.tensor.requires_grad and value.is_floating_point())


def _set(slot: AdapterSlot, value: torch.Tensor) -> None:
    if isinstance(value, torch.nn.Parameter):
        slot.owner._parameters[slot.name] = value
    else:
        slot.owner._buffers[slot.name] = value


def write_base(
    model: torch.nn.Module, writes: Mapping[str, torch.Tensor], where: str, undo: Iterable[Snapshot]
) -> list[Finding]:
    """Copy the base weights that an adapter file brings along into the base, in place, so that ties stay ties.

    What they overwrite is kept in each of ``undo``.
    """
    if not writes:
        return []
    own = named_tensors(model)
    findings = []
    for key, value in writes.items():
        moved = value.to(own[key])  # into a wider dtype at most
        if torch.equal(moved, own[key]):
            continue
        for snapshot in undo:
            snapshot.keep(own[key])
        with torch.no_grad():
            own[key].copy_(moved)
        findings.append(
            Finding(
                "base-weight-replaced",
                "info",
                f"{where}: {key}",
                "the file brings this weight of the base along and it differs from the base's own, so the base's was "
                "overwritten, as peft does (save_embedding_layers, bias).",
                "",
                value.nbytes,
            )
        )
    return findings
